"""Writes a model: tables first, then the weights, from file to file. It must not hold a weight in memory.

    [tables][length, weights inside the flatbuffer]...[weights behind it]...[bytes that no table names]

The same tables give the same bytes. Weights inside the flatbuffer stay inside while it is under 2 GB. Within each part,
weights of the same old file keep their order, and new weights follow. Each weight is 16-byte aligned, and at least as
well aligned as it was in its file.
"""

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import flatbuffers
from flatbuffers import number_types
from flatbuffers.builder import BuilderSizeError

from edge_opt.base.atomic import replacing
from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.schema.data import Data
from edge_opt.schema.table import (
    IDENTIFIER,
    MAX_FLATBUFFER_SIZE,
    NUMPY_TYPES,
    SCALAR_CODES,
    STORED_AFTER,
    UNIONS,
    FieldSpec,
    Table,
)

_NUMBERS = {name: getattr(number_types, f"{name.capitalize()}Flags") for name in SCALAR_CODES}


class _Hole(NamedTuple):
    """A place in the tables that wants the position of `data`: a uoffset if inside, else a uint64 offset."""

    at: int
    data: Data
    external: bool


_MISFIT = (TypeError, ValueError, OverflowError, AttributeError, struct.error)


class _TableBuilder:
    """Writes each table, vector and string once, and what they refer to before them; equal numbers share a vector."""

    def __init__(self, *, inside: bool, new_after: bool) -> None:
        self.holes: list[_Hole] = []
        self._inside = inside
        self._new_after = new_after
        self._builder = flatbuffers.Builder()
        self._written: dict[tuple[str, int], int] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}

    def finish(self, root: Table) -> bytearray:
        """The flatbuffer, and `holes` at their places in it."""
        try:
            self._builder.Finish(self._table(root), file_identifier=IDENTIFIER)
        except BuilderSizeError:
            message = "the tables take over 2 GB, which a flatbuffer cannot hold: remove some of them"
            raise ModelFormatError(message) from None
        content: bytearray = self._builder.Output()
        # A builder writes back to front: until the end, positions count from there.
        self.holes = [hole._replace(at=len(content) - hole.at) for hole in self.holes]
        return content

    def _table(self, table: Table) -> int:
        written = self._written.get(("", id(table)))
        if written is not None:
            return written
        spec, builder = table.spec, self._builder
        for name in table.fields.keys() - spec.by_name.keys():
            raise ModelFormatError("is not a field of this table: remove it", table=spec.name, field=name)
        fields, data, hole = self._placed(table)
        present = [field for field in spec.largest_first if field.name in fields]
        places: dict[str, int] = {}
        field = None
        try:
            for field in present:
                if field.kind != "scalar" and field.name != hole:
                    member = fields.get(f"{field.name}_type", 0)
                    places[field.name] = self._reference(field, fields[field.name], member)
            builder.StartObject(spec.slots)
            for field in present:
                if field.name in places:
                    builder.PrependUOffsetTRelative(places[field.name])
                elif field.kind == "scalar":
                    builder.Prepend(_NUMBERS[field.element], fields[field.name])
                else:
                    builder.PrependUint32(0)
                builder.Slot(field.slot)
                if field.name == hole and data is not None:
                    self.holes.append(_Hole(builder.Offset(), data, external=field.kind == "scalar"))
            position: int = builder.EndObject()
        except _MISFIT as error:
            assert field is not None
            text = f"holds {fields[field.name]!r:.80}, which does not fit {field.type}: {error}"
            raise ModelFormatError(text, table=spec.name, field=field.name) from error
        self._written["", id(table)] = position
        return position

    def _placed(self, table: Table) -> tuple[dict[str, Any], Data | None, str]:
        """The fields of a table, bytes that may lie behind the tables, and the field that says where."""
        inside, offset, size = STORED_AFTER.get(table.spec.name, ("", "", ""))
        fields = table.fields
        data = fields.get(inside)
        if not isinstance(data, Data):
            return fields, None, ""
        external = self._new_after if data.placement is None else data.placement
        if self._inside and not external:
            return fields, data, inside
        fields = {name: value for name, value in fields.items() if name != inside}
        return fields | {offset: 0, size: data.length}, data, offset

    def _reference(self, field: FieldSpec, value: Any, member: int) -> int:
        """Where a text, vector or table is; `member` says which table of a union it is."""
        if field.kind == "string":
            text: int = self._builder.CreateSharedString(value)
            return text
        if field.kind in {"table", "union"}:
            return self._child(
                UNIONS[field.element].get(member) if field.kind == "union" else field.element, value
            )
        key = (field.type, id(value))
        if key not in self._written:
            self._written[key] = self._vector(field, value)
        return self._written[key]

    def _child(self, kind: str | None, value: Any) -> int:
        if not isinstance(value, Table) or value.spec.name != kind:
            raise TypeError(f"expected {kind or 'its type beside it'}")
        return self._table(value)

    def _vector(self, field: FieldSpec, value: Any) -> int:
        builder: Any = self._builder
        if field.kind == "scalars":
            if field.table == "Buffer" or value.dtype != NUMPY_TYPES[field.element] or value.ndim != 1:
                raise TypeError(
                    "expected " + ("Data" if field.table == "Buffer" else f"a vector of {field.element}")
                )
            content = (field.element, value.tobytes())
            if content not in self._numbers:
                self._numbers[content] = builder.CreateNumpyVector(value)
            return self._numbers[content]
        targets = [self._child(field.element, item) for item in value]
        builder.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            builder.PrependUOffsetTRelative(target)
        position: int = builder.EndVector()
        return position


Progress = Callable[[int, int], None]

ALIGNMENT: Final = 16
_MOST_ALIGNMENT: Final = 4096

SUFFIXES: Final = {".tflite", ".litertlm", ".task", ".onnx", ".pte", ".gguf", ".safetensors"}


class Piece(NamedTuple):
    """Bytes for position `at`."""

    at: int
    data: Data


class Layout(NamedTuple):
    """A file in pieces, with zeros between them."""

    pieces: list[Piece]
    size: int


def write_model(
    root: Table,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the model below `root` to `path`, all at once; `progress(done, total)` counts bytes.

    `check` may look at the finished file before it gets its name, and refuse it by raising.

    Raises:
        UsageError: the output is the input, exists and `overwrite` is false, or is named like another format.
        OutputError: it could not be written; nothing was left behind.
        ModelFormatError: the tables hold what the format cannot, or the input was changed meanwhile.
    """
    check_suffix(path, ".tflite")
    write_layout(lay_out(root), path, overwrite=overwrite, progress=progress, check=check)


def write_layout(
    layout: Layout,
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    progress: Progress | None,
    check: Callable[[Path], None] | None,
) -> None:
    """Write a file in pieces, as `write_model`; files that pieces come from must not change meanwhile."""
    pieces = layout.pieces
    sources = list({id(data.source): data.source for _, data in pieces if data.source is not None}.values())
    inputs = tuple(source.identity for source in sources)
    done, total = 0, sum(data.length for _, data in pieces)
    with replacing(path, overwrite=overwrite, inputs=inputs, check=check) as target:
        os.ftruncate(target, layout.size)
        for at, data in pieces:
            data.write(target, at)
            done += data.length
            if progress is not None:
                progress(done, total)
        for source in sources:
            source.check_unchanged()


def check_suffix(path: str | os.PathLike[str], suffix: str) -> None:
    """UsageError where a name promises another format than the one that will be written."""
    if Path(path).suffix.lower() in SUFFIXES - {suffix}:
        raise UsageError(f"{os.fspath(path)} cannot be written: the result is a {suffix}, name it so")


def model_bytes(root: Table) -> bytes:
    """The model below `root` as the bytes that `write_model` would write; weights included, so mind its size.

    Raises:
        ModelFormatError: the tables hold what the format cannot.
    """
    layout = lay_out(root)
    content = bytearray(layout.size)
    for at, data in layout.pieces:
        content[at : at + data.length] = data.view().data
    return bytes(content)


def lay_out(root: Table) -> Layout:
    """Build the tables, and give every weight its place: inside the flatbuffer as far as that can be.

    Raises:
        ModelFormatError: a field holds something that the format cannot.
    """
    layout = _lay_out(root, inside=True) or _lay_out(root, inside=False)
    assert layout is not None
    trailing = root.trailing
    if trailing is None:
        return layout
    # Positions inside trailing bytes count from their own beginning or from the file's. Readers of zip archives work
    # out which from what stands in front: that may have grown, as in self-extracting archives, but not shrunk.
    at = max(layout.size, trailing.offset)
    return Layout([*layout.pieces, Piece(at, trailing)], at + trailing.length)


def _lay_out(root: Table, *, inside: bool) -> Layout | None:
    """The model with all weights inside the flatbuffer that may be, or none; None where it gets too large."""
    buffers = (table.fields.get("data") for table in root.fields.get("buffers", ()))
    # New bytes go where the model keeps its others.
    new_after = any(isinstance(data, Data) and data.external for data in buffers)
    builder = _TableBuilder(inside=inside, new_after=new_after)
    tables = builder.finish(root)
    end, pieces, positions = len(tables), list[Piece](), dict[tuple[bool, object], int]()
    for external in (False, True):
        for data in _in_order(hole.data for hole in builder.holes if hole.external == external):
            prefix = 0 if external else 4  # a vector's length
            at = end + prefix
            at += -at % _alignment(data)
            if prefix:
                pieces.append(Piece(at - prefix, Data(data.length.to_bytes(prefix, "little"))))
            pieces.append(Piece(at, data))
            positions[external, _key(data)] = at
            end = at + data.length
        if not external and end > MAX_FLATBUFFER_SIZE:
            return None
    for hole in builder.holes:
        position, at = positions[hole.external, _key(hole.data)], hole.at
        if hole.external:
            tables[at : at + 8] = position.to_bytes(8, "little")
        else:
            tables[at : at + 4] = (position - 4 - at).to_bytes(4, "little")
    return Layout([Piece(0, Data(bytes(tables))), *pieces], end)


def _key(data: Data) -> tuple[int, int, int]:
    """Equal for regions that are the same bytes of the same file."""
    return (id(data), 0, 0) if data.source is None else (id(data.source), data.offset, data.length)


def _in_order(weights: Iterable[Data]) -> list[Data]:
    """The distinct weights: those of each file by their places in it, the new ones behind them."""
    distinct = list({_key(data): data for data in weights}.values())
    files = list(dict.fromkeys(id(data.source) for data in distinct if data.source is not None))
    old = [data for data in distinct if data.source is not None]
    old.sort(key=lambda data: (files.index(id(data.source)), data.offset, data.length))
    return old + [data for data in distinct if data.source is None]


def _alignment(data: Data) -> int:
    """At least 16, and what a file's weight had, up to a page; one that was aligned worse is mended."""
    if data.source is None:
        return ALIGNMENT
    return min(max(data.offset & -data.offset, ALIGNMENT), _MOST_ALIGNMENT)
