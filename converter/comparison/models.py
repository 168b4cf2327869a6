"""The models that are run together: one that prefills and decodes, with its embedder and its auxiliary model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, ModelLike, Opened
from edge_opt.proof.source import Source

EMBEDDER, AUXILIARY, MAIN = "embedder", "auxiliary", "main"


class Models(NamedTuple):
    """A model and the two that an export may keep apart; `name` is the path that they were given by, if any."""

    name: str | None
    main: ModelLike
    embedder: ModelLike | None = None
    auxiliary: ModelLike | None = None

    def source(self, role: str) -> Source:
        """The main model for the worker, under the name of its file, else of its role."""
        return Source(self.main, role, self.name)

    def with_helpers_of(self, other: Models) -> Models:
        """The same; an embedder or auxiliary model that is missing is the other's."""
        return self._replace(
            embedder=self.embedder or other.embedder, auxiliary=self.auxiliary or other.auxiliary
        )


def find_models(
    given: ModelLike, embedder: ModelLike | None = None, auxiliary: ModelLike | None = None
) -> Models:
    """The three models: those given, else the sections of a bundle, else `embedder.tflite` beside the model.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle holds no prefill/decode model, or a model is compiled for an NPU.
    """
    if not isinstance(given, str | os.PathLike):
        return Models(None, given, embedder, auxiliary)
    opened = Opened(given)
    main = opened.main()
    if opened.bundle is None:
        helpers = embedder or _beside(given, EMBEDDER), auxiliary or _beside(given, AUXILIARY)
        return Models(opened.path, given, *helpers)
    helpers = embedder or opened.find(EMBEDDER_SECTION), auxiliary or opened.find(AUXILIARY_SECTION)
    return Models(opened.path, main, *helpers)


def _beside(given: str | os.PathLike[str], name: str) -> Path | None:
    path = Path(given)
    stem = path.name.split(".", 1)[0]
    files = path.with_name(f"{stem}.{name}.tflite"), path.with_name(f"{name}.tflite")
    return next((file for file in files if file.is_file()), None)
