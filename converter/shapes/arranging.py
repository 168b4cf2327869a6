"""Shape rules for operators that move, join, cut, repeat or pad axes, or take a part of a tensor."""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import TypeAlias

from edge_opt.ir.dtypes import DType
from edge_opt.shapes.dimension import OPEN, may_be_alike, may_be_equal, product, shape_text, total
from edge_opt.shapes.rules import Call, Results, UnknownError, rule

_MAX_RANK = 8  # for PAD, SQUEEZE and TRANSPOSE
_MOST_BOUNDS = 31


@rule("RESHAPE", "reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape in input 1, an int32 vector, else the one in the options.

    One size may be -1: it follows from the number of elements. `[0]` in the options means a scalar.
    """
    shape, tensor = call.shape(0), call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        target = call.elements(1)
    else:
        listed = call.option("new_shape")
        target = [] if listed is None or [*listed] == [0] else [int(size) for size in listed]
    sizes = [OPEN if size is None else size for size in target]
    count, known = product(*shape), product(*(size for size in sizes if size != OPEN))
    # With two sizes unknown or -1, neither can be computed.
    if sizes.count(OPEN) == 1 and count >= 0 and known > 0:
        sizes[sizes.index(OPEN)] = count // known
    fits = _may_hold(shape, product(*sizes)) and _may_hold(sizes, count)
    fits = fits and target.count(-1) <= 1 and min(sizes, default=0) >= OPEN
    call.expect(fits, f"as many elements as {shape_text(sizes)} has")
    return [tuple(sizes)]


def _may_hold(sizes: Sequence[int], count: int) -> bool:
    """True if a shape with these known sizes can have `count` elements (-1: unknown)."""
    known = math.prod(size for size in sizes if size >= 0)
    return count < 0 or (count == 0 if known == 0 else count % known == 0)


@rule("EXPAND_DIMS", "expand_dims.cc, ExpandTensorDim")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is inserted at the position in input 1; negative positions count from the end."""
    shape = call.shape(0)
    position = call.axis(call.given(1), len(shape) + 1)
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, which must have size 1, are removed; if empty, all axes of size 1."""
    shape, listed = call.shape(0, most=_MAX_RANK), call.option("squeeze_dims")
    dropped = {call.axis(int(axis), len(shape)) for axis in (() if listed is None else listed)}
    if not dropped and OPEN in shape:
        raise UnknownError
    call.expect(all(shape[axis] in (1, OPEN) for axis in dropped), f"size 1 in axes {sorted(dropped)}")
    kept = (size for axis, size in enumerate(shape) if (axis not in dropped if dropped else size != 1))
    return [tuple(kept)]


@rule("TRANSPOSE", "transpose.cc, ResizeOutputTensor")
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once."""
    shape, permutation = call.shape(0, most=_MAX_RANK), call.integers(1)
    axes = [call.axis(axis, len(shape)) for axis in permutation]
    call.expect(sorted(axes) == list(range(len(shape))), f"each axis once, not {permutation}")
    return [tuple(shape[axis] for axis in axes)]


@rule("CONCATENATION", "concatenation.cc, Prepare")
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other sizes must be equal. Known scalars become a vector."""
    shapes, axis = call.all_shapes(), call.number("axis")
    if axis == 0 and all(shape == () and value is not None for shape, value in call.inputs):
        return [(len(shapes),)]
    axis = call.axis(axis, len(shapes[0]))
    sizes = call.merged(range(len(shapes)), beside=axis)
    return [(*sizes[:axis], total(*(shape[axis] for shape in shapes)), *sizes[axis + 1 :])]


@rule("PACK", "pack.cc, Prepare")
def pack(call: Call) -> Results:
    """Inputs of the same shape are stacked along a new axis."""
    count = call.number("values_count")
    call.expect(count == len(call.inputs), f"{count} inputs, its values_count")
    sizes = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(sizes) + 1)
    return [(*sizes[:axis], count, *sizes[axis:])]


@rule("UNPACK", "unpack.cc, Prepare")
def unpack(call: Call) -> Results:
    """Each index along `axis` becomes a result without that axis."""
    count, shape = _output_count(call, "num"), call.shape(0)
    axis = call.axis(call.number("axis"), len(shape))
    call.expect(0 not in shape and may_be_equal(shape[axis], count), f"size {count}, its num, in axis {axis}")
    return [(*shape[:axis], *shape[axis + 1 :])] * count


def _output_count(call: Call, option: str) -> int:
    count, outputs = call.number(option), len(call.op.outputs)
    call.expect(count == outputs > 0, f"{outputs} in {option}, one for each output, not {count}")
    return count


@rule("SPLIT", "split.cc, ResizeOutputTensors")
def split(call: Call) -> Results:
    """Input 1 is cut into `num_splits` equal parts along the axis in input 0."""
    count, shape = _output_count(call, "num_splits"), call.shape(1)
    axis = call.axis(call.given(0), len(shape))
    size = shape[axis]
    call.expect(size < 0 or size % count == 0, f"{count} equal parts in axis {axis}")
    return [(*shape[:axis], OPEN if size < 0 else size // count, *shape[axis + 1 :])] * count


@rule("SPLIT_V", "split_v.cc, ResizeOutputTensors")
def split_v(call: Call) -> Results:
    """The axis in input 2 is cut into the sizes in input 1; one may be -1 and gets the rest."""
    count, shape = _output_count(call, "num_splits"), call.shape(0)
    axis = call.axis(call.given(2), len(shape))
    size, given = shape[axis], call.elements(1, rank=1)
    call.expect(len(given) == count, f"{count} sizes, one for each output")
    parts = [OPEN if part is None else part for part in given]
    if size >= 0 and None not in given:
        rest = size - sum(part for part in parts if part >= 0)
        adds_up = rest >= 0 if parts.count(OPEN) == 1 else rest == 0 and OPEN not in parts
        call.expect(adds_up and min(parts) >= OPEN, f"sizes that add up to {size}, or one -1, not {parts}")
        parts = [rest if part < 0 else part for part in parts]
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


@rule("TILE", "tile.cc, ResizeOutput")
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says."""
    shape, times = call.shape(0), call.sizes(1)
    call.expect(len(times) == len(shape), "one number for each axis")
    return [tuple(map(product, shape, times))]


@rule("BROADCAST_TO", "broadcast_to.cc, ResizeOutputTensor")
def broadcast_to(call: Call) -> Results:
    """The result has the shape in input 1; the input's axes of size 1 are stretched to it."""
    shape, target = call.shape(0), call.sizes(1, rank=1)
    lead = len(target) - len(shape)
    pairs = list(zip(shape, target[max(lead, 0) :], strict=lead >= 0))
    fits = lead >= 0 and all(size == 1 or may_be_equal(size, wanted) for size, wanted in pairs)
    call.expect(fits, f"an input that broadcasts to {shape_text(target)}")
    return [(*target[:lead], *(size if wanted < 0 and size > 1 else wanted for size, wanted in pairs))]


@rule("MIRROR_PAD PAD PADV2", "pad.cc, ResizeOutputTensor; mirror_pad.cc, GetPaddedOutputShape")
def pad(call: Call) -> Results:
    """Each axis grows by its two numbers in input 1, `[rank, 2]`."""
    shape = call.shape(0, most=_MAX_RANK)
    call.expect(may_be_alike(call.shape(1), (len(shape), 2)), "two numbers for each axis")
    numbers = call.sizes(1)
    return [tuple(map(total, shape, numbers[::2], numbers[1::2]))]


# Parts of a tensor


@rule("SLICE", "slice.cc, CalculateOutputShapeVector")
def slice_(call: Call) -> Results:
    """The result starts at `begin` (input 1) and has the sizes in input 2; -1 means the rest of the axis."""
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


Index: TypeAlias = "slice | int | EllipsisType | None"  # numpy's index into one axis; None adds an axis
_UNKNOWN = slice(None, None, 0)  # a slice with unknown bounds


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
    """Numpy indices for a STRIDED_SLICE, with its masks applied; 0 for an unknown single index."""
    bounds = [call.elements(index, rank=1) for index in (1, 2, 3)]
    count = len(bounds[0])
    alike = count <= _MOST_BOUNDS and all(len(one) == count for one in bounds)
    call.expect(alike, f"one number of bounds, up to {_MOST_BOUNDS}")
    if call.number("offset"):  # the end is relative to the begin, and the runtime treats masks differently
        raise UnknownError
    kinds = ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
    masks = {kind: call.number(f"{kind}_mask") for kind in kinds}
    indices: list[Index] = []
    for place, (begin, end, stride) in enumerate(zip(*bounds, strict=True)):
        flags = {kind for kind, mask in masks.items() if mask >> place & 1}
        call.expect(stride != 0, f"a stride at index {place}")
        if "ellipsis" in flags:
            indices.append(...)
        elif "new_axis" in flags:
            indices.append(None)
        elif "shrink_axis" in flags:
            # With a negative stride the runtime reads uninitialized memory.
            call.expect(stride is None or stride > 0, f"a positive stride at index {place}")
            indices.append(0 if "begin" in flags or begin is None else begin)
        else:
            first, last = None if "begin" in flags else begin, None if "end" in flags else end
            is_known = (
                stride and (first is not None or "begin" in flags) and (last is not None or "end" in flags)
            )
            indices.append(slice(first, last, stride) if is_known else _UNKNOWN)
    return indices


@rule("GATHER", "gather.cc, Prepare")
def gather(call: Call) -> Results:
    """Axis `axis` of input 0 is replaced by the axes of the indices, except the first `batch_dims`."""
    shape, indices, batch = call.shape(0), call.shape(1), call.number("batch_dims")
    axis = call.axis(call.number("axis"), len(shape))
    batch = batch + len(indices) if batch < 0 else batch
    fits = 0 <= batch <= min(axis, len(indices)) and may_be_alike(shape[:batch], indices[:batch])
    call.expect(fits, f"equal batch axes before axis {axis}, {batch} by its batch_dims")
    return [(*shape[:axis], *indices[batch:], *shape[axis + 1 :])]


@rule("DYNAMIC_UPDATE_SLICE", "dynamic_update_slice.cc, Prepare")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) must fit into it, at the position in input 2."""
    shape, update, start = call.shape(0), call.shape(1), call.shape(2, rank=1)
    pairs = zip(shape, update, strict=False)
    fits = len(update) == len(shape) and all(whole < 0 or size <= whole for whole, size in pairs)
    call.expect(fits and may_be_equal(start[0], len(shape)), "an update that fits, and a start for each axis")
    return [shape]


@rule("EMBEDDING_LOOKUP", "embedding_lookup.cc, Prepare")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1)."""
    return [(*call.shape(0, rank=1), *call.shape(1, least=2)[1:])]
