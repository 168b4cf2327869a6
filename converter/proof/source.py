"""A model in whatever form a caller has it, made into a path or bytes for the worker; checked before it may run.

Must not change the model.
"""

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_opt.ir import Model, save
from edge_opt.proof.checked import check_model
from edge_opt.schema.errors import EdgeOptError, UsageError

ModelLike = str | os.PathLike[str] | bytes | Model


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()
