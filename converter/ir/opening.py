"""Opens a user's model: a .tflite file, its bytes, a loaded model, or a bundle of several models.

A file's type follows from its content, not its name. Models are read on demand and written together.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, Unpack, runtime_checkable

from edge_opt.base.atomic import contents_of, scratch_folder
from edge_opt.base.errors import ModelFormatError, UsageError, unknown
from edge_opt.base.words import listed
from edge_opt.base.work import made_from
from edge_opt.ir.graph import used_tensors
from edge_opt.ir.model import Model, checked_tables, from_tables, to_bytes
from edge_opt.schema.data import Data, Source
from edge_opt.schema.litertlm import SUFFIX, Bundle, is_bundle, read_bundle
from edge_opt.schema.reader import read_model
from edge_opt.schema.table import new_table
from edge_opt.schema.writer import Writing


def load(
    source: str | os.PathLike[str] | bytes | IO[bytes] | Source, *, model: str | None = None
) -> Model:
    """Read a .tflite file or its bytes. Weights stay on disk until their numbers are needed.

    `model` names the one to read from a bundle: `prefill_decode`, `embedder`, `aux`.

    Raises:
        UsageError: `model` is given, and the source is not a bundle or has no such model.
        ModelFormatError: the model is invalid; names table, field and byte offset, or subgraph, operator and tensor.
    """
    if model is not None:
        opened = None if isinstance(source, bytes | Source) else Opened(source)
        if opened is None or opened.bundle is None:
            what = "what was given" if opened is None else opened.path
            raise UsageError(f"{what} is not a bundle: leave out model={model!r}")
        part = opened.find(model)
        if part is None:
            raise unknown("model", model, [part.name for part in opened.parts])
        return part.model
    file = Source.of(source)
    try:
        with without_collections():
            return from_tables(read_model(file), file)
    except ModelFormatError as error:
        if file.path is not None and not str(error).startswith(file.name):
            error.args = (f"{file.name}: {error}",)
        raise


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection: a model's many objects live to the end.

    The search for garbage took a third of the time of reading, and a tenth of a conversion's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@runtime_checkable
class ExportedModel(Protocol):
    """A model as `litert_torch.convert` returns it: callable, and written with `export`."""

    def export(self, path: str) -> None:
        """Write the .tflite file."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""


Readable = str | os.PathLike[str] | bytes | Model
ModelLike = Readable | IO[bytes] | ExportedModel


def readable(given: ModelLike) -> Readable:
    """Return `given`, an exported model as its .tflite bytes; UsageError if it is not a model."""
    if isinstance(given, str | os.PathLike | bytes | Model):
        return given
    content = contents_of(given)
    if content is not None:
        return content
    # litert-torch has `model_content`, ai-edge-torch had `tflite_model`.
    for name in ("model_content", "tflite_model"):
        reader = getattr(given, name, None)
        if callable(reader):
            return bytes(reader())
    raise UsageError(
        f"a {type(given).__module__}.{type(given).__qualname__} is not a model: give a .tflite file, its bytes, a "
        "Model, or what litert_torch.convert returns"
    )


MAIN_SECTION = "prefill_decode"
EMBEDDER_SECTION = "embedder"
PER_LAYER_SECTION = "per_layer_embedder"
AUXILIARY_SECTION = "aux"
"""Purposes of the models in a LiteRT-LM bundle, as their sections name them."""


@dataclass(eq=False)
class Part:
    """One model: `index` is its place among a bundle's sections, `kind` its purpose ("" for a single model).

    `name` tells it from the bundle's other models: its purpose, with the place if that is missing or repeated.
    A conversion names its signatures `label/signature` if there is a label, and sets `changed`. `is_helper` marks a
    model that was not requested: only passes that run on every model of a bundle run on it.
    """

    source: Readable | Source
    index: int = 0
    kind: str = ""
    name: str = ""
    label: str = field(default="", init=False)
    changed: bool = field(default=False, init=False)
    is_helper: bool = field(default=False, init=False)

    @cached_property
    def model(self) -> Model:
        """The model, read on first use; ModelFormatError if it is invalid."""
        return self.source if isinstance(self.source, Model) else load(self.source)

    @property
    def readable(self) -> Readable:
        """The model as given; a bundle's model is loaded."""
        return self.model if isinstance(self.source, Source) else self.source

    def signature(self, name: str) -> str:
        """A signature's name, prefixed with the label."""
        return f"{self.label}/{name}" if self.label else name

    @contextmanager
    def file(self) -> Iterator[Path]:
        """Provide a .tflite file of the model for a runtime or compiler: its own, or a temporary one."""
        source = self.source
        if isinstance(source, str | os.PathLike):
            yield Path(source).absolute()
            return
        if isinstance(source, Model):
            source = to_bytes(source)
        with scratch_folder() as folder:
            path = folder / "model.tflite"
            with path.open("wb") as file:
                Data(source).write(file.fileno())
            yield path


class Opened:
    """A single model (`bundle` is None) or a .litertlm bundle; `path` is None if the source is not a file.

    `BUNDLE.litertlm:NAME` chooses a model by name or purpose; `wanted` is that, or else `prefill_decode`.
    UsageError if the source is not a model, or the bundle has no such model, ModelFormatError for a damaged bundle.
    """

    def __init__(self, given: ModelLike) -> None:
        source = readable(given)
        self.path = None if isinstance(source, bytes | Model) else os.fspath(source)
        self.bundle: Bundle | None = None
        self.parts = [Part(source)]
        self.wanted = MAIN_SECTION
        if self.path is None:
            return
        path, _, name = self.path.rpartition(":")
        # A file may have a colon in its name. Not Path.exists, which raises an error for long names.
        names_a_model = is_bundle(path) and not os.path.exists(self.path)  # noqa: PTH110
        if names_a_model:
            self.path = path
            self.wanted = name
        if is_bundle(self.path):
            self.bundle = read_bundle(self.path)
            self.parts = _models(self.bundle)
        if names_a_model and self.find(name) is None:
            raise unknown("model", name, [part.name for part in self.parts])

    @property
    def suffix(self) -> str:
        """The file extension: `.tflite` or `.litertlm`."""
        return ".tflite" if self.bundle is None else SUFFIX

    def find(self, kind: str) -> Part | None:
        """The bundle's model of this kind or name, or None."""
        for part in [] if self.bundle is None else self.parts:
            if kind in (part.name, part.kind, f"section_{part.index}"):
                return part
        return None

    def main(self, *, may_be_compiled: bool = False) -> Part:
        """The only model, or the bundle's chosen model, by default the prefill/decode model.

        UsageError if there is none, or if it is compiled for an NPU and may not be.
        """
        part = self.parts[0] if len(self.parts) == 1 else self.find(self.wanted)
        if part is None and not self.parts:
            raise UsageError(f"{self.path} has no models: give a bundle with a TFLite model")
        if part is None:
            names = listed([part.name for part in self.parts])
            raise UsageError(
                f"{self.path} has several models and no {MAIN_SECTION}: choose one of {names}, for example "
                f"{self.path}:{self.parts[0].name} (convert --all-models rewrites all)"
            )
        if not may_be_compiled:
            check_not_compiled(part.model, self.path)
        return part

    def save(self, path: str | os.PathLike[str], **how: Unpack[Writing]) -> None:
        """Write the model, or the bundle with its changed models; see `Model.save`."""
        if self.bundle is None:
            self.parts[0].model.save(path, **how)
        else:
            models = {part.index: checked_tables(part.model) for part in self.parts if part.changed}
            self.bundle.write(models, path, **how)


def _models(bundle: Bundle) -> list[Part]:
    """The bundle's models, named."""
    kinds = {index: one.model_type for index, one in enumerate(bundle.sections) if one.is_model}
    counts = Counter(kinds.values())
    parts = []
    for index, kind in kinds.items():
        name = kind if kind and counts[kind] == 1 else f"{kind or 'section'}_{index}"
        parts.append(Part(bundle.content(index), index, kind, name))
    return parts


CALL = "DISPATCH_OP"
"""LiteRT's custom operator for one call of the NPU."""


def is_compiled(model: Model) -> bool:
    """True if any operator calls an NPU."""
    return any(operator.code.custom_code == CALL for operator in model.operators())


def weights_outside(model: Model) -> dict[str, int]:
    """Bytes of weights that are not in the model, by the file or section that the model names for them."""
    used: set[int] = set()
    for tensor in chain.from_iterable(map(used_tensors, model.subgraphs)):
        if tensor.table is not None and tensor.is_outside:
            used.add(tensor.table.get("external_buffer"))
    root = model.table or new_table("Model")
    places = {entry.get("id"): entry for entry in root.tables("external_buffers")}
    groups = [group.get("name") or "" for group in root.tables("external_buffer_groups")]
    found: dict[str, int] = {}
    for number in sorted(used):
        entry = places.get(number) or new_table("ExternalBuffer")
        group = entry.get("group")
        name = groups[group] if group < len(groups) else ""
        found[name] = found.get(name, 0) + entry.get("length")
    return found


def check_weights_inside(model: Model) -> None:
    """Raise ModelFormatError for a model that cannot run, because its weights are elsewhere."""
    outside = weights_outside(model)
    if outside:
        name = "the model" if model.source is None else model.source.name
        where = ", ".join(map(repr, outside))
        raise ModelFormatError(
            f"{name} has weights in another file or section ({where}), which LiteRT's interpreter cannot read: to run "
            "or compile it, export it with its weights inside"
        )


def check_not_compiled(model: Model, path: str | os.PathLike[str] | None) -> None:
    """Raise UsageError for a compiled model, naming the bundle to give instead if it can be found."""
    if is_compiled(model):
        instead = made_from(path) or "the bundle that it was made from"
        raise UsageError(f"{path or 'the model'} is compiled for an NPU already: give {instead}")
