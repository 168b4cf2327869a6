"""Tables, unions and enums of TFLite and of bundles' headers as data, and `Table`, a table in memory.

The data is `tables.json`, written by `testdata/make_tables.py`. Nothing here knows how a table is stored.
"""

import json
import struct
from collections.abc import Collection, Hashable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from edge_opt.schema.data import Data

_SHORT: Final = 64  # bytes

Default = int | float | bool | None
Row = tuple[str, int, str, Default]

IDENTIFIER: Final = b"TFL3"

# A flatbuffer addresses its own bytes with signed 32-bit offsets.
MAX_FLATBUFFER_SIZE: Final = 2**31 - 1

# Type name in schema.fbs (with its width spelled out) -> struct code.
SCALAR_CODES: Final[dict[str, str]] = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}

TABLES_FILE: Final = Path(__file__).with_name("tables.json")

_CONTENT: Final[dict[str, Any]] = json.loads(TABLES_FILE.read_text(encoding="utf-8"))

ENUMS: Final[dict[str, dict[str, int]]] = _CONTENT["enums"]
"""Enum -> member -> value."""

UNIONS: Final[dict[str, dict[int, str]]] = {
    name: dict(enumerate(members, 1)) for name, members in _CONTENT["unions"].items()
}
"""Union -> discriminator -> table."""


class FieldSpec(NamedTuple):
    """One field; `kind` is scalar(s), string, table(s) or union, `element` the type without brackets.

    `code` is the struct code of the inline value: a scalar's own, a uoffset for everything else; `size` its bytes.
    """

    table: str
    name: str
    slot: int
    type: str
    default: Default
    kind: str
    element: str
    code: str
    size: int


def field_spec(table: str, name: str, slot: int, type_name: str, default: Default) -> FieldSpec:
    """A field, from its row in `tables.json`; `type_name` is its type as in schema.fbs."""
    element = type_name.strip("[]")
    kind = _kind(element)
    if type_name != element:
        kind += "s"
    code = SCALAR_CODES[element] if kind == "scalar" else "I"
    size = struct.calcsize(f"<{code}")
    return FieldSpec(table, name, slot, type_name, default, kind, element, code, size)


def _kind(element: str) -> str:
    if element in SCALAR_CODES:
        return "scalar"
    if element in UNIONS:
        return "union"
    return "string" if element == "string" else "table"


class TableSpec:
    """One table: its name, its fields in slot order, and the value of each field when it is absent."""

    def __init__(self, name: str, slots: int, rows: Sequence[Row]) -> None:
        """`rows`: field, slot, type as in schema.fbs, and default."""
        self.name = name
        self.slots = slots
        self.fields = tuple(field_spec(name, *row) for row in rows)
        self.by_name = {field.name: field for field in self.fields}
        self.by_slot = {field.slot: field for field in self.fields}
        # Written in this order, fields need no padding between them.
        self.largest_first = sorted(self.fields, key=lambda field: -field.size)
        self.defaults = {field.name: field.default for field in self.fields}
        # As in `Table.key`; defaults are numbers or None.
        self.default_keys = {name: repr(default) for name, default in self.defaults.items()}


TABLES: Final = {
    name: TableSpec(name, slots, rows) for name, (slots, rows) in _CONTENT["tables"].items()
}
"""Table -> its fields."""

# Table -> the field for bytes inside the flatbuffer, and the offset and size fields for bytes after it.
STORED_AFTER: Final = {
    "Buffer": ("data", "offset", "size"),
    "Operator": ("custom_options", "large_custom_options_offset", "large_custom_options_size"),
}


NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(f"<{code}") for name, code in SCALAR_CODES.items()
}


class Table:
    """One table; `fields` holds only the present fields, so "present with the default" differs from "absent".

    Values: int, float, bool; str; read-only 1-D little-endian arrays for vectors of numbers; `list[Table]`;
    a union's value is a Table, its type the int field `<name>_type` beside it; the bytes of
    a buffer, and custom options stored after the flatbuffer, are `Data`. Vectors and tables may be shared.

    `trailing`, of a file's root: bytes after everything that the tables refer to, e.g. the zip archive of TFLite
    Metadata; None without any.
    """

    __slots__ = ("fields", "spec", "trailing")

    def __init__(self, spec: TableSpec, fields: dict[str, Any]) -> None:
        self.spec = spec
        self.fields = fields
        self.trailing: Data | None = None

    @property
    def name(self) -> str:
        """The table's name in schema.fbs, e.g. "Tensor"."""
        return self.spec.name

    def get(self, name: str) -> Any:
        """The field's value, or the schema's default (None for all but numbers) if absent."""
        fields = self.fields
        return fields[name] if name in fields else self.spec.defaults[name]

    def tables(self, name: str) -> list["Table"]:
        """The tables in a field that holds a list of them; none if it is absent."""
        found: list[Table] = self.fields.get(name, [])
        return found

    def set(self, name: str, value: Any) -> None:
        """Set a field, or remove it if `value` is None; a union's type is set with it.

        A list of numbers becomes an array of the field's type.
        """
        field = self.spec.by_name[name]
        if field.kind == "union":
            codes = {member: code for code, member in UNIONS[field.element].items()}
            self.set(f"{name}_type", None if value is None else codes[value.name])
        if value is None:
            self.fields.pop(name, None)
        elif field.kind == "scalars" and isinstance(value, list | tuple):
            self.fields[name] = vector(field.element, value)
        else:
            self.fields[name] = value

    def key(self, without: Collection[str] = ()) -> Hashable:
        """Equal for tables of one type with equal contents, in all fields but those `without`; a default is absent."""
        parts: list[Hashable] = [self.name]
        for name, value in sorted(self.fields.items()):
            if name in without:
                continue
            key = key_of(value)
            if key != self.spec.default_keys[name]:
                parts.append((name, key))
        return tuple(parts)

    def copy(self) -> "Table":
        """A table with the same values; the values themselves are shared, not copied."""
        copy = Table(self.spec, dict(self.fields))
        copy.trailing = self.trailing
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "Table":
        """Same as `copy`: values are never edited in place."""
        return self.copy()

    def __repr__(self) -> str:
        return f"{self.spec.name}({', '.join(self.fields)})"


def key_of(value: Any) -> Hashable:
    """Equal for equal values of a field, tables included; None is a value."""
    if isinstance(value, Table):
        return value.key()
    if isinstance(value, list):
        return tuple(map(key_of, value))
    if isinstance(value, Data):
        return value.key
    if isinstance(value, np.ndarray):
        return value.dtype.str, content_key(value)
    return repr(value)  # tells 0.0 from -0.0, and NaN equals itself


def content_key(array: np.ndarray[Any, Any]) -> bytes:
    """Equal for equal bytes; short for long ones."""
    if array.nbytes <= _SHORT:
        return array.tobytes()
    return sha256(np.ascontiguousarray(array).data).digest()


def new_table(table: str, /, **fields: Any) -> Table:
    """A table with these fields, as `Table.set` sets them: `new_table("ReshapeOptions", new_shape=[1, 2])`."""
    new = Table(TABLES[table], {})
    for name, value in fields.items():
        new.set(name, value)
    return new


def vector(element: str, values: Any) -> np.ndarray[Any, Any]:
    """`values` as a 1-D, little-endian, read-only vector of, e.g., "int32"; OverflowError if one does not fit."""
    array = np.array(values, dtype=NUMPY_TYPES[element])
    array.flags.writeable = False
    return array
