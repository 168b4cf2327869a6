"""Rules of operators that move, join, cut or repeat whole axes, and keep the elements as they are."""

from __future__ import annotations

from edge_opt.shapes.call import Call, Element, Results, as_dimension
from edge_opt.shapes.dimension import DYNAMIC, Shape, add_sizes, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

_MAX_TRANSPOSE_RANK = 8
_MAX_REVERSE_RANK = 8


@rule("TRANSPOSE", inputs=2)
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `perm[i]` of the input; `perm` is input 1 and names each axis once.

    Source: TFLite, transpose.cc, ResizeOutputTensor.
    """
    shape = call.require_rank(0, 0, _MAX_TRANSPOSE_RANK)
    call.require_rank(1, 1)
    permutation = call.elements(1)
    if shape is None:
        return [None if permutation is None else (DYNAMIC,) * len(permutation)]
    if permutation is None:
        return [(DYNAMIC,) * len(shape)]
    if len(permutation) != len(shape):
        raise ShapeError(
            f"the permutation has {len(permutation)} axes: expected one for each axis of {call.described(0)}"
        )
    axes = [None if axis is None else call.axis_of(0, axis) for axis in permutation]
    known = [axis for axis in axes if axis is not None]
    if len(set(known)) != len(known):
        raise ShapeError(f"the permutation {known} names an axis of {call.described(0)} twice")
    return [tuple(DYNAMIC if axis is None else shape[axis] for axis in axes)]


@rule("CONCATENATION", inputs=(1, None))
def concatenation(call: Call) -> Results:
    """The sizes along `axis` add up; all other axes are equal. Known scalars stack up to a vector.

    Source: TFLite, concatenation.cc, Prepare.
    """
    return [join(call, call.number("axis"))]


def join(call: Call, axis: int) -> Shape | None:
    """Return the shape of all inputs put one after the other along `axis`."""
    first = next((index for index, shape in enumerate(call.shapes) if shape is not None), None)
    if first is None:
        return None
    rank = len(call.shapes[first] or ())
    if rank == 0 and axis == 0 and _all_known_scalars(call):
        return (len(call.shapes),)
    axis = call.axis(axis, rank, call.described(first))
    dims = list(call.shapes[first] or ())
    for index, shape in enumerate(call.shapes):
        if shape is not None:
            _merge_beside(call, dims, first, index, axis)
    dims[axis] = add_sizes(DYNAMIC if shape is None else shape[axis] for shape in call.shapes)
    return tuple(dims)


def _all_known_scalars(call: Call) -> bool:
    return all(shape == () and call.value(index) is not None for index, shape in enumerate(call.shapes))


def _merge_beside(call: Call, dims: list[int], first: int, index: int, axis: int | None) -> None:
    """Check an input against the others, all axes but `axis`; take a size over where only it is known."""
    shape = call.shapes[index]
    assert shape is not None
    if len(shape) != len(dims):
        raise ShapeError(f"{call.described(first)} and {call.described(index)} have different ranks")
    for other, size in enumerate(shape):
        if other == axis:
            continue
        if not may_be_equal(dims[other], size):
            where = "in every axis" if axis is None else f"in every axis but {axis}"
            raise ShapeError(
                f"{call.described(first)} and {call.described(index)} differ in axis {other}: "
                f"expected equal sizes {where}"
            )
        if dims[other] < 0 <= size:
            dims[other] = size


@rule("PACK", inputs=(1, None))
def pack(call: Call) -> Results:
    """Inputs of one shape become the indices of a new axis.

    Source: TFLite, pack.cc, Prepare.
    """
    count = call.number("values_count")
    if count != len(call.shapes):
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {count}, its values_count")
    first = next((index for index, shape in enumerate(call.shapes) if shape is not None), None)
    if first is None:
        return [None]
    dims = list(call.shapes[first] or ())
    for index, shape in enumerate(call.shapes):
        if shape is not None:
            _merge_beside(call, dims, first, index, None)
    axis = call.axis(call.number("axis"), len(dims) + 1, f"the result of {call.described(first)}")
    return [(*dims[:axis], count, *dims[axis:])]


@rule("UNPACK", inputs=1, outputs=None)
def unpack(call: Call) -> Results:
    """Each index of an axis becomes a result, which lacks that axis.

    Source: TFLite, unpack.cc, Prepare.
    """
    count = call.number("num")
    if count != len(call.op.outputs):
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {count}, its num")
    shape = call.shapes[0]
    if shape is None:
        return [None] * count
    axis = call.axis_of(0)
    if 0 in shape:
        raise ShapeError(f"{call.described(0)} has no elements to unpack")
    if not may_be_equal(shape[axis], count):
        raise ShapeError(
            f"axis {axis} of {call.described(0)} has size {shape[axis]}: expected {count}, its num"
        )
    return [(*shape[:axis], *shape[axis + 1 :])] * count


@rule("SPLIT", inputs=2, outputs=None)
def split(call: Call) -> Results:
    """The axis that input 0 gives, of input 1, is cut into `num_splits` equal parts.

    Source: TFLite, split.cc, ResizeOutputTensors.
    """
    count = _checked_split_count(call)
    shape, axis = call.shapes[1], call.scalar(0)
    if shape is None:
        return [None] * count
    if axis is None:
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(1, axis)
    size = shape[axis]
    if count == 0 or (size >= 0 and size % count):
        raise ShapeError(f"axis {axis} of {call.described(1)} has size {size}: it has no {count} equal parts")
    part = size if count == 1 else DYNAMIC if size < 0 else size // count
    return [(*shape[:axis], part, *shape[axis + 1 :])] * count


def _checked_split_count(call: Call) -> int:
    count = call.number("num_splits")
    if count != len(call.op.outputs):
        raise ShapeError(f"it has {len(call.op.outputs)} outputs: expected {count}, its num_splits")
    return count


@rule("SPLIT_V", inputs=3, outputs=None)
def split_v(call: Call) -> Results:
    """The axis that input 2 gives is cut into the sizes of input 1; one may be -1, it takes what is left.

    Source: TFLite, split_v.cc, ResizeOutputTensors.
    """
    count = _checked_split_count(call)
    call.require_rank(1, 1)
    shape, sizes, axis = call.shapes[0], call.elements(1), call.scalar(2)
    if sizes is not None and len(sizes) != count:
        raise ShapeError(f"it has {count} outputs, but {len(sizes)} sizes in {call.label(1)}")
    if shape is None:
        return [None] * count
    if axis is None:
        return [(DYNAMIC,) * len(shape)] * count
    axis = call.axis_of(0, axis)
    parts = _split_sizes(call, shape[axis], [None] * count if sizes is None else sizes, axis)
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


def _split_sizes(call: Call, size: int, sizes: list[Element], axis: int) -> list[int]:
    if size < 0 or None in sizes:
        return [DYNAMIC if part in (None, DYNAMIC) else as_dimension(part) for part in sizes]
    parts = [as_dimension(part) for part in sizes]
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
    shape, times = call.shapes[0], call.elements(1)
    if shape is None:
        return [None if times is None else (DYNAMIC,) * len(times)]
    if times is None:
        return [(DYNAMIC,) * len(shape)]
    if len(times) != len(shape):
        raise ShapeError(
            f"{len(times)} multiples for {call.described(0)}: expected {len(shape)}, one for each axis"
        )
    if any(count is not None and count < 0 for count in times):
        raise ShapeError(f"the multiples {times} of {call.label(0)} must not be negative")
    return [tuple(_times(dim, count) for dim, count in zip(shape, times, strict=True))]


def _times(dim: int, count: Element) -> int:
    if dim == 0 or count == 0:
        return 0
    if dim == 1:
        return as_dimension(count)
    if count == 1:
        return dim
    return DYNAMIC if count is None or dim < 0 or count < 0 else dim * count


@rule("BROADCAST_TO", inputs=2)
def broadcast_to(call: Call) -> Results:
    """The result has the shape that input 1 gives; axes of size 1 of the input stretch to it.

    Source: TFLite, broadcast_to.cc, ResizeOutputTensor.
    """
    shape, dims = call.shapes[0], call.sizes(1)
    if dims is None:
        return [None]
    if shape is None:
        return [dims]
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
    left, right = call.require_rank(0, 1), call.require_rank(1, 1)
    if left is None or right is None or min(*left, *right) < 0:
        return [(DYNAMIC,)]
    return [(max(left[0], right[0]),)]


@rule("REVERSE_V2", inputs=2)
def reverse(call: Call) -> Results:
    """The result has the shape of the input; input 1 lists the axes to reverse.

    Source: TFLite, reverse.cc, Prepare.
    """
    shape, axes = call.require_rank(0, 0, _MAX_REVERSE_RANK), call.require_rank(1, 1)
    if shape is not None and axes is not None and axes[0] > len(shape):
        raise ShapeError(f"{call.described(1)} lists more axes than {call.described(0)} has")
    return [shape]
