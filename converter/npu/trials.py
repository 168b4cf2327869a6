"""One form of a model, compiled: which forms are tried, how one is compiled, how its outcome is remembered."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from edge_opt.attention.block import FORMS, Block
from edge_opt.conversion import convert
from edge_opt.npu.figures import Figures, Profile
from edge_opt.npu.sdk import CompilerFailedError, CompilerTimeoutError, cache_folder, libraries_digest
from edge_opt.output.record import Record, from_dict
from edge_opt.targets import Target

Compile = Callable[..., Profile]

_TILES, _LEAST_ROWS = 4, 2
_SMALL_TILES = (128, 64)
_ALWAYS = 1  # a least head size that every attention has


@dataclass(frozen=True, slots=True)
class Choice:
    """How one trial rewrites the attention; `form` None leaves it as exported.

    `norm_per_head_from`: other than the target's.
    """

    form: str | None = None
    rows_per_tile: int | None = None
    norm_per_head_from: int | None = None

    def __str__(self) -> str:
        if self.form is None:
            return "as exported"
        rows = "" if self.rows_per_tile is None else f", tiles of {self.rows_per_tile} rows"
        norms = {None: "", _ALWAYS: ", a norm for each head"}
        return self.form + rows + norms.get(self.norm_per_head_from, ", one norm for all")

    def applied(self, target: Target) -> Target:
        """The target with this form, which must be one, for every signature and length; its other facts stay."""
        assert self.form is not None
        return replace(
            target,
            form=self.form,
            rows_per_tile=self.rows_per_tile,
            long_context={},
            norm_per_head_from=self.norm_per_head_from or target.norm_per_head_from,
            split_signatures=("*",),
        )


def choices(attention: Block, target: Target) -> Iterator[Choice]:
    """As exported, every form, and of the one that is mostly the best tiles of rows and the other cut at the norm."""
    rows, least = attention.query_length, target.norm_per_head_from or _ALWAYS
    yield Choice()
    yield from map(Choice, FORMS)
    other = _ALWAYS if attention.head_size < least else attention.head_size + 1
    yield Choice("split-above", norm_per_head_from=other)
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
    sdk: str | os.PathLike[str] | None
    seconds: float | None

    def write(self, folder: Path) -> Path:
        """The exported model in the plan's form, not proved, in `folder`; the file that there is if as exported."""
        if self.choice.form is None:
            return Path(self.exported)
        converted = folder / "converted.tflite"
        convert(self.exported, converted, target=self.choice.applied(self.target), verify="none")
        return converted

    def key(self, digest: str) -> str:
        """What the outcome depends on: the model of this digest, the compiler, the form, the target and the flags."""
        values = {
            "model": digest,
            "choice": str(self.choice),
            "target": self.target.to_dict(),
            "chip": self.chip,
            "flags": self.flags,
            "libraries": libraries_digest(self.sdk),
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


def carry_out(plan: TrialPlan, compiler: Compile) -> Trial:
    """Convert the exported model into the plan's form, and compile that. A compiler that fails is an outcome."""
    started = time.perf_counter()
    options = {"sdk": plan.sdk, "chip": plan.chip, "flags": list(plan.flags), "seconds": plan.seconds}
    profile, failure, passing = None, None, False
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        model = plan.write(Path(folder))
        try:
            profile = compiler(model, plan.target, **options)
        except CompilerFailedError as error:
            failure, passing = str(error).partition(": ")[2], isinstance(error, CompilerTimeoutError)
    spent = round(time.perf_counter() - started, 2)
    if profile is None:
        return Trial(plan.choice, spent, failure=failure, passing=passing)
    figures, versions = profile.signatures[0], dict(profile.versions)
    return Trial(plan.choice, spent, figures, versions=versions, notes=profile.notes)


def outcomes(
    plans: Sequence[TrialPlan],
    compiler: Compile,
    executor: Executor,
    *,
    fresh: bool,
    done: Callable[[int, Trial | None], object],
) -> list[Trial]:
    """The outcome of every plan, in the order of the plans; each is remembered when it ends.

    Args:
        plans: of one exported model.
        compiler: what compiles, `edge_opt.npu.profile`.
        executor: what carries them out.
        fresh: compile again what an earlier search remembers.
        done: called with how many are done and the last one; at first with None.
    """
    with Path(plans[0].exported).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    keys = [plan.key(digest) for plan in plans]
    known = [None if fresh else remembered(key) for key in keys]
    trials = {place: trial for place, trial in enumerate(known) if trial is not None}
    waiting = {
        executor.submit(carry_out, plan, compiler): place
        for place, plan in enumerate(plans)
        if place not in trials
    }
    done(len(trials), None)
    for future in as_completed(waiting):
        place = waiting[future]
        trials[place] = future.result()
        remember(keys[place], trials[place])
        done(len(trials), trials[place])
    return [replace(trials[place], choice=plan.choice) for place, plan in enumerate(plans)]


def remembered(key: str) -> Trial | None:
    """A trial that an earlier search carried out; None where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        return from_dict(Trial, json.loads(_file(key).read_text(encoding="utf-8")))
    return None


def remember(key: str, trial: Trial) -> None:
    """For the next search, unless it would end otherwise another time. What cannot be kept is done again."""
    if not trial.passing:
        with suppress(OSError):
            scratch = _file(key).with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(asdict(trial)), encoding="utf-8")
            scratch.replace(_file(key))


def _file(key: str) -> Path:
    folder = cache_folder() / "trials"
    folder.mkdir(exist_ok=True)
    return folder / f"{key}.json"
