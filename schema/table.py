"""A table in memory: its spec and the fields that are present. It must not know how it is stored."""

from collections.abc import Hashable
from typing import Any

import numpy as np

from edge_opt.schema.data import Data
from edge_opt.schema.tables import SCALAR_CODES, TABLES, UNIONS, TableSpec

NUMPY_TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(f"<{code}") for name, code in SCALAR_CODES.items()}

_MOST_SHOWN = 8

_MEMBER_CODES = {union: {table: code for code, table in members.items()} for union, members in UNIONS.items()}


class Table:
    """One table; `fields` holds the present fields only, so "present with the default" is not "absent".

    Values: int, float, bool; str; read-only 1-D little-endian arrays for vectors of numbers; `list[Table]`
    and `list[str]`; a union's value is a Table, its type the int field `<name>_type` beside it; the bytes of
    a buffer, and custom options stored after the flatbuffer, are `Data`. Vectors and tables may be shared.

    `trailing`, of a file's root: what stands behind everything that the tables name, e.g. the zip archive of TFLite
    Metadata; None where nothing does.
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
        """The field's value, or the schema's default (None for everything but numbers) where it is absent.

        Raises:
            KeyError: the table has no such field.
        """
        fields = self.fields
        return fields[name] if name in fields else self.spec.defaults[name]

    def set(self, name: str, value: Any) -> None:
        """Make the field present with this value, or absent with None; a union takes its type along.

        Raises:
            KeyError: the table has no such field, or the union no such member.
        """
        field = self.spec.by_name[name]
        if field.kind == "union":
            self._set_union(name, field.element, value)
        elif value is None:
            self.fields.pop(name, None)
        else:
            self.fields[name] = value

    def _set_union(self, name: str, union: str, value: "Table | None") -> None:
        if value is None:
            self.fields.pop(name, None)
            self.fields.pop(f"{name}_type", None)
            return
        self.fields[f"{name}_type"] = _MEMBER_CODES[union][value.spec.name]
        self.fields[name] = value

    def has(self, name: str) -> bool:
        """Whether the field is present.

        Raises:
            KeyError: the table has no such field.
        """
        return self.spec.by_name[name].name in self.fields

    def key(self) -> Hashable:
        """Equal keys: tables of one kind that say the same; the tables and lists in them are the same objects."""
        return (self.name, *((name, _value_key(value)) for name, value in sorted(self.fields.items())))

    def copy(self) -> "Table":
        """A table with the same values; the values themselves are shared, not copied."""
        copy = Table(self.spec, dict(self.fields))
        copy.trailing = self.trailing
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "Table":
        """As `copy`: values are what a file said, and never edited in place."""
        return self.copy()

    def __repr__(self) -> str:
        return (
            f"{self.spec.name}({', '.join(f'{name}={_short(value)}' for name, value in self.fields.items())})"
        )


def _value_key(value: object) -> Hashable:
    if isinstance(value, np.ndarray):
        return (value.tobytes(), value.dtype.str)
    return value if isinstance(value, int | float | str) else id(value)


def _short(value: object) -> str:
    """A model's root holds everything: below a table, and of long vectors, only what it is."""
    if isinstance(value, Table):
        return f"{value.name}(...)"
    if isinstance(value, list) and value:
        return f"[{len(value)} x {value[0].name if isinstance(value[0], Table) else type(value[0]).__name__}]"
    if isinstance(value, np.ndarray) and len(value) > _MOST_SHOWN:
        return f"{value.dtype}[{len(value)}]"
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)


def new_table(table: str, /, **fields: Any) -> Table:
    """A table with these fields present; a field that is None stays absent.

    Lists of numbers become arrays of the field's type: `new_table("ReshapeOptions", new_shape=[1, 2])`.

    Raises:
        KeyError: there is no such table, field or union member.
    """
    new = Table(TABLES[table], {})
    for name, value in fields.items():
        field = new.spec.by_name[name]
        if field.kind == "scalars" and isinstance(value, list | tuple):
            new.set(name, vector(field.element, value))
        else:
            new.set(name, value)
    return new


def vector(element: str, values: Any) -> np.ndarray[Any, Any]:
    """`values` as a field's vector: 1-D, little-endian, read-only; `element` is its type, e.g. "int32".

    Raises:
        OverflowError: a value does not fit the element type.
    """
    array = np.array(values, dtype=NUMPY_TYPES[element])
    array.flags.writeable = False
    return array
