"""One form, compiled in one way: how it is carried out, also in another process, and how its outcome is remembered."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_opt.npu.candidates import Choice
from edge_opt.npu.errors import CompilerFailedError, CompilerTimeoutError
from edge_opt.npu.figures import Figures, Profile, SpillFigures, VelaFigures
from edge_opt.npu.probe import cache_folder
from edge_opt.npu.sdk import libraries_digest
from edge_opt.proof.plain import from_plain
from edge_opt.targets import Target

Compile = Callable[..., Profile]


@dataclass(frozen=True, slots=True)
class Job:
    """What one trial takes; plain values, so that another process can carry it out."""

    exported: str
    choice: Choice
    level: Mapping[str, str]
    target: Target
    chip: str
    flags: tuple[str, ...]
    sdk: str | os.PathLike[str] | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One form, compiled in one way: the compiler's figures, or why there are none.

    `verdict` says what is wrong with the numbers that the emulator computes; empty where nothing is, or nobody looked.
    """

    choice: Choice
    level: Mapping[str, str]
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
            "flags": [f"--{name}={value}" for name, value in self.level.items()],
            "seconds": round(self.seconds, 2),
            "failure": self.failure or None,
            "verdict": self.verdict or None,
            "figures": None if self.figures is None else self.figures.to_dict(),
        }


def carry_out(job: Job, compiler: Compile) -> Trial:
    """Convert the exported model into the job's form, and compile that. A compiler that fails is an outcome."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        converted = Path(job.exported)
        if job.choice.form is not None:
            converted = Path(folder) / "converted.tflite"
            job.choice.convert(job.exported, converted, job.target)
        try:
            told = compiler(
                converted, job.target, sdk=job.sdk, chip=job.chip, flags=list(job.flags), seconds=job.seconds
            )
        except CompilerFailedError as error:
            spent, reason = time.perf_counter() - started, str(error).partition(": ")[2]
            passing = isinstance(error, CompilerTimeoutError)
            return Trial(job.choice, job.level, spent, failure=reason, passing=passing)
    spent = time.perf_counter() - started
    return Trial(
        job.choice, job.level, spent, told.signatures[0], versions=dict(told.versions), notes=told.notes
    )


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
        told |= {"figures": _figures(told["figures"]), "notes": tuple(told["notes"])}
        return Trial(Choice(), {}, **told)
    return None


def remember(key: str, trial: Trial) -> None:
    """For the next search, unless it would end otherwise another time. What cannot be kept is done again."""
    if trial.passing:
        return
    told = {name: getattr(trial, name) for name in ("seconds", "failure", "versions", "notes")}
    figures = None if trial.figures is None else asdict(trial.figures)
    with suppress(OSError):
        path = _folder() / f"{key}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({**told, "figures": figures}), encoding="utf-8")
        scratch.replace(path)


def _folder() -> Path:
    folder = cache_folder() / "trials"
    folder.mkdir(exist_ok=True)
    return folder


def _figures(told: dict[str, Any] | None) -> Figures | None:
    kind = SpillFigures if "spill" in (told or {}) else VelaFigures
    found: Figures | None = from_plain(kind | None, told)
    return found
