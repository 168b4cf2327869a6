"""The door to the native runtime: a model in whatever form a caller has it, as a path or bytes for the worker.

What our own reader and graph checks refuse goes no further. Runs nothing, and changes no model.
"""

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Self

from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import ModelLike
from edge_opt.output.errors import EdgeOptError, UsageError


class Source:
    """A context manager; `model` is what the worker takes, `name` what messages say."""

    def __init__(self, given: ModelLike, role: str, name: str | None = None) -> None:
        self._given = given
        self._role = role
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.model: str | os.PathLike[str] | bytes = b""
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else f"<{role}>"
        self.name = name or path

    def __enter__(self) -> Self:
        """Our own reader goes first: no file reaches the native runtime before it passed."""
        if isinstance(self._given, Model):
            self._folder = tempfile.TemporaryDirectory(prefix="edge-opt-")
            self.model = Path(self._folder.name) / "model.tflite"
            save(self._given, self.model)
            return self
        if not isinstance(self._given, str | os.PathLike | bytes):
            kind = type(self._given).__name__
            raise UsageError(f"{self._role} must be a path, the bytes of a model or a Model, not {kind}")
        try:
            check_model(self._given)
        except EdgeOptError as error:
            error.add_note(f"while reading {self._role}: {self.name}")
            raise
        self.model = self._given
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def check_model(model: str | os.PathLike[str] | bytes) -> None:
    """Read the model's tables and graphs; a file that passed and was not written to since is not read again.

    Raises:
        ModelFormatError: it is no valid model.
    """
    if isinstance(model, bytes):
        load(model)
        return
    path = os.fspath(model)
    try:
        status = Path(path).stat()
    except OSError:
        load(path)  # the reader has the sentence for it
        return
    _check_file(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=32)
def _check_file(path: str, *_identity: int) -> None:
    load(path)
