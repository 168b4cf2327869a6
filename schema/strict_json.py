"""Values that every reader of JSON takes: RFC 8259 has no infinity and no NaN."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """The value with None for every number that is not finite, in dicts, lists and tuples too."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
