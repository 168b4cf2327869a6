"""Rules of operators whose result comes from numbers, not from an operand's axes: ranges, fills, indices."""

import math

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, Dim, is_number
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

_LONGEST_RANGE = 2**31 - 1


@rule("SHAPE", inputs=1)
def shape_of(call: Call) -> Results:
    """A vector with one number for each axis of the input.

    Source: TFLite, shape.cc, Prepare.
    """
    return [(len(call.shape(0)),)]


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
        call.shape(1, rank=0)
    return [call.sizes(0)]


@rule("RANGE", inputs=3)
def range_(call: Call) -> Results:
    """From start to limit by delta, three scalars: `ceil((limit - start) / delta)` numbers.

    Source: TFLite, range.cc, GetSize.
    """
    for index in range(3):
        call.shape(index, rank=0)
    values = [call.known(index) for index in range(3)]
    start, limit, delta = (None if value is None else value.item() for value in values)
    if isinstance(limit, Dim) and start == 0 and delta == 1:
        return [(limit,)]
    if not (is_number(start) and is_number(limit) and is_number(delta)):
        return [(DYNAMIC,)]
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


@rule("RFFT2D", inputs=2)
def rfft2d(call: Call) -> Results:
    """The last two axes become `[h, w / 2 + 1]`, h and w from input 1, powers of two.

    Source: TFLite, rfft2d.cc, ResizeOutputandTemporaryTensors.
    """
    shape, sizes = call.shape(0, least=2), call.sizes(1)
    if len(sizes) != 2:
        raise ShapeError(f"{call.described(1)} must hold two sizes, height and width")
    if any(size >= 0 and (size == 0 or size & (size - 1)) for size in sizes):
        raise ShapeError(f"{call.label(1)} gives the sizes {list(sizes)}: expected powers of two")
    height, width = sizes
    return [(*shape[:-2], height, DYNAMIC if width < 0 else width // 2 + 1)]


@rule("WHERE", inputs=1, data_dependent=True)
def where(call: Call) -> Results:
    """A row for each element that is not 0, with one number for each axis.

    Source: TFLite, where.cc, ResizeOutputTensor.
    """
    count = int((call.numbers(0) != 0).sum()) if call.is_known(0) else DYNAMIC
    return [(count, len(call.shape(0)))]
