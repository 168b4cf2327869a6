"""The only module that knows the stages and settings of litert-torch's experimental NPU pipeline.

Loaded in stage processes; the rest of the build sees plain values.
"""

import dataclasses
import importlib
import inspect
import json
import logging
import multiprocessing
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import UsageError, unknown
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress
from edge_opt.build.prompts import Plan, Wording, check_lengths, plan, read_prompts, wording_of
from edge_opt.build.rotation import ROTATED, rotate
from edge_opt.build.sections import keep_sections
from edge_opt.build.source import SETTING, SlidingLayers
from edge_opt.build.stages import INSTALL, SUPPORTED, Job
from edge_opt.integrations.npu_export import npu_optimize
from edge_opt.ir.opening import MAIN_SECTION, Opened
from edge_opt.npu.hexagon import first_complaint
from edge_opt.npu.sdk import CompilerFailedError
from edge_opt.schema.litertlm import read_bundle, section_of
from edge_opt.soundness import power_of_two
from edge_opt.targets import Target

_EXPORT = "litert_torch.generative.export_hf"
# Arguments of stages that have another name in the configuration.
_RENAMED = {"quantization_recipe": "weight_quantization_recipe", "kv_cache_max_len": "cache_length"}
_STAGES = {
    "export": "export_func",
    "calibrate": "calib_func",
    "quantize": "quant_func",
    "compile": "compile_func",
}
# Settings with their own option, or determined by something else.
_OURS = {
    "model_id": "the input",
    "model": "the input",
    "backend": "--soc",
    "soc_model": "--soc",
    "calibration_dataset_dir": "--prompts",
    "calibration_dataset_format": "--prompts",
    "calibration_eval_task_names": "--prompts",
    "overwrite": "the work folder",
    "weight_quantization_recipe": "--weights",
    "quantization_recipe": "--weights",
    "enable_formatting": "the tokenizer's chat template",
}
_FILES = ("_path", "_dir", "_litertlm", "_files")
_DEFAULTS = {"disable_aux_compilation": True}
"""Defaults that differ from litert-torch's, which compiles the auxiliary model's masks; LiteRT-LM makes its own."""
_WHOLE = "full_attention"
_LARGEST_CODE = 32767  # of int16; a symmetric range's scale is the range divided by it
_TASK = "ALL"


def _lib(name: str) -> Any:
    return importlib.import_module(f"{_EXPORT}.experimental.npu_export.{name}")


def _config(job: Job) -> Any:
    return _lib("config_manager").NpuPipelineConfig.from_dict(job.config)


# Settings


def configure(job: Job, _: Progress) -> dict[str, Any]:
    """Resolve the settings from defaults, vendor and user; UsageError for an unknown or invalid one."""
    manager, stages = _lib("config_manager"), _lib("stages")
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(manager.NpuPipelineConfig)
    }
    vendor = _lib("configs.vendor_configs").VENDOR_CONFIGS.get(job.options["vendor"], {})
    taken = {name: _parameters(stages, function) for name, function in _STAGES.items()}
    settings = job.options["settings"]
    _check_settings(settings, sorted({*defaults, *vendor}.union(*taken.values())), defaults)
    fixed = {
        "backend": job.options["vendor"],
        "soc_model": job.options["chip"],
        "model_id": job.inputs["model"],
    }
    merged = {**_DEFAULTS, **vendor, **settings, **fixed}
    merged.pop("default_soc", None)
    config = manager.NpuPipelineConfig.from_dict(merged)
    shape, caches = job.options["cache_shape"], job.options["caches"]
    if shape:
        config.cache_length = shape[config.k_ts_idx]
        if SETTING in settings:
            raise UsageError(f"--set {SETTING}: the bundle has its caches already, leave it out")
    else:
        check_lengths(config.prefill_lengths, config.cache_length)
        caches = _caches(config, job.inputs["model"], whole=settings.get(SETTING, 0) is None)
        if "prompts" in job.inputs:
            # Fail before the export: the bundle's tokenizer gives the same counts to within a token or two.
            _planned(job, wording_of(Path(job.inputs["model"])), config, config.prefill_lengths)
    config.print_summary()
    # The input is tracked by its digest instead. The exporter's own settings for calibration and quantization have no
    # effect here; `npu_quantize` ignores the exporter's recipe.
    taken["quantize"] -= {"quantization_recipe"}
    taken["export"] -= taken["calibrate"] | taken["quantize"]
    known = {
        stage: {
            name: value
            for name in sorted(names - {"model"})
            if (value := getattr(config, _RENAMED.get(name, name), None)) is not None
        }
        for stage, names in taken.items()
    }
    return {"config": config.to_dict(), "settings": known, "caches": caches}


def _parameters(stages: Any, name: str) -> set[str]:
    parameters = inspect.signature(getattr(stages, name)).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def _check_settings(given: Mapping[str, Any], names: Sequence[str], defaults: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _OURS or name.endswith(_FILES):
            source = _OURS.get(name, "the work folder")
            raise UsageError(f"--set {name} cannot be set: it follows from {source}")
        if name not in names:
            raise unknown("--set: setting", name, names)
        default = defaults.get(name, value)
        kinds = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise UsageError(f"--set {name}: {json.dumps(value)} must have the type of {json.dumps(default)}")


def _caches(config: Any, checkpoint: str, *, whole: bool) -> dict[str, Any]:
    """Set the length of ring buffers in `config`, and describe the caches."""
    described = importlib.import_module("transformers").AutoConfig.from_pretrained(checkpoint)
    layers = SlidingLayers.of(described.get_text_config().to_dict())
    chosen, prefill = getattr(config, SETTING, None), config.prefill_lengths
    if chosen is not None and type(chosen) is not int:
        raise UsageError(f"{SETTING}: {json.dumps(chosen)} is not an integer such as 512")
    shortest = min(getattr(config, "cache_lengths", None) or [config.cache_length])
    ring = layers.ring(prefill, shortest, chosen, whole=whole)
    setattr(config, SETTING, ring)
    return {"window": layers.window or None, "ring": ring, "notes": layers.notes(ring, prefill)}


def _planned(job: Job, wording: Wording, config: Any, lengths: Sequence[int]) -> Plan:
    prompts, room = read_prompts(Path(job.inputs["prompts"])), config.max_calibration_decode_steps
    return plan(prompts, wording.count, lengths, config.cache_length, room)


# Export


def export(job: Job, _: Progress) -> dict[str, Any]:
    """Export the checkpoint as a float bundle.

    Raises:
        UsageError: weights are NaN, truncated or do not match the configuration, or all layers slide.
    """
    _check_numbers(Path(job.inputs["model"]))
    config = _config(job)
    logging.getLogger("transformers").addHandler(_WeightsThatFit())
    rotated = Path(job.output, ROTATED)
    # In a process of its own: litert-torch's composites for norms need transformers' models not loaded before.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        note = pool.submit(rotate, Path(job.inputs["model"]), rotated).result()
    if note:
        config.model_id = str(rotated)
    if getattr(config, "export_vision_encoder", False):
        _embed_whole_prompts()
    try:
        _lib("stages").npu_export(config, job.output)
    except KeyError as error:
        if error.args != (_WHOLE,):
            raise
        raise UsageError(
            f"every layer of the checkpoint slides, but litert-torch {SUPPORTED} exports this family only with at "
            f"least one '{_WHOLE}' among layer_types in config.json"
        ) from error
    if job.options["window"]:
        _write_window(job.model, job.options["window"])
    return {"notes": [note] if note else []}


def _check_numbers(checkpoint: Path) -> None:
    """Raise UsageError if a weight in a safetensors file is NaN or infinite: calibration would fail later."""
    torch, safetensors = importlib.import_module("torch"), importlib.import_module("safetensors")
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    weights = file.get_tensor(name)
                    # torch has no isfinite for 8-bit floats.
                    if weights.is_floating_point() and not torch.isfinite(weights.float()).all():
                        raise UsageError(
                            f"{path}: '{name}' holds NaN or infinity, as after diverged training: give an "
                            f"earlier checkpoint"
                        )
        except safetensors.SafetensorError as error:
            raise UsageError(
                f"{path} is not a complete safetensors file ({error}): copy it again, or fetch it with git lfs"
            ) from error


class _WeightsThatFit(logging.Handler):
    """Ends the export if transformers reports weights of another shape, or missing ones, which it would invent."""

    def emit(self, record: logging.LogRecord) -> None:
        """Check a report with one line per weight."""
        wrong = re.findall(r"^([^|\n]+?) *\|[^|\n]*\b(MISSING|MISMATCH)\b", record.getMessage(), re.MULTILINE)
        if wrong:
            how = "is missing" if wrong[0][1] == "MISSING" else "has another shape"
            raise UsageError(
                f"the checkpoint's weights do not fit its config.json: {wrong[0][0]} {how}, the first of {len(wrong)}; "
                f"compare both with the base model"
            )


def _embed_whole_prompts() -> None:
    """Stop litert-torch 0.10 from exporting a single-token `embedder` for models with a vision encoder.

    Its calibration and LiteRT-LM's NPU executor need `prefill_embedder_128` and `decode_embedder`, as for text models.
    """
    settings = importlib.import_module(f"{_EXPORT}.core.exportable_module_config").ExportableModuleConfig
    settle = settings.__post_init__

    def settled(self: Any) -> None:
        settle(self)
        self.single_token_embedder = False

    settings.__post_init__ = settled


def _write_window(path: Path, window: int) -> None:
    """Write the window of sliding layers to the executor metadata; litert-torch 0.10 does so for ring buffers only."""
    metadata = importlib.import_module("litert_lm_builder.runtime.proto.executor_metadata_pb2")
    bundle = read_bundle(path)
    index = section_of(bundle)
    if index is None:
        raise UsageError(
            f"litert-torch wrote no executor metadata; without it, LiteRT-LM does not use the checkpoint's window "
            f"of {window} positions: {INSTALL}"
        )
    content = bundle.content(index)
    values = metadata.ExecutorMetadata.FromString(content.read(0, content.size))
    values.llm_executor_metadata.attention_mask_settings.sliding_window_size = window
    written = path.with_name(f"{path.stem}_window{path.suffix}")
    bundle.write({index: values.SerializeToString(deterministic=True)}, written)
    written.replace(path)


# Quantization


def calibrate(job: Job, _: Progress) -> dict[str, Any]:
    """Find every tensor's range on the prompts; UsageError if they are too short or an entry point never runs."""
    config, model = _config(job), Path(job.inputs["model"])
    signatures = [signature.key for signature in Opened(model).main().model.signatures]
    lengths = [int(match[1]) for name in signatures if (match := re.fullmatch(r"prefill_(\d+)", name))]
    check_lengths(lengths, config.cache_length)
    wording = wording_of(model)
    planned = _planned(job, wording, config, lengths)
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(f"{json.dumps(wording.text(prompt))}\n" for prompt in planned.prompts)
        Path(folder, f"{_TASK}.jsonl").write_text(lines, encoding="utf-8")
        _lib("stages").npu_calibrate(
            config,
            job.inputs["model"],
            folder,
            job.output,
            calibration_dataset_format="jsonl",
            calibration_eval_task_names=_TASK,
            enable_formatting=False,
        )
    check_all_ran(signatures, Path(job.output))
    widen_sums(model, Path(job.output))
    return {"notes": planned.notes, "tokens": planned.tokens}


def check_all_ran(signatures: Sequence[str], ranges: Path) -> None:
    """Raise UsageError if calibration skipped an entry point."""
    file = next(ranges.glob(f"*{MAIN_SECTION}*.json"))
    tensors = json.loads(file.read_text(encoding="utf-8"))["model_qsvs"]
    idle = [key for key in signatures if not any(name.startswith(f"{key}_") for name in tensors)]
    if idle:
        raise UsageError(
            f"litert-torch's calibration does not run {', '.join(idle)}, so its ranges are unknown: export without it"
        )


def widen_sums(model: Path, ranges: Path) -> None:
    """Widen ranges of broadcasting sums that end at a power of two by 1 %: LiteRT aborts on them in int16.

    For example, the auxiliary model's mask for a ring buffer of 512 adds 1 to positions up to 511.
    """
    sums = {
        operator.output.name
        for part in Opened(model).parts
        for graph in part.model.subgraphs
        for operator in graph.operators
        if operator.name == "ADD" and operator.input(0).shape != operator.input(1).shape
    }
    for file in ranges.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        for range_ in (one for name, one in content.get("model_qsvs", {}).items() if name in sums):
            ends = np.array([range_["min"], range_["max"]], np.float64)
            reach = np.abs(ends).max()
            if reach > 0 and power_of_two(reach / _LARGEST_CODE):
                range_["min"], range_["max"] = (1.01 * ends).tolist()
        file.write_text(json.dumps(content), encoding="utf-8")


def quantize(job: Job, _: Progress) -> dict[str, Any]:
    """Quantize the bundle, and restore sections that the pipeline's packing drops."""
    _lib("stages").npu_quantize(_config(job), job.inputs["model"], str(job.model), job.inputs["ranges"])
    for left in Path(job.output).glob("*intermediate.tflite"):
        left.unlink()
    lost = keep_sections(Path(job.inputs["model"]), job.model)
    return {"notes": [f"Restored what litert-torch's packing dropped: {', '.join(lost)}"] if lost else []}


# For the NPU


def optimize(job: Job, progress: Progress) -> dict[str, Any]:
    """Run edge-opt's own stage."""
    done = npu_optimize(
        _config(job),
        job.inputs["model"],
        job.model,
        sdk=job.options["sdk"],
        target=from_dict(Target, job.options["target"]),
        exported=job.inputs.get("exported"),
        progress=progress,
    )
    return done.to_dict()


def compile_bundle(job: Job, _: Progress) -> dict[str, Any]:
    """Compile the bundle for the NPU; CompilerFailedError with the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _lib("stages").npu_compile(
                _config(job),
                job.inputs["model"],
                str(job.model),
                intermediate_dir=folder,
                compile_configs=job.options["compile_configs"] or None,
            )
        except ValueError as error:
            # LiteRT leaves the compiler's output in a temporary file.
            said = [path.read_text(errors="replace") for path in Path(tempfile.gettempdir()).glob("*.error")]
            print(*said, sep="\n", flush=True)  # noqa: T201  to the stage's log
            raise CompilerFailedError(first_complaint("\n".join(said), "") or str(error)) from error
    return {}
