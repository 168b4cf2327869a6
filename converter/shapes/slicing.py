"""Rules of operators that take a part of a tensor, or put one in: slices, gathers, lookups, updates."""

from types import EllipsisType
from typing import TypeAlias

from edge_opt.shapes.dimension import OPEN, may_be_alike, may_be_equal
from edge_opt.shapes.rules import Call, Results, UnknownError, rule

Index: TypeAlias = "slice | int | EllipsisType | None"
"""What takes a part of one axis in numpy; None adds an axis."""

_UNKNOWN = slice(None, None, 0)
"""A part whose bounds are not known."""

_MOST_BOUNDS = 31


@rule("SLICE", "slice.cc, CalculateOutputShapeVector")
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


@rule("STRIDED_SLICE", "strided_slice.cc, ResizeOutputTensor; strided_slice_logic.h")
def strided_slice(call: Call) -> Results:
    """Numpy's `x[begin:end:stride, ...]`: inputs 1 to 3 give the bounds, masks open them or change the axes.

    `ellipsis_mask` covers the axes that have no bounds, `new_axis_mask` adds an axis of size 1,
    `shrink_axis_mask` takes the single index `begin` and drops the axis.
    """
    shape, indices = call.shape(0), strided_indices(call)
    named = sum(isinstance(index, slice | int) for index in indices)
    gaps, hidden = indices.count(...), len(shape) - named
    call.expect(gaps <= 1 and gaps <= hidden, "one ellipsis at most, and an axis for each bound")
    axis, result = 0, list[int]()
    for index in indices:
        if index is None:
            result.append(1)
        elif index is ...:
            result += shape[axis : axis + hidden]
            axis += hidden
        else:
            size = shape[axis]
            if isinstance(index, slice):
                unknown = size < 0 or index is _UNKNOWN
                result.append(OPEN if unknown else len(range(*index.indices(size))))
            else:
                call.expect(size < 0 or -size <= index < size, f"an index inside axis {axis}, not {index}")
            axis += 1
    return [(*result, *shape[axis:])]


def strided_indices(call: Call) -> list[Index]:
    """The bounds of a STRIDED_SLICE as numpy's indices, as the masks change them; an unknown single index as 0."""
    bounds = [call.elements(index, rank=1) for index in (1, 2, 3)]
    count = len(bounds[0])
    call.expect(
        count <= _MOST_BOUNDS and all(len(one) == count for one in bounds), "one number of bounds, up to 31"
    )
    if call.number("offset"):  # the end counts from the begin: the runtime takes masks its own way then
        raise UnknownError
    masks = {
        name: call.number(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
    }
    indices: list[Index] = []
    for place, (begin, end, stride) in enumerate(zip(*bounds, strict=True)):
        flags = {name for name, mask in masks.items() if mask >> place & 1}
        call.expect(stride != 0, f"a stride at index {place}")
        if "ellipsis" in flags:
            indices.append(...)
        elif "new_axis" in flags:
            indices.append(None)
        elif "shrink_axis" in flags:
            # With a negative stride the runtime reads what was never written.
            call.expect(stride is None or stride > 0, f"a positive stride at index {place}")
            indices.append(0 if "begin" in flags or begin is None else begin)
        elif (
            stride is None or ("begin" not in flags and begin is None) or ("end" not in flags and end is None)
        ):
            indices.append(_UNKNOWN)
        else:
            indices.append(
                slice(None if "begin" in flags else begin, None if "end" in flags else end, stride)
            )
    return indices


@rule("GATHER", "gather.cc, Prepare")
def gather(call: Call) -> Results:
    """The axis `axis` of input 0 is replaced by the axes of the indices, less the `batch_dims` leading ones."""
    shape, indices, batch = call.shape(0), call.shape(1), call.number("batch_dims")
    axis = call.axis(call.number("axis"), len(shape))
    batch = batch + len(indices) if batch < 0 else batch
    fits = 0 <= batch <= min(axis, len(indices)) and may_be_alike(shape[:batch], indices[:batch])
    call.expect(fits, f"equal batch axes in front of axis {axis}, {batch} by its batch_dims")
    return [(*shape[:axis], *indices[batch:], *shape[axis + 1 :])]


@rule("DYNAMIC_UPDATE_SLICE", "dynamic_update_slice.cc, Prepare")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) fits into it, input 2 says where."""
    shape, update, start = call.shape(0), call.shape(1), call.shape(2, rank=1)
    fits = len(update) == len(shape) and not any(
        0 <= whole < size for whole, size in zip(shape, update, strict=False)
    )
    call.expect(fits and may_be_equal(start[0], len(shape)), "an update that fits, and a start for each axis")
    return [shape]


@rule("EMBEDDING_LOOKUP", "embedding_lookup.cc, Prepare")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1)."""
    return [(*call.shape(0, rank=1), *call.shape(1, least=2)[1:])]
