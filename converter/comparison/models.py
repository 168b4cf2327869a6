"""The models that are compared: one that prefills and decodes, with its embedder and its auxiliary model."""

from __future__ import annotations

import os
from pathlib import Path

from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, ModelLike, Opened, Part

EMBEDDER, AUXILIARY, MAIN = "embedder", "auxiliary", "main"


def find_parts(given: ModelLike) -> dict[str, Part]:
    """The main model and the two that an export may keep apart: a bundle's, or files beside the model.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle holds no prefill/decode model, or it is compiled for an NPU.
    """
    opened = Opened(given)
    parts = {MAIN: opened.main()}
    for name, kind in ((EMBEDDER, EMBEDDER_SECTION), (AUXILIARY, AUXILIARY_SECTION)):
        beside = None if opened.path is None or opened.bundle is not None else _beside(opened.path, name)
        part = opened.find(kind) if beside is None else Part(beside)
        if part is not None:
            parts[name] = part
    return parts


def name_of(given: ModelLike, role: str) -> str:
    """A model's name for people: its path, or its role."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) else f"<{role}>"


def _beside(given: str | os.PathLike[str], name: str) -> Path | None:
    path = Path(given)
    stem = path.name.split(".", 1)[0]
    files = path.with_name(f"{stem}.{name}.tflite"), path.with_name(f"{name}.tflite")
    return next((file for file in files if file.is_file()), None)
