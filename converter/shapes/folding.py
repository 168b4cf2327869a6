"""Values of small tensors, as far as shapes need them: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Elements may stay unknown (None); nothing large is ever computed.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from edge_opt.ir import Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.control_flow import composite_facts
from edge_opt.shapes.dimension import Element, Shape, broadcast_operands, product, size_of
from edge_opt.shapes.rules import Array, Call, Results

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

_REDUCTIONS: dict[str, tuple[str, int | None]] = {
    "SUM": ("ADD", 0),
    "REDUCE_PROD": ("MUL", 1),
    "REDUCE_MAX": ("MAXIMUM", None),
    "REDUCE_MIN": ("MINIMUM", None),
    "REDUCE_ALL": ("LOGICAL_AND", 1),
    "REDUCE_ANY": ("LOGICAL_OR", 0),
    "UNSORTED_SEGMENT_PROD": ("MUL", 1),
}
"""The operator that combines two elements, and what no elements give."""


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


Folder: TypeAlias = Callable[[Call, Sequence[Shape]], Array | list[Array] | None]
"""Gives the result, of operators that may have several a list of them; the shapes are the results'."""

_MOST_ELEMENTS = 1024
_MAY_ACTIVATE = frozenset({"ADD", "SUB", "MUL", "DIV"})
_ENTERED = frozenset({"STABLEHLO_COMPOSITE", "CALL"})


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """Compute what is known of the operator's results; `shapes` are the derived ones.

    Returns:
        One value for each result: an array of its type where all is known, an object array with None in the place of
        unknown elements, or None.
    """
    try:
        if call.name in _ENTERED:
            return [fact.value for fact in composite_facts(call)]
        folder, small = _FOLDERS[call.name], [shape for shape in shapes if _is_small(shape)]
        if len(small) < len(shapes):
            return [None] * len(shapes)
        found = folder(call, small)
    except (KeyError, RefusedError):
        return [None] * len(shapes)
    values = found if isinstance(found, list) else [found]
    return [_settle(*triple) for triple in zip(values, small, call.op.outputs, strict=True)]


def _is_small(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and 0 <= product(*shape) <= _MOST_ELEMENTS


def _settle(value: Array | None, shape: Shape, tensor: Tensor) -> Array | None:
    """Give the value its tensor's type where all of it is known; drop it where nothing is, or it does not fit."""
    target = tensor.dtype.numpy
    if value is None or target is None or value.shape != shape:
        return None
    if value.dtype == object:
        elements = value.ravel().tolist()
        if None in elements:
            return None if set(elements) == {None} else value
    if value.dtype.kind == "c" and target.kind != "c":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if target.kind in "iu" and value.dtype.kind in "iufO":
            limits = np.iinfo(target.name)
            if not ((value >= limits.min) & (value <= limits.max)).all():
                return None
        return value.astype(target, copy=False)


def _as_shaped(call: Call, shapes: Sequence[Shape]) -> Array:
    return call.some(0).reshape(shapes[0])


def _unknown_where_dynamic(shape: Shape) -> Array:
    return np.array([*(size if size >= 0 else None for size in shape), None], object)[:-1]


def _cast(call: Call, _: Sequence[Shape]) -> Array:
    value = call.numbers(0) if call.op.outputs[0].dtype.is_float else call.some(0)
    return np.trunc(value) if value.dtype.kind == "f" else value


def _any_known(call: Call) -> list[Array]:
    """All inputs; an unknown one as an array of unknown elements, if any is known at all."""
    values = [call.value(index) for index in range(len(call.shapes))]
    if all(value is None for value in values):
        raise RefusedError("no input is known", call.op)
    arrays: list[Array] = []
    for value, shape in zip(values, call.shapes, strict=True):
        if value is None and not _is_small(shape):
            raise RefusedError("an input is too large", call.op)
        arrays.append(np.full(shape or (), None, object) if value is None else value)
    return arrays


def _concatenate(call: Call, _: Sequence[Shape]) -> Array:
    values = _any_known(call)
    if all(value.ndim == 0 for value in values):
        return np.stack(values)
    return np.concatenate(values, axis=call.number("axis"))


def _split(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    whole, given = (0, 2) if call.name == "SPLIT_V" else (1, 0)
    axis = call.given_axis(whole, given)
    return np.split(call.some(whole), np.cumsum([shape[axis] for shape in shapes])[:-1], axis=axis)


def _slice(call: Call, shapes: Sequence[Shape]) -> Array:
    stretches = zip(call.integers(1), shapes[0], strict=True)
    return call.some(0)[tuple(slice(begin, begin + size) for begin, size in stretches)]


def _strided_slice(call: Call, _: Sequence[Shape]) -> Array:
    value, triples = call.some(0), zip(*(call.integers(index) for index in (1, 2, 3)), strict=True)
    index = tuple(_index(call, place, *triple) for place, triple in enumerate(triples))
    return np.asarray(value[index], value.dtype)


def _index(call: Call, place: int, begin: int, end: int, stride: int) -> Any:
    def masked(name: str) -> bool:
        return bool(call.number(f"{name}_mask") >> place & 1)

    if masked("ellipsis"):
        return Ellipsis
    if masked("new_axis"):
        return None
    if masked("shrink_axis"):
        return 0 if masked("begin") else begin
    end = begin + end if call.number("offset") else end
    return slice(None if masked("begin") else begin, None if masked("end") else end, stride)


def _gather(call: Call, _: Sequence[Shape]) -> Array:
    value, indices, axis = call.some(0), call.numbers(1), call.number("axis")
    outside = indices.size and not 0 <= indices.min() <= indices.max() < value.shape[axis]
    if outside or call.number("batch_dims"):
        raise RefusedError("the positions are not followed", call.op)
    return np.asarray(value.take(indices, axis), value.dtype)


def _range(call: Call, shapes: Sequence[Shape]) -> Array:
    start, delta = call.numbers(0), call.numbers(2)
    return np.asarray(start + delta * np.arange(shapes[0][0], dtype=start.dtype))


def _broadcast_args(call: Call, _: Sequence[Shape]) -> Array:
    sizes = broadcast_operands([tuple(map(size_of, call.elements(index))) for index in (0, 1)], call.labels())
    return _unknown_where_dynamic(sizes or ())


def _elementwise(call: Call, _: Sequence[Shape]) -> Array | None:
    """Real numbers are computed by numpy if all are known, whole ones exactly and element by element."""
    if call.name in _MAY_ACTIVATE and call.number("fused_activation_function"):
        raise RefusedError("an activation is fused into it", call.op)
    values = _any_known(call)
    if any(value.dtype.kind not in _EXACT for value in values):
        if call.name not in _REALS or any(value.dtype == object for value in values):
            return None
        with np.errstate(all="ignore"):
            return np.asarray(_REALS[call.name](*values))
    function = _select if call.name in _SELECTIONS else partial(_compute, call.name)
    objects = [value.astype(object) for value in values]
    # For arrays without axes numpy gives a bare element.
    return np.asarray(np.frompyfunc(function, len(values), 1)(*objects), object)


def _reduced(name: str, value: Array, axes: Collection[int]) -> Array:
    """Combine all elements along these axes; unknown where an unknown one does not drop out."""
    combine, nothing = _REDUCTIONS[name]
    if value.dtype.kind not in _EXACT or (nothing is None and not value.size):
        raise RefusedError("the elements are not followed")
    function = np.frompyfunc(partial(_compute, combine), 2, 1, identity=nothing)
    return np.asarray(function.reduce(value.astype(object), axis=tuple(axes)), object)


def _reduce(call: Call, shapes: Sequence[Shape]) -> Array:
    value, axes = call.some(0), call.integers(1)
    return _reduced(call.name, value, {axis % value.ndim for axis in axes if value.ndim}).reshape(shapes[0])


def _segments(call: Call, shapes: Sequence[Shape]) -> Array:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value, ids, count = call.some(0), call.numbers(1), shapes[0][0]
    if ids.ndim != 1 or not count:
        raise RefusedError("the segments are no vector", call.op)
    return np.stack([_reduced(call.name, value[ids == segment], [0]) for segment in range(count)])


_FOLDERS: dict[str, Folder] = {
    "BROADCAST_ARGS": _broadcast_args,
    "BROADCAST_TO": lambda call, shapes: np.broadcast_to(call.some(0), shapes[0]),
    "CAST": _cast,
    "CONCATENATION": _concatenate,
    "EXPAND_DIMS": _as_shaped,
    "FILL": lambda call, shapes: np.broadcast_to(call.some(1), shapes[0]),
    "GATHER": _gather,
    "PACK": lambda call, _: np.stack(_any_known(call), axis=call.number("axis")),
    "RANGE": _range,
    "RANK": lambda call, _: np.array(len(call.shape(0)), np.int32),
    "RESHAPE": _as_shaped,
    "SHAPE": lambda call, _: _unknown_where_dynamic(call.shape(0)),
    "SLICE": _slice,
    "SPLIT": _split,
    "SPLIT_V": _split,
    "SQUEEZE": _as_shaped,
    "STRIDED_SLICE": _strided_slice,
    "TILE": lambda call, _: np.tile(call.some(0), call.integers(1)),
    "TRANSPOSE": lambda call, _: call.some(0).transpose(call.integers(1)),
    "UNPACK": lambda call, shapes: [call.some(0).take(i, call.number("axis")) for i in range(len(shapes))],
    "ZEROS_LIKE": lambda _, shapes: np.zeros(shapes[0], np.int64),
    **dict.fromkeys((*_NUMBERS, *_SELECTIONS), _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "UNSORTED_SEGMENT_PROD": _segments,
}
