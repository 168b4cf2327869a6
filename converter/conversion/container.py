"""What a conversion reads and writes: a .tflite file is one model, a .litertlm or .task bundle holds several.

Models as litert-torch (formerly ai-edge-torch) holds them are recognised without importing it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from edge_opt.comparison.graph_facts import signature_info
from edge_opt.ir import Model, save, to_bytes
from edge_opt.ir.model import checked_tables
from edge_opt.ir.opening import AUXILIARY_SECTION, MAIN_SECTION, ModelLike, Opened
from edge_opt.output.errors import ModelFormatError, UsageError
from edge_opt.passes import Pass
from edge_opt.passes.position_table import PositionTable
from edge_opt.proof.roles import known_length
from edge_opt.schema.executor_metadata import read_executor_metadata
from edge_opt.soundness import Unsound, broken_ranges, stopped_positions

Sections = Literal["prefill-decode", "all"]
_OF_HELPERS = frozenset({PositionTable.name})
"""Passes that run on every model of a bundle."""


@dataclass(slots=True)
class Part:
    """One model of a container, and whether anything in it was rewritten; `name` is empty where there is only one.

    `index` is its place in the bundle. `is_helper`: the caller did not ask for it; only passes that run on every model
    of a bundle run on it.
    """

    name: str
    model: Model
    index: int = 0
    changed: bool = False
    is_helper: bool = False

    def signature(self, name: str) -> str:
        """A signature's name, with the part's in front where there are several."""
        return f"{self.name}/{name}" if self.name else name

    def taking_part(self, passes: Iterable[Pass]) -> list[Pass]:
        """Those of the passes that run on it."""
        return [chosen for chosen in passes if not self.is_helper or chosen.name in _OF_HELPERS]


@dataclass(frozen=True, slots=True)
class Container:
    """Models that are read together and written together: a single one, or some of a bundle."""

    opened: Opened
    parts: list[Part]

    @property
    def suffix(self) -> str:
        """What the names of such files end in."""
        return ".tflite" if self.opened.bundle is None else self.opened.bundle.suffix

    @property
    def positions(self) -> int | None:
        """How many positions the longest cache of its models has room for; None where nothing tells.

        Rings do not tell: positions go on behind their end. LiteRT-LM knows them by other caches that are longer, or by
        the executor metadata.
        """
        metadata = read_executor_metadata(self.opened.bundle)
        if metadata is not None and metadata.buffers and all(cache.local for cache in metadata.buffers):
            return None
        return positions_of(part.model for part in self.parts)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        progress: Callable[[int, int], None] | None,
        check: Callable[[Path], None] | None,
    ) -> None:
        """Write the edited models; what else is in a bundle goes over byte for byte."""
        if self.opened.bundle is None:
            save(self.parts[0].model, path, overwrite=overwrite, progress=progress, check=check)
            return
        models = {part.index: checked_tables(part.model) for part in self.parts if part.changed}
        self.opened.bundle.write(models, path, overwrite=overwrite, progress=progress, check=check)

    def pairs(self, written: Path | None) -> Iterator[tuple[ModelLike, ModelLike]]:
        """For each part, the model as it was, and as it is in the written file, or in memory where none was written."""
        before = Opened(self.opened.source)
        after = None if written is None else Opened(written)
        for part in self.parts:
            if before.bundle is None:
                yield before.source, part.model if written is None else written
            else:
                yield before.model(part.index), part.model if after is None else after.model(part.index)


def open_container(source: ModelLike, sections: Sections = "prefill-decode") -> Container:
    """Read what a conversion works on; of a bundle the prefill/decode model, or `all` of its models.

    An auxiliary model that was not asked for comes last, as a helper.

    Raises:
        ModelFormatError: it is no model and no bundle, or a damaged one.
        UsageError: `sections` is unknown, or the bundle has no such model.
    """
    if sections not in get_args(Sections):
        raise UsageError(f"sections '{sections}' do not exist; there are: {', '.join(get_args(Sections))}")
    opened = Opened(source)
    if opened.bundle is None:
        return Container(opened, [Part("", opened.main(compiled=True))])
    chosen = [index for index, kind in opened.kinds.items() if sections == "all" or kind == MAIN_SECTION]
    if not chosen:
        opened.main()  # says what the bundle has instead
    names = {index: opened.kinds[index] or f"section_{index}" if len(chosen) > 1 else "" for index in chosen}
    parts = [Part(names[index], opened.model(index), index) for index in chosen]
    for index, kind in opened.kinds.items():
        if index not in chosen and kind == AUXILIARY_SECTION:
            with suppress(ModelFormatError):  # what is only copied need not be of a kind that we read
                parts.append(Part(kind, opened.model(index), index, is_helper=True))
    return Container(opened, parts)


def positions_of(models: Iterable[Model]) -> int | None:
    """How many positions the longest cache of these models has room for; None where nothing tells."""
    infos = (signature_info(signature) for model in models for signature in model.signatures)
    return max(map(known_length, infos), default=0) or None


def find_unsound(opened: Opened) -> list[Unsound]:
    """What was ruined in a model before it came here, and in every model of a bundle."""
    unsound: list[Unsound] = []
    for index, kind in opened.kinds.items():
        with suppress(ModelFormatError):  # one that is only copied need not be of a kind that we read
            unsound += [replace(one, model=kind) for one in broken_ranges(opened.model(index))]
    return unsound


def find_stopped(container: Container) -> list[Unsound]:
    """Where the models of a container, as they are now, stop counting positions before their caches are full."""
    return [
        replace(one, model=container.opened.kinds[part.index])
        for part in container.parts
        for one in stopped_positions(part.model, container.positions)
    ]


class ExportedModel(Protocol):
    """What `litert_torch.convert` returns: a model that can be called, and written with `export`."""

    def export(self, path: str) -> None:
        """Write the .tflite file."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""


Exported = TypeVar("Exported", bound=ExportedModel)


def model_content(model: object) -> bytes:
    """The .tflite bytes of a model.

    Raises:
        UsageError: it is no model of litert-torch or ai-edge-torch.
    """
    # litert-torch has `model_content`, ai-edge-torch had `tflite_model`.
    for name in ("model_content", "tflite_model"):
        reader = getattr(model, name, None)
        if callable(reader):
            return bytes(reader())
    raise UsageError(
        f"a {type(model).__module__}.{type(model).__qualname__} is no exported model: give what litert_torch.convert "
        "returns, a .tflite file, or its bytes"
    )


def remade(exported: Exported, model: Model) -> Exported:
    """A model of the same class that holds `model`; the given one stays as it is."""
    kind: Callable[[bytes], Exported] = type(exported)
    return kind(to_bytes(model))
