"""Rules of operators that move, join, cut or repeat whole axes, and keep the elements as they are."""

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    add_sizes,
    as_dimension,
    divide_size,
    element_count,
    is_negative,
    is_number,
    may_be_equal,
    shape_text,
)
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

_MAX_RANK = 8  # of TRANSPOSE and REVERSE_V2


@rule("TRANSPOSE", inputs=2)
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once.

    Source: TFLite, transpose.cc, ResizeOutputTensor.
    """
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


@rule("CONCATENATION", inputs=(1, None))
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other axes are equal. Known scalars stack up to a vector.

    Source: TFLite, concatenation.cc, Prepare.
    """
    shapes, axis = call.all_shapes(), call.number("axis")
    if axis == 0 and all(shape == () and call.is_known(index) for index, shape in enumerate(shapes)):
        return [(len(shapes),)]
    axis = call.axis_of(0, axis)
    dims = call.merged(range(len(shapes)), beside=axis)
    return [(*dims[:axis], add_sizes(shape[axis] for shape in shapes), *dims[axis + 1 :])]


@rule("PACK", inputs=(1, None))
def pack(call: Call) -> Results:
    """Inputs of one shape become the indices of a new axis.

    Source: TFLite, pack.cc, Prepare.
    """
    count = call.number("values_count")
    if count != len(call.shapes):
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {count}, its values_count")
    dims = call.merged(range(count))
    axis = call.axis(call.number("axis"), len(dims) + 1, f"the result of {call.described(0)}")
    return [(*dims[:axis], count, *dims[axis:])]


@rule("UNPACK", inputs=1, outputs=None)
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis.

    Source: TFLite, unpack.cc, Prepare.
    """
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


@rule("SPLIT", inputs=2, outputs=None)
def split(call: Call) -> Results:
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts.

    Source: TFLite, split.cc, ResizeOutputTensors.
    """
    count = _checked_count(call, "num_splits")
    shape, axis = call.shape(1), call.scalar(0)
    if not is_number(axis):
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(1, axis)
    size = shape[axis]
    if count == 0 or (size >= 0 and size % count):
        raise ShapeError(f"axis {axis} of {call.described(1)} has size {size}: it has no {count} equal parts")
    return [(*shape[:axis], divide_size(size, count), *shape[axis + 1 :])] * count


@rule("SPLIT_V", inputs=3, outputs=None)
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left.

    Source: TFLite, split_v.cc, ResizeOutputTensors.
    """
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


@rule("TILE", inputs=2)
def tile(call: Call) -> Results:
    """Each axis is repeated as often as input 1 says.

    Source: TFLite, tile.cc, ResizeOutput.
    """
    shape, times = call.shape(0), call.elements(1)
    if len(times) != len(shape):
        raise ShapeError(
            f"{len(times)} multiples for {call.described(0)}: expected {len(shape)}, one for each axis"
        )
    if any(map(is_negative, times)):
        raise ShapeError(f"the multiples {times} of {call.label(0)} must not be negative")
    pairs = zip(shape, map(as_dimension, times), strict=True)
    return [tuple(element_count(pair) for pair in pairs)]


@rule("BROADCAST_TO", inputs=2)
def broadcast_to(call: Call) -> Results:
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it.

    Source: TFLite, broadcast_to.cc, ResizeOutputTensor.
    """
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


@rule("BROADCAST_ARGS", inputs=2)
def broadcast_args(call: Call) -> Results:
    """Two shapes, as vectors, give the vector of the shape they broadcast to.

    Source: TFLite, broadcast_args.cc, Prepare.
    """
    left, right = call.shape(0, rank=1), call.shape(1, rank=1)
    return [(DYNAMIC if min(*left, *right) < 0 else max(left[0], right[0]),)]


@rule("REVERSE_V2", inputs=2)
def reverse(call: Call) -> Results:
    """The result has the shape of the input; input 1 lists the axes to reverse.

    Source: TFLite, reverse.cc, Prepare.
    """
    shape, axes = call.shape(0, most=_MAX_RANK), call.shape(1, rank=1)
    if axes[0] > len(shape):
        raise ShapeError(f"{call.described(1)} lists more axes than {call.described(0)} has")
    return [shape]
