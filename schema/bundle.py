"""Bundles of either kind, LiteRT-LM's and MediaPipe's: files that hold models and more. It knows neither's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edge_opt.schema.litertlm import is_bundle, read_bundle
from edge_opt.schema.task import is_task, read_task

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from edge_opt.schema.data import Source
    from edge_opt.schema.table import Table
    from edge_opt.schema.writer import Progress


class Section(Protocol):
    """One part of a bundle."""

    @property
    def is_model(self) -> bool:
        """True for a TFLite model."""

    @property
    def model_type(self) -> str:
        """What a model is for, e.g. `prefill_decode`; empty for other sections."""


class Bundle(Protocol):
    """An open bundle."""

    @property
    def source(self) -> Source:
        """The file."""

    @property
    def sections(self) -> Sequence[Section]:
        """Its parts."""

    def content(self, index: int) -> Source:
        """The bytes of a part, as something that `read_model` reads."""

    def write(
        self,
        models: Mapping[int, Table],
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the bundle with the models of some parts (by index) replaced, all else byte for byte."""


def open_bundle(path: str | os.PathLike[str]) -> Bundle | None:
    """A .litertlm or .task bundle; None where the file begins like neither.

    Raises:
        ModelFormatError: it is a damaged one.
    """
    if is_bundle(path):
        return read_bundle(path)
    return read_task(path) if is_task(path) else None
