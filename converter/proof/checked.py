"""The door to the native runtime: what our own reader and graph checks refuse goes no further. Runs nothing."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.ir import load

if TYPE_CHECKING:
    import os

_MOST_REMEMBERED = 32
_passed: OrderedDict[tuple[object, ...], None] = OrderedDict()


def check_model(model: str | os.PathLike[str] | bytes) -> None:
    """Read the model's tables and graphs; a file that passed and was not written to since is not read again.

    Raises:
        ModelFormatError: it is no valid model.
    """
    if isinstance(model, bytes):
        load(model)
        return
    identity = _identity(Path(model))
    if identity is not None and identity in _passed:
        return
    load(model)
    if identity is not None:
        _passed[identity] = None
        while len(_passed) > _MOST_REMEMBERED:
            _passed.popitem(last=False)


def _identity(path: Path) -> tuple[object, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # the reader has the sentence for it
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
