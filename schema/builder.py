"""Tables to flatbuffer bytes, with holes where the positions of weights will go; it never sees a weight.

Strings, vectors and tables are each packed in one piece, tables from a layout that is compiled once per table and set
of present fields.
"""

import struct
from typing import Any, NamedTuple, NoReturn

import numpy as np

from edge_opt.schema.data import Data
from edge_opt.schema.errors import ModelFormatError
from edge_opt.schema.table import NUMPY_TYPES, Table
from edge_opt.schema.tables import IDENTIFIER, MAX_FLATBUFFER_SIZE, STORED_AFTER, UNIONS, FieldSpec, TableSpec

_JOINED = 4096


class Hole(NamedTuple):
    """A place in the tables that wants the position of `data`: a uoffset if inside, else a uint64 offset."""

    at: int
    data: Data
    external: bool


class Built(NamedTuple):
    """The tables' bytes and the holes in them."""

    content: bytearray
    holes: list[Hole]


class _Layout(NamedTuple):
    """Where each present field of a table goes; `places` counts from the table's start."""

    size: int
    align: int
    vtable: bytes
    pack: struct.Struct
    order: tuple[str, ...]
    references: tuple[tuple[FieldSpec, int], ...]
    places: dict[str, int]


def build(root: Table, *, inside: bool) -> Built:
    """The flatbuffer of everything below `root`; `inside=False` moves all weights behind it.

    Raises:
        ModelFormatError: a field holds something that the format cannot.
    """
    builder = _TableBuilder(inside, _puts_new_data_after(root))
    content = builder.finish(root)
    total = len(content)
    return Built(content, [Hole(total - hole.at, hole.data, hole.external) for hole in builder.holes])


def _puts_new_data_after(root: Table) -> bool:
    """New bytes go where the model keeps its others."""
    stored = (table.fields.get("data") for table in root.fields.get("buffers", ()))
    return any(isinstance(data, Data) and data.external for data in stored)


class _TableBuilder:
    """Writes back to front, as flatbuffers do: positions count from the end until everything is built."""

    def __init__(self, inside: bool, new_after: bool) -> None:
        self.holes: list[Hole] = []
        self._inside = inside
        self._new_after = new_after
        self._pieces: list[bytes] = []  # the last one comes first in the file
        self._joined: list[bytes] = []  # the same, of many pieces each: many small ones take twice their size
        self._size = 0
        self._alignment = 1
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._vtables: dict[bytes, int] = {}
        self._tables: dict[int, int] = {}
        self._vectors: dict[tuple[str, int], int] = {}
        self._strings: dict[str, int] = {}

    def finish(self, root: Table) -> bytearray:
        start = self._table(root)
        self._align(self._alignment, 8)
        self._put(struct.pack("<I4s", self._size + 8 - start, IDENTIFIER))
        self._join()
        return bytearray().join(reversed(self._joined))

    def _join(self) -> None:
        self._joined.append(b"".join(reversed(self._pieces)))
        self._pieces.clear()

    def _put(self, piece: bytes) -> int:
        """The position of a piece, which goes in front of all others."""
        self._pieces.append(piece)
        if len(self._pieces) == _JOINED:
            self._join()
        self._size += len(piece)
        if self._size > MAX_FLATBUFFER_SIZE:
            raise ModelFormatError("the tables take over 2 GB, which no flatbuffer can: remove something")
        return self._size

    def _align(self, alignment: int, length: int) -> None:
        """Fill up with zeros, so that the byte behind the next `length` ones is aligned."""
        self._alignment = max(self._alignment, alignment)
        self._put(bytes(-(self._size + length) % alignment))

    def _table(self, table: Table) -> int:
        known = self._tables.get(id(table))
        if known is not None:
            return known
        spec = table.spec
        fields = table.fields
        data = None
        if spec.name in STORED_AFTER:
            fields, data, external = self._placed(table)
        layout = self._layouts.get((spec.name, *fields))
        if layout is None:
            layout = self._layouts[spec.name, *fields] = _arrange(spec, fields)
        targets = [self._reference(field, fields) for field, _ in layout.references]
        start = self._place(layout, spec, fields, targets)
        if data is not None:
            name = STORED_AFTER[spec.name][1 if external else 0]
            self.holes.append(Hole(start - layout.places[name], data, external))
        self._tables[id(table)] = start
        return start

    def _placed(self, table: Table) -> tuple[dict[str, Any], Data | None, bool]:
        """The fields to write for a table whose bytes may lie inside or after the flatbuffer."""
        inside, offset, size = STORED_AFTER[table.spec.name]
        fields = table.fields
        data = fields.get(inside)
        if not isinstance(data, Data):
            return fields, None, False
        wanted = self._new_after if data.placement is None else data.placement
        if not (wanted or not self._inside):
            return fields, data, False
        fields = {name: value for name, value in fields.items() if name != inside}
        return fields | {offset: 0, size: data.length}, data, True

    def _place(self, layout: _Layout, spec: TableSpec, fields: dict[str, Any], targets: list[int]) -> int:
        vtable = self._vtables.get(layout.vtable)
        if vtable is None:
            self._align(2, len(layout.vtable))
            vtable = self._vtables[layout.vtable] = self._put(layout.vtable)
        # The largest fields come first, so what has to be aligned is the byte after the vtable offset.
        self._align(layout.align, layout.size - 4)
        start = self._size + layout.size
        row = [fields[name] for name in layout.order]
        for (field, index), target in zip(layout.references, targets, strict=True):
            row[index] = start - layout.places[field.name] - target
        try:
            return self._put(layout.pack.pack(vtable - start, *row))
        except struct.error as error:
            _refuse_values(spec, fields, error)

    def _reference(self, field: FieldSpec, fields: dict[str, Any]) -> int:
        value = fields[field.name]
        if isinstance(value, Data) and field.name == STORED_AFTER.get(field.table, ("",))[0]:
            return 0
        if field.kind == "string":
            return self._string(field, value)
        if field.kind == "union":
            self._check_union(field, value, fields)
        if field.kind in {"table", "union"}:
            return self._child(field, value)
        known = self._vectors.get((field.type, id(value)))
        if known is None:
            known = self._vectors[field.type, id(value)] = self._vector(field, value)
        return known

    def _child(self, field: FieldSpec, value: Any) -> int:
        if not isinstance(value, Table) or (field.kind != "union" and value.spec.name != field.element):
            _refuse(field, f"holds {value!r:.80}, not a table of type {field.element}")
        return self._table(value)

    def _check_union(self, field: FieldSpec, value: Any, fields: dict[str, Any]) -> None:
        expected = UNIONS[field.element].get(fields.get(f"{field.name}_type", 0), "nothing")
        if not isinstance(value, Table) or expected != value.spec.name:
            _refuse(field, f"holds {value!r:.80}, but {field.name}_type says {expected}: set both")

    def _string(self, field: FieldSpec, text: Any) -> int:
        known = self._strings.get(text)
        if known is None:
            if not isinstance(text, str):
                _refuse(field, f"holds {text!r:.80}, which is no text")
            try:
                content = text.encode()
            except UnicodeEncodeError as error:
                _refuse(field, f"holds {text!r:.80}, which is no text ({error})")
            known = self._strings[text] = self._counted(len(content), content + b"\0", 1)
        return known

    def _vector(self, field: FieldSpec, value: Any) -> int:
        if field.kind == "scalars":
            numbers = _numbers(field, value)
            return self._counted(len(numbers), numbers.tobytes(), numbers.itemsize)
        write = self._child if field.kind == "tables" else self._string
        targets = [write(field, item) for item in value]
        self._align(4, 4 * len(targets))
        first = self._size + 4 * len(targets)
        # Slot i lies 4 * i bytes behind the first, and its offset counts from itself.
        offsets = [first - 4 * index - target for index, target in enumerate(targets)]
        return self._counted(len(targets), struct.pack(f"<{len(targets)}I", *offsets), 4)

    def _counted(self, count: int, content: bytes, alignment: int) -> int:
        """`[count, four bytes][content]`, as a flatbuffer has vectors and strings; the content is aligned."""
        self._align(max(4, alignment), len(content))
        return self._put(count.to_bytes(4, "little") + content)


def _numbers(field: FieldSpec, value: Any) -> np.ndarray[Any, Any]:
    """The vector in the field's type, unless that would change a value."""
    array = np.asarray(value)
    dtype = NUMPY_TYPES[field.element]
    if array.dtype == dtype and array.ndim == 1 and field.table != "Buffer":
        return array
    if array.ndim != 1 or field.table == "Buffer" or array.dtype.kind not in "biuf":
        expected = "Data" if field.table == "Buffer" else f"a vector of {field.element}"
        _refuse(field, f"holds {value!r:.80}, not {expected}")
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if not np.array_equal(cast, array.astype(np.float32) if dtype.kind == "f" else array):
        _refuse(field, f"holds {value!r:.80}, which does not fit {field.element}")
    return cast


def _arrange(spec: TableSpec, fields: dict[str, Any]) -> _Layout:
    """Largest fields first, so that none needs padding; the vtable follows from that."""
    present = [field for field in spec.fields if field.name in fields]
    if len(present) != len(fields):
        unknown = next(name for name in fields if name not in spec.by_name)
        raise ModelFormatError("is no field of this table: remove it", table=spec.name, field=unknown)
    ordered = sorted(present, key=lambda field: (-field.size, field.slot))
    places, size = {}, 4
    for field in ordered:
        places[field.name] = size
        size += field.size
    slots = [0] * (1 + max((field.slot for field in present), default=-1))
    for field in present:
        slots[field.slot] = places[field.name]
    return _Layout(
        size,
        max(4, max((field.size for field in present), default=4)),
        struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), size, *slots),
        struct.Struct("<i" + "".join(field.code for field in ordered)),
        tuple(field.name for field in ordered),
        tuple((field, ordered.index(field)) for field in present if field.kind != "scalar"),
        places,
    )


def _refuse_values(spec: TableSpec, values: dict[str, Any], error: struct.error) -> NoReturn:
    for field in spec.fields:
        if field.kind != "scalar" or field.name not in values:
            continue
        try:
            struct.pack(f"<{field.code}", values[field.name])
        except struct.error as cause:
            _refuse(field, f"holds {values[field.name]!r:.80}, which is no {field.type} ({cause})")
    raise AssertionError(f"{spec.name}: every value fits, but not all together") from error


def _refuse(field: FieldSpec, message: str) -> NoReturn:
    raise ModelFormatError(message, table=field.table, field=field.name)
