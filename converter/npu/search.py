"""Compiles a signature in every form, remembers and ranks what comes out, and makes a target of the best."""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from edge_opt.attention.block import FORMS, Block
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.processes import end_all
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.conversion import convert
from edge_opt.ir import save
from edge_opt.ir.opening import Opened
from edge_opt.ir.text import subgraph_text
from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.figures import Figures
from edge_opt.npu.hexagon import judged_by
from edge_opt.npu.layers import Layers, cut_layers
from edge_opt.npu.profiling import COMPILERS, compiled_target, profile
from edge_opt.npu.sdk import (
    CompilerFailedError,
    CompilerTimeoutError,
    cache_folder,
    find_sdk,
    libraries_digest,
)
from edge_opt.targets import Target, TargetLike

_TILES, _LEAST_ROWS = 4, 2
_SMALL_TILES = (128, 64)
_ALWAYS = 1  # a least head size that every attention has
_HEXAGON = "qualcomm-htp"
_CHECKED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """How one trial rewrites the attention; `form` None does not split it. With all None it is `AS_EXPORTED`.

    `norm_per_head_from`, `mask_before_join`: other than the target's.
    """

    form: str | None = None
    rows_per_tile: int | None = None
    norm_per_head_from: int | None = None
    mask_before_join: bool | None = None

    def __str__(self) -> str:
        rows = "" if self.rows_per_tile is None else f", tiles of {self.rows_per_tile} rows"
        norms = {None: "", _ALWAYS: ", a norm for each head"}
        norm = norms.get(self.norm_per_head_from, ", one norm for all")
        masks = {None: "", True: ", the mask before the join", False: ", the mask after the join"}
        return (self.form or "as exported") + rows + norm + masks[self.mask_before_join]

    def applied(self, target: Target) -> Target:
        """The target with this form for every signature and length; its other facts stay."""
        before = self.mask_before_join
        if before is None:
            before = target.mask_before_join and self.form is not None
        return replace(
            target,
            form=self.form or target.form,
            rows_per_tile=self.rows_per_tile,
            long_context={},
            norm_per_head_from=self.norm_per_head_from or target.norm_per_head_from,
            mask_before_join=before,
            split_signatures=("*",) if self.form else (),
        )


AS_EXPORTED = Choice()


def choices(attention: Block, target: Target) -> Iterator[Choice]:
    """As exported, with the mask before the join and without, and every form.

    Of the form that is mostly the best also tiles of rows, the other cut at the norm and the other place of the mask.
    """
    rows, least = attention.query_length, target.norm_per_head_from or _ALWAYS
    yield AS_EXPORTED
    yield Choice(mask_before_join=True)
    yield from map(Choice, FORMS)
    other = _ALWAYS if attention.head_size < least else attention.head_size + 1
    yield Choice("split-above", norm_per_head_from=other)
    yield Choice("split-above", mask_before_join=not target.mask_before_join)
    for size in dict.fromkeys((rows // _TILES, *_SMALL_TILES)):
        if _LEAST_ROWS <= size < rows and rows % size == 0:
            yield Choice("split-above", size)


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What one trial takes; plain values, so that another process can carry it out."""

    exported: str
    choice: Choice
    target: Target
    chip: str
    flags: tuple[str, ...]
    sdk: AnyPath | None
    seconds: float | None

    def write(self, folder: Path) -> Path:
        """The exported model in the plan's form, not proved, in `folder`; as exported it is the file that there is."""
        if self.choice == AS_EXPORTED:
            return Path(self.exported)
        converted = folder / "converted.tflite"
        convert(self.exported, converted, target=self.choice.applied(self.target), verify="none")
        return converted

    def key(self, model: str, libraries: str) -> str:
        """What the outcome depends on, model and libraries by their digests."""
        values = {
            "model": model,
            "choice": str(self.choice),
            "target": self.target.to_dict(),
            "chip": self.chip,
            "flags": self.flags,
            "libraries": libraries,
            "versions": [version("ai-edge-litert"), version("edge-opt")],
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """One form, compiled: the compiler's figures, or why there are none.

    `verdict` says what is wrong with the numbers that the emulator computes; None where nothing is, or nobody looked.
    `passing`: another time it might end otherwise.
    """

    choice: Choice
    seconds: float
    figures: Figures | None = None
    failure: str | None = None
    verdict: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    passing: bool = False

    _properties = ("form",)

    @property
    def form(self) -> str:
        """The choice in words."""
        return str(self.choice)

    @property
    def usable(self) -> bool:
        """Whether it compiled, and nothing is known to be wrong with its numbers."""
        return self.figures is not None and not self.verdict


def carry_out(plan: TrialPlan) -> Trial:
    """Convert the exported model into the plan's form, and compile that. A compiler that fails is an outcome."""
    started = time.perf_counter()
    outcome: dict[str, Any]
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        try:
            profiled = profile(
                plan.write(Path(folder)),
                plan.target,
                sdk=plan.sdk,
                chip=plan.chip,
                flags=plan.flags,
                seconds=plan.seconds,
            )
            figures, versions = profiled.signatures[0], dict(profiled.versions)
            outcome = {"figures": figures, "versions": versions, "notes": profiled.notes}
        except CompilerFailedError as error:
            reason = str(error).partition(": ")[2]
            outcome = {"failure": reason, "passing": isinstance(error, CompilerTimeoutError)}
    return Trial(plan.choice, round(time.perf_counter() - started, 2), **outcome)


def outcomes(
    plans: Sequence[TrialPlan],
    executor: Executor,
    *,
    fresh: bool,
    done: Callable[[int, Trial | None], object],
) -> list[Trial]:
    """The outcome of every plan, in the order of the plans; each is remembered when it ends.

    Args:
        plans: of one exported model.
        executor: what carries them out.
        fresh: compile again what an earlier search remembers.
        done: called with how many are done and the last one; at first with None.
    """
    libraries = libraries_digest(plans[0].sdk)
    with Path(plans[0].exported).open("rb") as exported:
        model = hashlib.file_digest(exported, "sha256").hexdigest()
    folder = cache_folder() / "trials"
    with suppress(OSError):  # what cannot be kept is compiled again
        folder.mkdir(exist_ok=True)
    files = [folder / f"{plan.key(model, libraries)}.json" for plan in plans]
    trials: dict[int, Trial] = {}
    for place, file in enumerate([] if fresh else files):
        with suppress(OSError, ValueError):  # none there, or it cannot be read
            trials[place] = from_dict(Trial, json.loads(file.read_text(encoding="utf-8")))
    waiting = {executor.submit(carry_out, plan): at for at, plan in enumerate(plans) if at not in trials}
    done(len(trials), None)
    for future in as_completed(waiting):
        place = waiting[future]
        trials[place] = future.result()
        # One that timed out might end otherwise another time; what cannot be kept is done again.
        if not trials[place].passing:
            with suppress(OSError):
                scratch = files[place].with_suffix(f".{os.getpid()}")
                scratch.write_text(json.dumps(asdict(trials[place])), encoding="utf-8")
                scratch.replace(files[place])
        done(len(trials), trials[place])
    return [replace(trials[place], choice=plan.choice) for place, plan in enumerate(plans)]


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """All trials, best first; those that failed, or whose numbers are wrong, come last.

    `blocks` is None where the whole signature was compiled. `long_context`: one head does not fit on the chip.
    `checked` says how the winner's numbers were checked, or why they were not.
    """

    model: str
    signature: str
    blocks: int | None
    long_context: bool
    target: Target
    chip: str
    versions: Mapping[str, str]
    trials: tuple[Trial, ...]
    checked: str = ""
    notes: tuple[str, ...] = ()

    _properties = ("winner",)

    @property
    def winner(self) -> Trial | None:
        """The best one that compiled and whose numbers are right, if there is any."""
        return self.trials[0] if self.trials and self.trials[0].usable else None

    @property
    def extent(self) -> str:
        """How much of the signature was compiled, in words."""
        return {None: "all layers", 1: "one layer"}.get(self.blocks, f"{self.blocks} layers")

    def to_dict(self) -> dict[str, Any]:
        """For `--json`; of the target only the name."""
        return {**Record.to_dict(self), "target": self.target.name}


def tune(
    path: AnyPath,
    target: TargetLike = _HEXAGON,
    *,
    signature: str | None = None,
    blocks: int | None = None,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    seconds: float | None = 1800.0,
    jobs: int | None = None,
    executor: Executor | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Tuning:
    """Try every form on one signature of a model. The file is only read.

    For a Hexagon NPU trials are ranked by the compiler's estimate of time, then by bytes. The best trial's numbers are
    checked in the emulator, on two layers at their real shapes: they must be near enough to the CPU's, and the same
    bits as before. If they are not, the next trial is taken.

    Args:
        path: a .tflite model as exported, or a bundle: then its prefill/decode model.
        target: a target that has a compiler here.
        signature: the entry point to tune for; None the one with the largest attention.
        blocks: only so many layers in a row, for a cheaper look; None the whole signature.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip.
        seconds: after so long a trial is given up; None never.
        jobs: how many trials run at a time; None as many as there are cores that have nothing to do.
        executor: what carries them out instead: any of `concurrent.futures`, a cluster's too. Its workers need the same
            files at the same paths, and edge-opt.
        fresh: compile again what an earlier search remembers.
        progress: called with (stage, done, total).

    Raises:
        UsageError: there is no compiler for the target, no such signature, or no attention in it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        ModelFormatError: the file is not a model.
    """
    facts = compiled_target(target)
    tell = progress or (lambda *_: None)
    with ExitStack() as stack:
        layers = cut_layers(Opened(path).main().model, signature, blocks=blocks)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-"))
        exported = Path(folder, "exported.tflite")
        save(layers.model, exported)
        running = executor or stack.enter_context(_own_executor(jobs))
        chip = chip or COMPILERS[facts.name]
        plan = TrialPlan(str(exported), AS_EXPORTED, facts, chip, (), sdk, seconds)
        compiled, unchecked = plan, "this compiler has no emulator here"
        if facts.name == _HEXAGON:
            unchecked = find_sdk(sdk).no_probe
            judge, flags = judged_by(chip, ())
            compiled = replace(plan, chip=judge, flags=tuple(flags))
        plans = [replace(compiled, choice=choice) for choice in _choices(layers, facts)]
        trials = outcomes(
            plans, running, fresh=fresh, done=lambda count, _: tell("compiling", count, len(plans))
        )
        trials.sort(key=rank)
        checked = f"numbers not checked: {unchecked}"
        if not unchecked:
            trials, checked = _checked(trials, plan, tell)
    first = next((trial for trial in trials if trial.figures is not None), None)
    return Tuning(
        model=os.fspath(path),
        signature=layers.signature,
        blocks=layers.blocks,
        long_context=facts.overflows(layers.attention),
        target=facts,
        chip=chip,
        versions={} if first is None else first.versions,
        trials=tuple(trials),
        checked=checked,
        notes=() if first is None else first.notes,
    )


def rank(trial: Trial) -> tuple[float, ...]:
    """Smaller is better; what did not compile comes last."""
    return (math.inf,) if trial.figures is None else tuple(trial.figures.ranking().values())


@contextmanager
def _own_executor(jobs: int | None) -> Iterator[Executor]:
    """Threads, each waiting for a compiler, by default one for each idle core; an interrupt leaves none behind."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(jobs or max(1, round(cores - os.getloadavg()[0]))) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Not once: a thread may be about to start its compiler just now.
            waiting = Thread(target=executor.shutdown)
            waiting.start()
            while waiting.is_alive():
                end_all()
                waiting.join(0.05)
            raise


def _choices(layers: Layers, target: Target) -> Iterator[Choice]:
    """Those that give another graph than the ones before them: without norms there is no other cut at the norm.

    The layer with the largest attention decides.
    """
    tried = set()
    for choice in choices(layers.attention, target):
        layer = cut_layers(layers.model, blocks=1).model
        convert(layer, target=choice.applied(target), verify="none")
        graph = subgraph_text(layer.entry_points()[0][1])
        if graph not in tried:
            tried.add(graph)
            yield choice


def _checked(ranked: Sequence[Trial], plan: TrialPlan, tell: Progress) -> tuple[list[Trial], str]:
    """The trials with the best one in front whose numbers are right, and what is to be said of the check."""
    wrong: list[Trial] = []
    for place, trial in enumerate(ranked):
        if not trial.usable:
            break
        tell(f"checking the numbers of {trial.choice}", place, len(ranked))
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
            model = replace(plan, choice=trial.choice).write(Path(folder))
            comparison = compare_on_npu(
                Path(plan.exported),
                model,
                sdk=plan.sdk,
                chip=plan.chip,
                layers=_CHECKED_LAYERS,
                seconds=plan.seconds,
            )
        if comparison.equal:
            exported = trial.choice == AS_EXPORTED
            same = "its numbers are the compiler's own" if exported else "the same bits as exported"
            layers = f"{_CHECKED_LAYERS} layers on {plan.chip}'s emulator"
            return [*ranked[place:], *wrong], f"{same}, {layers}"
        wrong.append(replace(trial, verdict=comparison.summary()))
    return [*wrong, *(trial for trial in ranked if not trial.usable)], "no trial's numbers are right"


def tuned_target(tuning: Tuning) -> Target:
    """The target with the form of the winner, and where that comes from.

    Raises:
        UsageError: every trial failed.
    """
    if tuning.winner is None:
        raise UsageError(
            f"nothing compiled for target '{tuning.target.name}' with the right numbers: there is no winner to write"
        )
    choice = tuning.winner.choice
    changed: dict[str, Any] = {"split_signatures": _split(tuning, split=choice.form is not None)}
    if choice.mask_before_join is not None:
        changed["mask_before_join"] = choice.mask_before_join
    elif choice.form is None and not changed["split_signatures"]:
        changed["mask_before_join"] = False  # the trial was the exported file, with no pass run on it
    if choice.form is not None:
        rows = {} if choice.rows_per_tile is None else {"rows_per_tile": choice.rows_per_tile}
        form = {"form": choice.form, **rows}
        changed |= {"long_context": form} if tuning.long_context else form
        if choice.norm_per_head_from is not None:
            changed["norm_per_head_from"] = choice.norm_per_head_from
    source = (
        f"measured with `edge-opt tune` on {tuning.extent} of {Path(tuning.model).name}, {tuning.signature}"
    )
    target = replace(tuning.target, **changed, versions={**tuning.versions, "chip": tuning.chip})
    others = {name: text for name, text in target.sources.items() if name not in changed}
    sources = {name: source for name in changed if name in target.stated()}
    return replace(target, sources={**others, **sources})


def _split(tuning: Tuning, *, split: bool) -> tuple[str, ...]:
    """Patterns of signatures: with this one, or those that match without it."""
    known = tuning.target.split_signatures
    if split:
        return known if tuning.target.splits(tuning.signature) else (*known, tuning.signature)
    return tuple(
        pattern
        for pattern in known
        if not replace(tuning.target, split_signatures=(pattern,)).splits(tuning.signature)
    )
