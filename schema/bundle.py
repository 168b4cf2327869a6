"""Bundles of either kind, LiteRT-LM's and MediaPipe's. It knows neither's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.schema.litertlm import is_bundle, read_bundle
from edge_opt.schema.task import is_task, read_task

if TYPE_CHECKING:
    import os

    from edge_opt.schema.sections import Bundle


def open_bundle(path: str | os.PathLike[str]) -> Bundle | None:
    """A .litertlm or .task bundle; None where the file begins like neither.

    Raises:
        ModelFormatError: it is a damaged one.
    """
    if is_bundle(path):
        return read_bundle(path)
    return read_task(path) if is_task(path) else None
