"""Files that hold models: a .tflite is one, a .litertlm or .task bundle several. What a conversion reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from edge_opt.ir import Model, from_tables, load, save, to_tables
from edge_opt.schema.bundle import Bundle, open_bundle
from edge_opt.schema.errors import UsageError
from edge_opt.schema.reader import read_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Comparable = str | os.PathLike[str] | bytes | Model

Sections = Literal["prefill-decode", "all"]
MAIN_SECTION = "prefill_decode"


@dataclass(slots=True)
class Part:
    """One model of a container, and whether anything in it was rewritten; `name` is empty where there is only one."""

    name: str
    model: Model
    changed: bool = False

    def signature(self, name: str) -> str:
        """A signature's name, with the part's in front where there are several."""
        return f"{self.name}/{name}" if self.name else name


class Container(Protocol):
    """Models that are read together and written together."""

    parts: list[Part]

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        progress: Callable[[int, int], None] | None,
        check: Callable[[Path], None] | None,
    ) -> None:
        """Write everything back, the edited models among it."""

    def pairs(self, written: Path | None) -> Iterator[tuple[Comparable, Comparable]]:
        """For each part, the model as it was, and as it is in the written file, or in memory where none was written."""


def open_container(
    source: str | os.PathLike[str] | bytes | Model, sections: Sections = "prefill-decode"
) -> Container:
    """Read what a conversion works on; of a bundle the prefill/decode model, or `all` of its models.

    Raises:
        ModelFormatError: it is no model and no bundle, or a damaged one.
        UsageError: `sections` is unknown, or the bundle has no such model.
    """
    if sections not in get_args(Sections):
        raise UsageError(f"sections '{sections}' do not exist; there are: {', '.join(get_args(Sections))}")
    if isinstance(source, Model):
        return SingleModel(source)
    bundle = None if isinstance(source, bytes) else open_bundle(source)
    return SingleModel(load(source), source) if bundle is None else BundledModels(bundle, sections)


class SingleModel:
    """A .tflite file, or a model in memory."""

    def __init__(self, model: Model, source: Comparable | None = None) -> None:
        self.parts = [Part("", model)]
        self._source = source

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        progress: Callable[[int, int], None] | None,
        check: Callable[[Path], None] | None,
    ) -> None:
        """Write the model."""
        save(self.parts[0].model, path, overwrite=overwrite, progress=progress, check=check)

    def pairs(self, written: Path | None) -> Iterator[tuple[Comparable, Comparable]]:
        """The file that was read, and the one that was written."""
        assert self._source is not None
        yield self._source, self.parts[0].model if written is None else written


class BundledModels:
    """The chosen models of a bundle; its other parts go over byte for byte."""

    def __init__(self, bundle: Bundle, sections: Sections) -> None:
        self._bundle = bundle
        self._chosen = [
            index
            for index, section in enumerate(bundle.sections)
            if section.is_model and (sections == "all" or section.model_type == MAIN_SECTION)
        ]
        if not self._chosen:
            held = ", ".join(s.model_type or "unnamed" for s in bundle.sections if s.is_model) or "none"
            raise UsageError(f"{bundle.source.name} has no {MAIN_SECTION} model, its models are: {held}")
        several = len(self._chosen) > 1
        self.parts = [
            Part(
                bundle.sections[index].model_type or f"section_{index}" if several else "",
                _section_model(bundle, index),
            )
            for index in self._chosen
        ]

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        progress: Callable[[int, int], None] | None,
        check: Callable[[Path], None] | None,
    ) -> None:
        """Write the bundle, those of the chosen models anew in which something was rewritten."""
        chosen = zip(self._chosen, self.parts, strict=True)
        models = {index: to_tables(part.model) for index, part in chosen if part.changed}
        self._bundle.write(models, path, overwrite=overwrite, progress=progress, check=check)

    def pairs(self, written: Path | None) -> Iterator[tuple[Comparable, Comparable]]:
        """The chosen sections, read afresh from both bundles."""
        after = None if written is None else open_bundle(written)
        for index, part in zip(self._chosen, self.parts, strict=True):
            before = _section_model(self._bundle, index)
            yield before, part.model if after is None else _section_model(after, index)


def _section_model(bundle: Bundle, index: int) -> Model:
    return from_tables(read_model(bundle.content(index)))
