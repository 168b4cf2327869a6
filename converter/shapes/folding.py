"""Values of small tensors, as far as shapes need them: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Whole numbers and truth values are followed, exactly as the kernels compute them; real numbers and the codes of
quantized tensors are not. Elements may stay unknown (None); nothing large is ever computed.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np

from edge_opt.ir import Tensor
from edge_opt.shapes.dimension import OPEN, Shape, broadcast, product
from edge_opt.shapes.rules import Array, Call, Element, Results, UnknownError
from edge_opt.shapes.slicing import Index, strided_indices

_KINDS: Final = "iubO"
"""Kinds of arrays that are followed: whole numbers, truth values, and either with unknown elements."""

_MOST_ELEMENTS: Final = 1024


def _truncated(a: int, b: int) -> int:
    """C's division: towards zero."""
    return abs(a) // abs(b) if (a >= 0) == (b >= 0) else -(abs(a) // abs(b))


_NUMBERS: Final[dict[str, Callable[..., Any]]] = {
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
_DIVISIONS: Final = ("DIV", "FLOOR_DIV", "FLOOR_MOD")
_REDUCTIONS: Final[dict[str, tuple[str, int | None]]] = {
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


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """What is known of the values of the operator's results, as `Fact` has it; `shapes` are the inferred ones."""
    folder, small = FOLDERS.get(call.op.name), [shape for shape in shapes if _is_small(shape)]
    unknown = [None] * len(shapes)
    if folder is None or len(small) < len(shapes) or not _has_whole_numbers(call):
        return unknown
    try:
        found = folder(call, small)
    except UnknownError:
        return unknown
    values = found if isinstance(found, list) else [found]
    return [_settle(*triple) for triple in zip(values, small, call.op.outputs, strict=True)]


def _is_small(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and OPEN not in shape and product(*shape) <= _MOST_ELEMENTS


def _has_whole_numbers(call: Call) -> bool:
    """Whether the results are plain whole numbers or truth values; SHAPE and RANK may look at any first operand."""
    types = [tensor.dtype.numpy for tensor in call.op.outputs]
    coded = any(tensor and tensor.is_quantized for tensor in (*call.op.inputs[1:], *call.op.outputs))
    return all(kind is not None and kind.kind in _KINDS for kind in types) and not coded


def _settle(value: Array, shape: Shape, tensor: Tensor) -> Array | None:
    """Give the value its tensor's type where all of it is known; drop it where nothing is, or it leaves the type."""
    assert value.shape == shape, f"'{tensor.name}' is folded to {value.shape}: expected {shape}"
    target = tensor.dtype.numpy
    assert target is not None
    if value.dtype.kind not in _KINDS:
        return None
    if target.kind == "b":
        value = _computed(lambda element: None if element is None else bool(element), value)
    elements = value.ravel().tolist()
    known = [element for element in elements if element is not None]
    limits = np.iinfo(target.name) if target.kind != "b" else np.iinfo(np.int8)
    fits = all(limits.min <= element <= limits.max for element in known)
    if not fits or (elements and not known):
        return None
    return value if len(known) < len(elements) else value.astype(target)


def _all_values(call: Call) -> list[Array]:
    """The values of all inputs; an unknown one as an array of unknown elements, if any is known at all."""
    values = [fact.value for fact in call.inputs]
    if all(value is None for value in values) or not all(_is_small(fact.shape) for fact in call.inputs):
        raise UnknownError
    if any(value is not None and value.dtype.kind not in _KINDS for value in values):
        raise UnknownError
    pairs = zip(values, call.all_shapes(), strict=True)
    return [np.full(shape, None, object) if value is None else value for value, shape in pairs]


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
    if call.op.name in ("ADD", "SUB", "MUL", "DIV") and call.number("fused_activation_function"):
        raise UnknownError
    return _computed(partial(_compute, call.op.name), *_all_values(call))


def _select(call: Call, shapes: Sequence[Shape]) -> Array:
    """Version one takes a condition of one axis for each row, whatever numpy would broadcast."""
    condition, *choices = _all_values(call)
    if call.op.name == "SELECT" and condition.ndim == 1:
        condition = condition.reshape(-1, *(1 for _ in shapes[0][1:]))
    return _computed(_choose, condition, *choices)


def _choose(condition: Element, a: Element, b: Element) -> Element:
    if condition is None:
        return a if a == b else None
    return a if condition else b


def _as_shaped(call: Call, shapes: Sequence[Shape]) -> Array:
    return call.some(0).reshape(shapes[0])


def _concatenate(call: Call, _: Sequence[Shape]) -> Array:
    values = _all_values(call)
    return np.stack(values) if values[0].ndim == 0 else np.concatenate(values, axis=call.number("axis"))


def _split(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    whole, given = (0, 2) if call.op.name == "SPLIT_V" else (1, 0)
    axis = call.axis(call.given(given), len(shapes[0]))
    return np.split(call.some(whole), np.cumsum([shape[axis] for shape in shapes])[:-1], axis=axis)


def _unpack(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    value, axis = call.some(0), call.number("axis")
    return [value.take([index], axis).reshape(shape) for index, shape in enumerate(shapes)]


def _slice(call: Call, shapes: Sequence[Shape]) -> Array:
    begins = zip(call.integers(1), shapes[0], strict=True)
    return _cut(call, [slice(begin, begin + size) for begin, size in begins], shapes[0])


def _strided_slice(call: Call, shapes: Sequence[Shape]) -> Array:
    """Every bound must be known, even one that a mask opens."""
    for bounds in (1, 2, 3):
        call.integers(bounds)
    return _cut(call, strided_indices(call), shapes[0])


def _cut(call: Call, indices: Sequence[Index], shape: Shape) -> Array:
    value = call.some(0)
    return np.array(value[tuple(indices)], value.dtype).reshape(shape)


def _gather(call: Call, shapes: Sequence[Shape]) -> Array:
    value, indices, axis = call.some(0), call.integers(1), call.number("axis")
    outside = indices and not 0 <= min(indices) <= max(indices) < value.shape[axis]
    if outside or call.number("batch_dims"):
        raise UnknownError
    return value.take(np.array(indices, int), axis).reshape(shapes[0])


def _range(call: Call, shapes: Sequence[Shape]) -> Array:
    start, _, delta = (value.astype(object) for value in _all_values(call))
    return np.asarray(start + delta * np.arange(*shapes[0]), object)


def _sizes(shape: Shape) -> Array:
    return np.array([size if size >= 0 else None for size in shape], object)


def _reduced(name: str, value: Array, axes: Collection[int]) -> Array:
    """Combine all elements along these axes; unknown where an unknown one does not drop out."""
    combine, nothing = _REDUCTIONS[name]
    if value.dtype.kind not in _KINDS or (nothing is None and not value.size):
        raise UnknownError
    function = np.frompyfunc(partial(_compute, combine), 2, 1, identity=nothing)
    return np.asarray(function.reduce(value.astype(object), axis=tuple(axes)), object)


def _reduce(call: Call, shapes: Sequence[Shape]) -> Array:
    value, axes = call.some(0), call.integers(1)
    return _reduced(call.op.name, value, {axis % value.ndim for axis in axes if value.ndim}).reshape(
        shapes[0]
    )


def _segments(call: Call, shapes: Sequence[Shape]) -> Array:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value, ids, count = call.some(0), call.known(1), shapes[0][0]
    if ids is None or ids.ndim != 1 or not count:
        raise UnknownError
    return np.stack([_reduced(call.op.name, value[ids == segment], [0]) for segment in range(count)])


FOLDERS: dict[str, Folder] = {
    "BROADCAST_ARGS": lambda call, _: _sizes(broadcast(call.sizes(0), call.sizes(1)) or ()),
    "BROADCAST_TO": lambda call, shapes: np.broadcast_to(call.some(0), shapes[0]),
    "CAST": lambda call, _: call.some(0),
    "CONCATENATION": _concatenate,
    "FILL": lambda call, shapes: np.broadcast_to(call.some(1), shapes[0]),
    "GATHER": _gather,
    "PACK": lambda call, _: np.stack(_all_values(call), axis=call.number("axis")),
    "RANGE": _range,
    "RANK": lambda call, _: np.array(len(call.shape(0))),
    "SHAPE": lambda call, _: _sizes(call.shape(0)),
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
    "TILE": lambda call, _: np.tile(call.some(0), call.integers(1)),
    "TRANSPOSE": lambda call, _: call.some(0).transpose(call.integers(1)),
    "UNPACK": _unpack,
    "ZEROS_LIKE": lambda _, shapes: np.zeros(shapes[0], np.int64),
    **dict.fromkeys(("EXPAND_DIMS", "RESHAPE", "SQUEEZE"), _as_shaped),
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
    **dict.fromkeys(("SPLIT", "SPLIT_V"), _split),
    **dict.fromkeys(_NUMBERS, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "UNSORTED_SEGMENT_PROD": _segments,
}
