"""TFLite's tables, unions and enums, as `tables.json` has them; `testdata/make_tables.py` writes that file."""

import json
from pathlib import Path
from typing import Any, Final

from edge_opt.schema.spec import TableSpec, table_specs

TABLES_FILE: Final = Path(__file__).with_name("tables.json")

_CONTENT: Final[dict[str, Any]] = json.loads(TABLES_FILE.read_text(encoding="utf-8"))

ENUMS: Final[dict[str, dict[str, int]]] = _CONTENT["enums"]
"""Enum -> member -> value."""

UNIONS: Final[dict[str, dict[int, str]]] = {
    name: dict(enumerate(members, 1)) for name, members in _CONTENT["unions"].items()
}
"""Union -> discriminator -> table."""

TABLES: Final[dict[str, TableSpec]] = table_specs(_CONTENT["tables"], UNIONS)
"""Table -> its fields."""

# Table -> the field that holds bytes, and the two that say where they lie if they lie after the flatbuffer.
STORED_AFTER: Final = {
    "Buffer": ("data", "offset", "size"),
    "Operator": ("custom_options", "large_custom_options_offset", "large_custom_options_size"),
}
