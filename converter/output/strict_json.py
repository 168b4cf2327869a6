"""Values that every reader of JSON takes: RFC 8259 has no infinity and no NaN."""

import math
from typing import Any


def strict(values: dict[str, Any]) -> dict[str, Any]:
    """The values with None for every number that is not finite, and lists for tuples, in dicts and lists too."""
    return {key: _strict(value) for key, value in values.items()}


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return strict(value)
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
