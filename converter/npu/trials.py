"""One form of a model, compiled: which forms are tried, how one is compiled, how its outcome is remembered."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_opt.attention.block import Block
from edge_opt.attention.form import FORMS
from edge_opt.conversion import convert
from edge_opt.npu.figures import Figures, Profile, SpillFigures, VelaFigures
from edge_opt.npu.process import CompilerFailedError, CompilerTimeoutError
from edge_opt.npu.sdk import cache_folder, libraries_digest
from edge_opt.proof.protocol import from_plain
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
        norms = {None: "", _ALWAYS: ", a norm for each head"}.get(
            self.norm_per_head_from, ", one norm for all"
        )
        return self.form + rows + norms

    def convert(self, exported: str | os.PathLike[str], output: Path, target: Target) -> None:
        """Write the exported model in this form; nothing is proved here."""
        convert(exported, output, target=self.applied(target), verify="none")

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
    sizes = dict.fromkeys((rows // _TILES, *_SMALL_TILES))
    yield from (
        Choice("split-above", size) for size in sizes if _LEAST_ROWS <= size < rows and rows % size == 0
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What one trial takes; plain values, so that another process can carry it out."""

    exported: str
    choice: Choice
    target: Target
    chip: str
    flags: tuple[str, ...]
    sdk: str | os.PathLike[str] | None
    seconds: float | None

    def write(self, folder: Path) -> Path:
        """The exported model in the job's form, in `folder`; where that is as exported, the file that there is."""
        if self.choice.form is None:
            return Path(self.exported)
        converted = folder / "converted.tflite"
        self.choice.convert(self.exported, converted, self.target)
        return converted


@dataclass(frozen=True, slots=True)
class Trial:
    """One form, compiled: the compiler's figures, or why there are none.

    `verdict` says what is wrong with the numbers that the emulator computes; empty where nothing is, or nobody looked.
    `passing`: another time it might end otherwise.
    """

    choice: Choice
    seconds: float
    figures: Figures | None = None
    failure: str = ""
    verdict: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    passing: bool = False

    @property
    def usable(self) -> bool:
        """Whether it compiled, and nothing is known to be wrong with its numbers."""
        return self.figures is not None and not self.verdict

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "form": str(self.choice),
            "seconds": round(self.seconds, 2),
            "failure": self.failure or None,
            "verdict": self.verdict or None,
            "figures": None if self.figures is None else self.figures.to_dict(),
        }


def carry_out(job: Job, compiler: Compile) -> Trial:
    """Convert the exported model into the job's form, and compile that. A compiler that fails is an outcome."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        made = job.write(Path(folder))
        try:
            told = compiler(
                made, job.target, sdk=job.sdk, chip=job.chip, flags=list(job.flags), seconds=job.seconds
            )
        except CompilerFailedError as error:
            spent, reason = time.perf_counter() - started, str(error).partition(": ")[2]
            return Trial(job.choice, spent, failure=reason, passing=isinstance(error, CompilerTimeoutError))
    spent = time.perf_counter() - started
    return Trial(job.choice, spent, told.signatures[0], versions=dict(told.versions), notes=told.notes)


def outcomes(
    jobs: Sequence[Job],
    compiler: Compile,
    executor: Executor,
    *,
    fresh: bool,
    done: Callable[[int, Trial | None], object],
) -> list[Trial]:
    """The outcome of every job, in the order of the jobs; each is remembered when it ends.

    Args:
        jobs: of one exported model.
        compiler: what compiles, `edge_opt.npu.profile`.
        executor: what carries them out.
        fresh: compile again what an earlier search remembers.
        done: called with how many are done and the last one; at first with None.
    """
    with Path(jobs[0].exported).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    keys = [key_of(digest, job) for job in jobs]
    known = [None if fresh else remembered(key) for key in keys]
    found = {place: trial for place, trial in enumerate(known) if trial is not None}
    waiting = {
        executor.submit(carry_out, job, compiler): place
        for place, job in enumerate(jobs)
        if place not in found
    }
    done(len(found), None)
    for future in _finished(waiting):
        place = waiting[future]
        found[place] = future.result()
        remember(keys[place], found[place])
        done(len(found), found[place])
    return [replace(found[place], choice=job.choice) for place, job in enumerate(jobs)]


def _finished(waiting: Iterable[Future[Any]]) -> Iterable[Future[Any]]:
    """As they end. An executor of a cluster may hand out futures of its own, which only it can wait for."""
    futures = list(waiting)
    return as_completed(futures) if all(isinstance(future, Future) for future in futures) else futures


def key_of(digest: str, job: Job) -> str:
    """What the outcome depends on: the bytes of the model and the compiler, the form, the target and the flags."""
    told = {
        "model": digest,
        "choice": str(job.choice),
        "target": job.target.to_dict(),
        "chip": job.chip,
        "flags": job.flags,
        "libraries": libraries_digest(job.sdk),
        "versions": [version("ai-edge-litert"), version("edge-opt")],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def remembered(key: str) -> Trial | None:
    """A trial that an earlier search carried out; None where there is none, or it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((_folder() / f"{key}.json").read_text(encoding="utf-8"))
        kind = SpillFigures if "spill" in (told["figures"] or {}) else VelaFigures
        figures = from_plain(kind | None, told["figures"])
        return Trial(**told | {"choice": Choice(), "figures": figures, "notes": tuple(told["notes"])})
    return None


def remember(key: str, trial: Trial) -> None:
    """For the next search, unless it would end otherwise another time. What cannot be kept is done again."""
    if trial.passing:
        return
    with suppress(OSError):
        path = _folder() / f"{key}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(trial)), encoding="utf-8")
        scratch.replace(path)


def _folder() -> Path:
    folder = cache_folder() / "trials"
    folder.mkdir(exist_ok=True)
    return folder
