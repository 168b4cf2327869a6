"""Builds a bundle: one stage after the other, each skipped where the work folder has its result."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_opt.base.atomic import AnyPath, replacing, resolve_target
from edge_opt.base.errors import EdgeOptError, OutputError, UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.build.evaluating import HeldOut, choose, compare
from edge_opt.build.prompts import read_prompts
from edge_opt.build.sections import faults
from edge_opt.build.source import CONFIG, Given, Kind, look_at
from edge_opt.build.vendors import QUALCOMM, NextSteps, Vendor, find_chip, find_compiler, next_steps
from edge_opt.build.work import (
    MODEL,
    BuildCheckError,
    Input,
    Job,
    Kept,
    Processes,
    StageAnswer,
    StageFailedError,
    WorkFolder,
    digest_of,
    key_of,
    taken,
)
from edge_opt.conversion.container import find_unsound
from edge_opt.integrations.npu_export import TARGETS
from edge_opt.ir.opening import WORK, Opened
from edge_opt.npu.sdk import CompilerMissingError, libraries_digest
from edge_opt.schema.data import Source, copy_range
from edge_opt.schema.litertlm import stamp_by_content
from edge_opt.soundness import sentences
from edge_opt.targets import load_target, target_names

CarryOut = Callable[[Job, Path, Path, Progress], StageAnswer]

_SUFFIX = Path(MODEL).suffix
_OURS = ("configure", "calibrate", "optimize", "evaluate")
"""Stages whose results depend on our own version."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage: how long it took, the memory of its largest process and its result's size, both in bytes.

    `made_now`: False where the result is of an earlier run, and so are seconds and memory. `notes` are what it did
    beside its task, in sentences.
    """

    name: str
    seconds: float
    peak_bytes: int | None
    bytes: int
    made_now: bool
    log: str
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class BuildResult(Record):
    """What was built, from what, and how: `optimized` is what our own stage says, `settings` what each other one took.

    `converted` is the bundle in front of the compiler, in the work folder; `output` is None where that is the last one.
    `caches` has the window of sliding layers, the length of their rings (None for whole caches), and `notes` on both.
    `next` says how to try it, and what goes to the phone. `evaluation` is an `Evaluation` of the source, the quantized
    and the converted bundle as plain values, with a `note` on the text; None where none was wanted.
    """

    source: str
    kind: str
    chip: str
    vendor: str
    work: str
    output: str | None = None
    converted: str | None = None
    stages: list[StageReport] = field(default_factory=list)
    optimized: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    sections_put_back: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    next: NextSteps | None = None
    evaluation: dict[str, Any] | None = None


def build(
    source: AnyPath,
    output: AnyPath,
    *,
    soc: str,
    prompts: AnyPath | None = None,
    sdk: AnyPath | None = None,
    prefill: Sequence[int] | None = None,
    cache: int | None = None,
    work: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    target: str | None = None,
    held_out: AnyPath | None = None,
    evaluate: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_stage: Callable[[StageReport], None] | None = None,
    toolchain: Processes | None = None,
) -> BuildResult:
    """Build a bundle for an NPU from a checkpoint, or from a bundle that litert-torch's pipeline wrote on the way.

    Args:
        source: a Hugging Face folder, a float .litertlm or a quantized one.
        output: the .litertlm to write.
        soc: the chip, e.g. SM8750.
        prompts: JSON lines to calibrate with; needed unless the source is quantized.
        sdk: folder with the vendor's libraries; where None, as `edge_opt.npu.profile`, or LiteRT's package of them.
        prefill: lengths of the prefill; 128 where None.
        cache: length of the cache; 1280 where None.
        work: where the stages leave their results; `<output's stem>.work` beside the output where None.
        settings: other fields of litert-torch's `NpuPipelineConfig`, and arguments of its stages.
        target: a target's name or the path of its file, as `edge_opt.npu.tune` writes one; the vendor's where None.
        held_out: JSON lines to evaluate with, see `edge_opt.evaluate`; every fifth prompt where None, which calibration
            then does not see.
        evaluate: whether to compare perplexity with the source's, in front of the compiler.
        overwrite: replace existing outputs.
        progress: called with (stage, done, total).
        on_stage: called when a stage is done.
        toolchain: what carries stages out; litert-torch's own in processes where None.

    Raises:
        UsageError: something given cannot work, or a package is missing.
        CompilerMissingError: the vendor's compiler is; for others than Qualcomm after the conversion, which is kept.
        StageFailedError: a tool failed.
        BuildCheckError: the quantized bundle is ruined, or the compiled one is not what it has to be.
        OutputError: no room, or the output cannot be written.
    """
    vendor, chip = find_chip(soc)
    folder = work_folder(output, work)
    _check_output(Path(output), Path(source), folder, overwrite=overwrite)
    # Loaded here so that a wrong one is refused at once; the stage reads it again, in a process of its own.
    chosen = TARGETS[vendor.name] if target is None else target
    facts = load_target(chosen)
    if facts.name in target_names() and facts.name not in {TARGETS[vendor.name], "generic"}:
        raise UsageError(f"target '{facts.name}' is for other NPUs than that of {chip}: leave target=... out")
    given = look_at(Path(source))
    _check_together(given, prompts, prefill, cache)
    if held_out is not None and not evaluate:
        raise UsageError("held_out=... is text to evaluate on: leave it out, or evaluate=False")
    lengths = {"prefill_lengths": None if prefill is None else [*prefill], "cache_length": cache}
    options = {
        "vendor": vendor.name,
        "chip": chip,
        "model_type": given.model_type,
        "cache_shape": given.cache_shape,
        "caches": {"window": given.caches.window, "ring": None, "notes": given.caches.lines()},
        "settings": {**(settings or {}), **{name: n for name, n in lengths.items() if n is not None}},
    }
    libraries, missing = _compiler(vendor, sdk)
    tools = toolchain or Processes()
    text = choose(held_out, prompts) if evaluate else HeldOut()
    runtimes = tools.check_runtimes(checkpoint=given.kind is Kind.CHECKPOINT) if text.parts else {}
    result = BuildResult(str(source), given.kind, chip, vendor.title, str(folder), versions=tools.versions())
    with taken(folder) as kept:
        run = _Stages(kept, tools, result, libraries, progress or (lambda *_: None), on_stage)
        place = chosen if chosen in target_names() else str(Path(chosen).resolve())
        order = {"target": place, "sdk": None if libraries is None else str(libraries)}
        try:
            root = given.path if given.path.is_dir() else given.path.parent
            origin = Input(given.path, digest_of(given.files, root))
            bundles = _quantized(run, given, origin, options, _rest(kept, text, prompts))
            optimized = run.stage("optimize", [*run.compiler, facts.to_dict()], order, **bundles)
            converted = optimized.bundle
            result.optimized, result.converted = optimized.values, str(converted.path)
            result.next = next_steps(vendor, chip, libraries, result.converted, None)
            if evaluate:
                models = {str(given.kind): origin, "quantized": bundles["model"], "converted": converted}
                if given.kind is Kind.QUANTIZED:
                    del models["quantized"]
                result.evaluation = _evaluation(run, text, runtimes, models)
            if missing is not None:
                raise CompilerMissingError(f"{missing}; what is converted until there, is {converted.path}")
            _deliver(run, converted, Path(output), overwrite=overwrite)
            result.next = next_steps(vendor, chip, libraries, result.converted, str(output))
        except EdgeOptError as error:
            error.result = result
            raise
        except KeyboardInterrupt as error:
            error.add_note(f"what is done so far is in {folder}: run it again to go on")
            raise
    return result


def work_folder(output: AnyPath, work: AnyPath | None) -> Path:
    """Where the stages leave their results: the folder that was named, else the one beside the output."""
    return Path(output).with_suffix(WORK) if work is None else Path(work)


def _check_output(output: Path, source: Path, work: Path, *, overwrite: bool) -> None:
    status = source.stat() if source.is_file() else None
    inputs = () if status is None else ((status.st_dev, status.st_ino),)
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    if output.suffix != _SUFFIX:
        raise UsageError(f"{output} must end in {_SUFFIX}, as LiteRT-LM's bundles do")
    if output.resolve() == work.resolve():
        raise UsageError(f"{work} is the output, too: give another work=...")


def _check_together(
    given: Given,
    prompts: AnyPath | None,
    prefill: Sequence[int] | None,
    cache: int | None,
) -> None:
    if given.kind is not Kind.CHECKPOINT and (prefill is not None or cache is not None):
        raise UsageError(f"{given.path} has its lengths already: leave prefill=... and cache=... out")
    if given.kind is Kind.QUANTIZED:
        if prompts is not None:
            raise UsageError(f"{given.path} is quantized already: leave prompts=... out")
    elif prompts is None:
        raise UsageError(f"a {given.kind} is calibrated on text: give prompts=FILE.jsonl, one prompt a line")
    else:
        read_prompts(Path(prompts))


def _compiler(vendor: Vendor, sdk: AnyPath | None) -> tuple[Path | None, CompilerMissingError | None]:
    """The compiler's libraries, or what is missing; Qualcomm's are to be had by everyone, so that is said at once."""
    try:
        return find_compiler(vendor, sdk), None
    except CompilerMissingError as error:
        if vendor is QUALCOMM or sdk is not None:
            raise
        return None, error


@dataclass
class _Stages:
    """The stages of one build; `config` is the pipeline's, once it is settled."""

    work: WorkFolder
    tools: Processes
    result: BuildResult
    libraries: Path | None
    progress: Progress
    on_stage: Callable[[StageReport], None] | None
    config: dict[str, Any] = field(default_factory=dict)

    def stage(
        self,
        name: str,
        depends: object,
        options: Mapping[str, Any] | None = None,
        carry_out: CarryOut | None = None,
        /,
        **inputs: Input,
    ) -> Kept:
        """The result of a stage: an earlier run's where it was made from the same, else made now.

        `carry_out` stands in for the toolchain's, for a stage of several jobs.
        """
        ours = name in _OURS
        versions = {tool: text for tool, text in self.result.versions.items() if ours or tool != "edge-opt"}
        digests = {role: given.digest for role, given in inputs.items()}
        key = key_of([name, digests, depends, versions])
        earlier, log = self.work.kept(name, key), self.work.log(name)
        if earlier is None:
            paths = {role: str(given.path.resolve()) for role, given in inputs.items()}
            libraries = None if self.libraries is None else str(self.libraries)
            try:
                output = str(self.work.begin(name).resolve())
                job = Job(name, output, paths, self.config or None, options or {}, libraries)
                kept = self._carry_out(job, key, carry_out or self.tools.carry_out)
            except (EdgeOptError, OSError) as error:
                cause = OutputError(error.strerror or str(error)) if isinstance(error, OSError) else error
                kinds = (UsageError, OutputError)
                kind = next((kind for kind in kinds if isinstance(cause, kind)), StageFailedError)
                raise kind(f"stage '{name}': {cause}; its log is {log}") from error
        else:
            kept = earlier
        notes = list(kept.values.get("notes", ()))
        report = StageReport(name, kept.seconds, kept.peak_bytes, kept.size, earlier is None, str(log), notes)
        self.result.stages.append(report)
        if self.on_stage is not None:
            self.on_stage(report)
        return kept

    def _carry_out(self, job: Job, key: str, carry_out: CarryOut) -> Kept:
        started = time.perf_counter()
        self.progress(job.stage, 0, 1)
        done = carry_out(job, self.work.log(job.stage), self.work.scratch.resolve(), self.progress)
        if job.model.exists():
            stamp_by_content(job.model)
        kept = self.work.keep(job.stage, key, time.perf_counter() - started, done)
        self.progress(job.stage, 1, 1)
        return kept

    @property
    def compiler(self) -> list[Any]:
        """What a stage that runs the vendor's compiler depends on: its settings and its libraries."""
        libraries = "" if self.libraries is None else libraries_digest(self.libraries)
        return [self.result.settings["compile"], libraries]


def _quantized(
    run: _Stages, given: Given, model: Input, options: Mapping[str, Any], prompts: AnyPath | None
) -> dict[str, Input]:
    """The quantized `model`: the input itself, or made of it by the first stages; and the float `exported`, if any."""
    # Of the content the configuration alone: nothing else decides on settings.
    configured = digest_of([given.path / CONFIG], given.path) if given.kind is Kind.CHECKPOINT else ""
    text = {}
    if prompts is not None:
        text["prompts"] = Input(Path(prompts), digest_of([Path(prompts)], Path(prompts).parent))
    depends, source = [str(given.path.resolve()), options], Input(given.path, configured)
    answer = run.stage("configure", depends, options, model=source, **text).values
    run.config, run.result.settings, run.result.caches = (
        answer[name] for name in ("config", "settings", "caches")
    )
    settings = answer["settings"]
    if given.kind is Kind.CHECKPOINT:
        window = {"window": answer["caches"]["window"]}
        model = run.stage("export", [settings["export"], window], window, model=model).bundle
    bundles = {"model": model}
    if given.kind is not Kind.QUANTIZED:
        calibrated = run.stage("calibrate", settings["calibrate"], None, model=model, **text)
        ranges = Input(calibrated.folder, calibrated.digest)
        quantized = run.stage("quantize", settings["quantize"], model=model, ranges=ranges)
        run.result.sections_put_back = list(quantized.values["put_back"])
        bundles = {"exported": model, "model": quantized.bundle}
    path = bundles["model"].path
    # Where calibration did not reach everything; a bundle that ignores its cache is no result.
    ruined = sentences(find_unsound(Opened(path)))
    if ruined:
        raise BuildCheckError(f"{path} is ruined, so nothing is delivered: {ruined[0]}")
    return bundles


def _rest(work: WorkFolder, text: HeldOut, prompts: AnyPath | None) -> AnyPath | None:
    """The prompts to calibrate with: those given, or a file of those that are not held out."""
    if text.rest is None:
        return prompts
    path = work.path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in text.rest), encoding="utf-8")
    return path


def _evaluation(
    run: _Stages, text: HeldOut, runtimes: Mapping[str, str], models: dict[str, Input]
) -> dict[str, Any]:
    """An `Evaluation` of the models, the reference first, as plain values, with a note on the text."""
    if not text.parts:
        return {"models": [], "note": text.note}

    def carry_out(job: Job, log: Path, scratch: Path, progress: Progress) -> StageAnswer:
        paths = {name: Path(path) for name, path in job.inputs.items()}
        evaluation, peak = compare(
            run.tools, paths, text, log, scratch, lambda _, *step: progress(job.stage, *step)
        )
        return StageAnswer(evaluation.to_dict(), peak)

    kept = run.stage("evaluate", [text.parts, text.rest is not None, runtimes], None, carry_out, **models)
    return {**kept.values, "note": text.note}


def _deliver(run: _Stages, converted: Input, output: Path, *, overwrite: bool) -> None:
    """Compile, look at what came of it, and write the output."""
    order = {"compile_configs": run.result.optimized["compile_configs"]}
    compiled = run.stage("compile", [*run.compiler, order], order, model=converted).bundle.path
    shared = run.result.vendor == QUALCOMM.title and not run.config.get("disable_weight_sharing")
    wrong = faults(converted.path, compiled, shared=shared)
    if wrong:
        raise BuildCheckError(f"{compiled} is not as it has to be: {'; '.join(wrong)}")
    source = Source.open(compiled)
    with replacing(output, overwrite=overwrite) as target:
        copy_range(source, 0, target, 0, source.size, lambda _: None)
    source.close()
    run.result.output = str(output)
