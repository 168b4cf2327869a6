"""Rules of operators that move, join, cut, repeat, pad or resize whole axes."""

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    Shape,
    ShapeError,
    add_sizes,
    as_dimension,
    divide_size,
    element_count,
    is_negative,
    is_number,
    may_be_alike,
    may_be_equal,
    shape_text,
)
from edge_opt.shapes.rules import rule

_MAX_RANK = 8  # of PAD, REVERSE_V2 and TRANSPOSE


@rule("TRANSPOSE", "TFLite, transpose.cc, ResizeOutputTensor")
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once."""
    shape, permutation = call.shape(0, most=_MAX_RANK), call.vector(1)
    if len(permutation) != len(shape):
        raise ShapeError(
            f"the permutation has {len(permutation)} axes: expected one for each axis of {call.described(0)}"
        )
    axes = [call.axis_of(0, axis) if is_number(axis) else None for axis in permutation]
    known = [axis for axis in axes if axis is not None]
    if len(set(known)) != len(known):
        raise ShapeError(f"the permutation {known} names an axis of {call.described(0)} twice")
    return [tuple(DYNAMIC if axis is None else shape[axis] for axis in axes)]


@rule("CONCATENATION", "TFLite, concatenation.cc, Prepare")
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other axes are equal. Known scalars stack up to a vector."""
    shapes, axis = call.all_shapes(), call.number("axis")
    if axis == 0 and all(shape == () and call.is_known(index) for index, shape in enumerate(shapes)):
        return [(len(shapes),)]
    axis = call.axis_of(0, axis)
    dims = call.merged(range(len(shapes)), beside=axis)
    return [(*dims[:axis], add_sizes(shape[axis] for shape in shapes), *dims[axis + 1 :])]


@rule("PACK", "TFLite, pack.cc, Prepare")
def pack(call: Call) -> Results:
    """Inputs of one shape become the indices of a new axis."""
    count = call.number("values_count")
    if count != len(call.shapes):
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {count}, its values_count")
    dims = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(dims) + 1, f"the result of {call.described(0)}")
    return [(*dims[:axis], count, *dims[axis:])]


@rule("UNPACK", "TFLite, unpack.cc, Prepare")
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis."""
    count = _checked_count(call, "num")
    shape, axis = call.shape(0), call.axis_of(0)
    if 0 in shape:
        raise ShapeError(f"{call.described(0)} has no elements to unpack")
    if not may_be_equal(shape[axis], count):
        raise ShapeError(
            f"axis {axis} of {call.described(0)} has size {shape[axis]}: expected {count}, its num"
        )
    return [(*shape[:axis], *shape[axis + 1 :])] * count


def _checked_count(call: Call, option: str) -> int:
    count = call.number(option)
    if count != len(call.op.outputs):
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {count}, its {option}")
    return count


@rule("SPLIT", "TFLite, split.cc, ResizeOutputTensors")
def split(call: Call) -> Results:
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts."""
    count = _checked_count(call, "num_splits")
    shape, axis = call.shape(1), call.scalar(0)
    if not is_number(axis):
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(1, axis)
    size = shape[axis]
    if count == 0 or (size >= 0 and size % count):
        raise ShapeError(f"axis {axis} of {call.described(1)} has size {size}: it has no {count} equal parts")
    return [(*shape[:axis], divide_size(size, count), *shape[axis + 1 :])] * count


@rule("SPLIT_V", "TFLite, split_v.cc, ResizeOutputTensors")
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left."""
    count = _checked_count(call, "num_splits")
    shape, sizes, axis = call.shape(0), call.vector(1), call.scalar(2)
    if len(sizes) != count:
        raise ShapeError(f"it has {count} outputs, but {len(sizes)} sizes in {call.label(1)}")
    if not is_number(axis):
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(0, axis)
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in _split_sizes(call, sizes, axis)]


def _split_sizes(call: Call, sizes: list[Element], axis: int) -> list[int]:
    size, parts = call.shape(0)[axis], [as_dimension(part) for part in sizes]
    if size < 0 or not all(map(is_number, sizes)):
        return parts
    given = sum(part for part in parts if part >= 0)
    rest = parts.count(DYNAMIC)
    if min(parts, default=0) < DYNAMIC or rest > 1 or given > size or (rest == 0 and given != size):
        raise ShapeError(
            f"the sizes {parts} do not add up to {size}, axis {axis} of {call.described(0)}: "
            "expected that sum, or one -1 for the rest"
        )
    return [size - given if part < 0 else part for part in parts]


@rule("TILE", "TFLite, tile.cc, ResizeOutput")
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says."""
    shape, times = call.shape(0), call.elements(1)
    if len(times) != len(shape):
        raise ShapeError(
            f"{len(times)} multiples for {call.described(0)}: expected {len(shape)}, one for each axis"
        )
    if any(map(is_negative, times)):
        raise ShapeError(f"the multiples {times} of {call.label(0)} must not be negative")
    pairs = zip(shape, map(as_dimension, times), strict=True)
    return [tuple(element_count(pair) for pair in pairs)]


@rule("BROADCAST_TO", "TFLite, broadcast_to.cc, ResizeOutputTensor")
def broadcast_to(call: Call) -> Results:
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it."""
    shape, dims = call.shape(0), call.sizes(1)
    if len(shape) > len(dims):
        raise ShapeError(f"{call.described(0)} has more axes than the shape {shape_text(dims)}")
    lead = len(dims) - len(shape)
    result = list(dims)
    for axis, size in enumerate(shape):
        wanted = dims[lead + axis]
        if size in (1, wanted) or size < 0:
            continue
        if wanted >= 0:
            raise ShapeError(
                f"{call.described(0)} does not broadcast to {shape_text(dims)}: axis {axis} has size {size}, "
                f"expected 1 or {wanted}"
            )
        result[lead + axis] = size
    return [tuple(result)]


@rule("BROADCAST_ARGS", "TFLite, broadcast_args.cc, Prepare")
def broadcast_args(call: Call) -> Results:
    """Two shapes, as vectors, give the vector of the shape they broadcast to."""
    left, right = call.shape(0, rank=1), call.shape(1, rank=1)
    return [(DYNAMIC if min(*left, *right) < 0 else max(left[0], right[0]),)]


@rule("REVERSE_V2", "TFLite, reverse.cc, Prepare")
def reverse(call: Call) -> Results:
    """The result has the shape of the input; input 1 lists the axes to reverse."""
    shape, axes = call.shape(0, most=_MAX_RANK), call.shape(1, rank=1)
    if axes[0] > len(shape):
        raise ShapeError(f"{call.described(1)} lists more axes than {call.described(0)} has")
    return [shape]


def _pads(call: Call) -> list[tuple[Element, Element]]:
    """Return the two numbers that input 1, `[rank, 2]`, has for each axis of input 0."""
    axes = len(call.shape(0))
    if not may_be_alike(call.shape(1), (axes, 2)):
        raise ShapeError(f"{call.described(1)} must have the shape [{axes},2], two numbers for each axis")
    numbers = call.elements(1)
    if any(map(is_negative, numbers)):
        raise ShapeError(f"{call.label(1)} has a negative number: {numbers}")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@rule("PAD PADV2", "TFLite, pad.cc, ResizeOutputTensor")
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it."""
    shape = call.shape(0, most=_MAX_RANK)
    if call.has(2):
        call.require_single(2)
    return [_padded(shape, _pads(call))]


def _padded(shape: Shape, pairs: list[tuple[Element, Element]]) -> Shape:
    return tuple(add_sizes((size, *map(as_dimension, pair))) for size, pair in zip(shape, pairs, strict=True))


@rule("MIRROR_PAD", "TFLite, mirror_pad.cc, GetPaddedOutputShape")
def mirror_pad(call: Call) -> Results:
    """As PAD, but an axis cannot grow by more than itself (by less than itself with `REFLECT`)."""
    shape, pairs, reflects = call.shape(0), _pads(call), call.number("mode") == 0
    for axis, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
        most = size - 1 if reflects else size
        if size >= 0 and any(is_number(number) and number > most for number in pair):
            raise ShapeError(
                f"axis {axis} of {call.described(0)} cannot be mirrored by {pair}: expected {most} at most"
            )
    return [_padded(shape, pairs)]


@rule("SPACE_TO_DEPTH", "TFLite, space_to_depth.cc, Prepare")
def space_to_depth(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h/s, w/s, c*s*s]`, s the `block_size`."""
    (batch, _, _, depth), block = call.shape(0, rank=4), _block_size(call)
    height, width = (_divided(call, axis, block) for axis in (1, 2))
    return [(batch, height, width, element_count((depth, block * block)))]


@rule("DEPTH_TO_SPACE", "TFLite, depth_to_space.cc, Prepare")
def depth_to_space(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h*s, w*s, c/(s*s)]`, s the `block_size`."""
    (batch, height, width, _), block = call.shape(0, rank=4), _block_size(call)
    depth = _divided(call, 3, block * block)
    return [(batch, element_count((height, block)), element_count((width, block)), depth)]


def _block_size(call: Call) -> int:
    block = call.number("block_size")
    if block <= 0:
        raise ShapeError(f"its block_size is {block}: expected 1 or more")
    return block


def _divided(call: Call, axis: int, factor: int) -> int:
    size = call.shape(0)[axis]
    if size >= 0 and size % factor:
        raise ShapeError(
            f"axis {axis} of {call.described(0)} has size {size}: expected a multiple of {factor}"
        )
    return divide_size(size, factor)


@rule(
    "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR",
    "TFLite, resize_bilinear.cc and resize_nearest_neighbor.cc, ResizeOutputTensor",
)
def resize(call: Call) -> Results:
    """`[b, h, w, c]` takes the height and width that input 1, `[2]`, gives."""
    shape, size = call.shape(0, rank=4), call.sizes(1)
    if len(size) != 2:
        raise ShapeError(f"{call.described(1)} must hold two sizes, height and width")
    if 0 in size:
        raise ShapeError(f"{call.label(1)} gives the size {list(size)}: expected 1 or more")
    return [(shape[0], *size, shape[3])]
