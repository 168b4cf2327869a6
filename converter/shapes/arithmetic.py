"""Arithmetic on values of which some elements are unknown (None); it knows no operator's shape rule."""

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from edge_opt.shapes.broadcast import infer_dimension
from edge_opt.shapes.call import Array
from edge_opt.shapes.dimension import Element, size_of

_EXACT = "iubO"
"""Kinds of arrays whose elements are computed as Python's whole numbers."""


def _truncated(a: int, b: int) -> int:
    """C's division: towards zero."""
    return abs(a) // abs(b) if (a >= 0) == (b >= 0) else -(abs(a) // abs(b))


_NUMBERS: dict[str, Callable[..., Any]] = {
    "ABS": abs,
    "ADD": operator.add,
    "DIV": _truncated,
    "EQUAL": operator.eq,
    "FLOOR_DIV": operator.floordiv,
    "FLOOR_MOD": operator.mod,
    "GREATER": operator.gt,
    "GREATER_EQUAL": operator.ge,
    "LESS": operator.lt,
    "LESS_EQUAL": operator.le,
    "LOGICAL_AND": lambda a, b: bool(a) and bool(b),
    "LOGICAL_NOT": operator.not_,
    "LOGICAL_OR": lambda a, b: bool(a) or bool(b),
    "MAXIMUM": max,
    "MINIMUM": min,
    "MUL": operator.mul,
    "NEG": operator.neg,
    "NOT_EQUAL": operator.ne,
    "SUB": operator.sub,
}
_REALS: dict[str, Callable[..., Any]] = {
    **{name: _NUMBERS[name] for name in ("ABS", "ADD", "MUL", "NEG", "SUB")},
    "DIV": np.divide,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
}
_SELECTIONS = frozenset({"SELECT", "SELECT_V2"})

ELEMENTWISE = (*_NUMBERS, *_SELECTIONS)
SEGMENTS: dict[str, tuple[str, list[int]]] = {
    "UNSORTED_SEGMENT_MAX": ("MAXIMUM", []),
    "UNSORTED_SEGMENT_MIN": ("MINIMUM", []),
    "UNSORTED_SEGMENT_PROD": ("MUL", [1]),
    "UNSORTED_SEGMENT_SUM": ("ADD", [0]),
}
REDUCTIONS: dict[str, tuple[str, list[int]]] = {
    "SUM": ("ADD", [0]),
    "REDUCE_PROD": ("MUL", [1]),
    "REDUCE_MAX": ("MAXIMUM", []),
    "REDUCE_MIN": ("MINIMUM", []),
    "REDUCE_ALL": ("LOGICAL_AND", [True]),
    "REDUCE_ANY": ("LOGICAL_OR", [False]),
}
"""The operator that combines two elements, and what it begins with."""


def _compute(name: str, *elements: Element) -> Element:
    if name == "MUL" and 0 in elements:
        return 0
    if None in elements or (name in ("DIV", "FLOOR_DIV", "FLOOR_MOD") and elements[1] == 0):
        return None
    return int(_NUMBERS[name](*elements))


def _select(condition: Element, a: Element, b: Element) -> Element:
    if condition is None:
        return a if a == b else None
    return a if condition else b


def elementwise(name: str, values: Sequence[Array]) -> Array | None:
    """Compute an elementwise operator; None for real numbers of which some are unknown.

    Whole numbers are computed exactly, element by element; real ones by numpy, in their own precision.
    """
    if any(value.dtype.kind not in _EXACT for value in values):
        if name not in _REALS or any(value.dtype == object for value in values):
            return None
        with np.errstate(all="ignore"):
            return np.asarray(_REALS[name](*values))
    function = _select if name in _SELECTIONS else partial(_compute, name)
    objects = [value.astype(object) for value in values]
    # For arrays without axes numpy gives a bare element.
    return np.asarray(np.frompyfunc(function, len(values), 1)(*objects), object)


def reduce_rows(name: str, rows: Array) -> Array:
    """Fold the last axis; unknown where an unknown element does not drop out. Real numbers are not folded."""
    combine, start = (REDUCTIONS | SEGMENTS)[name]
    result = np.full(rows.shape[:-1], None, object)
    for place in np.ndindex(result.shape) if rows.dtype.kind in _EXACT else ():
        row = [*start, *rows[place].tolist()]
        result[place] = reduce(partial(_compute, combine), row) if row else None
    return result


def broadcast_size(a: Element, b: Element) -> Element:
    """One dimension of two shapes that broadcast, as BROADCAST_ARGS computes it."""
    size = infer_dimension(size_of(a), size_of(b))
    return None if size is None or size < 0 else size
