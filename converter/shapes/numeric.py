"""Rules of operators that compute: element by element, along an axis, or a result made of numbers alone."""

import math
from fractions import Fraction

from edge_opt.ir.operators import UNARY
from edge_opt.shapes.broadcast import broadcast_operands
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, ShapeError, may_be_alike, may_be_equal, shape_text
from edge_opt.shapes.rules import rule


@rule(
    f"DENSIFY LOG_SOFTMAX {' '.join(UNARY)}",
    "TFLite, Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file",
)
def same_shape(call: Call) -> Results:
    """The result has the shape of the input."""
    return [call.shape(0)]


@rule("SOFTMAX L2_NORMALIZATION", "TFLite, activations.cc, SoftmaxPrepare; l2norm.cc, Prepare")
def per_row(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar: each row of the last axis is its own."""
    return [call.shape(0, least=1)]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND "
    "LOGICAL_OR MAXIMUM MINIMUM MUL NOT_EQUAL POW RIGHT_SHIFT SQUARED_DIFFERENCE SUB SELECT_V2",
    "TFLite, kernel_util.cc, CalculateShapeForBroadcast (the broadcast rules, size 0 as in numpy); select.cc, "
    "SelectPrepare (version two)",
)
def broadcasting(call: Call) -> Results:
    """The operands broadcast, a condition too."""
    return [broadcast_operands(call.all_shapes(), call.labels())]


@rule("SELECT", "TFLite, select.cc, SelectPrepare (version one)")
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition has it too, is a scalar, or picks whole rows."""
    shape, condition = call.merged((1, 2)), call.shape(0)
    rows = len(condition) == 1 and len(shape) >= 1 and may_be_equal(condition[0], shape[0])
    if condition != () and not rows and not may_be_alike(condition, shape):
        text = f"the condition {call.text(0)} fits neither the choices {shape_text(shape)} nor their rows"
        raise ShapeError(text)
    return [shape]


@rule("PRELU", "TFLite, activations.cc, PreluPrepare")
def prelu(call: Call) -> Results:
    """The slopes broadcast to the input, whose shape the result has."""
    shape, result = call.shape(0), broadcast_operands(call.all_shapes(), call.labels())
    if result is None or not may_be_alike(result, shape):
        raise ShapeError(f"the slopes {call.text(1)} do not broadcast to the input {call.text(0)}")
    return [shape]


@rule(
    "ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY "
    "STABLEHLO_SHIFT_LEFT ADD_N",
    "TFLite, Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc; StableHLO specification, elementwise "
    "operations",
)
def one_shape(call: Call) -> Results:
    """All operands have one shape, the result's; nothing broadcasts."""
    return [call.merged(range(len(call.shapes)))]


@rule("MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", "TFLite, reduce.cc, GetOutputShape")
def reduce(call: Call) -> Results:
    """The axes that input 1 lists are folded: dropped, or kept with size 1 under `keep_dims`."""
    shape = call.shape(0)
    if shape == ():
        return [()]
    keep = call.number("keep_dims")
    if keep and None in call.elements(1):
        return [(DYNAMIC,) * len(shape)]
    folded = {call.axis_of(0, axis) for axis in call.integers(1)}
    sizes = enumerate(shape)
    return [tuple(1 if axis in folded else size for axis, size in sizes if keep or axis not in folded)]


@rule("ARG_MAX ARG_MIN", "TFLite, arg_min_max.cc, ResizeOutput")
def arg_extreme(call: Call) -> Results:
    """The axis that input 1 gives is dropped."""
    shape, axis = call.shape(0, least=1), call.given_axis(0, 1)
    return [(*shape[:axis], *shape[axis + 1 :])]


@rule("CUMSUM", "TFLite, cumsum.cc, Prepare")
def cumsum(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar."""
    shape, axis = call.shape(0, least=1), call.scalar(1)
    if axis is not None:
        call.axis_of(0, axis)
    return [shape]


@rule("TOPK_V2", "TFLite, topk_v2.cc, ResizeOutput")
def top_k(call: Call) -> Results:
    """The last axis shrinks to the k that input 1 gives, for values and indices alike."""
    shape, k = call.shape(0, least=1), call.scalar(1)
    if k is not None and 0 <= shape[-1] < k:
        raise ShapeError(f"k is {k}, but the last axis of {call.text(0)} has size {shape[-1]}")
    return [(*shape[:-1], DYNAMIC if k is None else max(k, 0))] * 2


@rule("ONE_HOT", "TFLite, one_hot.cc, OneHotContext and ResizeOutputTensor")
def one_hot(call: Call) -> Results:
    """A new axis, as long as input 1 says, goes in at `axis` (-1: at the end)."""
    call.require_single(1, 2, 3)
    shape, depth, axis = call.shape(0), call.size(1), call.number("axis")
    position = len(shape) if axis == -1 else axis
    if not 0 <= position <= len(shape):
        raise ShapeError(f"its axis {axis} lies outside the result: expected -1 to {len(shape)}")
    return [(*shape[:position], depth, *shape[position:])]


@rule(
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
    "TFLite, unsorted_segment.cc, ResizeOutputTensor",
)
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says."""
    call.require_single(2)
    shape, segments, count = call.shape(0), call.shape(1), call.size(2)
    if not may_be_alike(segments, shape[: len(segments)]):
        raise ShapeError(f"the shape of the ids {call.text(1)} must be the start of that of {call.text(0)}")
    return [(count, *shape[len(segments) :])]


_LONGEST_RANGE = 2**31 - 1


@rule("SHAPE", "TFLite, shape.cc, Prepare")
def shape_of(call: Call) -> Results:
    """A vector with one number for each axis of the input."""
    return [(len(call.shape(0)),)]


@rule("RANK", "TFLite, rank.cc, Prepare")
def rank(_: Call) -> Results:
    """A scalar."""
    return [()]


@rule("FILL RANDOM_UNIFORM RANDOM_STANDARD_NORMAL", "TFLite, fill.cc, ResizeOutput; random_ops.cc, Prepare")
def fill(call: Call) -> Results:
    """The result has the shape that input 0 spells out; what a FILL is filled with is a scalar."""
    if call.has(1):
        call.shape(1, rank=0)
    return [call.sizes(0)]


@rule("RANGE", "TFLite, range.cc, GetSize")
def range_(call: Call) -> Results:
    """From start to limit by delta, three scalars: `ceil((limit - start) / delta)` numbers."""
    for index in range(3):
        call.shape(index, rank=0)
    if not all(map(call.is_known, range(3))):
        return [(DYNAMIC,)]
    values = [call.numbers(index) for index in range(3)]
    if any(value.dtype.kind not in "iuf" for value in values):
        raise ShapeError(f"the range from {call.text(0)} needs three numbers")
    start, limit, delta = (value.item() for value in values)
    if delta == 0 or (start > limit and delta > 0) or (start < limit and delta < 0):
        raise ShapeError(f"from {start} to {limit} by {delta} there is no range")
    integers = all(value.dtype.kind in "iu" for value in values)
    steps = Fraction(limit - start, delta) if integers else (limit - start) / delta
    if not steps <= _LONGEST_RANGE:  # nor is NaN a number of steps
        text = f"from {start} to {limit} by {delta} are {steps} numbers"
        raise ShapeError(f"{text}: expected {_LONGEST_RANGE} at most")
    return [(math.ceil(steps),)]


@rule("RFFT2D", "TFLite, rfft2d.cc, ResizeOutputandTemporaryTensors")
def rfft2d(call: Call) -> Results:
    """The last two axes become `[h, w / 2 + 1]`, h and w from input 1, powers of two."""
    shape, sizes = call.shape(0, least=2), call.sizes(1)
    if len(sizes) != 2:
        raise ShapeError(f"{call.text(1)} must hold two sizes, height and width")
    if any(size >= 0 and (size == 0 or size & (size - 1)) for size in sizes):
        raise ShapeError(f"{call.label(1)} gives the sizes {list(sizes)}: expected powers of two")
    height, width = sizes
    return [(*shape[:-2], height, DYNAMIC if width < 0 else width // 2 + 1)]


@rule("WHERE", "TFLite, where.cc, ResizeOutputTensor")
def where(call: Call) -> Results:
    """A row for each element that is not 0, with one number for each axis."""
    count = int((call.numbers(0) != 0).sum()) if call.is_known(0) else DYNAMIC
    return [(count, len(call.shape(0)))]
