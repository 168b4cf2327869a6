"""Rules of operators that pad, resize, or move numbers between space and depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.call import as_dimension
from edge_opt.shapes.dimension import DYNAMIC, Dim, add_sizes, may_be_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Element, Results
    from edge_opt.shapes.dimension import Shape

_MAX_PAD_RANK = 8


def _pairs(call: Call, index: int, axes: int) -> list[tuple[Element, Element]] | None:
    """Return the `[axes, 2]` numbers of an input as pairs; None where the input is no known constant.

    Raises:
        ShapeError: the input has another shape.
    """
    shape = call.shapes[index]
    if shape is not None and (
        len(shape) != 2 or not may_be_equal(shape[0], axes) or shape[1] not in (2, DYNAMIC)
    ):
        raise ShapeError(f"{call.described(index)} must have the shape [{axes},2], two numbers for each axis")
    numbers = call.elements(index)
    if numbers is None:
        return None
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _check_not_negative(call: Call, index: int, numbers: list[tuple[Element, Element]]) -> None:
    flat = [number for pair in numbers for number in pair]
    if any(number is not None and number < 0 and not isinstance(number, Dim) for number in flat):
        raise ShapeError(f"{call.label(index)} has a negative number: {flat}")


@rule("PAD", inputs=2)
@rule("PADV2", inputs=3)
def pad(call: Call) -> Results:
    """Each axis grows by the two numbers that input 1, `[rank, 2]`, has for it.

    Source: TFLite, pad.cc, ResizeOutputTensor.
    """
    shape = call.require_rank(0, 0, _MAX_PAD_RANK)
    if call.has(2):
        call.require_single(2)
    if shape is None:
        return [None]
    pairs = _pairs(call, 1, len(shape))
    if pairs is None:
        return [(DYNAMIC,) * len(shape)]
    _check_not_negative(call, 1, pairs)
    return [_padded(shape, pairs)]


def _padded(shape: Shape, pairs: list[tuple[Element, Element]]) -> Shape:
    return tuple(add_sizes((size, *map(as_dimension, pair))) for size, pair in zip(shape, pairs, strict=True))


@rule("MIRROR_PAD", inputs=2)
def mirror_pad(call: Call) -> Results:
    """As PAD, but an axis cannot grow by more than itself (by less than itself with `REFLECT`).

    Source: TFLite, mirror_pad.cc, GetPaddedOutputShape.
    """
    shape = call.shapes[0]
    if shape is None:
        return [None]
    pairs = _pairs(call, 1, len(shape))
    if pairs is None:
        return [(DYNAMIC,) * len(shape)]
    _check_not_negative(call, 1, pairs)
    reflects = call.number("mode") == 0
    for axis, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
        most = size - 1 if reflects else size
        if size >= 0 and any(number is not None and number > most for number in pair):
            raise ShapeError(
                f"axis {axis} of {call.described(0)} cannot be mirrored by {pair}: expected {most} at most"
            )
    return [_padded(shape, pairs)]


@rule("SPACE_TO_DEPTH", inputs=1)
def space_to_depth(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h/s, w/s, c*s*s]`, s the `block_size`.

    Source: TFLite, space_to_depth.cc, Prepare.
    """
    shape, block = call.require_rank(0, 4), _block_size(call)
    if shape is None:
        return [(DYNAMIC,) * 4]
    for axis in (1, 2):
        _require_multiple(call, axis, block)
    batch, height, width, depth = shape
    return [(batch, _divide(height, block), _divide(width, block), _multiply(depth, block * block))]


@rule("DEPTH_TO_SPACE", inputs=1)
def depth_to_space(call: Call) -> Results:
    """`[b, h, w, c]` becomes `[b, h*s, w*s, c/(s*s)]`, s the `block_size`.

    Source: TFLite, depth_to_space.cc, Prepare.
    """
    shape, block = call.require_rank(0, 4), _block_size(call)
    if shape is None:
        return [(DYNAMIC,) * 4]
    _require_multiple(call, 3, block * block)
    batch, height, width, depth = shape
    return [(batch, _multiply(height, block), _multiply(width, block), _divide(depth, block * block))]


def _block_size(call: Call) -> int:
    block = call.number("block_size")
    if block <= 0:
        raise ShapeError(f"its block_size is {block}: expected 1 or more")
    return block


def _require_multiple(call: Call, axis: int, factor: int) -> None:
    size = (call.shapes[0] or ())[axis]
    if size >= 0 and size % factor:
        raise ShapeError(
            f"axis {axis} of {call.described(0)} has size {size}: expected a multiple of {factor}"
        )


def _divide(size: int, factor: int) -> int:
    return size if factor == 1 else DYNAMIC if size < 0 else size // factor


def _multiply(size: int, factor: int) -> int:
    return size if factor == 1 else DYNAMIC if size < 0 else size * factor


@rule("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", inputs=2)
def resize(call: Call) -> Results:
    """`[b, h, w, c]` takes the height and width that input 1, `[2]`, gives.

    Source: TFLite, resize_bilinear.cc and resize_nearest_neighbor.cc, ResizeOutputTensor.
    """
    shape, size = call.require_rank(0, 4), call.sizes(1)
    length = call.require_rank(1, 1)
    if length is not None and not may_be_equal(length[0], 2):
        raise ShapeError(f"{call.described(1)} must hold two sizes, height and width")
    height, width = (DYNAMIC, DYNAMIC) if size is None else size
    if 0 in (height, width):
        raise ShapeError(f"{call.label(1)} gives the size [{height},{width}]: expected 1 or more")
    return [(DYNAMIC, height, width, DYNAMIC) if shape is None else (shape[0], height, width, shape[3])]
