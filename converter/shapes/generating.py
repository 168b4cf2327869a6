"""Rules of operators whose result comes from numbers, not from an operand's axes: ranges, fills, indices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edge_opt.shapes.dimension import DYNAMIC, Dim
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results

_LONGEST_RANGE = 2**31 - 1


@rule("SHAPE", inputs=1)
def shape_of(call: Call) -> Results:
    """A vector with one number for each axis of the input.

    Source: TFLite, shape.cc, Prepare.
    """
    shape = call.shapes[0]
    return [(DYNAMIC if shape is None else len(shape),)]


@rule("RANK", inputs=1)
def rank(call: Call) -> Results:
    """A scalar.

    Source: TFLite, rank.cc, Prepare.
    """
    del call
    return [()]


@rule("FILL", inputs=2)
@rule("RANDOM_UNIFORM RANDOM_STANDARD_NORMAL", inputs=1)
def fill(call: Call) -> Results:
    """The result has the shape that input 0 spells out; what a FILL is filled with is a scalar.

    Source: TFLite, fill.cc, ResizeOutput; random_ops.cc, Prepare.
    """
    if call.has(1):
        call.require_rank(1, 0)
    return [call.sizes(0)]


@rule("RANGE", inputs=3)
def range_(call: Call) -> Results:
    """From start to limit by delta, three scalars: `ceil((limit - start) / delta)` numbers.

    Source: TFLite, range.cc, GetSize.
    """
    for index in range(3):
        call.require_rank(index, 0)
    values = [call.value(index) for index in range(3)]
    if any(value is None for value in values):
        return [(_named_range(call),)]
    start, limit, delta = (value.item() for value in values if value is not None)
    if delta == 0 or (start > limit and delta > 0) or (start < limit and delta < 0):
        raise ShapeError(f"from {start} to {limit} by {delta} there is no range")
    if isinstance(start, float):
        count = math.ceil(abs((limit - start) / delta))
    else:
        count = -(-abs(limit - start) // abs(delta))
    if count > _LONGEST_RANGE:
        raise ShapeError(
            f"from {start} to {limit} by {delta} are {count} numbers: expected {_LONGEST_RANGE} at most"
        )
    return [(count,)]


def _named_range(call: Call) -> int:
    """`range(0, T, 1)` is T long."""
    start, delta = call.value(0), call.value(2)
    limit = call.known(1)
    if start is None or delta is None or limit is None or (start.item(), delta.item()) != (0, 1):
        return DYNAMIC
    element = limit.item()
    return element if isinstance(element, Dim) else DYNAMIC


@rule("RFFT2D", inputs=2)
def rfft2d(call: Call) -> Results:
    """The last two axes become `[h, w / 2 + 1]`, h and w from input 1, powers of two.

    Source: TFLite, rfft2d.cc, ResizeOutputandTemporaryTensors.
    """
    shape, sizes = call.shapes[0], call.sizes(1)
    if shape is None:
        return [None]
    if len(shape) < 2:
        raise ShapeError(f"{call.described(0)} has rank {len(shape)}: expected rank 2 or more")
    if sizes is None or len(sizes) != 2:
        if sizes is not None:
            raise ShapeError(f"{call.described(1)} must hold two sizes, height and width")
        return [(*shape[:-2], DYNAMIC, DYNAMIC)]
    if any(size >= 0 and (size == 0 or size & (size - 1)) for size in sizes):
        raise ShapeError(f"{call.label(1)} gives the sizes {list(sizes)}: expected powers of two")
    height, width = sizes
    return [(*shape[:-2], height, DYNAMIC if width < 0 else width // 2 + 1)]


@rule("WHERE", inputs=1, data_dependent=True)
def where(call: Call) -> Results:
    """A row for each element that is not 0, with one number for each axis.

    Source: TFLite, where.cc, ResizeOutputTensor.
    """
    shape, value = call.shapes[0], call.value(0)
    count = DYNAMIC if value is None else int((value != 0).sum())
    return [(count, DYNAMIC if shape is None else len(shape))]
