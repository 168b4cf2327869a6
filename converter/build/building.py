"""Builds a bundle stage by stage; stages whose result is in the work folder are skipped."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_opt.base.atomic import AnyPath, replacing, resolve_target
from edge_opt.base.errors import EdgeOptError, UsageError, unknown
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.build.evaluation import CPU, NPU, Evaluation, HeldOut, choose, emulation, in_turn
from edge_opt.build.logits import KEPT_ROWS
from edge_opt.build.phone import QUALCOMM, NextSteps, chip_of, find_compiler, next_steps
from edge_opt.build.prompts import read_prompts
from edge_opt.build.rotation import ROTATED
from edge_opt.build.sections import faults
from edge_opt.build.source import CONFIG, Given, Kind, look_at, read_json
from edge_opt.build.stages import (
    BuildCheckError,
    Input,
    Processes,
    StageFailedError,
    StageReport,
    Stages,
    digest_of,
    taken,
)
from edge_opt.conversion.models import find_unsound
from edge_opt.ir.opening import WORK, Opened
from edge_opt.npu.emulator import check_emulator
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.sdk import libraries_digest
from edge_opt.schema.data import Data, Source
from edge_opt.schema.litertlm import SUFFIX
from edge_opt.soundness import sentences
from edge_opt.targets import Target, load_target
from edge_opt.targets.chips import TARGETS

WEIGHTS = ("8", "4-logits")
"""Supported bits of weights: all at 8, or those of the logits at 4 except for frequent tokens."""
WORST_RATIO = 1.05
"""Perplexity relative to the checkpoint's above which a build warns."""
WORST_KL = 0.5
"""Mean KL divergence from the checkpoint in the NPU's emulator, in nats, above which a build warns."""
_NEXT = "NEXT.md"
_NO_REFERENCE = "Not evaluated: there is no checkpoint; `edge-opt evaluate` compares a bundle with one"


@dataclass(slots=True)
class BuildResult(Record):
    """The result of a build: `optimized` is our own stage's report, `settings` the settings of the other stages.

    `converted` is the uncompiled bundle in the work folder; `output` is None if nothing was compiled.
    `caches` has the window of sliding layers, their ring buffer's length (None for whole caches), and `notes` on both.
    `next` tells how to run the bundle here and on a phone; `next_file` is the same as a page. `evaluation` is an
    `Evaluation` as plain values, with a `note` on the text; None if not requested. `warnings` are to be read before the
    bundle is used. `seconds` is this run's time.
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
    optimized: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    next: NextSteps | None = None
    next_file: str | None = None
    evaluation: dict[str, Any] | None = None
    seconds: float = 0.0


def build(
    source: AnyPath,
    output: AnyPath,
    *,
    soc: str,
    prompts: AnyPath | None = None,
    sdk: AnyPath | None = None,
    prefill: Sequence[int] | None = None,
    cache: int | None = None,
    weights: str = WEIGHTS[0],
    work: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    target: str | None = None,
    held_out: AnyPath | None = None,
    evaluate: bool = True,
    npu_tokens: int = 4,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_stage: Callable[[StageReport], None] | None = None,
    toolchain: Processes | None = None,
) -> BuildResult:
    """Build a bundle for an NPU from a checkpoint, or from an intermediate bundle of litert-torch's pipeline.

    Args:
        source: a Hugging Face folder, a float .litertlm or a quantized one.
        output: the .litertlm to write.
        soc: the chip, e.g. SM8750.
        prompts: JSON lines to calibrate with; required unless the source is quantized.
        sdk: folder with Qualcomm's libraries; if None, found as in `edge_opt.npu.profile`, or in LiteRT's package of
            them. litert-torch finds other vendors' compilers.
        prefill: prefill lengths; None for 128.
        cache: cache length; None for 1280.
        weights: bits of the weights: "8" for all, or "4-logits" for 4-bit logits weights except for frequent tokens:
            faster generation, slightly worse text. "4-logits" needs a checkpoint and a Qualcomm NPU.
        work: folder for the stages' results; None for `<output's stem>.work` beside the output.
        settings: other fields of litert-torch's `NpuPipelineConfig`, and arguments of its stages.
            `sliding_window_ring_buffer_size` None keeps whole caches.
        target: a target's name, or the path of a file as `edge_opt.npu.tune` writes it; None for the vendor's.
        held_out: JSON lines to evaluate with, see `edge_opt.evaluate`; None for every fifth prompt, which is then not
            used for calibration.
        evaluate: compare the uncompiled bundle's perplexity with the checkpoint's.
        npu_tokens: how many tokens to score in the NPU's emulator too, if it is installed; takes minutes, 0 skips it.
        overwrite: replace existing outputs.
        progress: called with (stage, done, total).
        on_stage: called when a stage is done.
        toolchain: runs the stages; None for litert-torch in processes.

    Raises:
        UsageError: an argument is invalid, or a package is missing.
        CompilerMissingError: Qualcomm's compiler is missing.
        StageFailedError: a tool failed.
        BuildCheckError: the quantized bundle is broken, or the compiled one is invalid.
        OutputError: the disk is full, or the output cannot be written.
    """
    began, tools = time.perf_counter(), toolchain or Processes()
    folder = Path(output).with_suffix(WORK) if work is None else Path(work)
    _check_output(Path(output), Path(source), folder, overwrite=overwrite)
    vendor, chip = chip_of(soc)
    facts, given = _target(vendor, chip, target), look_at(Path(source))
    lengths = {"prefill_lengths": prefill and [*prefill], "cache_length": cache}
    lengths = {name: value for name, value in lengths.items() if value}
    _check_weights(weights, given, vendor)
    _check_calibration(given, prompts, lengths)
    libraries, text = find_compiler(vendor, sdk), _held_out(given, prompts, held_out, evaluate=evaluate)
    runtimes = tools.check_runtimes() if text is not None and text.parts else {}
    options = {
        "vendor": vendor,
        "chip": chip,
        "cache_shape": given.cache_shape,
        "caches": {"window": given.caches.window, "ring": None, "notes": given.caches.lines()},
        "settings": {**(settings or {}), **lengths},
    }
    result = BuildResult(str(source), given.kind, chip, vendor, str(folder), versions=tools.versions())
    with taken(folder):
        run = Stages(folder, tools, result.versions, libraries, progress or (lambda *_: None), on_stage)
        result.stages = run.done
        try:
            root = given.path if given.path.is_dir() else given.path.parent
            origin = Input(given.path, digest_of(given.files, root))
            bundles = _quantized(run, result, given, origin, options, _rest(folder, text, prompts), weights)
            compiler = [result.settings["compile"], "" if libraries is None else libraries_digest(libraries)]
            order = {"target": facts.to_dict(), "sdk": None if libraries is None else str(libraries)}
            optimized = run.run("optimize", [*compiler, order["target"]], order, **bundles)
            result.optimized, result.converted = optimized.values, str(optimized.bundle.path)
            _write_next(result, run)
            if text is not None:
                result.evaluation = {"models": [], "note": text.note}
                if text.parts:
                    models = {"checkpoint": origin, "converted": optimized.bundle}
                    _evaluate(run, result, text, runtimes, npu_tokens, **models)
            configs = {"compile_configs": optimized.values["compile_configs"]}
            compiled = run.run("compile", [*compiler, configs], configs, model=optimized.bundle).bundle.path
            _deliver(compiled, result, Path(output), overwrite=overwrite)
            _write_next(result, run)
        except EdgeOptError as error:
            error.result = result
            if isinstance(error, StageFailedError) and result.converted:
                error.args = (f"{error}; the bundle before the compiler is {result.converted}",)
            raise
        except KeyboardInterrupt as error:
            error.add_note(f"completed stages are in {folder}: run it again to continue")
            raise
        finally:
            result.seconds = round(time.perf_counter() - began, 3)
    return result


# Before anything runs


def _check_output(output: Path, source: Path, work: Path, *, overwrite: bool) -> None:
    resolve_target(output, overwrite=overwrite, inputs=[source])
    if output.suffix != SUFFIX:
        raise UsageError(f"{output} must end in {SUFFIX}, as LiteRT-LM's bundles do")
    if output.resolve() == work.resolve():
        raise UsageError(f"{work} is also the output: give another work=...")


def _target(vendor: str, chip: str, target: str | None) -> Target:
    facts = load_target(target or TARGETS[vendor])
    if target and not target.endswith(".toml") and facts.name not in {TARGETS[vendor], "generic"}:
        raise UsageError(f"target '{facts.name}' is not for the NPU of {chip}: leave target=... out")
    return facts


def _check_weights(weights: str, given: Given, vendor: str) -> None:
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights == WEIGHTS[0]:
        return
    if given.kind is not Kind.CHECKPOINT or vendor != QUALCOMM:
        raise UsageError(f"weights='{weights}' needs a checkpoint and a Qualcomm NPU: use weights='8'")
    config = read_json(given.path / CONFIG)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if size and size <= KEPT_ROWS:
        raise UsageError(
            f"the vocabulary has {size} tokens, of which {KEPT_ROWS} stay at 8 bits: use weights='8'"
        )


def _check_calibration(given: Given, prompts: AnyPath | None, lengths: Mapping[str, object]) -> None:
    if given.kind is not Kind.CHECKPOINT and lengths:
        raise UsageError(f"{given.path} has its lengths already: leave prefill=... and cache=... out")
    if given.kind is Kind.QUANTIZED and prompts is not None:
        raise UsageError(f"{given.path} is quantized already: leave prompts=... out")
    if given.kind is not Kind.QUANTIZED:
        if prompts is None:
            raise UsageError(
                f"a {given.kind} is calibrated on text: give prompts=FILE.jsonl, one prompt per line"
            )
        read_prompts(Path(prompts))


def _held_out(
    given: Given, prompts: AnyPath | None, held_out: AnyPath | None, *, evaluate: bool
) -> HeldOut | None:
    """The text to evaluate on; None if evaluation is off."""
    if held_out is not None and not evaluate:
        raise UsageError("held_out=... is text to evaluate on: leave it out, or evaluate=False")
    if given.kind is Kind.CHECKPOINT:
        return choose(held_out, prompts) if evaluate else None
    if held_out is not None:
        raise UsageError(f"held_out=... needs a checkpoint to compare with, and {given.path} is a bundle")
    return HeldOut(note=_NO_REFERENCE) if evaluate else None


# What runs


def _rest(folder: Path, text: HeldOut | None, prompts: AnyPath | None) -> AnyPath | None:
    """The prompts to calibrate with: the given file, or a new one without the held-out prompts."""
    if text is None or text.rest is None:
        return prompts
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in text.rest), encoding="utf-8")
    return path


def _quantized(
    run: Stages,
    result: BuildResult,
    given: Given,
    model: Input,
    options: Mapping[str, Any],
    prompts: AnyPath | None,
    weights: str,
) -> dict[str, Input]:
    """Run the stages up to quantization, if needed; return the quantized `model` and the float `exported`, if any."""
    # Settings depend on the configuration only, not on the weights.
    configured = digest_of([given.path / CONFIG], given.path) if given.kind is Kind.CHECKPOINT else ""
    text = {}
    if prompts is not None:
        text["prompts"] = Input(Path(prompts), digest_of([Path(prompts)], Path(prompts).parent))
    depends, source = [str(given.path.resolve()), options], Input(given.path, configured)
    answer = run.run("configure", depends, options, model=source, **text).values
    settings = answer["settings"]
    run.config, result.settings, result.caches = answer["config"], settings, answer["caches"]
    checkpoint = model
    if given.kind is Kind.CHECKPOINT:
        window = {"window": answer["caches"]["window"]}
        exported = run.run("export", [settings["export"], window], window, model=model)
        model = exported.bundle
        if (exported.folder / ROTATED).is_dir():
            checkpoint = Input(exported.folder / ROTATED, exported.digest)
    bundles = {"model": model}
    if given.kind is not Kind.QUANTIZED:
        calibrated = run.run("calibrate", settings["calibrate"], model=model, **text)
        ranges = Input(calibrated.folder, calibrated.digest)
        quantized = run.run("quantize", settings["quantize"], model=model, ranges=ranges)
        if weights != WEIGHTS[0]:
            made_from = {"model": quantized.bundle, "checkpoint": checkpoint}
            quantized = run.run("narrow", KEPT_ROWS, **made_from, **text)
        bundles = {"exported": model, "model": quantized.bundle}
    path = bundles["model"].path
    # If calibration missed a part, the bundle may ignore its cache.
    broken = sentences(find_unsound(Opened(path)))
    if broken:
        raise BuildCheckError(f"{path} is broken, so nothing is delivered: {broken[0]}")
    return bundles


def _evaluate(
    run: Stages,
    result: BuildResult,
    text: HeldOut,
    runtimes: Mapping[str, str],
    npu_tokens: int,
    **models: Input,
) -> None:
    """Score the checkpoint and the converted bundle, in the emulator too if it is installed."""
    parts = {"parts": in_turn(text.parts, [models["converted"].path])}
    found = from_dict(Evaluation, run.run(CPU, [parts, runtimes], parts, **models).values)
    result.evaluation = {**found.to_dict(), "note": text.note}
    if not found.within(WORST_RATIO):
        result.warnings.append(
            f"Perplexity is {found.models[-1].ratio:.2f} times the checkpoint's, more than {WORST_RATIO}: check "
            f"answers before releasing the bundle; changed settings may be the cause"
        )
    if not npu_tokens or run.libraries is None:
        return
    compiler = Compiler(result.chip, sdk=str(run.libraries))
    options = emulation(text, compiler, npu_tokens)
    depends = [options["texts"], options["tokens"], result.chip, libraries_digest(run.libraries)]
    try:
        check_emulator(compiler)
        answer = run.run(NPU, depends, options, **models)
    except EdgeOptError as error:  # the emulator's score is optional
        result.evaluation["note"] += f". Not evaluated in the NPU's emulator: {error}"
        return
    score = from_dict(Evaluation, answer.values).models[-1]
    result.evaluation["models"].append(asdict(score))
    assert score.kl is not None
    if not score.kl <= WORST_KL:  # NaN, too
        result.warnings.append(
            f"In the NPU's emulator the answers are far from the checkpoint's: mean KL divergence {score.kl:.2f} nats, "
            f"more than {WORST_KL}: check `edge-opt evaluate --on npu` with more tokens before releasing the bundle"
        )


def _write_next(result: BuildResult, run: Stages) -> None:
    """Write the next steps for the output or, if there is none yet, for the uncompiled bundle."""
    assert result.converted is not None
    result.next = next_steps(result.vendor, result.chip, run.libraries, result.converted, result.output)
    page = run.folder / _NEXT
    page.write_text(result.next.markdown(Path(result.output or result.converted).name), encoding="utf-8")
    result.next_file = str(page)


def _deliver(compiled: Path, result: BuildResult, output: Path, *, overwrite: bool) -> None:
    """Check the compiled bundle and write the output."""
    wrong = faults(Path(str(result.converted)), compiled)
    if wrong:
        raise BuildCheckError(f"{compiled} is not a valid result: {'; '.join(wrong)}")
    source = Source.open(compiled)
    with replacing(output, overwrite=overwrite) as target:
        Data.region(source, 0, source.size).write(target)
    source.close()
    result.output = str(output)
