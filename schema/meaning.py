"""What reading some tables means beyond their layout: where weights lie, and which codes we know.

It must not look at bytes; the reader has done that.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from edge_opt.schema.table import Table
from edge_opt.schema.tables import ENUMS, TABLES, UNIONS

if TYPE_CHECKING:
    from edge_opt.schema.reader import Reader

# Table -> the field that holds bytes, and the two that say where they lie if they lie after the flatbuffer.
STORED_AFTER: Final = {
    "Buffer": ("data", "offset", "size"),
    "Operator": ("custom_options", "large_custom_options_offset", "large_custom_options_size"),
}

_OPERATORS = frozenset(ENUMS["BuiltinOperator"].values())
_TENSOR_TYPES = frozenset(ENUMS["TensorType"].values())


def _stored_after(reader: "Reader", table: Table, position: int) -> None:
    """Turn an offset and size into the bytes' `Data`, in the field that would hold them inside.

    As in the runtime's InterpreterBuilder, an offset of 0 or 1 says that there are none (exporters write 1
    as a placeholder).
    """
    inside, offset, size = STORED_AFTER[table.spec.name]
    start = table.fields.get(offset, 0)
    if start <= 1:
        return
    field = table.spec.by_name[offset]
    if inside in table.fields:
        reader.fail(field, f"gives a second place for the bytes of {inside}", position)
    table.fields[inside] = reader.external(field, start, table.fields.get(size, 0), position)
    table.fields.pop(offset)
    table.fields.pop(size, None)


def _operator(reader: "Reader", table: Table, position: int) -> None:
    _stored_after(reader, table, position)
    _unions(reader, table, position)


def _operator_code(reader: "Reader", table: Table, position: int) -> None:
    # Codes above 126 do not fit the old int8 field, which then holds a placeholder; the larger one counts.
    code = max(table.get("deprecated_builtin_code"), table.get("builtin_code"))
    if code not in _OPERATORS:
        message = f"operator code {code} is unknown"
        reader.fail_newer(table.spec.name, "builtin_code", message, position)


def _tensor(reader: "Reader", table: Table, position: int) -> None:
    code = table.get("type")
    if code not in _TENSOR_TYPES:
        reader.fail_newer(table.spec.name, "type", f"tensor type {code} is unknown", position)


def _unions(reader: "Reader", table: Table, position: int) -> None:
    for name in _UNION_FIELDS[table.spec.name]:
        code = table.fields.get(f"{name}_type", 0)
        if code == 0 or name in table.fields:
            continue
        field = table.spec.by_name[name]
        if code not in UNIONS[field.element]:
            message = f"{field.element} has no member {code}"
            reader.fail_newer(field.table, name, message, position)
        reader.fail(field, f"has the type {UNIONS[field.element][code]} but no value", position)


_UNION_FIELDS: Final = {
    spec.name: tuple(field.name for field in spec.fields if field.kind == "union") for spec in TABLES.values()
}

MEANINGS: Final[dict[str, Callable[["Reader", Table, int], None]]] = {
    **{name: _unions for name, unions in _UNION_FIELDS.items() if unions},
    "Buffer": _stored_after,
    "Operator": _operator,
    "OperatorCode": _operator_code,
    "Tensor": _tensor,
    "VariantSubType": _tensor,
}
