"""Dataclasses that have a JSON form."""

from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from edge_opt.output.strict_json import strict


class Record:
    """A base of dataclasses: their JSON form has every field, and the properties that `_properties` names."""

    __slots__ = ()
    _properties: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports: values that every reader of JSON takes, None for a number that is not finite."""
        return strict(_fields(self))


def _fields(record: Any) -> dict[str, Any]:
    names = [*(field.name for field in fields(record)), *getattr(record, "_properties", ())]
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        own = getattr(value, "to_dict", None)
        return _fields(value) if own is None else own()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
