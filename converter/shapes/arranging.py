"""Rules of operators that reshape a tensor, or move, join, cut, repeat or pad whole axes."""

import math
from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.shapes.dimension import OPEN, may_be_alike, may_be_equal, product, shape_text, total
from edge_opt.shapes.rules import Call, Element, Results, UnknownError, rule

_MAX_RANK = 8  # of PAD, SQUEEZE and TRANSPOSE
_STRETCH = -1


@rule("RESHAPE", "reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.
    """
    shape, target = call.shape(0), _reshape_target(call)
    sizes = [OPEN if size is None else size for size in target]
    count, known = product(*shape), product(*(size for size in sizes if size != OPEN))
    # Of two sizes, unknown or stretched, each depends on the other.
    if sizes.count(OPEN) == 1 and count > 0 and known > 0:
        sizes[sizes.index(OPEN)] = count // known
    fits = _may_hold(shape, product(*sizes)) and _may_hold(sizes, count)
    fits = fits and target.count(_STRETCH) <= 1 and min(sizes, default=0) >= OPEN
    call.expect(fits, f"as many elements as {shape_text(sizes)} has")
    return [tuple(sizes)]


def _may_hold(sizes: Sequence[int], count: int) -> bool:
    """Whether the known sizes leave room for `count` elements, of which -1 says that nobody knows."""
    known = math.prod(size for size in sizes if size >= 0)
    return count < 0 or (count == 0 if known == 0 else count % known == 0)


def _reshape_target(call: Call) -> list[Element]:
    tensor = call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        return call.elements(1)
    sizes = call.listed("new_shape")
    return [] if sizes == [0] else list(sizes)


@rule("EXPAND_DIMS", "expand_dims.cc, ExpandTensorDim")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is put in at the position that input 1 gives, counted from the end where negative."""
    shape = call.shape(0)
    position = call.axis(call.given(1), len(shape) + 1)
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is."""
    shape, listed = call.shape(0, most=_MAX_RANK), call.listed("squeeze_dims")
    if not listed and OPEN in shape:
        raise UnknownError
    dropped = {call.axis(axis, len(shape)) for axis in listed}
    call.expect(all(shape[axis] in (1, OPEN) for axis in dropped), f"size 1 in axes {sorted(dropped)}")
    kept = (size for axis, size in enumerate(shape) if (axis not in dropped if listed else size != 1))
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
    """The sizes along `axis` add up; all other axes are equal. Known scalars stack up to a vector."""
    shapes, axis = call.all_shapes(), call.number("axis")
    if axis == 0 and all(shape == () and call.known(index) is not None for index, shape in enumerate(shapes)):
        return [(len(shapes),)]
    axis = call.axis(axis, len(shapes[0]))
    sizes = call.merged(range(len(shapes)), beside=axis)
    return [(*sizes[:axis], total(*(shape[axis] for shape in shapes)), *sizes[axis + 1 :])]


@rule("PACK", "pack.cc, Prepare")
def pack(call: Call) -> Results:
    """Inputs of one shape become the indices of a new axis."""
    count = call.number("values_count")
    call.expect(count == len(call.inputs), f"{count} inputs, its values_count")
    sizes = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(sizes) + 1)
    return [(*sizes[:axis], count, *sizes[axis:])]


@rule("UNPACK", "unpack.cc, Prepare")
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis."""
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
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts."""
    count, shape = _output_count(call, "num_splits"), call.shape(1)
    axis = call.axis(call.given(0), len(shape))
    size = shape[axis]
    call.expect(size < 0 or size % count == 0, f"{count} equal parts in axis {axis}")
    return [(*shape[:axis], OPEN if size < 0 else size // count, *shape[axis + 1 :])] * count


@rule("SPLIT_V", "split_v.cc, ResizeOutputTensors")
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left."""
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
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it."""
    shape, target = call.shape(0), call.sizes(1, rank=1)
    lead = len(target) - len(shape)
    pairs = list(zip(shape, target[max(lead, 0) :], strict=lead >= 0))
    fits = lead >= 0 and all(size == 1 or may_be_equal(size, wanted) for size, wanted in pairs)
    call.expect(fits, f"an input that broadcasts to {shape_text(target)}")
    return [(*target[:lead], *(size if wanted < 0 and size > 1 else wanted for size, wanted in pairs))]


@rule("BROADCAST_ARGS", "broadcast_args.cc, Prepare")
def broadcast_args(call: Call) -> Results:
    """Two shapes, as vectors, give the vector of the shape they broadcast to."""
    left, right = call.shape(0, rank=1), call.shape(1, rank=1)
    return [(OPEN if min(*left, *right) < 0 else max(*left, *right),)]


@rule("MIRROR_PAD PAD PADV2", "pad.cc, ResizeOutputTensor; mirror_pad.cc, GetPaddedOutputShape")
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it."""
    shape = call.shape(0, most=_MAX_RANK)
    call.expect(may_be_alike(call.shape(1), (len(shape), 2)), "two numbers for each axis")
    numbers = call.sizes(1)
    return [tuple(map(total, shape, numbers[::2], numbers[1::2]))]
