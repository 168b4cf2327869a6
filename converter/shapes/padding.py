"""Rules of operators that pad, resize, or move numbers between space and depth."""

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import (
    Element,
    Shape,
    add_sizes,
    as_dimension,
    divide_size,
    element_count,
    is_negative,
    is_number,
    may_be_alike,
)
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

_MAX_PAD_RANK = 8


def _pads(call: Call) -> list[tuple[Element, Element]]:
    """Return the two numbers that input 1, `[rank, 2]`, has for each axis of input 0."""
    axes = len(call.shape(0))
    if not may_be_alike(call.shape(1), (axes, 2)):
        raise ShapeError(f"{call.described(1)} must have the shape [{axes},2], two numbers for each axis")
    numbers = call.elements(1)
    if any(map(is_negative, numbers)):
        raise ShapeError(f"{call.label(1)} has a negative number: {numbers}")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@rule("PAD", inputs=2)
@rule("PADV2", inputs=3)
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it.

    Source: TFLite, pad.cc, ResizeOutputTensor.
    """
    shape = call.shape(0, most=_MAX_PAD_RANK)
    if call.has(2):
        call.require_single(2)
    return [_padded(shape, _pads(call))]


def _padded(shape: Shape, pairs: list[tuple[Element, Element]]) -> Shape:
    return tuple(add_sizes((size, *map(as_dimension, pair))) for size, pair in zip(shape, pairs, strict=True))


@rule("MIRROR_PAD", inputs=2)
def mirror_pad(call: Call) -> Results:
    """As PAD, but an axis cannot grow by more than itself (by less than itself with `REFLECT`).

    Source: TFLite, mirror_pad.cc, GetPaddedOutputShape.
    """
    shape, pairs, reflects = call.shape(0), _pads(call), call.number("mode") == 0
    for axis, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
        most = size - 1 if reflects else size
        if size >= 0 and any(is_number(number) and number > most for number in pair):
            raise ShapeError(
                f"axis {axis} of {call.described(0)} cannot be mirrored by {pair}: expected {most} at most"
            )
    return [_padded(shape, pairs)]


@rule("SPACE_TO_DEPTH", inputs=1)
def space_to_depth(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h/s, w/s, c*s*s]`, s the `block_size`.

    Source: TFLite, space_to_depth.cc, Prepare.
    """
    (batch, _, _, depth), block = call.shape(0, rank=4), _block_size(call)
    height, width = (_divided(call, axis, block) for axis in (1, 2))
    return [(batch, height, width, element_count((depth, block * block)))]


@rule("DEPTH_TO_SPACE", inputs=1)
def depth_to_space(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h*s, w*s, c/(s*s)]`, s the `block_size`.

    Source: TFLite, depth_to_space.cc, Prepare.
    """
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


@rule("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", inputs=2)
def resize(call: Call) -> Results:
    """`[b, h, w, c]` takes the height and width that input 1, `[2]`, gives.

    Source: TFLite, resize_bilinear.cc and resize_nearest_neighbor.cc, ResizeOutputTensor.
    """
    shape, size = call.shape(0, rank=4), call.sizes(1)
    if len(size) != 2:
        raise ShapeError(f"{call.described(1)} must hold two sizes, height and width")
    if 0 in size:
        raise ShapeError(f"{call.label(1)} gives the size {list(size)}: expected 1 or more")
    return [(shape[0], *size, shape[3])]
