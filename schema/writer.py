"""Writes a model: first the tables, then the weights, copied from file to file. It must not hold a weight in memory.

    [tables][length, weights inside the flatbuffer]...[weights after it]...[trailing bytes]

The same tables give the same bytes. Weights inside the flatbuffer stay inside while it is under 2 GB. Within each part,
weights of the same source file keep their order, and new weights follow. Each weight is 16-byte aligned, and at least
as well aligned as it was in its file.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import flatbuffers
from flatbuffers import number_types
from flatbuffers.builder import BuilderSizeError

from edge_opt.base.atomic import path_of, replacing
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
    """A placeholder in the tables for the position of `data`: a uoffset if inside, else a uint64 offset."""

    data: Data
    external: bool
    at: int = 0


_MISFIT = (TypeError, ValueError, OverflowError, AttributeError, struct.error)
"""The exceptions that a builder raises for a value that does not fit its field."""


class _TableBuilder:
    """Writes each table, vector and string once, after everything it refers to; equal vectors are shared."""

    def __init__(self, *, inside: bool, new_after: bool) -> None:
        self.holes: list[_Hole] = []
        self._inside = inside
        self._new_after = new_after
        self._builder = flatbuffers.Builder()
        self._written: dict[tuple[str, object], int] = {}

    def finish(self, root: Table, identifier: bytes | None = IDENTIFIER) -> bytearray:
        """Return the flatbuffer; `holes` then have their final positions."""
        try:
            self._builder.Finish(self._table(root, root.name), file_identifier=identifier)
        except BuilderSizeError:
            message = (
                "the tables take over 2 GB, which a flatbuffer cannot hold: remove some of them"
            )
            raise ModelFormatError(message) from None
        content: bytearray = self._builder.Output()
        # A builder writes back to front: until the end, positions count from there.
        self.holes = [hole._replace(at=len(content) - hole.at) for hole in self.holes]
        return content

    def _once(self, kind: str, key: object, write: Callable[..., int], *what: object) -> int:
        """The position of an object, which is written on first use."""
        if (kind, key) not in self._written:
            self._written[kind, key] = write(*what)
        return self._written[kind, key]

    def _table(self, table: Any, kind: str | None) -> int:
        if not isinstance(table, Table) or table.name != kind:
            raise TypeError(f"expected {kind or 'its type beside it'}")
        return self._once("", id(table), self._new_table, table)

    def _new_table(self, table: Table) -> int:
        spec = table.spec
        builder = self._builder
        for name in table.fields.keys() - spec.by_name.keys():
            raise ModelFormatError(
                "is not a field of this table: remove it", table=spec.name, field=name
            )
        fields = self._with_hole(table)
        present = [field for field in spec.largest_first if field.name in fields]
        places: dict[str, int] = {}
        field = None
        try:
            for field in present:
                if field.kind != "scalar" and not isinstance(fields[field.name], _Hole):
                    places[field.name] = self._reference(field, fields)
            builder.StartObject(spec.slots)
            for field in present:
                value = fields[field.name]
                if isinstance(value, _Hole):
                    builder.Prepend(_NUMBERS["uint64" if value.external else "uint32"], 0)
                    self.holes.append(value._replace(at=builder.Offset()))
                elif field.kind == "scalar":
                    builder.Prepend(_NUMBERS[field.element], value)
                else:
                    builder.PrependUOffsetTRelative(places[field.name])
                builder.Slot(field.slot)
            position: int = builder.EndObject()
        except _MISFIT as error:
            assert field is not None
            text = f"holds {fields[field.name]!r:.80}, which does not fit {field.type}: {error}"
            raise ModelFormatError(text, table=spec.name, field=field.name) from error
        return position

    def _with_hole(self, table: Table) -> dict[str, Any]:
        """The fields of a table, with a hole in place of its bytes, or of their offset if they go after the tables."""
        inside, offset, size = STORED_AFTER.get(table.name, ("", "", ""))
        data = table.fields.get(inside)
        if not isinstance(data, Data):
            return table.fields
        external = self._new_after if data.external is None else data.external
        if self._inside and not external:
            return {**table.fields, inside: _Hole(data, external=False)}
        fields = {**table.fields, offset: _Hole(data, external=True), size: data.length}
        del fields[inside]
        return fields

    def _reference(self, field: FieldSpec, fields: Mapping[str, Any]) -> int:
        """The position of the text, vector or table in a field; a union's type is in the field beside it."""
        value = fields[field.name]
        element = field.element
        builder = self._builder
        if field.kind == "string":
            text: int = builder.CreateSharedString(value.encode())
            return text
        if field.kind == "table":
            return self._table(value, element)
        if field.kind == "union":
            return self._table(value, UNIONS[element].get(fields.get(f"{field.name}_type", 0)))
        if field.kind == "tables":
            return self._once(field.type, id(value), self._tables, element, value)
        if field.table == "Buffer":
            raise TypeError("expected Data")
        if value.dtype != NUMPY_TYPES[element] or value.ndim != 1:
            raise TypeError(f"expected a vector of {element}")
        return self._once(field.type, value.tobytes(), builder.CreateNumpyVector, value)

    def _tables(self, kind: str, tables: Any) -> int:
        targets = [self._table(table, kind) for table in tables]
        self._builder.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            self._builder.PrependUOffsetTRelative(target)
        position: int = self._builder.EndVector()
        return position


ALIGNMENT: Final = 16
_MOST_ALIGNMENT: Final = 4096
_VECTOR_LENGTH: Final = 4  # bytes in front of a vector

SUFFIXES: Final = {".tflite", ".litertlm", ".task", ".onnx", ".pte", ".gguf", ".safetensors"}


class Piece(NamedTuple):
    """Bytes at position `at`. A file is a list of pieces, sorted by position, with zeros between them."""

    at: int
    data: Data

    @property
    def end(self) -> int:
        """The position after the bytes."""
        return self.at + self.data.length


class Writing(TypedDict, total=False):
    """Options: `progress(done, total)` counts bytes; `check` may refuse the finished file, before it gets its name."""

    overwrite: bool
    progress: Callable[[int, int], None] | None
    check: Callable[[Path], None] | None


def write_pieces(
    pieces: Sequence[Piece], path: str | os.PathLike[str], suffix: str, **how: Unpack[Writing]
) -> None:
    """Write a file from pieces, atomically; ModelFormatError if a source file was changed meanwhile.

    UsageError if the output is an input, exists and `overwrite` is False, or has another format's suffix.
    """
    check_suffix(path, suffix)
    sources = dict.fromkeys(data.source for _, data in pieces)
    progress = how.get("progress")
    done = 0
    total = sum(data.length for _, data in pieces)
    inputs = [source.path for source in sources]
    overwrite = how.get("overwrite", False)
    with replacing(path, overwrite=overwrite, inputs=inputs, check=how.get("check")) as target:
        os.ftruncate(target, pieces[-1].end)
        for at, data in pieces:
            data.write(target, at)
            done += data.length
            if progress is not None:
                progress(done, total)
        for source in sources:
            source.check_unchanged()


def check_suffix(path: str | os.PathLike[str], suffix: str) -> None:
    """Raise UsageError if the path ends in another format's suffix."""
    others = SUFFIXES - {suffix}
    if path_of(path, "an output").name.lower().endswith((*others,)):
        raise UsageError(
            f"{os.fspath(path)} cannot be written: the result is a {suffix}, use its suffix"
        )


def model_bytes(root: Table) -> bytes:
    """The model below `root` as bytes, all weights included; ModelFormatError if a value does not fit its field."""
    pieces = lay_out(root)
    content = bytearray(pieces[-1].end)
    for at, data in pieces:
        content[at : at + data.length] = data.view().data
    return bytes(content)


def table_bytes(root: Table) -> bytes:
    """A flatbuffer of tables alone, without an identifier."""
    return bytes(_TableBuilder(inside=True, new_after=False).finish(root, None))


def lay_out(root: Table) -> list[Piece]:
    """Build the tables, and place every weight; weights inside the flatbuffer stay there if it is small enough."""
    pieces = _pieces(root, inside=True) or _pieces(root, inside=False)
    trailing = root.trailing
    if trailing is not None:
        # Offsets inside trailing bytes count from their own beginning or from the file's. Zip readers infer which from
        # the bytes in front: these may have grown, as in self-extracting archives, but not shrunk.
        pieces.append(Piece(max(pieces[-1].end, trailing.offset), trailing))
    return pieces


def _pieces(root: Table, *, inside: bool) -> list[Piece]:
    """The model with weights inside the flatbuffer if they may be, or with none there; empty if it gets too large.

        [tables with holes][weights of inner holes, each after its length][weights of external holes]

    A hole then gets the position of its weight: inside, as a distance to the length; after the flatbuffer, from its
    beginning.
    """
    buffers = (table.fields.get("data") for table in root.tables("buffers"))
    # New weights go where the model keeps its other weights.
    new_after = any(isinstance(data, Data) and data.external for data in buffers)
    builder = _TableBuilder(inside=inside, new_after=new_after)
    tables = builder.finish(root)
    end = len(tables)
    pieces = list[Piece]()
    positions = dict[tuple[bool, object], int]()
    for external in (False, True):
        for data in _in_order(hole.data for hole in builder.holes if hole.external == external):
            at = end if external else end + _VECTOR_LENGTH
            # Keep the alignment in the source file, but at least 16 bytes and at most a page.
            alignment = min(max(data.offset & -data.offset, ALIGNMENT), _MOST_ALIGNMENT)
            at += -at % alignment
            if not external:
                length = data.length.to_bytes(_VECTOR_LENGTH, "little")
                pieces.append(Piece(at - _VECTOR_LENGTH, Data(length)))
            pieces.append(Piece(at, data))
            positions[external, data.key] = at
            end = at + data.length
        if not external and end > MAX_FLATBUFFER_SIZE:
            return []
    for data, external, at in builder.holes:
        position = positions[external, data.key]
        if external:
            tables[at : at + 8] = position.to_bytes(8, "little")
        else:
            distance = position - _VECTOR_LENGTH - at
            tables[at : at + 4] = distance.to_bytes(4, "little")
    return [Piece(0, Data(bytes(tables))), *pieces]


def _in_order(weights: Iterable[Data]) -> list[Data]:
    """The distinct weights: those of each file in file order, then the new ones."""
    distinct = list({data.key: data for data in weights}.values())
    first: dict[int, int] = {}  # source -> place of its first weight
    for index, data in enumerate(distinct):
        first.setdefault(id(data.source), index)

    def place(data: Data) -> tuple[bool, int, int, int]:
        return data.external is None, first[id(data.source)], data.offset, data.length

    return sorted(distinct, key=place)
