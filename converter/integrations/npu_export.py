"""Runs edge-opt as a stage of litert-torch's NPU pipeline, between `npu_quantize` and `npu_compile`.

Examples:
    from litert_torch.generative.export_hf.experimental.npu_export import stages
    from edge_opt.integrations.npu_export import npu_optimize

    stages.npu_quantize(cfg, "float.litertlm", "quantized.litertlm", "calibration")
    done = npu_optimize(cfg, "quantized.litertlm", "optimized.litertlm", sdk="qnn")
    stages.npu_compile(cfg, "optimized.litertlm", "npu.litertlm", compile_configs=done.compile_configs)
"""

import importlib
import json
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edge_opt.base.atomic import AnyPath, resolve_target
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.base.record import Record
from edge_opt.base.words import Progress, no_progress
from edge_opt.conversion import ConversionResult, convert
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, Opened
from edge_opt.npu.compiler import Compiler, CompilerMissingError, Figures, compiling_threads
from edge_opt.npu.profiling import Measured, gathered, measure
from edge_opt.npu.vendors import vendor_backend
from edge_opt.passes import PASSES
from edge_opt.targets import TargetLike, load_target
from edge_opt.targets.chips import TARGETS

_COMPILERS = 2  # at once; each uses one core, and beside the first ones the conversion another
_CONFIGS = "litert_lm_npu_compiler.litert_lm_npu_compiler_configs"


@dataclass(frozen=True, slots=True)
class Gain(Record):
    """The compiler's figures for an entry point as exported and as converted; which version was kept, and why.

    Figures are None if nothing was measured.
    """

    signature: str
    before: Figures | None
    after: Figures | None
    kept: Literal["converted", "exported"]
    why: str

    def __str__(self) -> str:
        return f"{self.signature} kept as {self.kept}: {self.why}"


@dataclass(frozen=True, slots=True)
class Optimized(Record):
    """The result of `npu_optimize`.

    `signatures`: entry points of the prefill/decode model. `compile_configs`: to pass to `npu_compile`, with the flags
    that were measured. `notes`: why nothing was measured, or which chip the times are for.
    """

    conversion: ConversionResult
    signatures: tuple[Gain, ...]
    compile_configs: dict[str, Any]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """A line for each entry point's outcome, then the notes."""
        return "\n".join([*map(str, self.signatures), *self.notes])


def npu_optimize(
    cfg: Any,
    input_litertlm: AnyPath,
    output_litertlm: AnyPath,
    *,
    sdk: AnyPath | None = None,
    target: TargetLike | None = None,
    exported: AnyPath | None = None,
    overwrite: bool | None = None,
    progress: Progress | None = None,
) -> Optimized:
    """Convert a quantized bundle for the NPU of `cfg`, verify it, and keep the better version of each entry point.

    Each entry point of the prefill/decode model is compiled as exported and as converted, with the flags that
    `npu_compile` will use, and is kept as exported unless the converted one is faster or more accurate. If the vendor's
    compiler has no estimate, it is kept as exported only if the converted one compiles worse.

    Args:
        cfg: litert-torch's `NpuPipelineConfig`: reads `backend` and `soc_model` and, if present, `overwrite`,
            `compile_configs`, `model_name` and `disable_weight_sharing`, as `npu_compile` does.
        input_litertlm: the bundle that `npu_quantize` wrote.
        output_litertlm: where to write.
        sdk: folder with the vendor's libraries, as for `edge_opt.npu.Compiler`. Without libraries, nothing is measured,
            every conversion is kept, and `notes` say so.
        target: a target's name or file, or a `Target`; the one for `cfg.backend` if None.
        exported: the float bundle that `npu_export` wrote, which gives RoPE tables exact frequencies.
        overwrite: replace an existing output; as in `cfg` if None.
        progress: called with (stage, done, total) on long work.

    Raises:
        UsageError: the vendor has no target, or the chip is unknown; otherwise as `edge_opt.convert`.
        CompilerMissingError: `sdk` names a folder without the libraries.
    """
    vendor = cfg.backend.strip().lower()
    if target is None and vendor not in TARGETS:
        raise UsageError(f"vendor '{cfg.backend}' has no target, {did_you_mean(vendor, TARGETS)}")
    facts = load_target(TARGETS[vendor] if target is None else target)
    configs = _compile_configs(cfg)
    compiler, note = _compiler(cfg, vendor, configs, sdk)
    replacing = bool(getattr(cfg, "overwrite", False)) if overwrite is None else overwrite
    resolve_target(output_litertlm, overwrite=replacing)
    tell = progress or no_progress
    auxiliary = None if exported is None else Opened(exported).find(AUXILIARY_SECTION)
    graphs = {} if auxiliary is None else dict(auxiliary.model.entry_points())
    run = partial(
        convert,
        input_litertlm,
        output_litertlm,
        target=facts,
        progress=progress,
        exported=graphs,
    )
    with compiling_threads(_COMPILERS) as threads:
        as_exported = _measuring(compiler, input_litertlm, threads)
        result = run(overwrite=replacing)
        before = gathered(as_exported, "compiling as exported", tell)
        as_converted = _measuring(compiler, output_litertlm, threads)
        after = gathered(as_converted, "compiling as converted", tell)
    gains = _gains(result, before, after)
    exported_only = {gain.signature for gain in gains if gain.kept == "exported"}
    if any(site.signature in exported_only for site in result.converted):
        kept = [entry.name for entry in result.signatures if entry.name not in exported_only]
        result = run(overwrite=True, signatures=kept)
    return Optimized(result, tuple(gains), configs, (note,) if note else ())


def _compiler(
    cfg: Any, vendor: str, configs: Mapping[str, Any], sdk: AnyPath | None
) -> tuple[Compiler | None, str]:
    """A compiler with the settings that `npu_compile` will use, None if none can run here; and a note about it."""
    backend = vendor_backend(vendor)
    if backend is None:
        return None, _unmeasured(f"edge-opt cannot run the compiler of '{cfg.backend}'")
    configured = configs[MAIN_SECTION].get("flags", ())
    shares_weights = not getattr(cfg, "disable_weight_sharing", False)
    flags = backend.pipeline_flags(configured, shares_weights=shares_weights)
    compiler = Compiler(cfg.soc_model.strip().upper(), tuple(flags), sdk)
    try:
        backend.check_installed(compiler)
    except CompilerMissingError as error:
        if sdk is not None:
            raise
        return None, _unmeasured(str(error))
    return backend.judge(compiler), backend.note(compiler.chip)


def _unmeasured(why: str) -> str:
    return f"every conversion is kept, because none could be measured: {why}"


def _measuring(
    compiler: Compiler | None, path: AnyPath, threads: Executor
) -> dict[str, Future[Measured]]:
    """Start to measure each entry point of a bundle's prefill/decode model; empty without a compiler."""
    if compiler is None:
        return {}
    model = Opened(path).main().model
    started: dict[str, Future[Measured]] = {}
    for name, _ in model.entry_points():
        started[name] = threads.submit(measure, model, name, compiler)
    return started


def _gains(
    result: ConversionResult, before: Mapping[str, Measured], after: Mapping[str, Measured]
) -> list[Gain]:
    """A `Gain` for each entry point of the prefill/decode model, in file order."""
    rewritten = {site.signature for site in result.converted}
    repaired = {site.signature for site in result.converted if PASSES[site.pass_name].repairs}
    gains: list[Gain] = []
    for entry in result.signatures:
        name = entry.name
        if name.startswith(f"{AUXILIARY_SECTION}/"):
            continue
        old = before.get(name, Measured(name))
        new = after.get(name, Measured(name))
        is_better = False
        why = "nothing was rewritten"
        if name in rewritten:
            is_better, why = _judged(old, new, repairs=name in repaired)
        kept: Literal["converted", "exported"] = "converted" if is_better else "exported"
        gains.append(Gain(name, old.figures, new.figures, kept, why))
    return gains


def _judged(old: Measured, new: Measured, *, repairs: bool) -> tuple[bool, str]:
    """Whether to keep an entry point as converted, and why."""
    if old.figures is not None and new.figures is not None:
        is_better, why = old.figures.gain(new.figures)
        if repairs and not is_better:
            return True, f"more accurate, although not faster; {why}"
        return is_better, why
    if old.figures is not None:
        return False, f"the converted one does not compile: {new.failure}"
    if new.figures is not None:
        return True, f"the exported one does not compile: {old.failure}"
    if new.failure:
        return True, f"not measured, because neither compiles: {new.failure}"
    return True, "not measured"


def _compile_configs(cfg: Any) -> dict[str, Any]:
    """Configs for `npu_compile`, always with an entry for the prefill/decode model.

    If a `cfg` of litert-torch has none, these are the pipeline's defaults for the vendor: without them, no other model
    would be compiled.
    """
    try:
        given = _configured(cfg)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cfg.compile_configs must be a dict, a JSON object or the path of a JSON file: {error}"
        ) from error
    except (ImportError, AttributeError) as error:
        where = f"litert-torch's compiler settings were not found ({error})"
        raise UsageError(f"{where}: set cfg.compile_configs") from error
    configs: dict[str, Any] = {}
    for kind, entry in {MAIN_SECTION: [], **given}.items():
        only_flags = not isinstance(entry, dict)
        configs[kind] = {"compile": True, "flags": [*entry]} if only_flags else deepcopy(entry)
    return configs


def _configured(cfg: Any) -> Any:
    """The configs that `cfg` has, holds as JSON text or names as a file; or else the pipeline's defaults."""
    given = getattr(cfg, "compile_configs", None) or {}
    if isinstance(given, str):
        text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
        given = json.loads(text)
    package, is_theirs, _ = type(cfg).__module__.partition(".npu_export")
    if given or not is_theirs:
        return given
    own = importlib.import_module(f"{package}.{_CONFIGS}")
    model = getattr(cfg, "model_name", None)
    specific = own.MODEL_SPECIFIC_DEFAULTS.get((cfg.backend, model))
    return specific or own.GENERIC_DEFAULT_CONFIGS.get(cfg.backend, {})
