"""Writes schema/tables.json: reads names, slots, types, defaults, unions and enums off the generated bindings.

It looks at the bindings of TFLite and of bundles' headers only, and never at a model. Run it after a schema release.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ai_edge_litert import schema_py_generated as tflite
from litert_lm_builder import litertlm_header_schema_py_generated as header

from edge_opt.schema.table import SCALAR_CODES, Default, Row

# flatc spells the one function of VData in another way.
bindings = SimpleNamespace(**{**vars(header), **vars(tflite), "VDataCreator": header.VdataCreator})

FILE = Path(__file__).resolve().parent.parent / "schema" / "tables.json"

# Fields that schema.fbs marks as deprecated: the bindings skip them, but older files may hold them.
DEPRECATED: dict[str, list[Row]] = {
    "ResizeBilinearOptions": [("new_height", 0, "int32", 0), ("new_width", 1, "int32", 0)],
    "SignatureDef": [("deprecated_tag", 3, "string", None)],
}

# Names of a bundle's sections in litert-lm-builder 0.19: releases lack the last two, and have others for the first two.
SECTIONS = {
    "Text2SpeechMetadataProto": 10,
    "Speech2TextMetadataProto": 11,
    "Text2ImageMetadataProto": 12,
    "Any2AnyMetadataProto": 13,
}

# flatc's camelCase drops the underscore before a digit; these are the names that had one.
_DIGIT_NAMES = {
    "builtinOptions2": "builtin_options_2",
    "builtinOptions2Type": "builtin_options_2_type",
}


class _Recorder:
    """Stands in for flatbuffers.Builder and writes down what the bindings ask of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def record(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return 0

        return record


def snake_case(name: str) -> str:
    """The schema.fbs spelling of a camelCase name of the bindings."""
    return _DIGIT_NAMES.get(name) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _record(function: str, *arguments: Any) -> tuple[str, tuple[Any, ...]]:
    recorder = _Recorder()
    getattr(bindings, function)(recorder, *arguments)
    return recorder.calls[-1]


def enum_members(name: str) -> dict[str, int]:
    """The members of an enum class of the bindings, in declaration order."""
    members = vars(getattr(bindings, name)).items()
    # Python 3.13 puts `__firstlineno__` among a class's own.
    return {
        key: value for key, value in members if isinstance(value, int) and not key.startswith("__")
    }


def _classes() -> list[str]:
    return [name for name, value in vars(bindings).items() if inspect.isclass(value)]


def read_enums() -> dict[str, dict[str, int]]:
    """Every enum that is not a union's discriminator."""
    plain = [
        name for name in _classes() if _is_enum(name) and not hasattr(bindings, f"{name}Creator")
    ]
    enums = {name: enum_members(name) for name in plain}
    sections = enums["AnySectionDataType"]
    known = {name: number for name, number in sections.items() if number < min(SECTIONS.values())}
    enums["AnySectionDataType"] = known | SECTIONS
    return enums


def _is_enum(name: str) -> bool:
    is_table = hasattr(getattr(bindings, name), "Init")
    return not is_table and not name.startswith("_") and bool(enum_members(name))


def read_unions() -> dict[str, list[str]]:
    """Union name -> its tables, in the order of their discriminators from 1 on."""
    found = {}
    for name in (
        name for name in _classes() if _is_enum(name) and hasattr(bindings, f"{name}Creator")
    ):
        _, *members = enum_members(name).items()
        if [code for _, code in members] != list(range(1, len(members) + 1)):
            raise ValueError(f"union {name}: its discriminators have gaps")
        if not all(hasattr(bindings, f"{table}T") for table, _ in members):
            raise ValueError(f"union {name}: a member is no table")
        found[name] = [table for table, _ in members]
    return found


def _scalar_name(prepend: str) -> str:
    return prepend.removeprefix("Prepend").removesuffix("Slot").lower()


def _vector_type(table: str, parameter: str, annotation: str) -> str:
    """Element type of a vector, from what packing a vector with one element asks of the builder."""
    if annotation.endswith("T]]"):
        return "[" + annotation.removeprefix("Optional[List[").removesuffix("T]]") + "]"
    element: Any = "" if "str" in annotation else 0
    recorder = _Recorder()
    getattr(bindings, f"{table}T")(**{parameter: [element]}).Pack(recorder)
    names = [name for name, _ in recorder.calls]
    if "CreateString" in names:
        return "[string]"
    return f"[{_scalar_name(names[names.index('StartVector') + 1])}]"


def _field_type(
    table: str, parameter: str, prepend: str, annotation: str, unions: dict[str, str]
) -> str:
    if "UOffsetT" not in prepend:
        return _scalar_name(prepend)
    if parameter in unions:
        return unions[parameter]
    if annotation.startswith("Optional[List["):
        return _vector_type(table, parameter, annotation)
    inner = annotation.removeprefix("Optional[").removesuffix("]")
    return "string" if inner == "str" else inner.removesuffix("T")


def _default(type_name: str, value: Any) -> Default:
    if type_name not in SCALAR_CODES:
        return None
    if type_name == "bool":
        return bool(value)
    return float(value) if type_name.startswith("float") else int(value)


def read_table(table: str) -> tuple[int, list[Row]]:
    """Number of slots and the rows `(field, slot, type, default)` of one table."""
    objects = getattr(bindings, f"{table}T")
    annotations = dict(
        re.findall(r"self\.(\w+) = \1  # type: (.*)", inspect.getsource(objects.__init__))
    )
    unpack = inspect.getsource(objects._UnPack)  # noqa: SLF001 - the only place that names a field's union
    unions = dict(re.findall(r"self\.(\w+) = (\w+)Creator\(", unpack))
    slots = _record(f"{table}Start")[1][0]
    rows = []
    for parameter, annotation in annotations.items():
        camel = parameter[0].upper() + parameter[1:]
        prepend, (slot, _, default) = _record(f"{table}Add{camel}", 0)
        type_name = _field_type(table, parameter, prepend, annotation, unions)
        rows.append((snake_case(parameter), slot, type_name, _default(type_name, default)))
    rows += DEPRECATED.get(table, [])
    # A gap is a field that has become deprecated since: add it to DEPRECATED.
    if sorted(slot for _, slot, _, _ in rows) != [*range(slots)]:
        raise ValueError(
            f"table {table}: {slots} slots, but fields at {sorted(row[1] for row in rows)}"
        )
    return slots, sorted(rows, key=lambda row: row[1])


def read_tables() -> dict[str, tuple[int, list[Row]]]:
    """The rows of every table of the bindings."""
    return {name: read_table(name) for name in _classes() if hasattr(bindings, f"{name}Start")}


def _block(name: str, entries: Mapping[str, object]) -> str:
    lines = [
        textwrap.fill(f"{json.dumps(key)}: {json.dumps(value)}", 118)
        for key, value in entries.items()
    ]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


def generate() -> str:
    """The text of tables.json."""
    blocks: dict[str, Mapping[str, object]] = {
        "enums": read_enums(),
        "unions": read_unions(),
        "tables": read_tables(),
    }
    return "{\n" + ",\n".join(_block(name, entries) for name, entries in blocks.items()) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
    print(f"wrote {FILE}")
