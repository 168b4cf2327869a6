"""Arithmetic on values of which some elements are unknown; it knows no operator's shape rule."""

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np

from edge_opt.shapes.broadcast import infer_dimension
from edge_opt.shapes.call import Array
from edge_opt.shapes.dimension import Element, as_dimension, is_negative, is_number

Binary: TypeAlias = Callable[[Any, Any], Any]

_INTEGERS = "iub"


def _truncated(a: int, b: int) -> int:
    """C's division: towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a >= 0) == (b >= 0) else -quotient


_NUMBERS: dict[str, Binary] = {
    "ADD": operator.add,
    "SUB": operator.sub,
    "MUL": operator.mul,
    "DIV": _truncated,
    "FLOOR_DIV": operator.floordiv,
    "FLOOR_MOD": operator.mod,
    "MAXIMUM": max,
    "MINIMUM": min,
    "EQUAL": operator.eq,
    "NOT_EQUAL": operator.ne,
    "GREATER": operator.gt,
    "GREATER_EQUAL": operator.ge,
    "LESS": operator.lt,
    "LESS_EQUAL": operator.le,
    "LOGICAL_AND": lambda a, b: bool(a) and bool(b),
    "LOGICAL_OR": lambda a, b: bool(a) or bool(b),
}
_DIVISIONS = frozenset({"DIV", "FLOOR_DIV", "FLOOR_MOD"})
_UNARY: dict[str, Callable[[Any], Any]] = {"NEG": operator.neg, "ABS": abs, "LOGICAL_NOT": operator.not_}
_SELECTIONS = frozenset({"SELECT", "SELECT_V2"})

ELEMENTWISE = (*_NUMBERS, *_UNARY, *_SELECTIONS)
REDUCTIONS = {
    "SUM": "ADD",
    "REDUCE_PROD": "MUL",
    "REDUCE_MAX": "MAXIMUM",
    "REDUCE_MIN": "MINIMUM",
    "REDUCE_ALL": "LOGICAL_AND",
    "REDUCE_ANY": "LOGICAL_OR",
}
_STARTS = {"SUM": 0, "REDUCE_PROD": 1, "REDUCE_ALL": True, "REDUCE_ANY": False}


def _binary(name: str, a: Element, b: Element) -> Element:
    if is_number(a) and is_number(b):
        if name in _DIVISIONS and b == 0:
            return None
        return int(_NUMBERS[name](a, b))
    return 0 if name == "MUL" and 0 in (a, b) else None


def _unary(name: str, a: Element) -> Element:
    return int(_UNARY[name](a)) if is_number(a) else None


def _select(condition: Element, a: Element, b: Element) -> Element:
    if condition is None:
        return a if a == b else None
    return a if condition else b


def elementwise(name: str, values: Sequence[Array]) -> Array | None:
    """Compute an elementwise operator; None for real numbers of which some are unknown.

    Whole numbers are computed exactly, element by element; real ones by numpy, in their own precision.
    """
    if any(value.dtype.kind not in _INTEGERS and value.dtype != object for value in values):
        return _on_reals(name, values)
    function = _select if name in _SELECTIONS else partial(_unary if name in _UNARY else _binary, name)
    objects = [value.astype(object) for value in values]
    # For arrays without axes numpy gives a bare element.
    return np.asarray(np.frompyfunc(function, len(values), 1)(*objects), object)


_ON_REALS: dict[str, Callable[..., Any]] = {
    "ADD": np.add,
    "SUB": np.subtract,
    "MUL": np.multiply,
    "DIV": np.divide,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "NEG": np.negative,
    "ABS": np.abs,
}


def _on_reals(name: str, values: Sequence[Array]) -> Array | None:
    function = _ON_REALS.get(name)
    if function is None or any(value.dtype == object for value in values):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(*values))


def reduce_rows(name: str, rows: Array) -> Array:
    """Fold the last axis; unknown where an unknown element does not drop out. Real numbers are not folded."""
    if rows.dtype.kind not in _INTEGERS and rows.dtype != object:
        return np.full(rows.shape[:-1], None, object)
    result = np.empty(rows.shape[:-1], object)
    for place in np.ndindex(result.shape):
        result[place] = _fold_row(name, rows[place].tolist())
    return result


def _fold_row(name: str, row: list[Element]) -> Element:
    if name in _STARTS:
        row = [_STARTS[name], *row]
    return reduce(lambda a, b: _binary(REDUCTIONS[name], a, b), row) if row else None


def broadcast_size(a: Element, b: Element) -> Element:
    """One dimension of two shapes that broadcast, as BROADCAST_ARGS computes it."""
    size = infer_dimension(as_dimension(a), as_dimension(b))
    return None if is_negative(size) else size
