"""Compiles a signature in every form and with every usable level of the compiler, and ranks what comes out by time."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

from edge_opt.conversion import convert
from edge_opt.ir import load, save
from edge_opt.npu.candidates import Choice, choices
from edge_opt.npu.comparing import NpuComparison, compare_on_npu
from edge_opt.npu.figures import SpillFigures
from edge_opt.npu.hexagon import judged_by
from edge_opt.npu.layers import Layers, cut_layers
from edge_opt.npu.process import end_all
from edge_opt.npu.profiling import COMPILERS, LEVELS, model_file, profile
from edge_opt.npu.sdk import find_sdk
from edge_opt.npu.trials import Compile, Job, Trial, carry_out, key_of, remember, remembered
from edge_opt.schema.errors import UsageError
from edge_opt.targets import Target, load_target

Progress = Callable[[str, int, int], None]
Compare = Callable[..., NpuComparison]

_HEXAGON = "qualcomm-htp"
_CHECKED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """All trials, best first; those that failed, or whose numbers are wrong, come last.

    `blocks` is None where the whole signature was compiled. `long_context`: one head does not fit on the chip. `levels`
    are the compiler's settings that were not tried, with the reason. `checked` says how the winner's numbers were
    checked, or why they were not.
    """

    model: str
    signature: str
    blocks: int | None
    long_context: bool
    target: Target
    chip: str
    versions: Mapping[str, str]
    trials: tuple[Trial, ...]
    levels: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> Trial | None:
        """The best one that compiled and whose numbers are right, if there is any."""
        return self.trials[0] if self.trials and self.trials[0].usable else None

    @property
    def extent(self) -> str:
        """How much of the signature was compiled, in words."""
        return {None: "all layers", 1: "one layer"}.get(self.blocks, f"{self.blocks} layers")

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "model": self.model,
            "signature": self.signature,
            "blocks": self.blocks,
            "target": self.target.name,
            "chip": self.chip,
            "versions": dict(self.versions),
            "long_context": self.long_context,
            "levels_left_out": dict(self.levels),
            "trials": [trial.to_dict() for trial in self.trials],
            "winner": None if self.winner is None else self.winner.to_dict(),
            "checked": self.checked,
            "notes": list(self.notes),
        }


def tune(
    path: str | os.PathLike[str],
    target: str | Target = _HEXAGON,
    *,
    signature: str | None = None,
    blocks: int | None = None,
    sdk: str | os.PathLike[str] | None = None,
    chip: str | None = None,
    seconds: float | None = 1800.0,
    jobs: int | None = None,
    executor: Executor | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    compiler: Compile = profile,
    comparer: Compare = compare_on_npu,
) -> Tuning:
    """Try every form and compiler level on one signature of a model. The file is only read.

    For a Hexagon NPU trials are ranked by the compiler's estimate of time, then by bytes. A level under which the model
    as exported crashes the emulator, or is too far from the CPU, is not tried. The best trial's numbers are checked
    in the emulator, on two layers at their real shapes: they must be the same bits as before. If they are not, the
    next trial is taken.

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
        compiler: what compiles, `edge_opt.npu.profile`.
        comparer: what compares numbers, `edge_opt.npu.compare_on_npu`.

    Raises:
        UsageError: there is no compiler for the target, no such signature, or no attention in it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        ModelFormatError: the file is not a model.
    """
    facts = load_target(target) if isinstance(target, str) else target
    if facts.name not in LEVELS:
        raise UsageError(f"target '{facts.name}' has no compiler here; there are: {', '.join(LEVELS)}")
    with ExitStack() as stack:
        layers = cut_layers(load(stack.enter_context(model_file(path))), signature, blocks=blocks)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        exported = folder / "exported.tflite"
        save(layers.model, exported)
        running = executor or stack.enter_context(_own_executor(jobs or idle_cores()))
        chip = chip or COMPILERS[facts.name]
        search = _Search(facts, layers, exported, sdk, chip, seconds, running, progress, compiler, comparer)
        return search.run(os.fspath(path), fresh=fresh)


@contextmanager
def _own_executor(jobs: int) -> Iterator[Executor]:
    """Threads, each waiting for a compiler; one that is interrupted leaves none behind."""
    with ThreadPoolExecutor(jobs) as executor:
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


def idle_cores() -> int:
    """How many of this machine's cores have nothing to do, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(cores - os.getloadavg()[0]))


@dataclass
class _Search:
    facts: Target
    layers: Layers
    exported: Path
    sdk: str | os.PathLike[str] | None
    chip: str
    seconds: float | None
    executor: Executor
    progress: Progress | None
    compiler: Compile
    comparer: Compare
    left_out: dict[str, str] = field(default_factory=dict)
    silence: str = ""

    def run(self, path: str, *, fresh: bool) -> Tuning:
        """The levels, the trials, the winner's numbers."""
        levels = self._levels()
        wanted = [(choice, level) for choice in self._choices() for level in levels]
        trials = self._trials(wanted, fresh=fresh)
        ranked, checked = self._checked(sorted(trials, key=rank))
        told = [trial for trial in ranked if trial.figures is not None]
        return Tuning(
            model=path,
            signature=self.layers.signature,
            blocks=self.layers.blocks,
            long_context=self.facts.overflows(self.layers.attention),
            target=self.facts,
            chip=self.chip,
            versions=told[0].versions if told else {},
            trials=tuple(ranked),
            levels=self.left_out,
            checked=checked,
            notes=told[0].notes if told else (),
        )

    def _choices(self) -> Iterator[Choice]:
        """Those that differ: where queries have no norm, it is the same graph whether a cut goes above it or not."""
        plain = self._operators(Choice("split-above"))
        for choice in choices(self.layers.attention, self.facts):
            if choice.norm_per_head_from is None or self._operators(choice) != plain:
                yield choice

    def _operators(self, choice: Choice) -> list[str]:
        """The operators of one layer in this form."""
        layer = cut_layers(self.layers.model, blocks=1).model
        convert(layer, target=choice.applied(self.facts), verify="none")
        return [operator.name for _, graph in layer.entry_points() for operator in graph.operators]

    def _levels(self) -> list[Mapping[str, str]]:
        """Those of the compiler's that leave the numbers of the model as exported right."""
        known = LEVELS[self.facts.name]
        if self.facts.name != _HEXAGON:
            self.silence = "this compiler has no emulator here"
            return [*known]
        if self.comparer is compare_on_npu:
            self.silence = find_sdk(self.sdk).silence
        if self.silence:
            return [*known]
        usable: list[Mapping[str, str]] = []
        waiting = {
            self.executor.submit(
                wrong_numbers, self.comparer, self.exported, self.exported, **self._options(level)
            ): level
            for level in known
        }
        self._tell("checking levels", 0, len(known))
        for done, future in enumerate(_finished(waiting), 1):
            level, reason = waiting[future], future.result()
            self._tell("checking levels", done, len(known))
            if reason:
                self.left_out[" ".join(level.values())] = reason
            else:
                usable.append(level)
        return sorted(usable, key=known.index)

    def _options(self, level: Mapping[str, str]) -> dict[str, Any]:
        """How numbers are checked under a level."""
        return {
            "sdk": self.sdk,
            "chip": self.chip,
            "flags": self._flags(level),
            "layers": _CHECKED_LAYERS,
            "seconds": self.seconds,
        }

    def _trials(self, wanted: Sequence[tuple[Choice, Mapping[str, str]]], *, fresh: bool) -> list[Trial]:
        with self.exported.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found: list[Trial] = []
        waiting: dict[Future[Trial], str] = {}
        for choice, level in wanted:
            job = self._job(choice, level)
            key = key_of(digest, job)
            known = None if fresh else remembered(key)
            if known is not None:
                found.append(replace(known, choice=choice, level=level))
            else:
                waiting[self.executor.submit(carry_out, job, self.compiler)] = key
        self._tell("compiling", len(found), len(wanted))
        for future in _finished(waiting):
            trial = future.result()
            remember(waiting[future], trial)
            found.append(trial)
            self._tell("compiling", len(found), len(wanted))
        # In the order in which they were asked for, not in which they ended: trials that rank alike keep it.
        order = {(choice, tuple(level.items())): place for place, (choice, level) in enumerate(wanted)}
        return sorted(found, key=lambda trial: order[trial.choice, tuple(trial.level.items())])

    def _job(self, choice: Choice, level: Mapping[str, str]) -> Job:
        chip, flags = self.chip, self._flags(level)
        if self.facts.name == _HEXAGON:
            chip, flags = judged_by(chip, flags)
        return Job(str(self.exported), choice, level, self.facts, chip, tuple(flags), self.sdk, self.seconds)

    def _flags(self, level: Mapping[str, str]) -> list[str]:
        own = dict(flag[2:].split("=", 1) for flag in self.facts.flags())
        return [f"--{name}={value}" for name, value in {**own, **level}.items()]

    def _checked(self, ranked: Sequence[Trial]) -> tuple[list[Trial], str]:
        """The trials with the best one in front whose numbers are right, and what is to be said of the check."""
        if self.silence:
            return [*ranked], f"numbers not checked: {self.silence}"
        wrong: list[Trial] = []
        for place, trial in enumerate(ranked):
            if not trial.usable:
                break
            self._tell(f"checking the numbers of {trial.choice}", place, len(ranked))
            verdict = "" if trial.choice.form is None else self._verdict(trial)
            if not verdict:
                same = (
                    "its numbers are the compiler's own"
                    if trial.choice.form is None
                    else "the same bits as exported"
                )
                layers = f"{_CHECKED_LAYERS} layers on {self.chip}'s emulator"
                return [*ranked[place:], *wrong], f"{same}, {layers}"
            wrong.append(replace(trial, verdict=verdict))
        return [*wrong, *(trial for trial in ranked if not trial.usable)], "no trial's numbers are right"

    def _verdict(self, trial: Trial) -> str:
        with tempfile.TemporaryDirectory(prefix="edge-opt-", dir=self.exported.parent) as folder:
            converted = Path(folder) / "converted.tflite"
            trial.choice.convert(self.exported, converted, self.facts)
            return wrong_numbers(self.comparer, self.exported, converted, **self._options(trial.level))

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


def wrong_numbers(comparer: Compare, exported: Path, converted: Path, **options: Any) -> str:
    """What is wrong with the numbers of a model that was converted and compiled so; nothing if they are right."""
    found = comparer(exported, converted, **options)
    return "" if found.equal else found.summary()


def _finished(waiting: Iterable[Future[Any]]) -> Iterable[Future[Any]]:
    """As they end. An executor of a cluster may hand out futures of its own, which only it can wait for."""
    futures = list(waiting)
    return as_completed(futures) if all(isinstance(future, Future) for future in futures) else futures


def rank(trial: Trial) -> tuple[float, ...]:
    """Smaller is better: what leaves the NPU counts first, then time (for Vela cycles), then bytes moved."""
    figures = trial.figures
    if figures is None:
        return (float("inf"),)
    left = figures.operators - figures.taken
    if isinstance(figures, SpillFigures):
        time = float("inf") if figures.time is None else figures.time.us
        return (left, figures.partitions, time, figures.ddr_read + figures.ddr_written, figures.run_list)
    return (left, figures.cycles, figures.sram_traffic + figures.dram_traffic)
