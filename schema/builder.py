"""Tables to flatbuffer bytes, with holes where the positions of weights will go; it never sees a weight."""

import struct
from typing import Any, NamedTuple, NoReturn

import flatbuffers
import numpy as np
from flatbuffers import number_types
from flatbuffers.builder import BuilderSizeError

from edge_opt.output.errors import ModelFormatError
from edge_opt.schema.data import Data
from edge_opt.schema.table import NUMPY_TYPES, Table
from edge_opt.schema.tables import IDENTIFIER, SCALAR_CODES, STORED_AFTER, UNIONS, FieldSpec

_NUMBERS = {name: getattr(number_types, f"{name.capitalize()}Flags") for name in SCALAR_CODES}


class Hole(NamedTuple):
    """A place in the tables that wants the position of `data`: a uoffset if inside, else a uint64 offset."""

    at: int
    data: Data
    external: bool


class Built(NamedTuple):
    """The tables' bytes and the holes in them."""

    content: bytearray
    holes: list[Hole]


def build(root: Table, *, inside: bool) -> Built:
    """The flatbuffer of everything below `root`; `inside=False` moves all weights behind it.

    Raises:
        ModelFormatError: a field holds something that the format cannot.
    """
    stored = (table.fields.get("data") for table in root.fields.get("buffers", ()))
    # New bytes go where the model keeps its others.
    new_after = any(isinstance(data, Data) and data.external for data in stored)
    tables = _TableBuilder(inside, new_after)
    try:
        content = tables.finish(root)
    except BuilderSizeError:
        message = "the tables take over 2 GB, which no flatbuffer can: remove something"
        raise ModelFormatError(message) from None
    # A builder writes back to front: until the end, positions count from there.
    return Built(content, [hole._replace(at=len(content) - hole.at) for hole in tables.holes])


class _TableBuilder:
    """Writes each table, vector and string once, and what they refer to before them."""

    def __init__(self, inside: bool, new_after: bool) -> None:
        self.holes: list[Hole] = []
        self._inside = inside
        self._new_after = new_after
        self._builder = flatbuffers.Builder()
        self._tables: dict[int, int] = {}
        self._vectors: dict[tuple[str, int], int] = {}

    def finish(self, root: Table) -> bytearray:
        self._builder.Finish(self._table(root), file_identifier=IDENTIFIER)
        content: bytearray = self._builder.Output()
        return content

    def _table(self, table: Table) -> int:
        written = self._tables.get(id(table))
        if written is not None:
            return written
        spec = table.spec
        unknown = next((name for name in table.fields if name not in spec.by_name), None)
        if unknown is not None:
            raise ModelFormatError("is no field of this table: remove it", table=spec.name, field=unknown)
        fields, stored, hole = table.fields, None, ""
        if spec.name in STORED_AFTER:
            fields, stored, hole = self._placed(table)
        present = [field for field in spec.largest_first if field.name in fields]
        references = {
            field.name: self._reference(field, fields)
            for field in present
            if field.kind != "scalar" and field.name != hole
        }
        builder = self._builder
        builder.StartObject(spec.slots)
        for field in present:
            if field.name in references:
                builder.PrependUOffsetTRelative(references[field.name])
            elif field.kind != "scalar":
                builder.PrependUint32(0)
            else:
                self._number(field, fields[field.name])
            builder.Slot(field.slot)
            if field.name == hole and stored is not None:
                self.holes.append(Hole(builder.Offset(), stored, external=field.kind == "scalar"))
        position: int = builder.EndObject()
        self._tables[id(table)] = position
        return position

    def _placed(self, table: Table) -> tuple[dict[str, Any], Data | None, str]:
        """The fields of a table whose bytes may lie behind the tables, the bytes, and the field that says where."""
        inside, offset, size = STORED_AFTER[table.spec.name]
        fields = table.fields
        data = fields.get(inside)
        if not isinstance(data, Data):
            return fields, None, ""
        external = self._new_after if data.placement is None else data.placement
        if self._inside and not external:
            return fields, data, inside
        fields = {name: value for name, value in fields.items() if name != inside}
        return fields | {offset: 0, size: data.length}, data, offset

    def _number(self, field: FieldSpec, value: Any) -> None:
        try:
            self._builder.Prepend(_NUMBERS[field.element], value)
        except (TypeError, OverflowError, struct.error) as error:
            _refuse(field, f"holds {value!r:.80}, which is no {field.type} ({error})")

    def _reference(self, field: FieldSpec, fields: dict[str, Any]) -> int:
        value = fields[field.name]
        if field.kind == "string":
            return self._string(field, value)
        if field.kind in {"table", "union"}:
            return self._child(field, value, fields.get(f"{field.name}_type", 0))
        position = self._vectors.get((field.type, id(value)))
        if position is None:
            position = self._vectors[field.type, id(value)] = self._vector(field, value)
        return position

    def _child(self, field: FieldSpec, value: Any, member: int = 0) -> int:
        """A table; `member` says which of a union's it is."""
        is_union = field.kind == "union"
        expected = UNIONS[field.element].get(member, "nothing") if is_union else field.element
        if not isinstance(value, Table) or value.spec.name != expected:
            wrong = f"but {field.name}_type says {expected}: set both"
            _refuse(field, f"holds {value!r:.80}, {wrong if is_union else f'not a table of type {expected}'}")
        return self._table(value)

    def _string(self, field: FieldSpec, text: Any) -> int:
        if not isinstance(text, str):
            _refuse(field, f"holds {text!r:.80}, which is no text")
        try:
            position: int = self._builder.CreateSharedString(text)
        except UnicodeEncodeError as error:
            _refuse(field, f"holds {text!r:.80}, which is no text ({error})")
        return position

    def _vector(self, field: FieldSpec, value: Any) -> int:
        builder: Any = self._builder
        if field.kind == "scalars":
            position: int = builder.CreateNumpyVector(_numbers(field, value))
        else:
            write = self._child if field.kind == "tables" else self._string
            targets = [write(field, item) for item in value]
            builder.StartVector(4, len(targets), 4)
            for target in reversed(targets):
                builder.PrependUOffsetTRelative(target)
            position = builder.EndVector()
        return position


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


def _refuse(field: FieldSpec, message: str) -> NoReturn:
    raise ModelFormatError(message, table=field.table, field=field.name)
