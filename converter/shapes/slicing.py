"""Rules of operators that take a part of a tensor, or put one in: slices, gathers, scatters, lookups, updates."""

from collections.abc import Sequence
from typing import NamedTuple

from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.arranging import check_one_per_axis
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    Shape,
    ShapeError,
    may_be_alike,
    may_be_equal,
    shape_text,
)
from edge_opt.shapes.rules import Call, Results, rule

_MOST_STRIDED_INDICES = 31


@rule("SLICE", "TFLite, slice.cc, CalculateOutputShapeVector")
def slice_(call: Call) -> Results:
    """The result starts at `begin` (input 1) and has the sizes of input 2; -1 stands for all that is left."""
    bounds = [call.elements(index, rank=1) for index in (1, 2)]
    check_one_per_axis(call, 1)
    check_one_per_axis(call, 2)
    return [tuple(_slice_size(call, axis, *pair) for axis, pair in enumerate(zip(*bounds, strict=True)))]


def _slice_size(call: Call, axis: int, begin: Element, size: Element) -> int:
    whole, text = call.shape(0)[axis], f"the slice of {call.text(0)}"
    if begin is not None and begin < 0:
        raise ShapeError(f"{text} begins at {begin} in axis {axis}: expected 0 or more")
    if size is None:
        return DYNAMIC
    if size < -1:
        raise ShapeError(f"{text} has the size {size} in axis {axis}: expected -1 or more")
    if whole >= 0 and (begin or 0) + max(size, 0) > whole:
        amount = "the rest" if size < 0 else size
        raise ShapeError(f"{text} leaves axis {axis}: it begins at {begin or 0} and takes {amount}")
    if size >= 0:
        return size
    return DYNAMIC if begin is None or whole < 0 else whole - begin


class _Window(NamedTuple):
    """One entry of a strided slice: where it begins and ends, and whether masks open these, or shrink the axis."""

    begin: Element
    end: Element
    stride: Element
    open_begin: bool
    open_end: bool
    shrink: bool


@rule("STRIDED_SLICE", "TFLite, strided_slice.cc, ResizeOutputTensor; strided_slice_logic.h")
def strided_slice(call: Call) -> Results:
    """Numpy's `x[begin:end:stride, ...]`: inputs 1 to 3 give the bounds, masks open them or change the axes.

    `ellipsis_mask` covers the axes that have no bounds, `new_axis_mask` adds an axis of size 1,
    `shrink_axis_mask` takes the single index `begin` and drops the axis. With `offset`, the end counts from
    the begin.
    """
    shape, bounds = call.shape(0), [call.elements(index, rank=1) for index in (1, 2, 3)]
    count = len(bounds[0])
    if count > _MOST_STRIDED_INDICES or any(len(numbers) != count for numbers in bounds):
        raise ShapeError(f"its begin, end and strides need one length, at most {_MOST_STRIDED_INDICES}")
    masks = [_masked(call, name, count) for name in ("begin", "end", "shrink_axis")]
    return [_walk_axes(call, shape, [_Window(*entry) for entry in zip(*bounds, *masks, strict=True)])]


def _masked(call: Call, name: str, count: int) -> list[bool]:
    mask = call.number(f"{name}_mask")
    return [bool(mask >> index & 1) for index in range(count)]


def _walk_axes(call: Call, shape: Shape, windows: Sequence[_Window]) -> Shape:
    """Go through the bounds and the input's axes side by side, as the masks pair them up."""
    ellipsis, new_axes = (_masked(call, name, len(windows)) for name in ("ellipsis", "new_axis"))
    if sum(ellipsis) > 1:
        raise ShapeError(f"its ellipsis_mask has {sum(ellipsis)} bits: expected at most one")
    covered = len(shape) - sum(not (gap or new) for gap, new in zip(ellipsis, new_axes, strict=True))
    if covered < sum(ellipsis):
        text = f"{call.text(0)} has fewer axes than the slice has bounds"
        raise ShapeError(f"{text} and an ellipsis, which takes one axis at least" if any(ellipsis) else text)
    result: list[int] = []
    axis = 0
    for index, window in enumerate(windows):
        if window.stride == 0:
            raise ShapeError(f"the stride at index {index} is 0")
        if ellipsis[index]:
            result.extend(shape[axis : axis + covered])
            axis += covered
        elif new_axes[index]:
            result.append(1)
        else:
            result.extend(_strided_sizes(call, axis, window))
            axis += 1
    return (*result, *shape[axis:])


def _strided_sizes(call: Call, axis: int, window: _Window) -> Sequence[int]:
    """The size of an axis that is cut; nothing of one that is shrunk."""
    size, stride = call.shape(0)[axis], window.stride
    begin, end = (None if window.open_begin else window.begin), (None if window.open_end else window.end)
    if window.shrink:
        index = 0 if window.open_begin else begin
        # With a negative stride the runtime reads what was never written.
        if stride is not None and stride < 0:
            raise ShapeError(f"axis {axis} of {call.text(0)} is shrunk by a stride of {stride}")
        if index is not None and size >= 0 and not -size <= index < size:
            raise ShapeError(f"index {index} lies outside axis {axis} of {call.text(0)}")
        return ()
    if call.number("offset"):
        return (_offset_size(call, axis, window),)
    known = (window.open_begin or begin is not None) and (window.open_end or end is not None)
    if size < 0 or not known or stride is None:
        return (DYNAMIC,)
    return (len(range(*slice(begin, end, stride).indices(size))),)


def _offset_size(call: Call, axis: int, window: _Window) -> int:
    """The end counts from the begin, and is not cut to the axis: it must lie in it."""
    size, begin, length, stride = call.shape(0)[axis], window.begin, window.end, window.stride
    if length is None or stride is None:
        return DYNAMIC
    if begin is not None and size >= 0:
        start = begin + size if begin < 0 else begin
        if not 0 <= start <= size or not -1 <= start + length <= size:
            raise ShapeError(f"the slice from {begin} on by {length} leaves axis {axis} of {call.text(0)}")
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
        text = f"its batch_dims {batch} must lie between 0, its axis {axis} and the rank of {call.text(1)}"
        raise ShapeError(text)
    if not may_be_alike(shape[:batch], indices[:batch]):
        raise ShapeError(f"{call.text(0)} and {call.text(1)} differ in their {batch} batch axes")
    return [(*shape[:axis], *indices[batch:], *shape[axis + 1 :])]


@rule("GATHER_ND", "TFLite, gather_nd.cc, Prepare")
def gather_nd(call: Call) -> Results:
    """Each row of the last axis of the indices picks a slice of input 0."""
    shape, (*rows, depth) = (call.shape(index, least=1) for index in (0, 1))
    if depth < 0:
        raise RefusedError("the length of an index is not known", call.op)
    if depth > len(shape):
        raise ShapeError(f"the rows of {call.text(1)} have more numbers than {call.text(0)} has axes")
    return [(*rows, *shape[depth:])]


@rule("SCATTER_ND", "TFLite, scatter_nd.cc, CheckShapes and ResizeOutputTensor")
def scatter_nd(call: Call) -> Results:
    """The result has the shape that input 2 spells out; each row of the indices places a slice."""
    (*rows, depth), updates = (call.shape(index, least=1) for index in (0, 1))
    result = call.sizes(2, rank=1)
    expected = (*rows, *result[depth:])
    if depth >= 0 and (depth > len(result) or not may_be_alike(updates, expected)):
        slices = f"a slice of {shape_text(result)} for each row of {call.text(0)}"
        raise ShapeError(f"the updates {call.text(1)} must have the shape {shape_text(expected)}: {slices}")
    return [result]


@rule("DYNAMIC_UPDATE_SLICE", "TFLite, dynamic_update_slice.cc, Prepare")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) fits into it, input 2 says where."""
    shape, update, start = call.shape(0), call.shape(1), call.shape(2, rank=1)
    if not may_be_equal(start[0], len(shape)):
        raise ShapeError(
            f"{call.text(2)} must have {len(shape)} numbers, one for each axis of {call.text(0)}"
        )
    if len(update) != len(shape):
        raise ShapeError(f"the update {call.text(1)} must have the rank of {call.text(0)}")
    if any(0 <= size < part for size, part in zip(shape, update, strict=True)):
        raise ShapeError(f"the update {call.text(1)} does not fit into {call.text(0)}")
    return [shape]


@rule("EMBEDDING_LOOKUP", "TFLite, embedding_lookup.cc, Prepare")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1)."""
    lookup, table = call.shape(0, rank=1), call.shape(1, least=2)
    return [(lookup[0], *table[1:])]


@rule("STABLEHLO_GATHER", "StableHLO specification, gather; TFLite, stablehlo_gather.cc, GetResultShape")
def stablehlo_gather(call: Call) -> Results:
    """The indices' axes, less the vector axis, with the slice's axes at `offset_dims`."""
    shape, indices = call.all_shapes()
    sizes = call.listed("slice_sizes", len(shape))
    collapsed, offsets = call.listed("collapsed_slice_dims"), call.listed("offset_dims")
    window = [size for axis, size in enumerate(sizes) if axis not in collapsed]
    if len(window) != len(offsets):
        text = f"its slice {sizes} less {collapsed} has {len(window)} axes"
        raise ShapeError(f"{text}: expected those of {offsets}")
    if any(0 <= whole < size for whole, size in zip(shape, sizes, strict=True)):
        raise ShapeError(f"the slice {shape_text(sizes)} does not fit into {call.text(0)}")
    vector = call.number("index_vector_dim")
    if not 0 <= vector <= len(indices):
        raise ShapeError(f"its index_vector_dim {vector} lies outside {call.text(1)}")
    batch = [dim for axis, dim in enumerate(indices) if axis != vector]
    rank = len(batch) + len(window)
    if any(not 0 <= axis < rank for axis in offsets) or len(set(offsets)) != len(offsets):
        raise ShapeError(f"its offset_dims {offsets} must name axes of the result, of rank {rank}")
    slices, places = iter(window), iter(batch)
    return [tuple(next(slices) if axis in offsets else next(places) for axis in range(rank))]


@rule("STABLEHLO_SCATTER", "StableHLO specification, scatter; TFLite, stablehlo_scatter.cc, Prepare")
def stablehlo_scatter(call: Call) -> Results:
    """The results have the shapes of the operands: the first inputs, before the indices and the updates."""
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count + 1:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count + 1} for {count} outputs")
    return list(call.shapes[:count])
