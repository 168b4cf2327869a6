"""The models that a caller means: of a bundle its prefill/decode model, with embedder and auxiliary model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from edge_opt.ir import Model, load
from edge_opt.ir.compiled import check_not_compiled
from edge_opt.output.errors import UsageError
from edge_opt.proof.source import ModelLike, Source
from edge_opt.schema.bundle import open_bundle
from edge_opt.schema.sections import Bundle

EMBEDDER, AUXILIARY, MAIN = "embedder", "auxiliary", "main"
_SECTIONS = {EMBEDDER: "embedder", AUXILIARY: "aux", MAIN: "prefill_decode"}


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
        """What this one has no embedder or auxiliary model for, it shares with the other."""
        return self._replace(
            embedder=self.embedder or other.embedder, auxiliary=self.auxiliary or other.auxiliary
        )


def find_models(
    given: ModelLike, embedder: ModelLike | None = None, auxiliary: ModelLike | None = None
) -> Models:
    """The three models: those given, else the sections of a bundle, else `embedder.tflite` beside the model.

    Raises:
        ModelFormatError: a bundle is damaged.
        UsageError: a bundle holds no prefill/decode model, or a model is compiled for an NPU.
    """
    if not isinstance(given, str | os.PathLike):
        return Models(None, given, embedder, auxiliary)
    name, bundle = os.fspath(given), open_bundle(given)
    if bundle is None:
        check_not_compiled(load(given), given)
        helpers = embedder or _beside(given, EMBEDDER), auxiliary or _beside(given, AUXILIARY)
        return Models(name, given, *helpers)
    main = model_of(bundle, MAIN)
    if main is None:
        raise UsageError(f"{name} has no prefill/decode model")
    check_not_compiled(main, given)
    return Models(
        name, main, embedder or model_of(bundle, EMBEDDER), auxiliary or model_of(bundle, AUXILIARY)
    )


def model_of(bundle: Bundle, name: str = MAIN) -> Model | None:
    """A model of a bundle, `MAIN`, `EMBEDDER` or `AUXILIARY`; None where it has no such section."""
    for index, section in enumerate(bundle.sections):
        if section.model_type == _SECTIONS[name]:
            return load(bundle.content(index))
    return None


def _beside(given: str | os.PathLike[str], name: str) -> Path | None:
    path = Path(given)
    stem = path.name.split(".", 1)[0]
    found = (path.with_name(f"{stem}.{name}.tflite"), path.with_name(f"{name}.tflite"))
    return next((file for file in found if file.is_file()), None)
