"""The work folder: what each stage left, with a digest of what it was made from, so that a later run goes on.

A result gets its folder when it is complete, and is taken again only where its content is still what was written.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_opt.schema.errors import OutputError, UsageError

_MARK = "edge-opt-build"
_TOLD, _PARTIAL, _SCRATCH = "stage.json", ".partial", "scratch"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a stage: its folder, the digest of what is in it, its size in bytes, and what the stage said."""

    folder: Path
    digest: str
    size: int
    seconds: float
    peak_bytes: int | None
    told: dict[str, Any]


class WorkFolder:
    """A folder that is ours alone while a build runs; `with` takes it and gives it free.

    Raises:
        UsageError: another build is in it, or it holds something else.
        OutputError: it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def __enter__(self) -> Self:
        mark = self.path / _MARK
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not mark.exists():
                raise UsageError(
                    f"{self.path} holds other files: give an empty folder, or a new one, with --work"
                )
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"work folder {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(
                f"another build is at work in {self.path}: wait for it, or give another --work"
            ) from None
        for left in (self.scratch, *self.path.glob(f"*{_PARTIAL}")):
            shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.close(self._lock)

    @property
    def scratch(self) -> Path:
        """For what tools leave lying about; gone after each stage."""
        return self.path / _SCRATCH

    def log(self, stage: str) -> Path:
        """Where the tools of a stage print."""
        return self.path / f"{stage}.log"

    def kept(self, stage: str, key: str) -> Kept | None:
        """The result of an earlier run, where it was made from the same; None where it is to be made."""
        folder = self.path / stage
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads((folder / _TOLD).read_text(encoding="utf-8"))
            if told["key"] == key and digest_of(_files(folder), folder) == told["digest"]:
                return _kept(folder, told)
        return None

    def begin(self, stage: str) -> Path:
        """An empty folder for the result of a stage, and an empty one for its scratch."""
        partial = self.path / f"{stage}{_PARTIAL}"
        for folder in (partial, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return partial

    def keep(
        self, stage: str, key: str, seconds: float, peak_bytes: int | None, told: dict[str, Any]
    ) -> Kept:
        """Give what was made its name; what an earlier run left there goes."""
        partial, folder = self.path / f"{stage}{_PARTIAL}", self.path / stage
        files = _files(partial)
        values = {
            "key": key,
            "digest": digest_of(files, partial),
            "size": sum(file.stat().st_size for file in files),
            "seconds": round(seconds, 3),
            "peak_bytes": peak_bytes,
            "told": told,
        }
        (partial / _TOLD).write_text(json.dumps(values, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return _kept(folder, values)


def key_of(value: object) -> str:
    """What a result depends on, as one digest; `value` is of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_of(files: Iterable[Path], root: Path) -> str:
    """One digest of the names below `root` and the contents of files."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(f"{path.relative_to(root)}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(_CHUNK):
                found.update(chunk)
    return found.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _TOLD)


def _kept(folder: Path, told: dict[str, Any]) -> Kept:
    return Kept(folder, told["digest"], told["size"], told["seconds"], told["peak_bytes"], dict(told["told"]))
