"""Rules of operators that pad, dilate, resize or move between space, depth and batch."""

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
    reflects = int(call.option("mode", 0)) == 0
    for axis, (size, pair) in enumerate(zip(shape, pairs, strict=True)):
        most = size - 1 if reflects else size
        if size >= 0 and any(number is not None and number > most for number in pair):
            raise ShapeError(
                f"axis {axis} of {call.described(0)} cannot be mirrored by {pair}: expected {most} at most"
            )
    return [_padded(shape, pairs)]


@rule("DILATE", inputs=3)
def dilate(call: Call) -> Results:
    """`d - 1` elements go in between every two of an axis, d from input 1: n becomes `(n - 1) * d + 1`.

    Source: TFLite, dilate.cc, DilateDim.
    """
    shape, factors = call.shapes[0], call.elements(1)
    if shape is None:
        return [None]
    if not shape:
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    if factors is None:
        return [(DYNAMIC,) * len(shape)]
    if len(factors) != len(shape):
        raise ShapeError(
            f"{call.label(1)} has {len(factors)} numbers: expected one per axis of {call.described(0)}"
        )
    return [tuple(_dilated(call, size, factor) for size, factor in zip(shape, factors, strict=True))]


def _dilated(call: Call, size: int, factor: Element) -> int:
    if factor == 1 or size == 1:
        return size
    if size == 0 and factor is not None:
        raise ShapeError(f"{call.described(0)} has no elements to dilate")
    return DYNAMIC if factor is None or factor < 0 or size < 0 else (size - 1) * factor + 1


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
    block = int(call.option("block_size", 0))
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


def _blocks(call: Call, shape: Shape) -> tuple[list[Element], list[tuple[Element, Element]]] | None:
    """Block sizes and pairs of paddings or crops, for each axis between the first and the last."""
    count = len(shape) - 2
    blocks, pairs = call.elements(1), _pairs(call, 2, count)
    call.require_rank(1, 1)
    if blocks is None or pairs is None:
        return None
    if len(blocks) != count:
        raise ShapeError(
            f"{call.label(1)} has {len(blocks)} numbers: expected {count}, one for each inner axis"
        )
    if any(block is not None and block <= 0 and not isinstance(block, Dim) for block in blocks):
        raise ShapeError(f"{call.label(1)} has a block size below 1: {blocks}")
    return blocks, pairs


@rule("SPACE_TO_BATCH_ND", inputs=3)
def space_to_batch(call: Call) -> Results:
    """Inner axes are padded (input 2), divided by their block size (input 1), and the batch grows by it.

    Source: TFLite, space_to_batch_nd.cc, ResizeOutputTensor.
    """
    shape = call.require_rank(0, 3, 4)
    given = None if shape is None else _blocks(call, shape)
    if shape is None or given is None:
        return [None if shape is None else (*(DYNAMIC,) * (len(shape) - 1), shape[-1])]
    batch, inner = shape[0], []
    for axis, (block, pair) in enumerate(zip(*given, strict=True), start=1):
        padded = add_sizes((shape[axis], *map(as_dimension, pair)))
        if padded >= 0 and block is not None and block > 0 and padded % block:
            raise ShapeError(
                f"axis {axis} of {call.described(0)}, padded to {padded}, is no multiple of its block {block}"
            )
        inner.append(DYNAMIC if block is None or block < 0 else _divide(padded, block))
        batch = DYNAMIC if block is None or block < 0 else _multiply(batch, block)
    return [(batch, *inner, shape[-1])]


@rule("BATCH_TO_SPACE_ND", inputs=3)
def batch_to_space(call: Call) -> Results:
    """Block sizes (input 1) divide the batch and multiply the inner axes, which lose their crops (input 2).

    Source: TFLite, batch_to_space_nd.cc, ResizeOutputTensor.
    """
    shape = call.require_rank(0, 3, 4)
    given = None if shape is None else _blocks(call, shape)
    if shape is None or given is None:
        return [None if shape is None else (*(DYNAMIC,) * (len(shape) - 1), shape[-1])]
    _check_not_negative(call, 2, given[1])
    batch, inner = shape[0], []
    for axis, (block, pair) in enumerate(zip(*given, strict=True), start=1):
        if block is None or block < 0:
            batch = DYNAMIC
            inner.append(DYNAMIC)
            continue
        if batch >= 0 and batch % block:
            raise ShapeError(f"the batch of {call.described(0)} is no multiple of the block sizes {given[0]}")
        batch = _divide(batch, block)
        inner.append(_cropped(call, axis, _multiply(shape[axis], block), pair))
    return [(batch, *inner, shape[-1])]


def _cropped(call: Call, axis: int, size: int, pair: tuple[Element, Element]) -> int:
    if pair == (0, 0):
        return size
    crops = [as_dimension(crop) for crop in pair]
    if size < 0 or min(crops) < 0:
        return DYNAMIC
    if sum(crops) > size:
        raise ShapeError(
            f"the crops {pair} take more than axis {axis} of {call.described(0)} will have: {size}"
        )
    return size - sum(crops)


@rule("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", inputs=2)
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
