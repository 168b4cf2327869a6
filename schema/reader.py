"""Reads a flatbuffer's tables from an untrusted file; every number is checked before it is used.

It must not copy weights, open other files, or change what it reads. Python has no flatbuffers verifier, so all checks
are here. The schema's tables are not recursive (a test checks this), so the schema bounds the depth; an object is read
once and shared, and objects may not overlap.
"""

import os
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.base.mistaken import ENOUGH, recognized
from edge_opt.schema.data import Data, Source
from edge_opt.schema.table import (
    IDENTIFIER,
    MAX_FLATBUFFER_SIZE,
    NUMPY_TYPES,
    STORED_AFTER,
    TABLES,
    UNIONS,
    FieldSpec,
    Table,
    TableSpec,
    field_spec,
)

# Gemma3-270M has 15,000 tables, 135,000 objects in all. The limit keeps files of many tiny tables, or of shared parts
# (which take more memory than space in the file), within a second and 200 MiB.
MAX_OBJECTS: Final = 500_000
MAX_OBJECTS_VARIABLE: Final = "EDGE_OPT_MAX_OBJECTS"

# Bytes that count as one object. Texts take up to four bytes per character, and int32 vectors become Python ints.
_TEXT_PER_OBJECT: Final = 64
_INDICES_PER_OBJECT: Final = 8
_BYTES_PER_OBJECT: Final = 256
_VTABLE_PER_OBJECT: Final = 8
# Objects that a table counts as: as long as it takes to read, with what `edge_opt.ir` makes of it.
_OBJECTS_PER_TABLE: Final = 3

# Writers may pad a file to a multiple of this.
_PADDING: Final = 64

_u16_u16 = struct.Struct("<HH").unpack
_i32 = struct.Struct("<i").unpack
_u32 = struct.Struct("<I").unpack


def read_model(model: str | os.PathLike[str] | bytes | Source) -> Table:
    """The root table of a .tflite file (or of a section of a file); weights are read when needed.

    ModelFormatError if it is missing, malformed, of a newer schema, or has too many objects.
    """
    source = Source.of(model)
    try:
        start = source.read(0, min(ENOUGH, source.size))
        if start[4:8] != IDENTIFIER:
            raise ModelFormatError(f"{source.name} is not a TFLite model: {_what_else(start)}")
        reader = Reader(source)
        root = reader.root("Model")
        # Bytes after everything that tables refer to, unless they are padding.
        rest = Data(source, reader.named_end)
        root.trailing = rest if rest.length >= _PADDING or rest.view().any() else None
        source.check_unchanged()
    except BaseException:
        source.close()
        raise
    return root


class _Placed(NamedTuple):
    """A field that is present, and its place inside its table."""

    at: int
    field: FieldSpec


class _Layout(NamedTuple):
    """How the tables of one vtable lie: their size, and the present fields, sorted by place.

    `unpack` gives the inline values of all of them; those of the `references` are offsets.
    """

    size: int
    names: list[str]
    unpack: Callable[[bytes], tuple[Any, ...]]
    references: list[_Placed]


class Reader:
    """Reads one source once. `named_end`: end of the bytes that tables refer to."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.named_end = 0
        self._end = min(source.size, MAX_FLATBUFFER_SIZE)
        self._bytes_left = source.size
        allowed = os.environ.get(MAX_OBJECTS_VARIABLE, str(MAX_OBJECTS))
        if not (allowed.isascii() and allowed.isdigit() and len(allowed) <= 18):
            raise UsageError(
                f"{MAX_OBJECTS_VARIABLE} is {allowed!r:.40}: give a number of objects, or unset it"
            )
        self._objects_left = self._allowed = int(allowed)
        self._layouts: dict[tuple[str, int], _Layout] = {}
        self._known: dict[tuple[object, int], tuple[Any, int]] = {}

    def root(self, table: str) -> Table:
        """The root table, of type `table`, and everything below it; ModelFormatError for a bad file."""
        (offset,) = _u32(self.source.read(0, 4))
        entry = field_spec(table, "", 0, table, None)
        if offset < 4 + len(IDENTIFIER):
            self._fail(
                entry, f"the root table's offset is {offset}, but it cannot lie in the header", 0
            )
        return self._table(table, offset, entry)

    def _fail(self, field: FieldSpec, message: str, offset: int) -> NoReturn:
        """Refuse the file, naming the field that points to the damage."""
        text = f"{message}: the file is damaged, export or download it again"
        raise ModelFormatError(text, table=field.table, field=field.name or None, offset=offset)

    def _spend(self, field: FieldSpec, size: int, offset: int, objects: int = 1) -> None:
        """Count bytes, which may be used only once, and the objects made from them."""
        self._bytes_left -= size
        self.named_end = max(self.named_end, offset + size)
        if self._bytes_left < 0:
            self._fail(field, "tables, vectors or weights overlap", offset)
        self._count_objects(objects)

    def _count_objects(self, objects: int) -> None:
        self._objects_left -= objects
        if self._objects_left < 0:
            limit = f"more than {self._allowed} tables, vectors and strings (large ones count as several)"
            trusted = f"if it is trusted, set the environment variable {MAX_OBJECTS_VARIABLE}"
            raise ModelFormatError(
                f"{self.source.name} has {limit}: {trusted} to {4 * self._allowed}"
            )

    def _once(self, key: tuple[object, int], read: Callable[..., Any], *place: Any) -> Any:
        """Read an object once; each reference to it counts as it would without sharing."""
        if key in self._known:
            value, objects = self._known[key]
            self._count_objects(objects)
            return value
        before = self._objects_left
        value = read(*place)
        self._known[key] = value, before - self._objects_left
        return value

    def _table(self, name: str, position: int, field: FieldSpec) -> Table:
        """The table, of type `name`, that `field` refers to."""
        key = (name, position)
        table: Table = self._once(key, self._new_table, TABLES[name], position, field)
        return table

    def _new_table(self, spec: TableSpec, position: int, field: FieldSpec) -> Table:
        if position + 4 > self._end:
            self._fail(field, f"{spec.name} lies beyond the end of the file", position)
        vtable = position - _i32(self.source.read(position, 4))[0]
        if (spec.name, vtable) not in self._layouts:
            self._layouts[spec.name, vtable] = self._layout(spec, vtable, field, position)
        layout = self._layouts[spec.name, vtable]
        if position + layout.size > self._end:
            self._fail(field, f"{spec.name} runs over the end of the file", position)
        self._spend(field, layout.size, position, _OBJECTS_PER_TABLE)
        inline = layout.unpack(self.source.read(position, layout.size))
        values = dict(zip(layout.names, inline, strict=True))
        for at, referring in layout.references:
            values[referring.name] = self._reference(referring, position + at, values)
        table = Table(spec, values)
        if spec.name in STORED_AFTER:
            self._stored_after(table, position)
        return table

    def _layout(self, spec: TableSpec, vtable: int, field: FieldSpec, position: int) -> _Layout:
        """Read a vtable.

        vtable: [its length][size of the table][place of field 0][place of field 1]...   all uint16, 0: absent
        """
        if not 0 <= vtable <= self._end - 4:
            self._fail(field, f"the vtable of {spec.name} lies outside the file", position)
        length, size = _u16_u16(self.source.read(vtable, 4))
        if length < 4 or length % 2 or vtable + length > self._end or size < 4:
            self._fail(
                field, f"the vtable of {spec.name} has impossible sizes {length} and {size}", vtable
            )
        # Writers may overlap vtables, so no bytes are counted.
        self._spend(field, 0, vtable + length, 1 + length // _VTABLE_PER_OBJECT)
        places = self._numbers("uint16", vtable + 4, length - 4)
        present: list[_Placed] = []
        for slot, at in enumerate(places.tolist()):
            if not at:
                continue
            where = vtable + 4 + 2 * slot
            known = spec.by_slot.get(slot)
            if known is None:
                refuse_newer(spec.name, f"slot {slot}", "an unknown field is present", where)
            if at < 4 or at + known.size > size:
                self._fail(known, f"lies at {at}, outside its table of {size} bytes", where)
            present.append(_Placed(at, known))
        present.sort(key=itemgetter(0))
        # For `struct`: before each value, `4x` skips four bytes.
        form = "<"
        end = 0
        for at, known in present:
            if at < end:
                self._fail(known, f"lies at {at}, over another field", vtable)
            form += f"{at - end}x{known.code}"
            end = at + known.size
        names = [known.name for _, known in present]
        references = [placed for placed in present if placed.field.kind != "scalar"]
        return _Layout(size, names, struct.Struct(form).unpack_from, references)

    def _reference(self, field: FieldSpec, at: int, values: dict[str, Any]) -> Any:
        """The value that a field at `at` refers to; `values` are its table's fields, including a union's type."""
        target = at + values[field.name]
        element = field.element
        if field.kind == "union":
            code = values.get(f"{field.name}_type", 0)
            if not code:
                self._fail(field, f"has a value but no {field.name}_type", at)
            if code not in UNIONS[element]:
                refuse_newer(field.table, field.name, f"{element} has no member {code}", at)
            element = UNIONS[element][code]
        if target < at + 4 or target > self._end - 4:
            self._fail(
                field, f"points to byte {target}, outside the file of {self.source.size} bytes", at
            )
        read: Callable[..., Any]
        match field.kind:
            case "table" | "union":
                return self._table(element, target, field)
            case "tables":
                read = self._children
            case "string":
                read = self._text
            case _:
                read = self._scalars
        # A buffer's bytes become `Data`, those of any other vector an array.
        form = "data" if field.table == "Buffer" else field.type
        return self._once((form, target), read, field, target)

    def _size(self, field: FieldSpec, target: int, width: int) -> int:
        """The number of bytes of a vector with elements of `width` bytes."""
        count: int = _u32(self.source.read(target, 4))[0]
        if count * width > self._end - target - 4:
            self._fail(field, f"claims {count} elements, more than the file holds", target)
        return count * width

    def _scalars(self, field: FieldSpec, target: int) -> Data | np.ndarray[Any, Any]:
        size = self._size(field, target, NUMPY_TYPES[field.element].itemsize)
        if field.table == "Buffer":
            self._spend(field, 4 + size, target)
            return Data(self.source, target + 4, size, external=False)
        width = _INDICES_PER_OBJECT if field.element == "int32" else _BYTES_PER_OBJECT
        self._spend(field, 4 + size, target, 1 + size // width)
        return self._numbers(field.element, target + 4, size)

    def _numbers(self, element: str, begin: int, size: int) -> np.ndarray[Any, Any]:
        """The numbers in `size` bytes."""
        return np.frombuffer(self.source.read(begin, size), NUMPY_TYPES[element])

    def _text(self, field: FieldSpec, target: int) -> str:
        size = self._size(field, target, 1)
        self._spend(field, 4 + size + 1, target, 1 + size // _TEXT_PER_OBJECT)
        begin = target + 4
        content = self.source.read(begin, min(size + 1, self._end - begin))
        if content[size:] != b"\0":
            self._fail(field, "is a string that does not end in a zero byte", target)
        try:
            return str(content[:size], "utf-8")
        except UnicodeDecodeError:
            self._fail(field, "is not valid UTF-8", begin)

    def _children(self, field: FieldSpec, target: int) -> list[Table]:
        size = self._size(field, target, 4)
        self._spend(field, 4 + size, target)
        children: list[Table] = []
        place = target + 4
        for offset in self._numbers("uint32", place, size).tolist():
            children.append(self._table(field.element, place + offset, field))
            place += 4
        return children

    def _stored_after(self, table: Table, position: int) -> None:
        """Replace an offset and size by `Data`, in the field for bytes inside the flatbuffer.

        As in the runtime's InterpreterBuilder, an offset of 0 or 1 means no bytes (exporters write 1 as a placeholder).
        """
        inside, offset, size = STORED_AFTER[table.spec.name]
        start = table.fields.get(offset, 0)
        length = table.fields.get(size, 0)
        if start <= 1:
            return
        field = table.spec.by_name[offset]
        if inside in table.fields:
            self._fail(field, f"gives a second place for the bytes of {inside}", position)
        if start + length > self.source.size:
            limit = f"the file has {self.source.size} bytes"
            self._fail(field, f"claims {length} bytes from byte {start} on, but {limit}", position)
        table.fields[inside] = self._once((start, length), self._after, field, start, length)
        table.fields.pop(offset)
        table.fields.pop(size, None)

    def _after(self, field: FieldSpec, start: int, length: int) -> Data:
        self._spend(field, length, start)
        return Data(self.source, start, length, external=True)


def refuse_newer(table: str, field: str, message: str, offset: int | None = None) -> NoReturn:
    """Refuse data that our schema lacks: to write the rest would lose it."""
    newer = "written by a newer schema: update ai-edge-litert and edge-opt, or export for an older version"
    raise ModelFormatError(f"{message}, so it was {newer}", table=table, field=field, offset=offset)


def _what_else(start: bytes) -> str:
    """What a file without TFLite's identifier may be, and the fix."""
    if len(start) < 8:
        return f"it has only {len(start)} bytes, export or download it again"
    known = recognized(start)
    if known:
        return f"it is {known}"
    return f"bytes 4 to 8 are {start[4:8]!r} instead of {IDENTIFIER!r}, give a .tflite file"
