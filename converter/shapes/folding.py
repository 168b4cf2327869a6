"""Folding of small tensors that shapes depend on: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Integers and booleans are computed exactly as the kernels do; floats and quantized tensors are not folded. A value is
known whole or not at all; nothing large is computed.
"""

from collections.abc import Callable, Sequence
from operator import add
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np

from edge_opt.ir import DType, Operator, Tensor
from edge_opt.shapes.arranging import Index, strided_indices
from edge_opt.shapes.dimension import OPEN, Shape, product
from edge_opt.shapes.rules import Array, Call, Results, UnknownError

_KINDS: Final = "iub"  # numpy's kinds that are folded: integers and booleans
_MOST_ELEMENTS: Final = 1024
# For shorter types there are kernels of quantized tensors only: without a scale, MUL gives 0, ADD ends the process.
_COMPUTED: Final = frozenset({DType.BOOL, DType.INT32, DType.INT64})

NUMBERS: Final[dict[str, Callable[..., Any]]] = {
    "ABS": np.abs,
    "ADD": np.add,
    "EQUAL": np.equal,
    "FLOOR_DIV": np.floor_divide,
    "FLOOR_MOD": np.remainder,
    "GREATER": np.greater,
    "GREATER_EQUAL": np.greater_equal,
    "LESS": np.less,
    "LESS_EQUAL": np.less_equal,
    "LOGICAL_AND": np.logical_and,
    "LOGICAL_NOT": np.logical_not,
    "LOGICAL_OR": np.logical_or,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "MUL": np.multiply,
    "NEG": np.negative,
    "NOT_EQUAL": np.not_equal,
    "SUB": np.subtract,
}
"""Elementwise operators that are one numpy function each."""

# Computes the result, or a list of results for operators that may have several, of the given shapes.
Folder: TypeAlias = Callable[[Call, Sequence[Shape]], Array | list[Array]]


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """The known values of the operator's results, as in `Fact`; `shapes` are the inferred ones.

    Only unquantized integers and booleans are folded, except that SHAPE takes any first operand.
    """
    unknown = [None] * len(shapes)
    folder = FOLDERS.get(call.op.name)
    if folder is None or not _has_foldable_types(call.op):
        return unknown
    small = [shape for shape in shapes if _is_small(shape)]
    if len(small) < len(shapes):
        return unknown
    try:
        found = folder(call, small)
    except (UnknownError, ZeroDivisionError):
        return unknown
    values = found if isinstance(found, list) else [found]
    return list(map(_stored, values, small, call.op.outputs))


def _has_foldable_types(op: Operator) -> bool:
    """True if the results are whole numbers, and neither they nor the operands behind the first are quantized."""
    if any(tensor and tensor.is_quantized for tensor in (*op.inputs[1:], *op.outputs)):
        return False
    types = [tensor.dtype.numpy for tensor in op.outputs]
    return all(kind is not None and kind.kind in _KINDS for kind in types)


def _is_small(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and OPEN not in shape and product(*shape) <= _MOST_ELEMENTS


def _stored(value: Array, shape: Shape, tensor: Tensor) -> Array | None:
    """Cast a value to its tensor's type; None if an element is out of range."""
    assert value.shape == shape, f"'{tensor.name}' is folded to {value.shape}: expected {shape}"
    target = tensor.dtype.numpy
    assert target is not None
    if target.kind != "b" and value.size:
        limits = np.iinfo(target.name)
        if value.min() < limits.min or value.max() > limits.max:
            return None
    return value.astype(target)


def _whole(call: Call, index: int) -> Array:
    """The value of an input, as Python's integers, which do not overflow."""
    value = call.value(index)
    if value.dtype.kind not in _KINDS:
        raise UnknownError
    return value.astype(object)


def _all_values(call: Call) -> list[Array]:
    return [_whole(call, index) for index in range(len(call.inputs))]


def _elementwise(call: Call, _: Sequence[Shape]) -> Array:
    if call.op.name in ("ADD", "SUB", "MUL") and call.option("fused_activation_function"):
        raise UnknownError
    if any(tensor.dtype not in _COMPUTED for tensor in call.op.given):
        raise UnknownError
    return np.asarray(NUMBERS[call.op.name](*_all_values(call)), object)


def _select(call: Call, shapes: Sequence[Shape]) -> Array:
    """SELECT applies a 1-D condition to whole rows, unlike numpy's broadcasting."""
    condition, *choices = _all_values(call)
    if call.op.name == "SELECT" and condition.ndim == 1:
        others = (1,) * (len(shapes[0]) - 1)
        condition = condition.reshape(-1, *others)
    return np.where(condition.astype(bool), *choices)


def _join(call: Call, _: Sequence[Shape]) -> Array:
    """PACK and CONCATENATION, which packs scalars."""
    values = _all_values(call)
    is_stacked = call.op.name == "PACK" or not values[0].ndim
    join = np.stack if is_stacked else np.concatenate
    return join(values, axis=call.option("axis"))


def _unpack(call: Call, shapes: Sequence[Shape]) -> list[Array]:
    value = _whole(call, 0)
    axis = call.option("axis")
    return [value.take([index], axis).reshape(shape) for index, shape in enumerate(shapes)]


def _cut(call: Call, shapes: Sequence[Shape]) -> Array:
    """SLICE and STRIDED_SLICE. Every bound must be known, even one that a mask overrides."""
    value = _whole(call, 0)
    begins = call.integers(1)
    if call.op.name == "STRIDED_SLICE":
        call.integers(2)
        call.integers(3)
        indices = strided_indices(call)
    else:
        ends = map(add, begins, shapes[0])
        indices = list[Index](map(slice, begins, ends))
    return np.array(value[tuple(indices)], value.dtype).reshape(shapes[0])


def _gather(call: Call, shapes: Sequence[Shape]) -> Array:
    value = _whole(call, 0)
    indices = call.integers(1)
    axis = call.option("axis")
    size = value.shape[axis]
    is_inside = all(0 <= index < size for index in indices)
    if not is_inside or call.option("batch_dims"):
        raise UnknownError
    return value.take(np.array(indices, int), axis).reshape(shapes[0])


def _range(call: Call, shapes: Sequence[Shape]) -> Array:
    start, _, delta = _all_values(call)
    return np.asarray(start + delta * np.arange(*shapes[0]), object)


def _reduce(call: Call, shapes: Sequence[Shape]) -> Array:
    value = _whole(call, 0)
    axes = call.integers(1)
    positive = tuple({axis % value.ndim for axis in axes}) if value.ndim else ()
    result = np.multiply.reduce(value, axis=positive)
    return np.asarray(result, object).reshape(shapes[0])


def _segments(call: Call, shapes: Sequence[Shape]) -> Array:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value = _whole(call, 0)
    ids = call.value(1)
    count = shapes[0][0]
    if ids.ndim != 1 or not count:
        raise UnknownError
    products = [np.multiply.reduce(value[ids == segment]) for segment in range(count)]
    return np.array(products, object).reshape(shapes[0])


def _shape(call: Call, _: Sequence[Shape]) -> Array:
    if OPEN in call.shape(0):
        raise UnknownError
    return np.array(call.shape(0), object)


def _fill(call: Call, shapes: Sequence[Shape]) -> Array:
    return np.broadcast_to(_whole(call, 1), shapes[0])


def _reshape(call: Call, shapes: Sequence[Shape]) -> Array:
    return _whole(call, 0).reshape(shapes[0])


FOLDERS: dict[str, Folder] = {
    "CAST": _reshape,
    "CONCATENATION": _join,
    "EXPAND_DIMS": _reshape,
    "FILL": _fill,
    "GATHER": _gather,
    "PACK": _join,
    "RANGE": _range,
    "REDUCE_PROD": _reduce,
    "RESHAPE": _reshape,
    "SELECT": _select,
    "SELECT_V2": _select,
    "SHAPE": _shape,
    "SLICE": _cut,
    "SQUEEZE": _reshape,
    "STRIDED_SLICE": _cut,
    "UNPACK": _unpack,
    "UNSORTED_SEGMENT_PROD": _segments,
    **dict.fromkeys(NUMBERS, _elementwise),
}
