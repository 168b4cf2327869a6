"""Makes dataclasses of the plain values that JSON leaves of them: in frames of the worker, and in golden files."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of `dataclasses.asdict` for a dataclass of that kind, after a way through JSON.

    Fields may hold dataclasses, tuples and mappings of them, or None; a field with a default may be missing.

    Raises:
        KeyError, TypeError, ValueError: the values are not those of such a dataclass.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else from_plain(inner[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: from_plain(_fields(kind)[name], part) for name, part in dict(value).items()})
    if origin is Mapping:
        return {name: from_plain(inner[1], part) for name, part in dict(value).items()}
    if origin is not tuple:
        return value
    kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
    return tuple(from_plain(own, part) for own, part in zip(kinds, value, strict=True))


_fields = cache(get_type_hints)
