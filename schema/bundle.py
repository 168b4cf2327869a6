"""Bundles of either kind, LiteRT-LM's and MediaPipe's. It knows neither's format."""

import os

from edge_opt.schema.litertlm import is_bundle, read_bundle
from edge_opt.schema.sections import Bundle
from edge_opt.schema.task import is_task, read_task


def open_bundle(path: str | os.PathLike[str]) -> Bundle | None:
    """A .litertlm or .task bundle; None where the file begins like neither.

    Raises:
        ModelFormatError: it is a damaged one.
    """
    if is_bundle(path):
        return read_bundle(path)
    return read_task(path) if is_task(path) else None
