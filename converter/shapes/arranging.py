"""Shape rules for operators that move, join, cut, repeat or pad axes, or take a part of a tensor."""

import math
from collections.abc import Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias

from edge_opt.ir.dtypes import DType
from edge_opt.shapes.dimension import (
    OPEN,
    Shape,
    may_be_alike,
    may_be_equal,
    product,
    shape_text,
    total,
    with_axis,
)
from edge_opt.shapes.rules import Call, Results, UnknownError, rule

_MAX_RANK = 8  # for PAD, SQUEEZE and TRANSPOSE
_MOST_BOUNDS = 31


@rule("RESHAPE")
def reshape(call: Call) -> Results:
    """The result has the shape in input 1, an int32 vector, else the one in the options.

    One size may be -1: it follows from the number of elements. `[0]` in the options means a scalar.

    Source: reshape.cc, GetOutputShape and ResolveOutputShape
    """
    shape = call.shape(0)
    target = _target_of(call)
    sizes = [OPEN if size is None else size for size in target]
    is_valid = target.count(-1) <= 1 and min(sizes, default=0) >= OPEN
    count = product(*shape)
    others = _known_count(sizes)
    # With two sizes unknown or -1, neither can be computed.
    if sizes.count(OPEN) == 1 and count >= 0 and others > 0:
        sizes[sizes.index(OPEN)] = count // others
    fits = is_valid and _may_hold(shape, product(*sizes)) and _may_hold(sizes, count)
    call.expect(fits, f"as many elements as {shape_text(sizes)} has")
    return [tuple(sizes)]


def _target_of(call: Call) -> list[int | None]:
    """The sizes that a RESHAPE asks for: -1 for one that follows from the others, None for an unknown one."""
    tensor = call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        return call.integers_if_known(1)
    listed: Any = call.op.option("new_shape")
    if listed is None or [*listed] == [0]:
        return []
    return [*map(int, listed)]


def _known_count(sizes: Sequence[int]) -> int:
    """The product of the sizes that are not open."""
    return math.prod(size for size in sizes if size >= 0)


def _may_hold(sizes: Sequence[int], count: int) -> bool:
    """True if a shape with these known sizes can have `count` elements (-1: unknown)."""
    if count < 0:
        return True
    known = _known_count(sizes)
    return count == 0 if known == 0 else count % known == 0


@rule("EXPAND_DIMS")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is inserted at the position in input 1; negative positions count from the end.

    Source: expand_dims.cc, ExpandTensorDim
    """
    shape = call.shape(0)
    position = call.axis(call.integer(1), len(shape) + 1)
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, which must have size 1, are removed; if empty, all axes of size 1.

    Source: squeeze.cc, Prepare
    """
    shape = call.shape(0, most=_MAX_RANK)
    listed: Any = call.op.option("squeeze_dims")
    if listed is None:
        listed = []
    dropped = {call.axis(int(axis), len(shape)) for axis in listed}
    if not dropped:
        if OPEN in shape:
            raise UnknownError
        return [tuple(size for size in shape if size != 1)]
    fits = all(shape[axis] in (1, OPEN) for axis in dropped)
    call.expect(fits, f"size 1 in axes {sorted(dropped)}")
    return [tuple(size for axis, size in enumerate(shape) if axis not in dropped)]


@rule("TRANSPOSE")
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once.

    Source: transpose.cc, ResizeOutputTensor
    """
    shape = call.shape(0, most=_MAX_RANK)
    permutation = call.integers(1)
    axes = [call.axis(axis, len(shape)) for axis in permutation]
    call.expect(sorted(axes) == list(range(len(shape))), f"each axis once, not {permutation}")
    return [tuple(shape[axis] for axis in axes)]


@rule("CONCATENATION")
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other sizes must be equal. Known scalars become a vector.

    Source: concatenation.cc, Prepare
    """
    shapes = call.all_shapes()
    if call.option("axis") == 0 and all(fact.is_known_scalar for fact in call.inputs):
        return [(len(shapes),)]
    axis = call.axis_option(len(shapes[0]))
    sizes = call.common_shape(range(len(shapes)), beside=axis)
    length = total(*(shape[axis] for shape in shapes))
    return [with_axis(sizes, axis, length)]


@rule("PACK")
def pack(call: Call) -> Results:
    """Inputs of the same shape are stacked along a new axis.

    Source: pack.cc, Prepare
    """
    count = call.option("values_count")
    call.expect(count == len(call.inputs), f"{count} inputs, its values_count")
    sizes = call.common_shape(range(count))
    axis = call.axis_option(len(sizes) + 1)
    return [(*sizes[:axis], count, *sizes[axis:])]


@rule("UNPACK")
def unpack(call: Call) -> Results:
    """Each index along `axis` becomes a result without that axis.

    Source: unpack.cc, Prepare
    """
    count = _output_count(call, "num")
    shape = call.shape(0)
    axis = call.axis_option(len(shape))
    fits = 0 not in shape and may_be_equal(shape[axis], count)
    call.expect(fits, f"size {count}, its num, in axis {axis}")
    return [with_axis(shape, axis)] * count


def _output_count(call: Call, option: str) -> int:
    count = call.option(option)
    outputs = len(call.op.outputs)
    call.expect(count == outputs > 0, f"{outputs} in {option}, one for each output, not {count}")
    return count


@rule("SPLIT")
def split(call: Call) -> Results:
    """Input 1 is cut into `num_splits` equal parts along the axis in input 0.

    Source: split.cc, ResizeOutputTensors
    """
    count = _output_count(call, "num_splits")
    shape = call.shape(1)
    axis = call.axis(call.integer(0), len(shape))
    size = shape[axis]
    call.expect(size < 0 or size % count == 0, f"{count} equal parts in axis {axis}")
    part = OPEN if size < 0 else size // count
    return [with_axis(shape, axis, part)] * count


@rule("SPLIT_V")
def split_v(call: Call) -> Results:
    """The axis in input 2 is cut into the sizes in input 1; one may be -1 and gets the rest.

    Source: split_v.cc, ResizeOutputTensors
    """
    count = _output_count(call, "num_splits")
    shape = call.shape(0)
    axis = call.axis(call.integer(2), len(shape))
    size = shape[axis]
    given = call.integers_if_known(1, rank=1)
    call.expect(len(given) == count, f"{count} sizes, one for each output")
    parts = [OPEN if part is None else part for part in given]
    if size >= 0 and None not in given:
        parts = _adding_up(call, parts, size)
    return [with_axis(shape, axis, part) for part in parts]


def _adding_up(call: Call, parts: list[int], size: int) -> list[int]:
    """The sizes of all parts of an axis; one may be -1, and gets the rest."""
    rest = size - sum(part for part in parts if part >= 0)
    negative = [part for part in parts if part < 0]
    fits = rest == 0
    if negative:
        fits = rest >= 0 and negative == [-1]
    call.expect(fits, f"sizes that add up to {size}, or one -1, not {parts}")
    return [rest if part < 0 else part for part in parts]


@rule("TILE")
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says.

    Source: tile.cc, ResizeOutput
    """
    shape = call.shape(0)
    times = call.sizes(1)
    call.expect(len(times) == len(shape), "one number for each axis")
    return [tuple(map(product, shape, times))]


@rule("BROADCAST_TO")
def broadcast_to(call: Call) -> Results:
    """The result has the shape in input 1; the input's axes of size 1 are stretched to it.

    Source: broadcast_to.cc, ResizeOutputTensor
    """
    shape = call.shape(0)
    target = call.sizes(1, rank=1)
    lead = len(target) - len(shape)
    message = f"an input that broadcasts to {shape_text(target)}"
    call.expect(lead >= 0, message)
    sizes = list(target)
    for axis, size in enumerate(shape, lead):
        call.expect(size == 1 or may_be_equal(size, target[axis]), message)
        if target[axis] < 0 and size > 1:
            sizes[axis] = size
    return [tuple(sizes)]


@rule("MIRROR_PAD PAD PADV2")
def pad(call: Call) -> Results:
    """Each axis grows by its two numbers in input 1, `[rank, 2]`.

    Source: pad.cc, ResizeOutputTensor; mirror_pad.cc, GetPaddedOutputShape
    """
    shape = call.shape(0, most=_MAX_RANK)
    call.expect(may_be_alike(call.shape(1), (len(shape), 2)), "two numbers for each axis")
    numbers = call.sizes(1)
    return [tuple(map(total, shape, numbers[::2], numbers[1::2]))]


# Parts of a tensor


@rule("SLICE")
def slice_(call: Call) -> Results:
    """The result starts at `begin` (input 1) and has the sizes in input 2; -1 means the rest of the axis.

    Source: slice.cc, CalculateOutputShapeVector
    """
    shape = call.shape(0)
    begins = call.integers_if_known(1, rank=1)
    sizes = call.integers_if_known(2, rank=1)
    call.expect(len(begins) == len(sizes) == len(shape), "a begin and a size for each axis")
    axes = range(len(shape))
    return [tuple(map(partial(_sliced, call), axes, shape, begins, sizes))]


def _sliced(call: Call, axis: int, whole: int, begin: int | None, size: int | None) -> int:
    """The size of one axis after a SLICE; `begin` and `size` are None if they are unknown."""
    if size is None:
        return OPEN
    first = begin or 0
    end = first + max(size, 0)
    is_inside = first >= 0 and size >= -1 and (whole < 0 or end <= whole)
    call.expect(is_inside, f"a slice inside axis {axis}, not {size} from {begin} on")
    if size >= 0:
        return size
    return OPEN if begin is None or whole < 0 else whole - begin


Index: TypeAlias = "slice | int | EllipsisType | None"
"""Numpy's index into one axis; None adds an axis."""
_UNKNOWN = slice(None, None, 0)  # a slice with unknown bounds


@rule("STRIDED_SLICE")
def strided_slice(call: Call) -> Results:
    """Numpy's `x[begin:end:stride, ...]`: inputs 1 to 3 give the bounds, masks open them or change the axes.

    `ellipsis_mask` covers the axes that have no bounds, `new_axis_mask` adds an axis of size 1,
    `shrink_axis_mask` takes the single index `begin` and drops the axis:

        [8,6,4,2] with [1:7:2, ..., None, 0] -> [3, 6,4, 1]

    Source: strided_slice.cc, ResizeOutputTensor; strided_slice_logic.h
    """
    shape = call.shape(0)
    indices = strided_indices(call)
    gaps = indices.count(...)
    bounded = [index for index in indices if isinstance(index, slice | int)]
    hidden = len(shape) - len(bounded)
    call.expect(gaps <= 1 and gaps <= hidden, "one ellipsis at most, and an axis for each bound")
    if gaps:
        gap = indices.index(...)
        indices[gap : gap + 1] = [slice(None)] * hidden
    axis = 0
    result: list[int] = []
    for index in indices:
        if index is None:
            result.append(1)
            continue
        size = shape[axis]
        if isinstance(index, int):
            is_inside = size < 0 or -size <= index < size
            call.expect(is_inside, f"an index inside axis {axis}, not {index}")
        elif isinstance(index, slice):
            is_unknown = size < 0 or index is _UNKNOWN
            result.append(OPEN if is_unknown else len(range(*index.indices(size))))
        axis += 1
    return [(*result, *shape[axis:])]


def strided_indices(call: Call) -> list[Index]:
    """Numpy indices for a STRIDED_SLICE, with its masks applied; 0 for an unknown single index."""
    begins = call.integers_if_known(1, rank=1)
    ends = call.integers_if_known(2, rank=1)
    strides = call.integers_if_known(3, rank=1)
    is_valid = len(begins) == len(ends) == len(strides) <= _MOST_BOUNDS
    call.expect(is_valid, f"one number of bounds, up to {_MOST_BOUNDS}")
    # With an offset, the end is relative to the begin, and the runtime treats masks differently.
    if call.option("offset"):
        raise UnknownError
    places = range(len(begins))
    return list(map(partial(_strided_index, call), places, begins, ends, strides))


def _strided_index(
    call: Call, place: int, begin: int | None, end: int | None, stride: int | None
) -> Index:
    """The index at one place of a STRIDED_SLICE, with the masks applied; bounds are None if unknown."""

    def is_set(mask: str) -> bool:
        return bool(call.option(f"{mask}_mask") >> place & 1)

    call.expect(stride != 0, f"a stride at index {place}")
    if is_set("ellipsis"):
        return ...
    if is_set("new_axis"):
        return None
    if is_set("shrink_axis"):
        # With a negative stride the runtime reads uninitialized memory.
        call.expect(stride is None or stride > 0, f"a positive stride at index {place}")
        return 0 if is_set("begin") or begin is None else begin
    knows_begin = is_set("begin") or begin is not None
    knows_end = is_set("end") or end is not None
    if stride is None or not knows_begin or not knows_end:
        return _UNKNOWN
    return slice(None if is_set("begin") else begin, None if is_set("end") else end, stride)


@rule("GATHER")
def gather(call: Call) -> Results:
    """Axis `axis` of input 0 is replaced by the axes of the indices, except the first `batch_dims`.

    Source: gather.cc, Prepare
    """
    shape = call.shape(0)
    indices = call.shape(1)
    axis = call.axis_option(len(shape))
    batch = call.option("batch_dims")
    if batch < 0:
        batch += len(indices)
    fits = 0 <= batch <= axis and may_be_alike(shape[:batch], indices[:batch])
    call.expect(fits, f"equal batch axes before axis {axis}, {batch} by its batch_dims")
    return [with_axis(shape, axis, *indices[batch:])]


@rule("DYNAMIC_UPDATE_SLICE")
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of input 0; the update (input 1) must fit into it, at the position in input 2.

    Source: dynamic_update_slice.cc, Prepare
    """
    shape = call.shape(0)
    start = call.shape(2, rank=1)
    is_placed = may_be_equal(start[0], len(shape))
    fits = is_placed and _fits_into(call.shape(1), shape)
    call.expect(fits, "an update that fits, and a start for each axis")
    return [shape]


def _fits_into(part: Shape, whole: Shape) -> bool:
    """True if a tensor may fit into a larger one with as many axes."""
    if len(part) != len(whole):
        return False
    return all(most < 0 or size <= most for size, most in zip(part, whole, strict=True))


@rule("EMBEDDING_LOOKUP")
def embedding_lookup(call: Call) -> Results:
    """Each index of the vector `[n]` (input 0) picks a row of the table `[rows, ...]` (input 1).

    Source: embedding_lookup.cc, Prepare
    """
    count = call.shape(0, rank=1)
    table = call.shape(1, least=2)
    return [(*count, *table[1:])]
