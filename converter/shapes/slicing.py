"""Rules of operators that take a part of a tensor, or put one in: slices, gathers, scatters, lookups, updates."""

from collections.abc import Sequence
from typing import NamedTuple

from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    Shape,
    ShapeError,
    as_dimension,
    is_negative,
    is_number,
    may_be_alike,
    may_be_equal,
    shape_text,
)
from edge_opt.shapes.rules import rule

_MOST_STRIDED_INDICES = 31


@rule("SLICE", "TFLite, slice.cc, CalculateOutputShapeVector")
def slice_(call: Call) -> Results:
    """The result starts at `begin` (input 1) and has the sizes of input 2; -1 stands for all that is left."""
    shape, begin, size = call.shape(0), call.vector(1), call.vector(2)
    for index, known in ((1, begin), (2, size)):
        if len(known) != len(shape):
            raise ShapeError(
                f"{call.label(index)} has {len(known)} numbers: expected one per axis of {call.described(0)}"
            )
    return [tuple(_slice_size(call, axis, *pair) for axis, pair in enumerate(zip(begin, size, strict=True)))]


def _slice_size(call: Call, axis: int, begin: Element, size: Element) -> int:
    whole = call.shape(0)[axis]
    if is_negative(begin):
        raise ShapeError(
            f"the slice of {call.described(0)} begins at {begin} in axis {axis}: expected 0 or more"
        )
    if not is_number(size):
        return as_dimension(size)
    if size < DYNAMIC:
        raise ShapeError(
            f"the slice of {call.described(0)} has the size {size} in axis {axis}: expected -1 or more"
        )
    start = begin if is_number(begin) else None
    if whole >= 0 and (start or 0) + max(size, 0) > whole:
        raise ShapeError(
            f"the slice of {call.described(0)} leaves axis {axis}: it begins at {start or 0} and takes "
            f"{'the rest' if size < 0 else size}"
        )
    if size >= 0:
        return size
    if start == 0:
        return whole
    return DYNAMIC if start is None or whole < 0 else whole - start


class _Window(NamedTuple):
    """One entry of a strided slice: where it begins and ends, None for an unknown or masked bound."""

    begin: Element
    end: Element
    stride: Element
    open_begin: bool
    open_end: bool
    shrink: bool


@rule(
    "STRIDED_SLICE",
    "TFLite, strided_slice.cc, BuildStridedSliceParams and ResizeOutputTensor; strided_slice_logic.h",
)
def strided_slice(call: Call) -> Results:
    """Numpy's `x[begin:end:stride, ...]`: inputs 1 to 3 give the bounds, masks open them or change the axes.

    `ellipsis_mask` covers the axes that have no bounds, `new_axis_mask` adds an axis of size 1,
    `shrink_axis_mask` takes the single index `begin` and drops the axis. With `offset`, the end counts from
    the begin.
    """
    shape, bounds = call.shape(0), [call.vector(index) for index in (1, 2, 3)]
    count = len(bounds[0])
    if count > _MOST_STRIDED_INDICES or any(len(known) != count for known in bounds):
        raise ShapeError(f"its begin, end and strides need one length, at most {_MOST_STRIDED_INDICES}")
    windows = [_window(call, index, *triple) for index, triple in enumerate(zip(*bounds, strict=True))]
    return [_walk_axes(call, shape, windows)]


def _masked(call: Call, name: str, index: int) -> bool:
    return bool(call.number(name) >> index & 1)


def _window(call: Call, index: int, begin: Element, end: Element, stride: Element) -> _Window:
    if stride == 0:
        raise ShapeError(f"the stride at index {index} is 0")
    masks = (_masked(call, name, index) for name in ("begin_mask", "end_mask", "shrink_axis_mask"))
    return _Window(begin, end, stride, *masks)


def _walk_axes(call: Call, shape: Shape, windows: Sequence[_Window]) -> Shape:
    """Go through the bounds and the input's axes side by side, as the masks pair them up."""
    ellipsis = [index for index in range(len(windows)) if _masked(call, "ellipsis_mask", index)]
    if len(ellipsis) > 1:
        raise ShapeError(f"its ellipsis_mask has {len(ellipsis)} bits: expected at most one")
    added = [i for i in range(len(windows)) if _masked(call, "new_axis_mask", i) and i not in ellipsis]
    covered = len(shape) - (len(windows) - len(added) - len(ellipsis))
    if covered < len(ellipsis):
        raise ShapeError(
            f"{call.described(0)} has fewer axes than the slice has bounds"
            + (" and an ellipsis, which the runtime gives one axis at least" if ellipsis else "")
        )
    result: list[int] = []
    axis = 0
    for index, window in enumerate(windows):
        if index in ellipsis:
            result.extend(shape[axis : axis + covered])
            axis += covered
        elif index in added:
            result.append(1)
        else:
            if window.shrink:
                _check_index(call, axis, window)
            else:
                result.append(_strided_size(call, axis, window))
            axis += 1
    return (*result, *shape[axis:])


def _check_index(call: Call, axis: int, window: _Window) -> None:
    """A shrunk axis takes one index, forwards: with a negative stride the runtime reads what was never written."""
    size, index = call.shape(0)[axis], 0 if window.open_begin else window.begin
    if is_negative(window.stride):
        raise ShapeError(f"axis {axis} of {call.described(0)} is shrunk by a stride of {window.stride}")
    if is_number(index) and size >= 0 and not -size <= index < size:
        raise ShapeError(f"index {index} lies outside axis {axis} of {call.described(0)}")


def _strided_size(call: Call, axis: int, window: _Window) -> int:
    size = call.shape(0)[axis]
    if call.flag("offset"):
        return _offset_size(call, axis, window)
    if size < 0:
        return DYNAMIC
    begin, end = (None if window.open_begin else window.begin), (None if window.open_end else window.end)
    known = (window.open_begin or is_number(begin)) and (window.open_end or is_number(end))
    if not known or not is_number(window.stride):
        return DYNAMIC
    return len(range(*slice(begin, end, window.stride).indices(size)))


def _offset_size(call: Call, axis: int, window: _Window) -> int:
    """The end counts from the begin, and is not cut to the axis: it must lie in it."""
    size, begin, length, stride = call.shape(0)[axis], window.begin, window.end, window.stride
    if not is_number(length) or not is_number(stride):
        return as_dimension(length) if stride == 1 else DYNAMIC
    if is_number(begin) and size >= 0:
        start = begin + size if begin < 0 else begin
        if not 0 <= start <= size or not -1 <= start + length <= size:
            raise ShapeError(
                f"the slice from {begin} on by {length} leaves axis {axis} of {call.described(0)}"
            )
    return len(range(0, length, stride))


@rule("GATHER", "TFLite, gather.cc, Prepare")
def gather(call: Call) -> Results:
    """The axis `axis` of input 0 is replaced by the axes of the indices, less the `batch_dims` leading ones."""
    shape, indices, axis = call.shape(0), call.shape(1), call.axis_of(0)
    if call.is_known(1):
        call.integers(1)
    batch = call.number("batch_dims")
    batch = batch + len(indices) if batch < 0 else batch
    if not 0 <= batch <= min(axis, len(indices)):
        raise ShapeError(
            f"its batch_dims {batch} must lie between 0, its axis {axis} and the rank of {call.described(1)}"
        )
    for index in range(batch):
        if not may_be_equal(shape[index], indices[index]):
            raise ShapeError(f"{call.described(0)} and {call.described(1)} differ in batch axis {index}")
    return [(*shape[:axis], *indices[batch:], *shape[axis + 1 :])]


@rule("GATHER_ND", "TFLite, gather_nd.cc, Prepare")
def gather_nd(call: Call) -> Results:
    """Each row of the last axis of the indices picks a slice of input 0."""
    shape, indices = (call.shape(index, least=1) for index in (0, 1))
    if indices[-1] < 0:
        raise RefusedError("the length of an index is not known", call.op)
    if indices[-1] > len(shape):
        raise ShapeError(
            f"the rows of {call.described(1)} have more numbers than {call.described(0)} has axes"
        )
    return [(*indices[:-1], *shape[indices[-1] :])]


@rule("SCATTER_ND", "TFLite, scatter_nd.cc, CheckShapes and ResizeOutputTensor")
def scatter_nd(call: Call) -> Results:
    """The result has the shape that input 2 spells out; each row of the indices places a slice."""
    indices, updates, result = call.shape(0, least=1), call.shape(1, least=1), call.sizes(2)
    outer, depth = indices[:-1], indices[-1]
    if depth < 0:
        return [result]
    expected = (*outer, *result[depth:])
    if depth > len(result) or not may_be_alike(updates, expected):
        raise ShapeError(
            f"the updates {call.described(1)} must have the shape {shape_text(expected)}: a slice of "
            f"{shape_text(result)} for each row of {call.described(0)}"
        )
    return [result]


@rule("DYNAMIC_UPDATE_SLICE", "TFLite, dynamic_update_slice.cc, Prepare")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) fits into it, input 2 says where."""
    shape, update, start = call.shape(0), call.shape(1), call.shape(2, rank=1)
    if not may_be_equal(start[0], len(shape)):
        raise ShapeError(
            f"{call.described(2)} must have {len(shape)} numbers, one for each axis of {call.described(0)}"
        )
    if len(update) != len(shape):
        raise ShapeError(f"the update {call.described(1)} must have the rank of {call.described(0)}")
    for axis, (size, part) in enumerate(zip(shape, update, strict=True)):
        if 0 <= size < part:
            raise ShapeError(
                f"the update {call.described(1)} is longer than {call.described(0)} in axis {axis}"
            )
    return [shape]


@rule("EMBEDDING_LOOKUP", "TFLite, embedding_lookup.cc, Prepare")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1)."""
    lookup, table = call.shape(0, rank=1), call.shape(1, least=2)
    return [(lookup[0], *table[1:])]
