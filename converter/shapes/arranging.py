"""Rules of operators that reshape a tensor, or move, join, cut, repeat, pad or resize whole axes."""

import math
from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    Shape,
    ShapeError,
    may_be_alike,
    may_be_equal,
    product,
    shape_text,
    size_of,
    size_text,
    total,
)
from edge_opt.shapes.rules import Call, Results, rule

_MAX_RANK = 8  # of PAD, REVERSE_V2, SQUEEZE and TRANSPOSE
_STRETCH = -1


def check_one_per_axis(call: Call, index: int) -> None:
    """Refuse an input that has not one number for each axis of input 0."""
    count, rank = len(call.elements(index)), len(call.shape(0))
    if count != rank:
        raise ShapeError(f"{call.label(index)} has {count} numbers: expected one per axis of {call.text(0)}")


@rule("RESHAPE", "TFLite, reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.
    """
    target = _reshape_target(call)
    text = "[" + ",".join("?" if size is None else str(size) for size in target) + "]"
    if target.count(_STRETCH) > 1:
        raise ShapeError(f"the shape {text} has {target.count(_STRETCH)} sizes of -1: expected at most one")
    if any(size is not None and size < _STRETCH for size in target):
        raise ShapeError(f"the shape {text} has a negative size")
    shape, sizes = call.shape(0), list(map(size_of, target))
    # Of two sizes, unknown or stretched, each depends on the other.
    if sizes.count(DYNAMIC) == 1:
        axis = sizes.index(DYNAMIC)
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
        return DYNAMIC
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
        return [(DYNAMIC,) * (len(shape) + 1)]
    position = call.axis(axis, len(shape) + 1, f"the result of {call.text(0)}")
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "TFLite, squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is."""
    shape, listed = call.shape(0, most=_MAX_RANK), call.listed("squeeze_dims")
    if not listed:
        if DYNAMIC in shape:
            raise RefusedError("which axes have size 1 is not known", call.op)
        return [tuple(size for size in shape if size != 1)]
    dropped = {call.axis_of(0, axis) for axis in listed}
    for axis in dropped:
        if shape[axis] not in (1, DYNAMIC):
            text = f"axis {axis} of {call.text(0)} has size {shape[axis]}"
            raise ShapeError(f"{text}: only size 1 can be dropped")
    return [tuple(size for axis, size in enumerate(shape) if axis not in dropped)]


@rule("TRANSPOSE", "TFLite, transpose.cc, ResizeOutputTensor")
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once."""
    shape, permutation = call.shape(0, most=_MAX_RANK), call.elements(1, rank=1)
    check_one_per_axis(call, 1)
    axes = [None if axis is None else call.axis_of(0, axis) for axis in permutation]
    named = [axis for axis in axes if axis is not None]
    if len(set(named)) != len(named):
        raise ShapeError(f"the permutation {named} names an axis of {call.text(0)} twice")
    return [tuple(DYNAMIC if axis is None else shape[axis] for axis in axes)]


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
    if count != len(call.shapes):
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {count}, its values_count")
    sizes = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(sizes) + 1, f"the result of {call.text(0)}")
    return [(*sizes[:axis], count, *sizes[axis:])]


@rule("UNPACK", "TFLite, unpack.cc, Prepare")
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis."""
    count = _output_count(call, "num")
    shape, axis = call.shape(0), call.axis_of(0)
    if 0 in shape:
        raise ShapeError(f"{call.text(0)} has no elements to unpack")
    if not may_be_equal(shape[axis], count):
        raise ShapeError(f"axis {axis} of {call.text(0)} has size {shape[axis]}: expected {count}, its num")
    return [(*shape[:axis], *shape[axis + 1 :])] * count


def _output_count(call: Call, option: str) -> int:
    count = call.number(option)
    if count != len(call.op.outputs):
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {count}, its {option}")
    return count


@rule("SPLIT", "TFLite, split.cc, ResizeOutputTensors")
def split(call: Call) -> Results:
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts."""
    count = _output_count(call, "num_splits")
    shape, axis = call.shape(1), call.scalar(0)
    if axis is None:
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(1, axis)
    return [(*shape[:axis], _divided(call, 1, axis, count), *shape[axis + 1 :])] * count


def _divided(call: Call, index: int, axis: int, count: int) -> int:
    """An axis of input `index`, cut into equal parts."""
    size = call.shape(index)[axis]
    if count == 0 or (size >= 0 and size % count):
        raise ShapeError(f"axis {axis} of {call.text(index)} has size {size}: it has no {count} equal parts")
    return DYNAMIC if size < 0 else size // count


@rule("SPLIT_V", "TFLite, split_v.cc, ResizeOutputTensors")
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left."""
    count = _output_count(call, "num_splits")
    shape, sizes, axis = call.shape(0), call.elements(1, rank=1), call.scalar(2)
    if len(sizes) != count:
        raise ShapeError(f"it has {count} outputs, but {len(sizes)} sizes in {call.label(1)}")
    if axis is None:
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(0, axis)
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in _split_sizes(call, sizes, axis)]


def _split_sizes(call: Call, sizes: Sequence[Element], axis: int) -> list[int]:
    size, parts = call.shape(0)[axis], list(map(size_of, sizes))
    if size < 0 or None in sizes:
        return parts
    given, rest = sum(part for part in parts if part >= 0), parts.count(DYNAMIC)
    if min(parts, default=0) < DYNAMIC or rest > 1 or given > size or (rest == 0 and given != size):
        text = f"the sizes {parts} do not add up to {size}, axis {axis} of {call.text(0)}"
        raise ShapeError(f"{text}: expected that sum, or one -1 for the rest")
    return [size - given if part < 0 else part for part in parts]


@rule("TILE", "TFLite, tile.cc, ResizeOutput")
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says."""
    shape, times = call.shape(0), call.sizes(1)
    check_one_per_axis(call, 1)
    return [tuple(map(product, shape, times))]


@rule("BROADCAST_TO", "TFLite, broadcast_to.cc, ResizeOutputTensor")
def broadcast_to(call: Call) -> Results:
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it."""
    shape, target = call.shape(0), call.sizes(1, rank=1)
    if len(shape) > len(target):
        raise ShapeError(f"{call.text(0)} has more axes than the shape {shape_text(target)}")
    lead = len(target) - len(shape)
    result = list(target)
    for axis, size in enumerate(shape, start=lead):
        if size >= 0 and size not in (1, target[axis]):
            if target[axis] >= 0:
                expected = f"axis {axis - lead} has size {size}, expected 1 or {target[axis]}"
                raise ShapeError(f"{call.text(0)} does not broadcast to {shape_text(target)}: {expected}")
            result[axis] = size
    return [tuple(result)]


@rule("BROADCAST_ARGS", "TFLite, broadcast_args.cc, Prepare")
def broadcast_args(call: Call) -> Results:
    """Two shapes, as vectors, give the vector of the shape they broadcast to."""
    left, right = call.shape(0, rank=1), call.shape(1, rank=1)
    return [(DYNAMIC if min(*left, *right) < 0 else max(*left, *right),)]


@rule("REVERSE_V2", "TFLite, reverse.cc, Prepare")
def reverse(call: Call) -> Results:
    """The result has the shape of the input; input 1 lists the axes to reverse."""
    shape, axes = call.shape(0, most=_MAX_RANK), call.shape(1, rank=1)
    if axes[0] > len(shape):
        raise ShapeError(f"{call.text(1)} lists more axes than {call.text(0)} has")
    return [shape]


@rule("PAD PADV2", "TFLite, pad.cc, ResizeOutputTensor")
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it."""
    call.shape(0, most=_MAX_RANK)
    if call.has(2):
        call.require_single(2)
    return [_padded(call)]


@rule("MIRROR_PAD", "TFLite, mirror_pad.cc, GetPaddedOutputShape")
def mirror_pad(call: Call) -> Results:
    """As PAD, but an axis cannot grow by more than itself (by less than itself with `REFLECT`)."""
    shape, result, reflects = call.shape(0), _padded(call), call.number("mode") == 0
    for axis, size in enumerate(shape):
        pair, most = call.sizes(1)[2 * axis : 2 * axis + 2], size - reflects
        if size >= 0 and max(pair) > most:
            text = f"axis {axis} of {call.text(0)} cannot be mirrored by {pair}: expected {most} at most"
            raise ShapeError(text)
    return [result]


def _padded(call: Call) -> Shape:
    shape = call.shape(0)
    if not may_be_alike(call.shape(1), (len(shape), 2)):
        raise ShapeError(f"{call.text(1)} must have the shape [{len(shape)},2], two numbers for each axis")
    numbers = call.sizes(1)
    return tuple(map(total, shape, numbers[::2], numbers[1::2]))


@rule("SPACE_TO_DEPTH", "TFLite, space_to_depth.cc, Prepare")
def space_to_depth(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h/s, w/s, c*s*s]`, s the `block_size`."""
    (batch, _, _, depth), block = call.shape(0, rank=4), _block_size(call)
    return [(batch, _divided(call, 0, 1, block), _divided(call, 0, 2, block), product(depth, block, block))]


@rule("DEPTH_TO_SPACE", "TFLite, depth_to_space.cc, Prepare")
def depth_to_space(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h*s, w*s, c/(s*s)]`, s the `block_size`."""
    (batch, height, width, _), block = call.shape(0, rank=4), _block_size(call)
    return [(batch, product(height, block), product(width, block), _divided(call, 0, 3, block * block))]


def _block_size(call: Call) -> int:
    block = call.number("block_size")
    if block <= 0:
        raise ShapeError(f"its block_size is {block}: expected 1 or more")
    return block


@rule("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", "TFLite, ResizeOutputTensor of each one's own file")
def resize(call: Call) -> Results:
    """`[b, h, w, c]` takes the height and width that input 1, `[2]`, gives."""
    shape, size = call.shape(0, rank=4), call.sizes(1, rank=1)
    if len(size) != 2:
        raise ShapeError(f"{call.text(1)} must hold two sizes, height and width")
    if 0 in size:
        raise ShapeError(f"{call.label(1)} gives the size {list(size)}: expected 1 or more")
    return [(shape[0], *size, shape[3])]
