"""litert-torch's pipeline for NPUs: edge-opt as a stage between its `npu_quantize` and its `npu_compile`.

from litert_torch.generative.export_hf.experimental.npu_export import stages
from edge_opt.integrations.npu_export import npu_optimize

stages.npu_quantize(cfg, "float.litertlm", "quantized.litertlm", "calibration")
done = npu_optimize(cfg, "quantized.litertlm", "optimized.litertlm", sdk="qnn")
stages.npu_compile(cfg, "optimized.litertlm", "npu.litertlm", compile_configs=done.compile_configs)
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from edge_opt.base.atomic import AnyPath, resolve_target
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.conversion import ConversionResult, Verify, convert
from edge_opt.conversion.container import Sections
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, Opened
from edge_opt.npu.figures import Profile, SpillFigures, StepFigures
from edge_opt.npu.hexagon import judged_by
from edge_opt.npu.profiling import profile
from edge_opt.npu.sdk import CHIPS, CompilerFailedError, CompilerMissingError, estimate_note, find_sdk
from edge_opt.targets import Target, TargetLike, load_target

Version = Literal["converted", "exported"]
_Compiler = Callable[..., Profile]

TARGETS = {
    "qualcomm": "qualcomm-htp",
    "mediatek": "mediatek",
    "google": "google-tensor",
    "google_tensor": "google-tensor",
    "intel_openvino": "intel-npu",
}
"""edge-opt's target for each vendor, as LiteRT and its pipeline call them."""

_HEXAGON = "qualcomm-htp"
_SHARING = "qualcomm_enable_weight_sharing"
_LOG_LEVEL = "qualcomm_log_level"  # figures are read from the log
_CONFIGS = "litert_lm_npu_compiler.litert_lm_npu_compiler_configs"


class PipelineConfig(Protocol):
    """What is read of the pipeline's own configuration; more of it where it is there, see `npu_optimize`."""

    backend: str
    soc_model: str


@dataclass(frozen=True, slots=True)
class Gain(Record):
    """One entry point: the compiler's figures as exported and as converted, which of the two was kept, and why.

    Figures are None where nothing was measured.
    """

    signature: str
    before: SpillFigures | None
    after: SpillFigures | None
    kept: Version
    why: str

    @property
    def figures(self) -> SpillFigures | None:
        """Those of the kept one."""
        return self.before if self.kept == "exported" else self.after

    def __str__(self) -> str:
        return f"{self.signature}: {self.kept}, {self.why}"


@dataclass(frozen=True, slots=True)
class Optimized(Record):
    """What `npu_optimize` did.

    `signatures` has the entry points of the prefill/decode model. `compile_configs` is what `npu_compile` takes, with
    the flags that were judged. `notes` are sentences: why nothing was measured, or of which chip the time is. `steps`
    say what one prefill and one token take, by part, with the decoder that was kept.
    """

    conversion: ConversionResult
    signatures: tuple[Gain, ...]
    compile_configs: dict[str, Any]
    notes: tuple[str, ...] = ()
    steps: tuple[StepFigures, ...] = ()

    def summary(self) -> str:
        """What became of each entry point, in sentences."""
        return "\n".join([*map(str, self.signatures), *self.notes])


def npu_optimize(
    cfg: PipelineConfig,
    input_litertlm: AnyPath,
    output_litertlm: AnyPath,
    *,
    sdk: AnyPath | None = None,
    target: TargetLike | None = None,
    sections: Sections = "prefill-decode",
    verify: Verify = "regions",
    exported: AnyPath | None = None,
    overwrite: bool | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Optimized:
    """Convert a quantized bundle for the NPU of `cfg`, prove it, and keep what its compiler finds better.

    Where the vendor's compiler can be run here, the prefill/decode model is compiled as exported and as converted, with
    the flags that `npu_compile` will give it. Each signature stays as exported unless it gained. Embedder and auxiliary
    model are measured as they are.

    Args:
        cfg: litert-torch's `NpuPipelineConfig`: `backend` and `soc_model` are read, and where they are there
            `overwrite`, `compile_configs`, `model_name` and `disable_weight_sharing`, as `npu_compile` reads them.
        input_litertlm: what `npu_quantize` wrote.
        output_litertlm: where to write.
        sdk: folder with the vendor's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT. Without them nothing
            is measured, what was converted is kept, and `notes` say so.
        target: a target's name or file, or a `Target`; None the one for `cfg.backend`.
        sections: of the bundle, rewrite the prefill/decode model only, or "all" of its models.
        verify: as `edge_opt.convert` has it.
        exported: the float bundle that `npu_export` wrote; tables of rope then have its exact frequencies.
        overwrite: replace an existing output; None as `cfg` says.
        seconds: after so long the compiler is stopped; None never.
        progress: called with (stage, done, total) on long work.

    Raises:
        UsageError: no target for the vendor, or no such chip; else as `edge_opt.convert`.
        CompilerMissingError: `sdk` names a folder without the libraries.
    """
    facts = _target(cfg, target)
    configs = _compile_configs(cfg)
    compiler, note = _compiler(cfg, facts, configs, sdk, seconds)
    replacing = bool(getattr(cfg, "overwrite", False)) if overwrite is None else overwrite
    resolve_target(output_litertlm, overwrite=replacing)
    tell = progress or (lambda *_: None)
    tell("compiling as exported", 0, 1)
    before = _measured(compiler, input_litertlm, parts=False)
    auxiliary = None if exported is None else Opened(exported).find(AUXILIARY_SECTION)
    graphs = {} if auxiliary is None else dict(auxiliary.model.entry_points())
    run = partial(
        convert,
        input_litertlm,
        output_litertlm,
        target=facts,
        sections=sections,
        verify=verify,
        progress=progress,
        exported=graphs,
    )
    result = run(overwrite=replacing)
    tell("compiling as converted", 0, 1)
    after = _measured(compiler, output_litertlm, parts=True)
    gains = {gain.signature.removeprefix(f"{MAIN_SECTION}/"): gain for gain in _gains(result, before, after)}
    lost = {gain.signature for gain in gains.values() if gain.kept == "exported"}
    if any(site.signature in lost for site in result.converted):
        kept = [entry.name for entry in result.signatures if entry.name not in lost]
        result = run(overwrite=True, signatures=kept)
    steps = tuple(step.with_decoder(gains[step.name].figures) for step in after.steps)
    return Optimized(result, tuple(gains.values()), configs, (*filter(None, [note]), *before.notes), steps)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Figures by signature; none where the compiler failed, with the reason, or did not run."""

    figures: Mapping[str, SpillFigures] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str = ""
    steps: tuple[StepFigures, ...] = ()


def _compiler(
    cfg: PipelineConfig, facts: Target, configs: Mapping[str, Any], sdk: AnyPath | None, seconds: float | None
) -> tuple[_Compiler | None, str]:
    """What compiles a bundle as it will be compiled for the chip of `cfg`, if anything can; and what to say of it."""
    try:
        if facts.name != _HEXAGON:
            raise CompilerMissingError(f"no compiler for target '{facts.name}' can be run here")
        find_sdk(sdk)
    except CompilerMissingError as error:
        if facts.name == _HEXAGON and sdk is not None:
            raise
        return None, f"nothing was measured, and what was converted is kept: {error}"
    flags = [flag for flag in configs[MAIN_SECTION].get("flags", ()) if _name(flag) != _LOG_LEVEL]
    if _SHARING not in map(_name, flags) and not getattr(cfg, "disable_weight_sharing", False):
        flags.append(f"--{_SHARING}=true")
    own = cfg.soc_model.strip().upper()
    chip, flags = judged_by(own, flags)
    note = estimate_note(own, CHIPS[chip]) if chip != own else ""
    return partial(profile, target=facts, sdk=sdk, chip=chip, flags=flags, seconds=seconds), note


def _measured(compiler: _Compiler | None, path: AnyPath, *, parts: bool) -> _Measured:
    """Of the bundle's prefill/decode model, with `parts` of the others, too; a compiler that fails is an outcome."""
    if compiler is None:
        return _Measured()
    try:
        measured = compiler(path, parts=parts)
    except CompilerFailedError as error:
        return _Measured(failure=str(error))
    figures = {entry.signature: entry for entry in measured.signatures if isinstance(entry, SpillFigures)}
    return _Measured(figures, measured.notes, steps=measured.steps)


def _gains(result: ConversionResult, before: _Measured, after: _Measured) -> Iterator[Gain]:
    """One for each entry point of the prefill/decode model, in the file's order."""
    main, helper = f"{MAIN_SECTION}/", f"{AUXILIARY_SECTION}/"
    names = [entry.name for entry in result.signatures if not entry.name.startswith(helper)]
    rewritten = {site.signature for site in result.converted}
    for name in [name for name in names if name.startswith(main)] or names:
        bare = name.removeprefix(main)
        old, new = before.figures.get(bare), after.figures.get(bare)
        kept: Version = "converted"
        if name not in rewritten:
            kept, why = "exported", "nothing was rewritten in it"
        elif old is not None and new is not None:
            kept, why = better(old, new)
        elif old is not None:
            kept, why = "exported", f"it does not compile as converted: {after.failure}"
        elif new is not None:
            why = f"it does not compile as exported: {before.failure}"
        else:
            why = f"it compiles neither way: {after.failure}" if after.failure else "not measured"
        yield Gain(name, old, new, kept, why)


def better(before: SpillFigures, after: SpillFigures) -> tuple[Version, str]:
    """The better of the two by `SpillFigures.ranking`, as exported where nothing is gained; and why."""
    timed = before.time is not None and after.time is not None
    old, new = before.ranking(timed=timed), after.ranking(timed=timed)
    counted = [*old][:3]  # after the pieces either the time or the bytes, not both
    text = next((text for text in counted if old[text] != new[text]), counted[-1])
    ratio = f" ({new[text] / old[text]:.3f} of it)" if old[text] and new[text] else ""
    why = f"{text.format(old[text])} as exported, {text.format(new[text])} as converted{ratio}"
    return "converted" if new[text] < old[text] else "exported", why


def _target(cfg: PipelineConfig, target: TargetLike | None) -> Target:
    if target is not None:
        return load_target(target)
    name = cfg.backend.strip().lower()
    if name not in TARGETS:
        raise UsageError(f"there is no target for the vendor '{cfg.backend}', {did_you_mean(name, TARGETS)}")
    return load_target(TARGETS[name])


def _compile_configs(cfg: PipelineConfig) -> dict[str, Any]:
    """What `npu_compile` takes: the pipeline's own, with an entry for the model that is rewritten."""
    given: Any = getattr(cfg, "compile_configs", None) or _own_configs(cfg)
    try:
        if isinstance(given, str):
            given = json.loads(given if given.startswith("{") else Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cfg.compile_configs must be a table, JSON or a file of it: {error}") from error
    told: dict[str, Any] = {MAIN_SECTION: [], **given}
    return {
        kind: deepcopy(entry) if isinstance(entry, dict) else {"compile": True, "flags": [*entry]}
        for kind, entry in told.items()
    }


def _own_configs(cfg: PipelineConfig) -> Mapping[str, Any]:
    """The pipeline's own for this vendor, where `cfg` is the pipeline's: without them no other model is compiled."""
    package, found, _ = type(cfg).__module__.partition(".npu_export")
    if not found:
        return {}
    try:
        own = importlib.import_module(f"{package}.{_CONFIGS}")
        model = (cfg.backend, getattr(cfg, "model_name", None))
        configs: Mapping[str, Any] = own.MODEL_SPECIFIC_DEFAULTS.get(
            model
        ) or own.GENERIC_DEFAULT_CONFIGS.get(cfg.backend, {})
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"this version of litert-torch keeps its compiler's settings elsewhere ({error}): set cfg.compile_configs"
        ) from error
    return configs


def _name(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]
