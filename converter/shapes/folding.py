"""Folding of small tensors that shapes depend on: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Integers and booleans are computed exactly as the kernels do; floats and quantized tensors are not folded. Elements may
be unknown (None); nothing large is computed.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np

from edge_opt.ir import Tensor
from edge_opt.shapes.arranging import Index, strided_indices
from edge_opt.shapes.dimension import OPEN, Shape, product
from edge_opt.shapes.rules import Array, Call, Element, Results, UnknownError

_KINDS: Final = "iubO"
"""Kinds of numpy arrays that are folded: integers, booleans, and objects for either with unknown elements."""

_MOST_ELEMENTS: Final = 1024

_NUMBERS: Final[dict[str, Callable[..., Any]]] = {
    "ABS": abs,
    "ADD": operator.add,
    "DIV": lambda a, b: a // b if (a >= 0) == (b >= 0) else -(-a // b),  # C's division: towards zero
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

Folder: TypeAlias = Callable[[Call, Sequence[Shape]], Array | list[Array]]
"""Compute the result, or a list of results for operators that may have several, of the given shapes."""


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """The known values of the operator's results, as in `Fact`; `shapes` are the inferred ones.

    Only unquantized integers and booleans are folded, except that SHAPE takes any first operand.
    """
    folder, small = FOLDERS.get(call.op.name), [shape for shape in shapes if _is_small(shape)]
    types = [tensor.dtype.numpy for tensor in call.op.outputs]
    whole = all(kind is not None and kind.kind in _KINDS for kind in types)
    coded = any(tensor and tensor.is_quantized for tensor in (*call.op.inputs[1:], *call.op.outputs))
    unknown = [None] * len(shapes)
    if folder is None or len(small) < len(shapes) or not whole or coded:
        return unknown
    try:
        found = folder(call, small)
    except UnknownError:
        return unknown
    values = found if isinstance(found, list) else [found]
    return [_settle(*triple) for triple in zip(values, small, call.op.outputs, strict=True)]


def _is_small(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and OPEN not in shape and product(*shape) <= _MOST_ELEMENTS


def _settle(value: Array, shape: Shape, tensor: Tensor) -> Array | None:
    """Cast a fully known value to its tensor's type; None if no element is known, or one is out of range."""
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
    """The values of all inputs, unknown ones as arrays of None; UnknownError if none is known."""
    values = [fact.value for fact in call.inputs]
    if all(value is None for value in values) or not all(_is_small(fact.shape) for fact in call.inputs):
        raise UnknownError
    if any(value is not None and value.dtype.kind not in _KINDS for value in values):
        raise UnknownError
    pairs = zip(values, call.all_shapes(), strict=True)
    return [np.full(shape, None, object) if value is None else value for value, shape in pairs]


def _computed(function: Callable[..., Element], *values: Array) -> Array:
    """Apply a function of Python integers (None: unknown) to the elements of arrays that broadcast."""
    objects = [value.astype(object) for value in values]
    # For arrays without axes numpy returns a bare element.
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
    """SELECT applies a 1-D condition to whole rows, unlike numpy's broadcasting."""

    def choose(condition: Element, a: Element, b: Element) -> Element:
        if condition is None:
            return a if a == b else None
        return a if condition else b

    condition, *choices = _all_values(call)
    if call.op.name == "SELECT" and condition.ndim == 1:
        condition = condition.reshape(-1, *(1 for _ in shapes[0][1:]))
    return _computed(choose, condition, *choices)


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


def _cut(call: Call, shapes: Sequence[Shape]) -> Array:
    """SLICE and STRIDED_SLICE. Every bound must be known, even one that a mask overrides."""
    value, begins = call.some(0), call.integers(1)
    indices: list[Index] = [slice(at, at + size) for at, size in zip(begins, shapes[0], strict=False)]
    if call.op.name == "STRIDED_SLICE":
        call.integers(2)
        call.integers(3)
        indices = strided_indices(call)
    return np.array(value[tuple(indices)], value.dtype).reshape(shapes[0])


def _gather(call: Call, shapes: Sequence[Shape]) -> Array:
    value, indices, axis = call.some(0), call.integers(1), call.number("axis")
    outside = indices and not 0 <= min(indices) <= max(indices) < value.shape[axis]
    if outside or call.number("batch_dims"):
        raise UnknownError
    return value.take(np.array(indices, int), axis).reshape(shapes[0])


def _range(call: Call, shapes: Sequence[Shape]) -> Array:
    start, _, delta = (value.astype(object) for value in _all_values(call))
    return np.asarray(start + delta * np.arange(*shapes[0]), object)


_multiplied = np.frompyfunc(partial(_compute, "MUL"), 2, 1, identity=1)


def _reduce(call: Call, shapes: Sequence[Shape]) -> Array:
    value, axes = call.some(0).astype(object), call.integers(1)
    positive = tuple({axis % value.ndim for axis in axes if value.ndim})
    return np.asarray(_multiplied.reduce(value, axis=positive), object).reshape(shapes[0])


def _segments(call: Call, shapes: Sequence[Shape]) -> Array:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value, ids, count = call.some(0).astype(object), call.known(1), shapes[0][0]
    if ids is None or ids.ndim != 1 or not count:
        raise UnknownError
    products = [_multiplied.reduce(value[ids == segment]) for segment in range(count)]
    return np.array(products, object).reshape(shapes[0])


FOLDERS: dict[str, Folder] = {
    "BROADCAST_TO": lambda call, shapes: np.broadcast_to(call.some(0), shapes[0]),
    "CAST": lambda call, _: call.some(0),
    "CONCATENATION": _concatenate,
    "FILL": lambda call, shapes: np.broadcast_to(call.some(1), shapes[0]),
    "GATHER": _gather,
    "PACK": lambda call, _: np.stack(_all_values(call), axis=call.number("axis")),
    "RANGE": _range,
    "SHAPE": lambda call, _: np.array([None if size < 0 else size for size in call.shape(0)], object),
    "TILE": lambda call, _: np.tile(call.some(0), call.integers(1)),
    "TRANSPOSE": lambda call, _: call.some(0).transpose(call.integers(1)),
    "UNPACK": _unpack,
    **dict.fromkeys(
        ("EXPAND_DIMS", "RESHAPE", "SQUEEZE"), lambda call, shapes: call.some(0).reshape(shapes[0])
    ),
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), _cut),
    **dict.fromkeys(("SPLIT", "SPLIT_V"), _split),
    **dict.fromkeys(_NUMBERS, _elementwise),
    "REDUCE_PROD": _reduce,
    "UNSORTED_SEGMENT_PROD": _segments,
}
