"""Dataclasses as JSON, and read back: one pair for results that are printed, kept, or sent to another process."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from edge_opt.base.errors import EdgeOptError

Read = TypeVar("Read")
_JSON_TYPES: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float)}
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


class RecordError(EdgeOptError, ValueError):
    """JSON values are not those of the record that is read from them; the message says which one."""


class Record:
    """A base of dataclasses: their JSON form has every field, and the properties that `_properties` names.

    Fields in `_left_out` are not in it; a text in `_or_null` is null where it is empty.
    """

    __slots__ = ()
    _properties: ClassVar[tuple[str, ...]] = ()
    _left_out: ClassVar[tuple[str, ...]] = ()
    _or_null: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports: values that every reader of JSON takes, see `to_json`."""
        return _fields(self)


def to_json(value: Any) -> Any:
    """Records, dicts, lists and tuples as JSON has them; None for infinity and NaN, which RFC 8259 does not have."""
    if is_dataclass(value):
        return to_json(value.to_dict()) if hasattr(value, "to_dict") else _fields(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(record: Any) -> dict[str, Any]:
    names = [*(field.name for field in fields(record)), *getattr(record, "_properties", ())]
    left_out, or_null = getattr(record, "_left_out", ()), getattr(record, "_or_null", ())
    values = {name: to_json(getattr(record, name)) for name in names if name not in left_out}
    return {name: None if name in or_null and value == "" else value for name, value in values.items()}


def from_dict(kind: type[Read], values: Any, where: str = "") -> Read:
    """A dataclass of that kind, from what its fields became on their way through JSON; properties are passed over.

    Fields may hold plain values, dataclasses, and tuples, lists and mappings of them; defaults may be missing.

    Raises:
        RecordError: the values are not those of such a dataclass.
    """
    where = where or kind.__name__
    if not isinstance(values, dict):
        raise RecordError(f"{where} must be an object, found {values!r:.80}")
    hints = _hints(kind)
    given = {name: value for name, value in values.items() if name not in getattr(kind, "_properties", ())}
    for name in given:
        if name not in hints:
            raise RecordError(f"{where} has no field '{name}'")
    read = {name: _read(hints[name], value, f"{where}.{name}") for name, value in given.items()}
    try:
        return kind(**read)
    except TypeError as error:  # a field is missing
        raise RecordError(f"{where}: {error}") from error


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _read_one_of(inner, value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return from_dict(kind, value, where)
    if origin in (Mapping, dict):
        items = dict(_expect(dict, value, where))
        return {name: _read(inner[1], item, f"{where}.{name}") for name, item in items.items()}
    if origin in (tuple, list):
        items = _expect((list, tuple), value, where)
        kinds = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(items)
        if len(kinds) != len(items):
            raise RecordError(f"{where} must have {len(kinds)} items, found {len(items)}")
        return origin(map(_read, kinds, items, [where] * len(items)))
    return _expect(_JSON_TYPES[kind], value, where) if kind in _JSON_TYPES else value


def _read_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not NoneType)
    for kind in others:
        try:
            return _read(kind, value, where)
        except RecordError:
            continue
    return _read(last, value, where)


def _expect(kinds: Any, value: Any, where: str) -> Any:
    """The value, which must be of one of these types; true and false are no numbers."""
    if isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool)):
        return value
    raise RecordError(f"{where} has a value of another type: {value!r:.80}")
