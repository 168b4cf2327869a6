"""Rules of operators that reshape a tensor, or move, join, cut, repeat, pad or resize whole axes."""

import math
from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import (
    OPEN,
    Shape,
    ShapeError,
    may_be_alike,
    may_be_equal,
    product,
    shape_text,
    size_text,
    total,
)
from edge_opt.shapes.rules import Call, Element, Results, rule

_MAX_RANK = 8  # of PAD, REVERSE_V2, SQUEEZE and TRANSPOSE
_STRETCH = -1


@rule("RESHAPE", "TFLite, reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.
    """
    shape, target = call.shape(0), _reshape_target(call)
    text = "[" + ",".join("?" if size is None else str(size) for size in target) + "]"
    if target.count(_STRETCH) > 1 or any(size is not None and size < _STRETCH for size in target):
        raise ShapeError(f"the shape {text} has negative sizes: expected at most one -1")
    sizes = [OPEN if size is None else size for size in target]
    # Of two sizes, unknown or stretched, each depends on the other.
    if sizes.count(OPEN) == 1:
        axis = sizes.index(OPEN)
        sizes[axis] = _remaining(shape, (*sizes[:axis], *sizes[axis + 1 :]), stretched=_STRETCH in target)
    given, wanted = product(*shape), product(*sizes)
    if not (_may_hold(shape, wanted) and _may_hold(sizes, given)):
        counts = f"it has {size_text(given)} elements, the result {size_text(wanted)}"
        raise ShapeError(f"{call.text(0)} cannot become {text}: {counts}")
    return [tuple(sizes)]


def _reshape_target(call: Call) -> list[Element]:
    tensor = call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        return call.elements(1)
    sizes = call.listed("new_shape")
    return [] if sizes == [0] else list(sizes)


def _remaining(shape: Shape, others: Shape, *, stretched: bool) -> int:
    """The size that, with the others, makes as many elements as the shape has; -1 where that is not known.

    Where there are no elements the runtime stretches to 0, or counts without the zeros if the others have one too.
    """
    if min((*shape, *others), default=0) < 0 or (0 in (*shape, *others) and not stretched):
        return OPEN
    if 0 in shape and 0 not in others:
        return 0
    return math.prod(filter(None, shape)) // math.prod(filter(None, others))


def _may_hold(sizes: Sequence[int], count: int) -> bool:
    """Whether the known sizes leave room for `count` elements, of which -1 says that nobody knows."""
    known = math.prod(size for size in sizes if size >= 0)
    return count < 0 or (count == 0 if known == 0 else count % known == 0)


@rule("EXPAND_DIMS", "TFLite, expand_dims.cc, ExpandTensorDim")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is put in at the position that input 1 gives, counted from the end where negative."""
    shape, axis = call.shape(0), call.scalar(1)
    if axis is None:
        return [(OPEN,) * (len(shape) + 1)]
    position = call.axis(axis, len(shape) + 1)
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "TFLite, squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is."""
    shape, listed = call.shape(0, most=_MAX_RANK), call.listed("squeeze_dims")
    if not listed and OPEN in shape:
        raise RefusedError("which axes have size 1 is not known", call.op)
    dropped = {call.axis_of(0, axis) for axis in listed}
    call.expect(all(shape[axis] in (1, OPEN) for axis in dropped), f"size 1 in axes {sorted(dropped)}")
    kept = (size for axis, size in enumerate(shape) if (axis not in dropped if listed else size != 1))
    return [tuple(kept)]


@rule("TRANSPOSE", "TFLite, transpose.cc, ResizeOutputTensor")
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once."""
    shape, permutation = call.shape(0, most=_MAX_RANK), call.elements(1, rank=1)
    axes = [None if axis is None else call.axis_of(0, axis) for axis in permutation]
    named = [axis for axis in axes if axis is not None]
    once = len(axes) == len(shape) and len(set(named)) == len(named)
    call.expect(once, f"a permutation that names each axis once, not {permutation}")
    return [tuple(OPEN if axis is None else shape[axis] for axis in axes)]


@rule("CONCATENATION", "TFLite, concatenation.cc, Prepare")
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other axes are equal. Known scalars stack up to a vector."""
    shapes, axis = call.all_shapes(), call.number("axis")
    if axis == 0 and all(shape == () and call.is_known(index) for index, shape in enumerate(shapes)):
        return [(len(shapes),)]
    axis = call.axis_of(0, axis)
    sizes = call.merged(range(len(shapes)), beside=axis)
    return [(*sizes[:axis], total(*(shape[axis] for shape in shapes)), *sizes[axis + 1 :])]


@rule("PACK", "TFLite, pack.cc, Prepare")
def pack(call: Call) -> Results:
    """Inputs of one shape become the indices of a new axis."""
    count = call.number("values_count")
    call.expect(count == len(call.shapes), f"{count} inputs, its values_count")
    sizes = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(sizes) + 1)
    return [(*sizes[:axis], count, *sizes[axis:])]


@rule("UNPACK", "TFLite, unpack.cc, Prepare")
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis."""
    count, shape, axis = _output_count(call, "num"), call.shape(0), call.axis_of(0)
    call.expect(0 not in shape and may_be_equal(shape[axis], count), f"size {count}, its num, in axis {axis}")
    return [(*shape[:axis], *shape[axis + 1 :])] * count


def _output_count(call: Call, option: str) -> int:
    count = call.number(option)
    if count != len(call.op.outputs):
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {count}, its {option}")
    return count


@rule("SPLIT", "TFLite, split.cc, ResizeOutputTensors")
def split(call: Call) -> Results:
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts."""
    count, shape, axis = _output_count(call, "num_splits"), call.shape(1), call.scalar(0)
    if axis is None:
        return [(OPEN,) * len(shape)] * count
    axis = call.axis_of(1, axis)
    return [(*shape[:axis], _divided(call, 1, axis, count), *shape[axis + 1 :])] * count


def _divided(call: Call, index: int, axis: int, count: int) -> int:
    """An axis of input `index`, cut into equal parts."""
    size = call.shape(index)[axis]
    call.expect(count > 0 and (size < 0 or size % count == 0), f"{count} equal parts in axis {axis}")
    return OPEN if size < 0 else size // count


@rule("SPLIT_V", "TFLite, split_v.cc, ResizeOutputTensors")
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left."""
    count, shape, axis = _output_count(call, "num_splits"), call.shape(0), call.scalar(2)
    given = call.elements(1, rank=1)
    call.expect(len(given) == count, f"{count} sizes, one for each output")
    if axis is None:
        return [(OPEN,) * len(shape)] * count
    axis = call.axis_of(0, axis)
    size, parts = shape[axis], [OPEN if part is None else part for part in given]
    if size >= 0 and None not in given:
        rest = size - sum(part for part in parts if part >= 0)
        adds_up = rest >= 0 if parts.count(OPEN) == 1 else rest == 0 and OPEN not in parts
        call.expect(
            adds_up and min(parts, default=0) >= OPEN, f"sizes that add up to {size}, or one -1, not {parts}"
        )
        parts = [rest if part < 0 else part for part in parts]
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


@rule("TILE", "TFLite, tile.cc, ResizeOutput")
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says."""
    shape, times = call.shape(0), call.sizes(1)
    call.expect(len(times) == len(shape), "one number for each axis")
    return [tuple(map(product, shape, times))]


@rule("BROADCAST_TO", "TFLite, broadcast_to.cc, ResizeOutputTensor")
def broadcast_to(call: Call) -> Results:
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it."""
    shape, target = call.shape(0), call.sizes(1, rank=1)
    lead = len(target) - len(shape)
    pairs = list(zip(shape, target[max(lead, 0) :], strict=lead >= 0))
    fits = lead >= 0 and all(size == 1 or may_be_equal(size, wanted) for size, wanted in pairs)
    call.expect(fits, f"an input that broadcasts to {shape_text(target)}")
    return [(*target[:lead], *(size if wanted < 0 and size > 1 else wanted for size, wanted in pairs))]


@rule("BROADCAST_ARGS", "TFLite, broadcast_args.cc, Prepare")
def broadcast_args(call: Call) -> Results:
    """Two shapes, as vectors, give the vector of the shape they broadcast to."""
    left, right = call.shape(0, rank=1), call.shape(1, rank=1)
    return [(OPEN if min(*left, *right) < 0 else max(*left, *right),)]


@rule("REVERSE_V2", "TFLite, reverse.cc, Prepare")
def reverse(call: Call) -> Results:
    """The result has the shape of the input; input 1 lists the axes to reverse."""
    shape, axes = call.shape(0, most=_MAX_RANK), call.shape(1, rank=1)
    call.expect(axes[0] <= len(shape), "at most one number for each axis")
    return [shape]


@rule("MIRROR_PAD PAD PADV2", "TFLite, pad.cc, ResizeOutputTensor; mirror_pad.cc, GetPaddedOutputShape")
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it."""
    shape = call.shape(0, most=_MAX_RANK)
    call.expect(may_be_alike(call.shape(1), (len(shape), 2)), "two numbers for each axis")
    numbers = call.sizes(1)
    return [tuple(map(total, shape, numbers[::2], numbers[1::2]))]


@rule("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", "TFLite, ResizeOutputTensor of each one's own file")
def resize(call: Call) -> Results:
    """`[b, h, w, c]` takes the height and width that input 1, `[2]`, gives."""
    shape, size = call.shape(0, rank=4), call.sizes(1, rank=1)
    call.expect(len(size) == 2 and 0 not in size, "a height and a width from 1")
    return [(shape[0], *size, shape[3])]
