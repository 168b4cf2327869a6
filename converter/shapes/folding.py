"""Values of small tensors, as far as shapes need them: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Whole numbers and truth values are followed, exactly as the kernels compute them; real numbers and the codes of
quantized tensors are not. Elements may stay unknown (None); nothing large is ever computed.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from edge_opt.ir import Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import OPEN, Shape, broadcast, product
from edge_opt.shapes.rules import CALLS, Array, Call, Element, Results
from edge_opt.shapes.slicing import strided_cuts

_KINDS = "iubO"
"""Kinds of arrays that are followed: whole numbers, truth values, and either with unknown elements."""


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
_DIVISIONS = frozenset({"DIV", "FLOOR_DIV", "FLOOR_MOD"})
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

Folder: TypeAlias = Callable[[Call, Sequence[Shape]], Array | list[Array]]
"""Gives the result, of operators that may have several a list of them; the shapes are the results'."""

_MOST_ELEMENTS = 1024


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """Compute what is known of the operator's results; `shapes` are the inferred ones.

    Returns:
        One value for each result: an array of its type where all is known, an object array with None in the place of
        unknown elements, or None.
    """
    folder, small = FOLDERS.get(call.name), [shape for shape in shapes if _is_small(shape)]
    try:
        if call.name in CALLS:
            return [fact.value for fact in call.entered()]
        if folder is None or len(small) < len(shapes) or not _has_whole_numbers(call):
            return [None] * len(shapes)
        found = folder(call, small)
    except RefusedError:
        return [None] * len(shapes)
    values = found if isinstance(found, list) else [found]
    return [_settle(*triple) for triple in zip(values, small, call.op.outputs, strict=True)]


def _is_small(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and OPEN not in shape and product(*shape) <= _MOST_ELEMENTS


def _has_whole_numbers(call: Call) -> bool:
    """Whether the results are plain whole numbers or truth values; SHAPE and RANK may look at any first operand."""
    types = [tensor.dtype.numpy for tensor in call.op.outputs]
    coded = any(
        tensor is not None and tensor.is_quantized for tensor in (*call.op.inputs[1:], *call.op.outputs)
    )
    return all(kind is not None and kind.kind in _KINDS for kind in types) and not coded


def _settle(value: Array, shape: Shape, tensor: Tensor) -> Array | None:
    """Give the value its tensor's type where all of it is known; drop it where nothing is, or it leaves the type."""
    assert value.shape == shape, f"'{tensor.name}' is folded to {value.shape}: expected {shape}"
    target = tensor.dtype.numpy
    assert target is not None
    elements = value.ravel().tolist() if value.dtype.kind in _KINDS else [None]
    known = [element for element in elements if element is not None]
    is_partial = len(known) < len(elements)
    if (
        is_partial or target.kind != "b"
    ):  # of a truth value that is cast from a number, 0 and 1 are followed in parts
        least, most = (0, 1) if target.kind == "b" else (np.iinfo(target.name).min, np.iinfo(target.name).max)
        if (is_partial and not known) or not all(least <= element <= most for element in known):
            return None
    return value if is_partial else value.astype(target, copy=False)


def _followed(value: Array) -> Array:
    if value.dtype.kind not in _KINDS:
        raise RefusedError("real numbers are not followed")
    return value


def _all_values(call: Call) -> list[Array]:
    """The values of all inputs; an unknown one as an array of unknown elements, if any is known at all."""
    values = [call.value(index) for index in range(len(call.shapes))]
    if all(value is None for value in values) or not all(map(_is_small, call.shapes)):
        raise RefusedError("no input is known, or one is too large", call.op)
    pairs = zip(values, call.shapes, strict=True)
    return [
        np.full(shape or (), None, object) if value is None else _followed(value) for value, shape in pairs
    ]


def _computed(function: Callable[..., Element], *values: Array) -> Array:
    """Apply a function of Python's whole numbers, None for unknown ones, to the elements of arrays that broadcast."""
    objects = [value.astype(object) for value in values]
    # For arrays without axes numpy gives a bare element.
    return np.asarray(np.frompyfunc(function, len(values), 1)(*objects), object)


def _compute(name: str, *elements: Element) -> Element:
    if name == "MUL" and 0 in elements:
        return 0
    if None in elements or (name in _DIVISIONS and elements[1] == 0):
        return None
    return int(_NUMBERS[name](*elements))


def _elementwise(call: Call, _: Sequence[Shape]) -> Array:
    if call.name in ("ADD", "SUB", "MUL", "DIV") and call.number("fused_activation_function"):
        raise RefusedError("an activation is fused into it", call.op)
    return _computed(partial(_compute, call.name), *_all_values(call))


def _select(call: Call, shapes: Sequence[Shape]) -> Array:
    """Version one takes a condition of one axis for each row, whatever numpy would broadcast."""
    condition, *choices = _all_values(call)
    if call.name == "SELECT" and condition.ndim == 1:
        condition = condition.reshape(-1, *(1 for _ in shapes[0][1:]))
    return _computed(_choose, condition, *choices)


def _choose(condition: Element, a: Element, b: Element) -> Element:
    if condition is None:
        return a if a == b else None
    return a if condition else b


def _as_shaped(call: Call, shapes: Sequence[Shape]) -> Array:
    return call.some(0).reshape(shapes[0])


def _concatenate(call: Call, shapes: Sequence[Shape]) -> Array:
    values = _all_values(call)
    return np.stack(values) if values[0].ndim == 0 else np.concatenate(values, axis=call.number("axis"))


def _split(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    whole, given = (0, 2) if call.name == "SPLIT_V" else (1, 0)
    axis = call.given_axis(whole, given)
    return np.split(call.some(whole), np.cumsum([shape[axis] for shape in shapes])[:-1], axis=axis)


def _unpack(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    value, axis = call.some(0), call.number("axis")
    return [value.take([index], axis).reshape(shape) for index, shape in enumerate(shapes)]


def _slice(call: Call, shapes: Sequence[Shape]) -> Array:
    value = call.some(0)
    for axis, (begin, size) in enumerate(zip(call.integers(1), shapes[0], strict=True)):
        value = value.take(range(begin, begin + size), axis)
    return value


def _strided_slice(call: Call, shapes: Sequence[Shape]) -> Array:
    value = call.some(0)
    for axis, cut in enumerate(cut for cut in strided_cuts(call) if not cut.is_new):
        if cut.places is None:
            raise RefusedError("the places are not known", call.op)
        value = value.take(list(cut.places), axis)
    return value.reshape(shapes[0])


def _gather(call: Call, shapes: Sequence[Shape]) -> Array:
    value, indices, axis = call.some(0), call.numbers(1), call.axis_of(0)
    outside = indices.size and not 0 <= indices.min() <= indices.max() < value.shape[axis]
    if indices.dtype.kind not in "iu" or outside or call.number("batch_dims"):
        raise RefusedError("the positions are not followed", call.op)
    return value.take(indices.ravel(), axis).reshape(shapes[0])


def _range(call: Call, shapes: Sequence[Shape]) -> Array:
    start, delta = (_followed(call.numbers(index)) for index in (0, 2))
    return np.asarray(start.astype(object) + delta.astype(object) * np.arange(*shapes[0]), object)


def _sizes(shape: Shape) -> Array:
    return np.array([size if size >= 0 else None for size in shape], object)


def _broadcast_args(call: Call, _: Sequence[Shape]) -> Array:
    return _sizes(broadcast(*(call.sizes(index) for index in (0, 1)), labels=call.labels()) or ())


def _reduced(name: str, value: Array, axes: Collection[int]) -> Array:
    """Combine all elements along these axes; unknown where an unknown one does not drop out."""
    combine, nothing = _REDUCTIONS[name]
    if nothing is None and not value.size:
        raise RefusedError("there are no elements")
    function = np.frompyfunc(partial(_compute, combine), 2, 1, identity=nothing)
    return np.asarray(function.reduce(_followed(value).astype(object), axis=tuple(axes)), object)


def _reduce(call: Call, shapes: Sequence[Shape]) -> Array:
    value, axes = call.some(0), call.integers(1)
    return _reduced(call.name, value, {axis % value.ndim for axis in axes if value.ndim}).reshape(shapes[0])


def _segments(call: Call, shapes: Sequence[Shape]) -> Array:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value, ids, count = call.some(0), call.numbers(1), shapes[0][0]
    if ids.ndim != 1 or not count:
        raise RefusedError("the segments are not a vector", call.op)
    return np.stack([_reduced(call.name, value[ids == segment], [0]) for segment in range(count)])


FOLDERS: dict[str, Folder] = {
    "BROADCAST_ARGS": _broadcast_args,
    "BROADCAST_TO": lambda call, shapes: np.broadcast_to(call.some(0), shapes[0]),
    "CAST": lambda call, _: call.some(0),
    "CONCATENATION": _concatenate,
    "EXPAND_DIMS": _as_shaped,
    "FILL": lambda call, shapes: np.broadcast_to(call.some(1), shapes[0]),
    "GATHER": _gather,
    "PACK": lambda call, _: np.stack(_all_values(call), axis=call.number("axis")),
    "RANGE": _range,
    "RANK": lambda call, _: np.array(len(call.shape(0))),
    "RESHAPE": _as_shaped,
    "SELECT": _select,
    "SELECT_V2": _select,
    "SHAPE": lambda call, _: _sizes(call.shape(0)),
    "SLICE": _slice,
    "SPLIT": _split,
    "SPLIT_V": _split,
    "SQUEEZE": _as_shaped,
    "STRIDED_SLICE": _strided_slice,
    "TILE": lambda call, _: np.tile(call.some(0), call.integers(1)),
    "TRANSPOSE": lambda call, _: call.some(0).transpose(call.integers(1)),
    "UNPACK": _unpack,
    "ZEROS_LIKE": lambda _, shapes: np.zeros(shapes[0], np.int64),
    **dict.fromkeys(_NUMBERS, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "UNSORTED_SEGMENT_PROD": _segments,
}
