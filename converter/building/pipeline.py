"""The only module that knows the stages and settings of litert-torch's experimental NPU pipeline.

Loaded in stage processes; the rest of the build sees plain values.
"""

import importlib
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from edge_opt.base.errors import UsageError
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress
from edge_opt.building.biases import restore_clipped
from edge_opt.building.chat_template import mend_template
from edge_opt.building.exportable import check_layers, check_rope, export_as_it_is
from edge_opt.building.masks import widen_masks
from edge_opt.building.mending import mend_export, save_main, widen_sums, write_window
from edge_opt.building.prompts import (
    Wording,
    begin_as_litert_lm,
    check_lengths,
    plan_prompts,
    read_prompts,
    wording_of,
)
from edge_opt.building.rings import SETTING, plan_caches
from edge_opt.building.rotation import prepare
from edge_opt.building.sections import keep_sections
from edge_opt.building.source import check_end
from edge_opt.building.stages import INSTALL, QUANTIZERS, Job, Values
from edge_opt.integrations.npu_export import npu_optimize
from edge_opt.ir.opening import MAIN_SECTION, Opened
from edge_opt.npu.compiler import Compiler, CompilerFailedError, first_complaint
from edge_opt.npu.vendors import vendor_backend
from edge_opt.targets import Target

_EXPORT = "litert_torch.generative.export_hf"
# Arguments of stages that have another name in the configuration.
_RENAMED = {
    "quantization_recipe": "weight_quantization_recipe",
    "kv_cache_max_len": "cache_length",
}
_STAGES = {
    "export": "export",
    "calibrate": "calib",
    "quantize": "quant",
    "compile": "compile",
}
"""The pipeline's stages, as `npu_..` names them, and its functions, as `.._func` does."""
_CALLED = (
    "NpuPipelineConfig",
    *(f"{short}_func" for short in _STAGES.values()),
    *(f"npu_{name}" for name in _STAGES),
)
"""What edge-opt calls of the pipeline's module `stages`."""
_DEFAULTS = {"disable_aux_compilation": True, "rotate": True}
"""Our defaults. litert-torch also compiles the auxiliary model's masks; LiteRT-LM makes its own. For `rotate`, see
`rotation`. `use_v2`, whose default depends on TensorFlow, is litert-torch's second converter, which streams weights."""
_IN_MEMORY = "Exported with all weights in memory: "
_LESS_MEMORY = (
    f"{_IN_MEMORY}with TensorFlow 2.22 or newer (pip uninstall tensorflow; pip install tf-nightly), litert-torch "
    f"streams them"
)
_NOT_STREAMED = (
    f"{_IN_MEMORY}litert-torch would stream them from one model.safetensors, or from the files of an index, that hold "
    f"each once and under its name, but not for a model that reads one outside its module, as Gemma 4 with images does"
)
_PREFILL = re.compile(r"prefill_(\d+)")


def _lib(name: str) -> Any:
    """A module of the pipeline."""
    return importlib.import_module(f"{_EXPORT}.experimental.npu_export.{name}")


def _config(job: Job) -> Any:
    """The settings in the pipeline's own class."""
    return _lib("config_manager").NpuPipelineConfig.from_dict(job.config)


def check_pipeline() -> None:
    """Raise UsageError if the installed litert-torch has not all of the pipeline that is called here."""
    try:
        stages = _lib("stages")
        _lib("configs.vendor_configs")
    except ImportError as error:
        raise UsageError(
            f"litert-torch's NPU pipeline is not there ({error}): {INSTALL}"
        ) from error
    missing = [name for name in _CALLED if not hasattr(stages, name)]
    if missing:
        raise UsageError(f"litert-torch's NPU pipeline has no {', '.join(missing)}: {INSTALL}")


def configure(job: Job, _: Progress) -> Values:
    """Resolve the settings from defaults, vendor and user.

    UsageError if caches or prompts do not fit, or if the pipeline is another one than edge-opt calls.
    """
    check_pipeline()
    settings = job.options["settings"]
    model = Path(job.inputs["source"])
    make = _lib("stages").NpuPipelineConfig
    vendor = _lib("configs.vendor_configs").VENDOR_CONFIGS.get(job.options["vendor"], {})
    used = _used_settings()
    streams = importlib.import_module("litert_torch._convert.converter_v2").is_supported()
    ours = {**_DEFAULTS, "use_v2": streams}
    fixed = {
        "backend": job.options["vendor"],
        "soc_model": job.options["chip"],
        "model_id": str(model),
    }
    config = make.from_dict({**ours, **vendor, **settings, **fixed})
    caches = job.options["caches"]
    if model.is_dir():
        asks_for_whole = SETTING in settings and settings[SETTING] is None
        caches = _planned_caches(config, model, whole=asks_for_whole)
        setattr(config, SETTING, caches["ring"])
        if "prompts" in job.inputs:
            # Fail before the export: the bundle's tokenizer gives the same counts to within a token or two.
            _planned_prompts(job, wording_of(model), config, config.prefill_lengths)
    else:
        config.cache_length = job.options["cache"]
    config.print_summary()
    return {
        "config": config.to_dict(),
        "settings": {stage: _known_values(config, names) for stage, names in used.items()},
        "caches": caches,
        "notes": caches["notes"],
    }


def _used_settings() -> dict[str, set[str]]:
    """Names of the settings that each stage of the pipeline reads."""
    stages = _lib("stages")
    used: dict[str, set[str]] = {}
    for name, short in _STAGES.items():
        function = getattr(stages, f"{short}_func")
        used[name] = {*signature(function).parameters}
    # The exporter's own settings for calibration and quantization have no effect here.
    used["quantize"].remove("quantization_recipe")
    used["export"] -= used["calibrate"] | used["quantize"]
    used["export"].add("rotate")
    return used


def _known_values(config: Any, names: set[str]) -> Values:
    """The values of settings, without those that are None."""
    known: Values = {}
    for name in sorted(names - {"model"}):
        value = getattr(config, _RENAMED.get(name, name), None)
        if value is not None:
            known[name] = value
    return known


def _planned_caches(config: Any, checkpoint: Path, *, whole: bool) -> Values:
    """The lengths of a checkpoint's caches, see `plan_caches`."""
    from transformers import AutoConfig, GenerationConfig

    described = AutoConfig.from_pretrained(checkpoint)
    check_layers(described)
    lengths = getattr(config, "cache_lengths", None) or [config.cache_length]
    check_rope(described, max(lengths))
    check_end(checkpoint, GenerationConfig.from_model_config(described).eos_token_id)
    text = described.get_text_config().to_dict()
    return plan_caches(
        text, config.prefill_lengths, min(lengths), getattr(config, SETTING, None), whole=whole
    )


def _planned_prompts(
    job: Job, wording: Wording, config: Any, lengths: Sequence[int]
) -> tuple[list[Any], list[str]]:
    """The prompts to calibrate with, and notes on them; see `plan_prompts`."""
    prompts = read_prompts(Path(job.inputs["prompts"]))
    room = config.max_calibration_decode_steps
    return plan_prompts(prompts, wording.count, lengths, config.cache_length, room)


def export(job: Job, _: Progress) -> Values:
    """Export the checkpoint as a float bundle.

    Returns:
        Notes for the user, and whether the residual stream is `rotated`.

    Raises:
        UsageError: weights are NaN, truncated or do not match the configuration.
    """
    # The temporary folder ends with the stage: the copy has twice the size of a checkpoint in bfloat16.
    rotated = Path(tempfile.gettempdir(), "rotated")
    # In a process of its own: litert-torch's composites for norms need transformers' models not loaded before.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        preparing = pool.submit(
            prepare, Path(job.inputs["base"]), rotated, rotate=job.options["rotate"]
        )
        # This loads packages, which takes as long.
        config = _config(job)
        stages = _lib("stages")
        prepared = preparing.result()
    source = rotated if prepared.rotated else Path(job.inputs["base"])
    can_stream = config.use_v2
    streams = can_stream and prepared.streamed
    config.model_id = str(source)
    config.use_v2 = streams
    config.delete_in_memory_params = streams
    if streams:
        _read_generation_settings(source)
    export_as_it_is()
    stages.npu_export(config, job.output)
    if streams:
        mend_export(job.model)
    if job.options["window"]:
        write_window(job.model, job.options["window"])
    how_loaded = memory_note(can_stream=can_stream, streams=streams)
    notes = [prepared.note, how_loaded, mend_template(job.model, source)]
    return {"notes": notes, "rotated": prepared.rotated}


def memory_note(*, can_stream: bool, streams: bool) -> str:
    """Why an export did not stream the weights, although this machine may have what it takes; empty if it did."""
    if streams:
        return ""
    return _NOT_STREAMED if can_stream else _LESS_MEMORY


def _read_generation_settings(checkpoint: Path) -> None:
    """Make litert-torch's second converter read the tokens that end a text from where the first one does."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    def stored(_: Any) -> Any:
        return GenerationConfig.from_pretrained(checkpoint)

    if (checkpoint / GENERATION_CONFIG_NAME).is_file():
        GenerationConfig.from_model_config = staticmethod(stored)


def calibrate(job: Job, _: Progress) -> Values:
    """Find every tensor's range on the prompts; UsageError if they are too short or an entry point never runs."""
    config = _config(job)
    model = Path(job.inputs["model"])
    signatures = [signature.key for signature in Opened(model).main().model.signatures]
    lengths: list[int] = []
    for name in signatures:
        prefill = _PREFILL.fullmatch(name)
        if prefill is not None:
            lengths.append(int(prefill[1]))
    check_lengths(lengths, config.cache_length)
    begin_as_litert_lm(model)
    wording = wording_of(model)
    planned, notes = _planned_prompts(job, wording, config, lengths)
    _limit_threads()
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(f"{json.dumps(wording.text(prompt))}\n" for prompt in planned)
        Path(folder, "ALL.jsonl").write_text(lines, encoding="utf-8")
        _lib("stages").npu_calibrate(
            config, str(model), folder, job.output, enable_formatting=False
        )
    check_all_ran(signatures, Path(job.output))
    widen_sums(model, Path(job.output))
    return {"notes": notes}


def _limit_threads() -> None:
    """Make the quantizer's interpreters run one thread a core.

    It asks for 16; those without a core of their own lose time waiting for each other.
    """
    cores = len(os.sched_getaffinity(0))
    for name in filter(find_spec, QUANTIZERS):
        interpreters: Any = importlib.import_module(f"{name}.utils.tfl_interpreter_utils")
        create = interpreters.create_tfl_interpreter
        interpreters.create_tfl_interpreter = partial(create, num_threads=cores)


def check_all_ran(signatures: Sequence[str], ranges: Path) -> None:
    """Raise UsageError if calibration skipped an entry point."""
    file = next(ranges.glob(f"*{MAIN_SECTION}*.json"))
    tensors = json.loads(file.read_text(encoding="utf-8"))["model_qsvs"]
    idle = [key for key in signatures if not _starts_any(f"{key}_", tensors)]
    if idle:
        raise UsageError(
            f"litert-torch's calibration does not run {', '.join(idle)}, so its ranges are unknown: export without it"
        )


def _starts_any(prefix: str, names: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def quantize(job: Job, _: Progress) -> Values:
    """Quantize the bundle, restore sections that the pipeline's packing drops, and widen the masks."""
    _lib("stages").npu_quantize(
        _config(job), job.inputs["model"], str(job.model), job.inputs["ranges"]
    )
    for left in Path(job.output).glob("*intermediate.tflite"):
        left.unlink()
    exported = Path(job.inputs["model"])
    restored = keep_sections(exported, job.model)
    opened = Opened(job.model)
    model = opened.main().model
    mended = [widen_masks(model)]
    if job.options["restore"]:
        mended.append(restore_clipped(model, Opened(exported).main().model))
    if any(mended):
        save_main(opened, job.model)
    return {"notes": [restored, *mended]}


def optimize(job: Job, progress: Progress) -> Values:
    """Run edge-opt's own stage."""
    done = npu_optimize(
        _config(job),
        job.inputs["model"],
        job.model,
        sdk=job.libraries,
        target=from_dict(Target, job.options["target"]),
        exported=job.inputs.get("exported"),
        progress=progress,
    )
    return {**done.to_dict(), "notes": [*map(str, done.signatures), *done.notes]}


def compile_bundle(job: Job, _: Progress) -> Values:
    """Compile the bundle for the NPU; CompilerFailedError with the compiler's message.

    Raises:
        CompilerMissingError: the vendor's libraries are not on this machine.
    """
    config = _config(job)
    configs = job.options["compile_configs"] or None
    backend = vendor_backend(config.backend)
    if backend is not None:
        backend.check_installed(Compiler(config.soc_model, sdk=job.libraries))
    with tempfile.TemporaryDirectory() as folder:
        try:
            _lib("stages").npu_compile(
                config,
                job.inputs["model"],
                str(job.model),
                intermediate_dir=folder,
                compile_configs=configs,
            )
        except ValueError as error:
            # LiteRT leaves the compiler's output in a temporary file.
            files = Path(tempfile.gettempdir()).glob("*.error")
            said = "\n".join(file.read_text(errors="replace") for file in files)
            print(said, flush=True)  # noqa: T201  to the stage's log
            raise CompilerFailedError(first_complaint(said) or str(error)) from error
    return {}
