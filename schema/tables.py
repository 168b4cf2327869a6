"""TFLite's tables, unions and enums as data, read from `tables.json`; `testdata/make_tables.py` writes that file.

It must not know about files or values.
"""

import json
import struct
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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

    __slots__ = ("by_name", "by_slot", "defaults", "fields", "largest_first", "name", "slots", "unions")

    def __init__(self, name: str, slots: int, rows: Sequence[Row], unions: Container[str] = UNIONS) -> None:
        """`rows`: field, slot, type as in schema.fbs (which may be one of the `unions`), and default."""
        self.name = name
        self.slots = slots
        self.fields = tuple(FieldSpec(name, *row, *_kind(row[2], unions)) for row in rows)
        self.by_name = {field.name: field for field in self.fields}
        self.by_slot = {field.slot: field for field in self.fields}
        # Written in this order, fields need no padding between them.
        self.largest_first = sorted(self.fields, key=lambda field: -field.size)
        self.unions = tuple(field for field in self.fields if field.kind == "union")
        self.defaults = {field.name: field.default for field in self.fields}


def _kind(type_name: str, unions: Container[str]) -> tuple[str, str]:
    element = type_name.strip("[]")
    if element in SCALAR_CODES:
        kind = "scalar"
    elif element in unions:
        kind = "union"
    else:
        kind = "string" if element == "string" else "table"
    return (kind if element == type_name else f"{kind}s"), element


TABLES: Final = {name: TableSpec(name, slots, rows) for name, (slots, rows) in _CONTENT["tables"].items()}
"""Table -> its fields."""


class Schema(NamedTuple):
    """The tables and unions of a format; what a schema that is not `complete` leaves out is skipped by the reader."""

    tables: Mapping[str, TableSpec]
    unions: Mapping[str, Mapping[int, str]]
    complete: bool


TFLITE: Final = Schema(TABLES, UNIONS, complete=True)

# Table -> the field that holds bytes, and the two that say where they lie if they lie after the flatbuffer.
STORED_AFTER: Final = {
    "Buffer": ("data", "offset", "size"),
    "Operator": ("custom_options", "large_custom_options_offset", "large_custom_options_size"),
}
