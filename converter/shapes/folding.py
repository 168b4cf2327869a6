"""Values of small tensors, as far as shapes need them: SHAPE -> STRIDED_SLICE -> PACK -> RESHAPE chains.

Elements may stay unknown (None) or be dynamic dimensions (`Dim`); nothing large is ever computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.shapes import arithmetic
from edge_opt.shapes.control_flow import composite_facts
from edge_opt.shapes.dimension import Dim, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_opt.shapes.call import Array, Call, Results
    from edge_opt.shapes.dimension import Shape

    Folder: TypeAlias = Callable[[Call, Results], Sequence[Array | None] | None]

_MOST_ELEMENTS = 1024
_MAY_ACTIVATE = frozenset({"ADD", "SUB", "MUL", "DIV"})
_ENTERED = frozenset({"STABLEHLO_COMPOSITE", "CALL"})


def fold(call: Call, shapes: Results) -> Sequence[Array | None]:
    """Compute what is known of the operator's results; `shapes` are the derived ones.

    Returns:
        One value for each result: an array of its type where all is known, an object array with None or `Dim` in
        the place of unknown elements, or None.
    """
    if call.name in _ENTERED:
        facts = composite_facts(call)
        return [None] * len(shapes) if facts is None else [fact.value for fact in facts]
    folder = _FOLDERS.get(call.name)
    if folder is None or not all(_is_small(shape) for shape in shapes):
        return [None] * len(shapes)
    values = folder(call, shapes)
    if values is None:
        return [None] * len(shapes)
    outputs = call.op.outputs
    return [_settle(*triple) for triple in zip(values, shapes, (t.dtype for t in outputs), strict=True)]


def _is_small(shape: Shape | None) -> bool:
    return shape is not None and 0 <= element_count(shape) <= _MOST_ELEMENTS


def _settle(value: Array | None, shape: Shape | None, dtype: int) -> Array | None:
    """Give the value its tensor's type where all of it is known; drop it where nothing is, or it does not fit."""
    target = DType(dtype).numpy
    if value is None or target is None or value.shape != shape:
        return None
    if value.dtype != object:
        with np.errstate(over="ignore"):
            return value.astype(target, copy=False) if _fits(value, target) else None
    elements = value.ravel().tolist()
    if all(element is None for element in elements):
        return None
    if any(element is None or isinstance(element, Dim) for element in elements):
        return value
    known = np.array(elements, np.int64).reshape(shape)
    return known.astype(target) if _fits(known, target) else None


def _fits(value: Array, target: np.dtype[Any]) -> bool:
    if value.dtype.kind == "c" and target.kind != "c":
        return False
    if value.dtype == target or value.dtype.kind == "b" or target.kind in "bfc" or not value.size:
        return True
    limits = np.iinfo(target)
    with np.errstate(invalid="ignore"):
        return bool((value >= limits.min).all() and (value <= limits.max).all())


def _shape(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    shape = call.shapes[0]
    if shape is None:
        return None
    elements = [dim if dim >= 0 or isinstance(dim, Dim) else None for dim in shape]
    return [np.array([*elements, None], object)[:-1]]


def _rank(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    return None if call.shapes[0] is None else [np.array(len(call.shapes[0]), np.int32)]


def _as_shaped(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, shape = call.known(0), shapes[0]
    return None if value is None or shape is None else [value.reshape(shape)]


def _cast(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    value = call.known(0)
    if value is None or (value.dtype == object and DType(call.op.outputs[0].dtype).is_float):
        return None
    return [np.trunc(value) if value.dtype.kind == "f" else value]


def _transpose(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    value, axes = call.known(0), call.integers(1)
    return None if value is None or axes is None else [value.transpose(axes)]


def _all_known(call: Call, first: int = 0) -> list[Array] | None:
    """All inputs from `first` on; an unknown one as an array of unknown elements, if any is known at all."""
    values = [call.known(index) for index in range(first, len(call.shapes))]
    if all(value is None for value in values):
        return None
    filled = []
    for value, shape in zip(values, call.shapes[first:], strict=True):
        if value is None and not _is_small(shape):
            return None
        filled.append(np.full(shape or (), None, object) if value is None else value)
    return filled


def _concatenate(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    values, shape = _all_known(call), shapes[0]
    if values is None or shape is None:
        return None
    if all(value.ndim == 0 for value in values):
        return [np.stack(values)]
    return [np.concatenate(values, axis=call.number("axis"))]


def _pack(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    values = _all_known(call)
    return None if values is None else [np.stack(values, axis=call.number("axis"))]


def _unpack(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, axis = call.known(0), call.number("axis")
    return None if value is None else [value.take(index, axis) for index in range(len(shapes))]


def _split(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    axes, value = (
        (call.integers(2), call.known(0)) if call.name == "SPLIT_V" else (call.integers(0), call.known(1))
    )
    if value is None or axes is None:
        return None
    sizes = [0 if shape is None else shape[axes[0]] for shape in shapes]
    return np.split(value, np.cumsum(sizes)[:-1], axis=axes[0])


def _slice(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, begin, shape = call.known(0), call.integers(1), shapes[0]
    if value is None or begin is None or shape is None:
        return None
    return [value[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]]


def _strided_slice(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    value = call.known(0)
    bounds = [call.integers(index) for index in (1, 2, 3)]
    if value is None or any(bound is None for bound in bounds):
        return None
    triples = zip(*(bound for bound in bounds if bound is not None), strict=True)
    index = tuple(_index(call, place, *triple) for place, triple in enumerate(triples))
    return [np.asarray(value[index], value.dtype)]


def _index(call: Call, place: int, begin: int, end: int, stride: int) -> Any:
    def masked(name: str) -> bool:
        return bool(call.number(f"{name}_mask") >> place & 1)

    if masked("ellipsis"):
        return Ellipsis
    if masked("new_axis"):
        return None
    if masked("shrink_axis"):
        return 0 if masked("begin") else begin
    end = begin + end if call.flag("offset") else end
    return slice(None if masked("begin") else begin, None if masked("end") else end, stride)


def _gather(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    value, indices, axis = call.known(0), call.value(1), call.number("axis")
    if value is None or indices is None or call.number("batch_dims"):
        return None
    size = value.shape[axis]
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        return None
    return [np.asarray(value.take(indices, axis), value.dtype)]


def _tile(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    value, times = call.known(0), call.integers(1)
    return None if value is None or times is None else [np.tile(value, times)]


def _broadcast_to(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, shape = call.known(0), shapes[0]
    return None if value is None or shape is None else [np.broadcast_to(value, shape)]


def _fill(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, shape = call.known(1), shapes[0]
    return None if value is None or shape is None else [np.broadcast_to(value, shape)]


def _zeros_like(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del call
    return None if shapes[0] is None else [np.zeros(shapes[0], np.int64)]


def _range(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    start, delta, shape = call.value(0), call.value(2), shapes[0]
    if start is None or delta is None or shape is None:
        return None
    return [start + delta * np.arange(shape[0], dtype=start.dtype)]


def _broadcast_args(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    left, right = call.known(0), call.known(1)
    if left is None or right is None or shapes[0] is None:
        return None
    count = shapes[0][0]
    padded = [np.array([1] * (count - value.size) + value.tolist(), object) for value in (left, right)]
    return [np.frompyfunc(arithmetic.broadcast_size, 2, 1)(*padded)]


def _elementwise(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    del shapes
    if call.name in _MAY_ACTIVATE and call.number("fused_activation_function"):
        return None
    values = _all_known(call)
    return None if values is None else [arithmetic.elementwise(call.name, values)]


def _reduce(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    value, axes, shape = call.known(0), call.integers(1), shapes[0]
    if value is None or axes is None or shape is None:
        return None
    folded = {axis % value.ndim for axis in axes} if value.ndim else set()
    kept = [axis for axis in range(value.ndim) if axis not in folded]
    rows = value.transpose([*kept, *sorted(folded)]).reshape(*(value.shape[axis] for axis in kept), -1)
    return [arithmetic.reduce_rows(call.name, rows).reshape(shape)]


_SEGMENTS = {
    "UNSORTED_SEGMENT_MAX": "REDUCE_MAX",
    "UNSORTED_SEGMENT_MIN": "REDUCE_MIN",
    "UNSORTED_SEGMENT_PROD": "REDUCE_PROD",
    "UNSORTED_SEGMENT_SUM": "SUM",
}


def _segments(call: Call, shapes: Results) -> Sequence[Array | None] | None:
    """Dynamic exports multiply sizes this way: one product for each group of axes that a RESHAPE merges."""
    value, ids, shape = call.known(0), call.value(1), shapes[0]
    if value is None or ids is None or shape is None or ids.ndim != 1:
        return None
    rows = [value[ids == segment] for segment in range(shape[0])]
    folded = [arithmetic.reduce_rows(_SEGMENTS[call.name], np.moveaxis(row, 0, -1)) for row in rows]
    return [np.stack(folded)] if folded else None


_FOLDERS: dict[str, Folder] = {
    "BROADCAST_ARGS": _broadcast_args,
    "BROADCAST_TO": _broadcast_to,
    "CAST": _cast,
    "CONCATENATION": _concatenate,
    "EXPAND_DIMS": _as_shaped,
    "FILL": _fill,
    "GATHER": _gather,
    "PACK": _pack,
    "RANGE": _range,
    "RANK": _rank,
    "RESHAPE": _as_shaped,
    "SHAPE": _shape,
    "SLICE": _slice,
    "SPLIT": _split,
    "SPLIT_V": _split,
    "SQUEEZE": _as_shaped,
    "STRIDED_SLICE": _strided_slice,
    "TILE": _tile,
    "TRANSPOSE": _transpose,
    "UNPACK": _unpack,
    "ZEROS_LIKE": _zeros_like,
    **dict.fromkeys(arithmetic.ELEMENTWISE, _elementwise),
    **dict.fromkeys(arithmetic.REDUCTIONS, _reduce),
    **dict.fromkeys(_SEGMENTS, _segments),
}
