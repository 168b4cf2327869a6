"""Convert dataclasses to and from JSON, for results that are printed, stored or sent to another process."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from edge_opt.base.errors import EdgeOptError

Read = TypeVar("Read")


class RecordError(EdgeOptError, ValueError):
    """JSON values do not fit the dataclass; the message names it and the value."""


class Record:
    """Base of dataclasses whose JSON form has all fields and the properties in `_properties`.

    Fields in `_left_out` are omitted; an empty text in `_or_null` becomes null. Fields in `_only_here` belong to this
    process, such as graphs and open files: in a pickle or a copy they have their defaults.
    """

    __slots__ = ()
    _properties: ClassVar[tuple[str, ...]] = ()
    _left_out: ClassVar[tuple[str, ...]] = ()
    _or_null: ClassVar[tuple[str, ...]] = ()
    _only_here: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return _made, (
            type(self),
            {name: getattr(self, name) for name in names if name not in self._only_here},
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values (see `to_json`), for `--json` and reports."""
        names = [*(field.name for field in fields(self)), *self._properties]  # type: ignore[arg-type]
        values = {
            name: to_json(getattr(self, name)) for name in names if name not in self._left_out
        }
        return values | {name: None for name in self._or_null if not values[name]}


def _made(kind: type[Record], values: Mapping[str, Any]) -> Record:
    return kind(**values)


def to_json(value: Any) -> Any:
    """Convert records, dicts, lists and tuples to JSON values; infinity and NaN become None (RFC 8259 has neither)."""
    if hasattr(value, "to_dict"):
        return to_json(value.to_dict())
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_dict(kind: type[Read], values: Any) -> Read:
    """Make a dataclass of this kind from JSON values; RecordError if they do not fit."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise RecordError(f"{kind.__name__}: {error}") from error
