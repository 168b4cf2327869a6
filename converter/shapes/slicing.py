"""Rules of operators that take a part of a tensor, or put one in: slices, gathers, scatters, lookups, updates."""

from collections.abc import Iterator
from typing import NamedTuple

from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import OPEN, ShapeError, may_be_alike, may_be_equal, shape_text
from edge_opt.shapes.rules import Call, Element, Results, rule

_MOST_STRIDED_INDICES = 31


@rule("SLICE", "TFLite, slice.cc, CalculateOutputShapeVector")
def slice_(call: Call) -> Results:
    """The result starts at `begin` (input 1) and has the sizes of input 2; -1 stands for all that is left."""
    shape, begins, sizes = call.shape(0), call.elements(1, rank=1), call.elements(2, rank=1)
    call.expect(len(begins) == len(sizes) == len(shape), "a begin and a size for each axis")
    result = []
    for axis, (whole, begin, size) in enumerate(zip(shape, begins, sizes, strict=True)):
        first, least = begin or 0, -1 if size is None else size
        inside = first >= 0 and least >= -1 and (whole < 0 or first + max(least, 0) <= whole)
        call.expect(size is None or inside, f"a slice inside axis {axis}, not {size} from {begin} on")
        rest = OPEN if begin is None or whole < 0 else whole - begin
        result.append(OPEN if size is None else rest if size < 0 else size)
    return [tuple(result)]


class Cut(NamedTuple):
    """What a strided slice takes of one axis of its input, or of a new one."""

    size: int | None
    """The size in the result; None where the axis is dropped, -1 where unknown."""
    places: range | None
    """The indices that are taken; None where unknown."""
    is_new: bool = False


@rule("STRIDED_SLICE", "TFLite, strided_slice.cc, ResizeOutputTensor; strided_slice_logic.h")
def strided_slice(call: Call) -> Results:
    """Numpy's `x[begin:end:stride, ...]`: inputs 1 to 3 give the bounds, masks open them or change the axes.

    `ellipsis_mask` covers the axes that have no bounds, `new_axis_mask` adds an axis of size 1,
    `shrink_axis_mask` takes the single index `begin` and drops the axis. With `offset`, the end counts from
    the begin.
    """
    return [tuple(cut.size for cut in strided_cuts(call) if cut.size is not None)]


def strided_cuts(call: Call) -> Iterator[Cut]:
    """Go through the bounds and the input's axes side by side, as the masks pair them up."""
    shape, bounds = call.shape(0), [call.elements(index, rank=1) for index in (1, 2, 3)]
    count = len(bounds[0])
    if count > _MOST_STRIDED_INDICES or any(len(numbers) != count for numbers in bounds):
        raise ShapeError(f"its begin, end and strides need one length, at most {_MOST_STRIDED_INDICES}")
    gap, new = (call.number(f"{name}_mask") for name in ("ellipsis", "new_axis"))
    masked = gap or new or call.number("begin_mask") or call.number("end_mask")
    if call.number("offset") and (masked or count < len(shape)):
        raise RefusedError("with an offset, the runtime takes masks and missing bounds its own way", call.op)
    gaps = [bool(gap >> index & 1) for index in range(count)]
    news = [bool(new >> index & 1) and not gaps[index] for index in range(count)]
    covered = len(shape) - count + sum(news) + sum(gaps)
    call.expect(sum(gaps) <= 1 and covered >= sum(gaps), "one ellipsis at most, and an axis for each bound")
    axis = 0
    for index, entry in enumerate(zip(*bounds, strict=True)):
        call.expect(entry[2] != 0, f"a stride at index {index}")
        if news[index]:
            yield Cut(1, None, is_new=True)
        elif gaps[index]:
            yield from (_whole(size) for size in shape[axis : axis + covered])
            axis += covered
        else:
            yield _cut(call, axis, index, *entry)
            axis += 1
    yield from map(_whole, shape[axis:])


def _whole(size: int) -> Cut:
    return Cut(size, None if size < 0 else range(size))


def _cut(call: Call, axis: int, index: int, begin: Element, end: Element, stride: Element) -> Cut:
    """What the bounds at `index` take of an axis."""
    size = call.shape(0)[axis]
    open_begin, open_end, shrink = (
        bool(call.number(f"{name}_mask") >> index & 1) for name in ("begin", "end", "shrink_axis")
    )
    if shrink:
        place = 0 if open_begin else begin
        # With a negative stride the runtime reads what was never written.
        forward = stride is None or stride > 0
        inside = place is None or size < 0 or -size <= place < size
        call.expect(forward and inside, f"an index inside axis {axis}, not {place} by {stride}")
        places = None if place is None or size < 0 else range(place % size, place % size + 1)
        return Cut(None, places)
    if call.number("offset"):
        return Cut(_offset_size(call, axis, begin, end, stride), None)
    known = (open_begin or begin is not None) and (open_end or end is not None)
    if size < 0 or not known or stride is None:
        return Cut(OPEN, None)
    places = range(*slice(None if open_begin else begin, None if open_end else end, stride).indices(size))
    return Cut(len(places), places)


def _offset_size(call: Call, axis: int, begin: Element, length: Element, stride: Element) -> int:
    """The end counts from the begin, and is not cut to the axis: it must lie in it."""
    size = call.shape(0)[axis]
    if length is None or stride is None:
        return OPEN
    if begin is not None and size >= 0:
        start = begin + size if begin < 0 else begin
        inside = 0 <= start <= size and -1 <= start + length <= size
        call.expect(inside, f"a slice inside axis {axis}, not {length} from {begin} on")
    return len(range(0, length, stride))


@rule("GATHER", "TFLite, gather.cc, Prepare")
def gather(call: Call) -> Results:
    """The axis `axis` of input 0 is replaced by the axes of the indices, less the `batch_dims` leading ones."""
    shape, indices, axis, batch = call.shape(0), call.shape(1), call.axis_of(0), call.number("batch_dims")
    batch = batch + len(indices) if batch < 0 else batch
    fits = 0 <= batch <= min(axis, len(indices)) and may_be_alike(shape[:batch], indices[:batch])
    call.expect(fits, f"equal batch axes in front of axis {axis}, {batch} by its batch_dims")
    return [(*shape[:axis], *indices[batch:], *shape[axis + 1 :])]


@rule("GATHER_ND", "TFLite, gather_nd.cc, Prepare")
def gather_nd(call: Call) -> Results:
    """Each row of the last axis of the indices picks a slice of input 0."""
    shape, (*rows, depth) = (call.shape(index, least=1) for index in (0, 1))
    if depth < 0:
        raise RefusedError("the length of an index is not known", call.op)
    call.expect(depth <= len(shape), "rows with at most one number for each axis")
    return [(*rows, *shape[depth:])]


@rule("SCATTER_ND", "TFLite, scatter_nd.cc, CheckShapes and ResizeOutputTensor")
def scatter_nd(call: Call) -> Results:
    """The result has the shape that input 2 spells out; each row of the indices places a slice."""
    (*rows, depth), updates, result = call.shape(0, least=1), call.shape(1, least=1), call.sizes(2, rank=1)
    expected = (*rows, *result[depth:])
    fits = depth < 0 or (depth <= len(result) and may_be_alike(updates, expected))
    call.expect(fits, f"updates of the shape {shape_text(expected)}")
    return [result]


@rule("DYNAMIC_UPDATE_SLICE", "TFLite, dynamic_update_slice.cc, Prepare")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) fits into it, input 2 says where."""
    shape, update, start = call.shape(0), call.shape(1), call.shape(2, rank=1)
    fits = len(update) == len(shape) and not any(
        0 <= whole < size for whole, size in zip(shape, update, strict=False)
    )
    call.expect(fits and may_be_equal(start[0], len(shape)), "an update that fits, and a start for each axis")
    return [shape]


@rule("EMBEDDING_LOOKUP", "TFLite, embedding_lookup.cc, Prepare")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1)."""
    lookup, table = call.shape(0, rank=1), call.shape(1, least=2)
    return [(lookup[0], *table[1:])]
