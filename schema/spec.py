"""What a table of the file format looks like, as data. It must not know about files or values."""

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

Default = int | float | bool | None
Row = tuple[str, int, str, Default]

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


class FieldSpec(NamedTuple):
    """One field; `kind` is scalar(s), string(s), table(s) or union, `element` the type without brackets."""

    table: str
    name: str
    slot: int
    type: str
    default: Default
    kind: str
    element: str

    @property
    def size(self) -> int:
        """Inline bytes of the field: a scalar's own, four (a uoffset) for everything else."""
        return struct.calcsize(f"<{self.code}")

    @property
    def code(self) -> str:
        """Struct code of the inline value."""
        return SCALAR_CODES[self.element] if self.kind == "scalar" else "I"


class TableSpec:
    """One table: its name, its fields in slot order, and the value of each field when it is absent."""

    __slots__ = ("by_name", "by_slot", "defaults", "fields", "name", "slots")

    def __init__(self, name: str, slots: int, fields: tuple[FieldSpec, ...]) -> None:
        self.name = name
        self.slots = slots
        self.fields = fields
        self.by_name: dict[str, FieldSpec] = {field.name: field for field in fields}
        self.by_slot: dict[int, FieldSpec] = {field.slot: field for field in fields}
        self.defaults: dict[str, Default] = {field.name: field.default for field in fields}

    def __repr__(self) -> str:
        return f"TableSpec({self.name!r}, {len(self.fields)} fields)"


def _kind(type_name: str, unions: dict[str, dict[int, str]]) -> tuple[str, str]:
    if not type_name.startswith("["):
        if type_name in SCALAR_CODES:
            return "scalar", type_name
        if type_name == "string":
            return "string", type_name
        return ("union" if type_name in unions else "table"), type_name
    element = type_name[1:-1]
    if element in SCALAR_CODES:
        return "scalars", element
    return ("strings" if element == "string" else "tables"), element


def table_specs(
    tables: Mapping[str, tuple[int, Sequence[Row]]], unions: dict[str, dict[int, str]]
) -> dict[str, TableSpec]:
    """The specs of all tables from rows `(field, slot, type, default)`, types spelled as in schema.fbs."""
    return {
        table: TableSpec(
            table,
            slots,
            tuple(
                FieldSpec(table, name, slot, kind, default, *_kind(kind, unions))
                for name, slot, kind, default in rows
            ),
        )
        for table, (slots, rows) in tables.items()
    }
