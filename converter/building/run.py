"""Builds a bundle stage by stage; stages whose result is in the work folder are skipped."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath, path_of, replacing, resolve_target, write_whole
from edge_opt.base.errors import EdgeOptError, UsageError, unknown
from edge_opt.base.packages import versions_of
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress, no_progress
from edge_opt.base.work import work_folder
from edge_opt.building import evaluation, stages
from edge_opt.building.evaluation import Evaluation
from edge_opt.building.held_out import Texts, hold_out, in_turn, read_texts, repeating
from edge_opt.building.needs import needs_of
from edge_opt.building.plan import PLAN, plan_of
from edge_opt.building.prompts import read_prompts
from edge_opt.building.recipe import (
    COMPILE,
    CONFIGURE,
    EMULATE,
    EVALUATE,
    MERGE,
    OPTIMIZE,
    ROUND,
    SOURCES,
    check_weights,
    run_quantization,
)
from edge_opt.building.sections import faults
from edge_opt.building.settings import check_settings
from edge_opt.building.source import Given, Kind, look_at, read_object
from edge_opt.building.stages import (
    LIBRARIES,
    BuildCheckError,
    Input,
    Stage,
    StageReport,
    Stages,
    Values,
)
from edge_opt.conversion.models import find_unsound
from edge_opt.ir.opening import Opened
from edge_opt.npu.compiler import Compiler, CompilerMissingError
from edge_opt.npu.vendors import backend_of, vendor_backend
from edge_opt.schema.data import Data, Source
from edge_opt.schema.litertlm import SUFFIX
from edge_opt.soundness import MASK_TOO_SMALL, sentences
from edge_opt.targets import Target, load_target
from edge_opt.targets.chips import NAMES, TARGETS, find_chip

WORST_RATIO = 1.05
"""Perplexity relative to the checkpoint's above which a build warns, or fails if the layers' weights are in 4 bits."""
WORST_KL = 0.1
"""Nats of mean KL divergence from the checkpoint, more than on CPU kernels, above which a build warns of the NPU.

In Gemma 3 270M, norms that truncate add 0.15 over eight texts, and 0.03 where they are balanced.
"""
_NO_REFERENCE = (
    "Not evaluated: there is no checkpoint; `edge-opt evaluate` compares a bundle with one"
)


@dataclass(slots=True)
class BuildResult(Record):
    """The result of a build: `optimized` is our own stage's report, `settings` the settings of the other stages.

    `converted` is the uncompiled bundle in the work folder; `output` is None if nothing was compiled.
    `caches` has the window of sliding layers, their ring buffer's length (None for whole caches), and `notes` on both.
    `evaluation` is None if not requested. Read `warnings` before using the bundle. `seconds` is this run's time.
    """

    source: str
    kind: str
    chip: str
    vendor: str
    work: str
    output: str | None = None
    converted: str | None = None
    warnings: list[str] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)
    optimized: Values = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    caches: Values = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    seconds: float = 0.0


def build(
    source: AnyPath,
    output: AnyPath,
    *,
    soc: str,
    base: AnyPath | None = None,
    prompts: AnyPath | None = None,
    sdk: AnyPath | None = None,
    prefill: Sequence[int] | None = None,
    cache: int | None = None,
    weights: str = "8",
    max_perplexity_ratio: float | None = None,
    plan: AnyPath | None = None,
    work: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    target: str | None = None,
    held_out: AnyPath | None = None,
    evaluate: bool = True,
    npu_tokens: int = 4,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_stage: Callable[[StageReport], None] | None = None,
) -> BuildResult:
    """Build a bundle for an NPU from a checkpoint, or from an intermediate bundle of litert-torch's pipeline.

    Args:
        source: a Hugging Face folder, a LoRA adapter's folder, a float .litertlm or a quantized one.
        output: the .litertlm to write.
        soc: the chip, e.g. SM8750.
        base: the checkpoint that a LoRA adapter belongs to; None for the folder that it names, or one of that name
            beside it.
        prompts: JSON lines to calibrate with; required unless the source is quantized.
        sdk: folder with the vendor's libraries, as for `edge_opt.npu.Compiler`. Without MediaTek's, the build ends at
            the compiler, and the next run continues there. litert-torch finds other vendors' compilers.
        prefill: prefill lengths; None for 128.
        cache: cache length; None for 1280.
        weights: bits of the weights: "8" for all, or "4-logits" for 4-bit logits weights except for frequent tokens:
            faster generation, slightly worse text; or "4" for that, and as many of the layers' weights in 4 bits as
            `max_perplexity_ratio` allows. "4-logits" and "4" need a checkpoint and a Qualcomm NPU.
        max_perplexity_ratio: fail if the bundle's perplexity, less the standard error of its measurement, is more than
            this times the checkpoint's; None for 1.05 with weights "4", and for no limit otherwise.
        plan: with weights "4", a file with the bits of each product, as an earlier build wrote it to its work folder
            (round/plan.json), for a checkpoint of the same shape; None to measure and choose.
        work: folder for the stages' results; None for `<output's stem>.work` beside the output.
        settings: other fields of litert-torch's `NpuPipelineConfig`, and arguments of its stages.
            `sliding_window_ring_buffer_size` None keeps whole caches; `rotate` False does not rotate the residual
            stream.
        target: a target's name, or the path of a target file as written by `edge_opt.npu.tune`; None for the vendor's.
        held_out: JSON lines to evaluate with, see `edge_opt.evaluate`; None for every fifth prompt, which is then not
            used for calibration.
        evaluate: compare the uncompiled bundle's perplexity with the checkpoint's.
        npu_tokens: number of tokens to score in the NPU's emulator, if it is installed; takes minutes, 0 skips it.
        overwrite: replace existing outputs.
        progress: called with (stage, done, total).
        on_stage: called when a stage is done.

    Raises:
        UsageError: an argument is invalid, or a package is missing.
        CompilerMissingError: the vendor's compiler is missing.
        StageFailedError: a tool failed.
        BuildCheckError: the quantized bundle is broken, or the compiled one is invalid.
        OutputError: the disk is full, or the output cannot be written.
    """
    began = time.perf_counter()
    output = path_of(output, "the output")
    if output.suffix != SUFFIX:
        raise UsageError(f"{output} must be NAME{SUFFIX}, as LiteRT-LM's bundles are called")
    source = path_of(source, "the source")
    folder = work_folder(output) if work is None else path_of(work, "the work folder")
    _check_paths(output, folder, (source, base, prompts, held_out), overwrite=overwrite)
    vendor, chip = _chip_of(soc)
    given = look_at(source, None if base is None else path_of(base, "the base"))
    facts = _target(vendor, chip, target)
    settings = {**(settings or {}), **_lengths(given, prefill, cache)}
    check_settings(given, settings)
    libraries = _libraries(vendor, Compiler(chip, sdk=sdk))
    check_weights(weights, given.kind, vendor)
    limit = _limit(max_perplexity_ratio, weights)
    # A plan is chosen so that the limit is kept; one that is given is taken as it is.
    rounding = {"ratio": limit if plan is None else None, "plan": _plan(plan, weights)}
    texts = _texts(given, prompts, held_out, evaluate=evaluate)
    versions = stages.tool_versions()
    if given.adapter:
        versions = versions | versions_of(("peft",), stages.INSTALL)
    runtimes = evaluation.check_runtimes() if texts.scored else {}
    result = BuildResult(
        source=str(source),
        kind=given.kind,
        chip=chip,
        vendor=vendor,
        work=str(folder),
        versions=versions,
    )
    result.warnings += filter(None, [stages.untried(versions)])
    with stages.locked(folder), _finishing(result, began):
        runner = Stages(folder, versions, progress or no_progress, on_stage, done=result.stages)
        runner.files |= libraries
        _give_inputs(runner, given, texts.calibration)
        _configure(runner, result, given, settings, rounds=weights == "4")
        quantized = run_quantization(
            runner, given.kind, weights, result.settings, result.caches["window"], rounding
        )
        result.warnings += _check_sound(quantized.path)
        compiling = result.settings["compile"]
        optimized = runner.run(OPTIMIZE, {**compiling, "target": facts.to_dict()})
        result.optimized = optimized.values
        result.converted = str(optimized.bundle)
        if evaluate:
            result.evaluation = Evaluation([], 0, note=texts.note)
        configs = result.optimized["compile_configs"]
        last: dict[Stage, Values] = {COMPILE: {**compiling, "compile_configs": configs}}
        if texts.scored:
            parts = in_turn(texts.scored, optimized.bundle)
            last[EVALUATE] = {"parts": parts, "runtimes": runtimes}
            if npu_tokens and libraries and backend_of(chip).emulates:
                last[EMULATE] = evaluation.emulation(texts.scored, npu_tokens, Compiler(chip))
        compiled = _run_last(runner, result, last, texts.note)
        _check_quality(result, limit, compiled)
        _deliver(compiled, result, output, overwrite=overwrite)
    return result


def _give_inputs(runner: Stages, given: Given, calibration: list[Any]) -> None:
    """Name the files that stages read; a LoRA folder is merged with its base first."""
    runner.files |= dict.fromkeys(SOURCES[given.kind], _input(given.files, given.path))
    if calibration:
        path = runner.folder / "prompts.jsonl"
        lines = "".join(f"{json.dumps(prompt)}\n" for prompt in calibration)
        write_whole(path, lines.encode(), overwrite=True)
        runner.files["prompts"] = _input([path], path)
    if given.adapter:
        runner.files["adapter"] = _input(given.adapter, given.adapter[0].parent)
        runner.run(MERGE, {})


def _input(files: Sequence[Path], path: Path) -> Input:
    """The file or folder `path`, whose result depends on these files."""
    return Input(path, stages.digest_of(files, files[0].parent))


@contextmanager
def _finishing(result: BuildResult, began: float) -> Iterator[None]:
    """Note the time, and give an error the result so far and the way to go on."""
    try:
        yield
    except EdgeOptError as error:
        error.result = result
        if result.converted and not isinstance(error, BuildCheckError):
            error.args = (f"{error}; the bundle before compilation is {result.converted}",)
        raise
    except KeyboardInterrupt as error:
        error.add_note(f"completed stages are in {result.work}: run the same command to continue")
        raise
    finally:
        result.seconds = round(time.perf_counter() - began, 3)


def _configure(
    runner: Stages,
    result: BuildResult,
    given: Given,
    settings: Values,
    *,
    rounds: bool,
) -> None:
    """Resolve the pipeline's settings, and the lengths of caches; tell what the other stages need."""
    options = {
        "vendor": result.vendor,
        "chip": result.chip,
        "settings": settings,
        "cache": given.cache,
        "caches": {"window": given.caches.window, "ring": None, "notes": given.caches.lines()},
    }
    configured = runner.result(CONFIGURE, options)
    runner.config = configured.values["config"]
    is_checkpoint = given.kind is Kind.CHECKPOINT
    files = given.weights if is_checkpoint else given.files
    streams = runner.config.get("use_v2", False)
    needs = needs_of(files, rounds=rounds, streams=streams)
    runner.needs = needs.memory
    if is_checkpoint:
        configured.values["notes"] = needs.lines(runner.folder, result.vendor)
    runner.add(configured)
    result.settings = configured.values["settings"]
    result.caches = configured.values["caches"]


def _check_sound(path: Path) -> list[str]:
    """Raise BuildCheckError for broken quantization: if calibration missed a part, the bundle may ignore its cache.

    Masks that are too small are returned as warnings: a given bundle may have them, and may be good enough.
    """
    found = find_unsound(Opened(path))
    broken = sentences(one for one in found if one.rule != MASK_TOO_SMALL)
    if broken:
        raise BuildCheckError(f"{path} is broken, no bundle was written: {broken[0]}")
    return sentences(found)


def _chip_of(name: str) -> tuple[str, str]:
    """The vendor of a chip, as litert-torch's pipeline names it, and the chip; UsageError for an unknown chip."""
    found = find_chip(name)
    if found is None:
        error = unknown("chip", name.strip(), NAMES)
        raise UsageError(f"{error}; `adb shell getprop ro.soc.model` asks a phone for its chip")
    return found


def _libraries(vendor: str, compiler: Compiler) -> dict[str, Input]:
    """The vendor's libraries by their role; empty if litert-torch finds them, or they are needed only at the end."""
    backend = vendor_backend(vendor)
    if backend is None:
        if compiler.sdk is not None:
            raise UsageError(
                f"sdk=... is not for {vendor}: leave it out, litert-torch finds its libraries"
            )
        return {}
    try:
        folder = backend.libraries(compiler)
    except CompilerMissingError:
        if compiler.sdk is None and not backend.estimates:
            return {}  # nothing but the last stage needs them
        raise
    return {LIBRARIES: _input(sorted(folder.glob(backend.results_from)), folder)}


def _check_paths(
    output: Path, work: Path, inputs: Sequence[AnyPath | None], *, overwrite: bool
) -> None:
    """Raise UsageError or OutputError for paths that exclude each other: stages replace files in the work folder."""
    for path in filter(None, (output, *inputs)):
        if work.resolve() in path_of(path, "an input").resolve().parents:
            raise UsageError(
                f"{path} is in the work folder {work}, where the build replaces files: choose another place for it, "
                f"or give another work=..."
            )
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    if output.resolve() == work.resolve():
        raise UsageError(f"{work} is also the output: give another work=...")


def _target(vendor: str, chip: str, target: str | None) -> Target:
    facts = load_target(TARGETS[vendor] if target is None else target)
    if target and not target.endswith(".toml") and facts.name not in {TARGETS[vendor], "generic"}:
        raise UsageError(
            f"target '{facts.name}' is not for the NPU of {chip}: leave out target=..."
        )
    return facts


def _lengths(given: Given, prefill: Sequence[int] | None, cache: int | None) -> Values:
    """The pipeline's settings for lengths that are given."""
    lengths: Values = {}
    if prefill:
        lengths["prefill_lengths"] = [*prefill]
    if cache:
        lengths["cache_length"] = cache
    if lengths and given.kind is not Kind.CHECKPOINT:
        raise UsageError(f"{given.path} has fixed lengths: leave out prefill=... and cache=...")
    return lengths


def _limit(ratio: float | None, weights: str) -> float | None:
    """The perplexity ratio above which the build fails."""
    if ratio is None and weights == "4":
        return WORST_RATIO
    if ratio is not None and not ratio >= 1:
        raise UsageError(
            f"max_perplexity_ratio={ratio:g} is below the checkpoint's own: give 1 or more"
        )
    return ratio


def _plan(path: AnyPath | None, weights: str) -> Values | None:
    """The choices in a plan file, without what does not affect the result; UsageError if it is not a plan."""
    if path is None:
        return None
    if weights != "4":
        raise UsageError(
            f"plan=... says which weights are in 4 bits, and weights='{weights}' has none to choose"
        )
    plan = plan_of(read_object(path_of(path, "the plan")), f"plan {path}")
    return {"products": [asdict(replace(one, weights=0)) for one in plan.products]}


def _texts(
    given: Given, prompts: AnyPath | None, held_out: AnyPath | None, *, evaluate: bool
) -> Texts:
    """Read the prompts, and hold some out for evaluation unless `held_out` has others."""
    if given.kind is Kind.QUANTIZED and prompts is not None:
        raise UsageError(f"{given.path} is quantized already: leave out prompts=...")
    if given.kind is not Kind.QUANTIZED and prompts is None:
        raise UsageError(f"calibrating a {given.kind} needs prompts: give prompts=FILE.jsonl")
    every = [] if prompts is None else read_prompts(path_of(prompts, "prompts"))
    has_reference = given.kind is Kind.CHECKPOINT
    if held_out is None:
        return hold_out(every) if has_reference and evaluate else Texts([], every, _NO_REFERENCE)
    if not evaluate:
        raise UsageError("held_out=... and evaluate=False exclude each other: leave one out")
    if not has_reference:
        raise UsageError(
            f"held_out=... needs a checkpoint to compare with, and {given.path} is a bundle"
        )
    texts = read_texts(Path(held_out), every)
    return Texts(texts, every, f"Evaluated on {held_out}{repeating(texts, every)}")


def _run_last(runner: Stages, result: BuildResult, last: Mapping[Stage, Values], note: str) -> Path:
    """Compile and score, at the same time if memory allows it; the path of the compiled bundle."""
    needed = sum(runner.needs.get(stage.name, 0) for stage in last)
    with runner.threads(side_by_side=needed <= processes.free_memory()) as threads:
        running: dict[Stage, Future[StageReport]] = {}
        for stage, options in last.items():
            running[stage] = threads.submit(runner.result, stage, options)
        # The compiler ends first, and its failure ends the others.
        compiled = runner.add(running[COMPILE].result())
        if EVALUATE in last:
            result.evaluation = _evaluated(runner, result, running, note)
    return compiled.bundle


def _evaluated(
    runner: Stages, result: BuildResult, scoring: Mapping[Stage, Future[StageReport]], note: str
) -> Evaluation:
    """Wait for the scores in LiteRT-LM and in the NPU's emulator; a note says why if the emulator fails."""
    report = runner.add(scoring[EVALUATE].result())
    found = replace(from_dict(Evaluation, report.values), note=note)
    if not found.within(WORST_RATIO):
        bundle = found.models[-1]
        result.warnings.append(
            f"Perplexity is {bundle.ratio:.3f} +- {bundle.ratio_error:.3f} times the checkpoint's, more than "
            f"{WORST_RATIO}: check answers before releasing the bundle; changed settings may be the cause"
        )
    if EMULATE not in scoring:
        return found
    try:
        report = runner.add(scoring[EMULATE].result())
    except EdgeOptError as error:
        return replace(found, note=f"{note}. Not evaluated in the NPU's emulator: {error}")
    *_, cpu, npu = from_dict(Evaluation, report.values).models
    assert cpu.kl is not None
    assert npu.kl is not None
    if not npu.kl - cpu.kl <= WORST_KL:  # NaN, too
        result.warnings.append(
            f"In the NPU's emulator the answers are farther from the checkpoint's than on CPU kernels: mean KL "
            f"divergence {npu.kl:.2f} nats, not {cpu.kl:.2f}, on {npu.tokens} tokens: run `edge-opt evaluate --on npu` "
            f"with more before releasing the bundle"
        )
    return replace(found, models=[*found.models, npu])


def _check_quality(result: BuildResult, limit: float | None, compiled: Path) -> None:
    """Raise BuildCheckError if the bundle's perplexity on CPU kernels exceeds the limit by more than its error."""
    if limit is None:
        return
    models = [] if result.evaluation is None else result.evaluation.models
    # The checkpoint, then the bundle, if they were scored. The error of a ratio of one token is not known.
    if len(models) < 2 or models[1].tokens < 2:
        result.warnings.append(
            f"Perplexity was not measured, so it may be more than {limit:g} times the checkpoint's: run "
            f"`edge-opt evaluate`"
        )
        return
    bundle = models[1]
    if bundle.exceeds(limit):
        is_rounded = any(stage.name == ROUND.name for stage in result.stages)
        kept = f"plan={Path(result.work, ROUND.name, PLAN)} with " if is_rounded else ""
        raise BuildCheckError(
            f"perplexity is {bundle.ratio:.3f} +- {bundle.ratio_error:.3f} times the checkpoint's, more than "
            f"{limit:g}, so nothing was written at the output; the bundle is {compiled}: give more prompts, or accept "
            f"it: {kept}a larger max_perplexity_ratio"
        )


def _deliver(compiled: Path, result: BuildResult, output: Path, *, overwrite: bool) -> None:
    """Check the compiled bundle, and write the output."""
    wrong = faults(Path(str(result.converted)), compiled)
    if wrong:
        raise BuildCheckError(f"{compiled} is not a valid result: {'; '.join(wrong)}")
    source = Source.open(compiled)
    with replacing(output, overwrite=overwrite) as target:
        Data(source).write(target)
    source.close()
    result.output = str(output)
