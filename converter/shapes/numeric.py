"""Rules of operators that compute: elements, rows, numbers alone, products with weights, windows."""

import math
from fractions import Fraction

from edge_opt.ir.operators import UNARY
from edge_opt.shapes.dimension import (
    OPEN,
    Shape,
    ShapeError,
    broadcast,
    matmul,
    may_be_alike,
    may_be_equal,
    product,
)
from edge_opt.shapes.rules import Call, Results, rule


@rule(
    f"DENSIFY LOG_SOFTMAX {' '.join(UNARY)}",
    "TFLite, Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file",
)
def same_shape(call: Call) -> Results:
    """The result has the shape of the input."""
    return [call.shape(0)]


@rule(
    "CUMSUM L2_NORMALIZATION SOFTMAX",
    "TFLite, Prepare of cumsum.cc and l2norm.cc; activations.cc, SoftmaxPrepare",
)
def per_row(call: Call) -> Results:
    """The result has the shape of the input, which must have rows."""
    return [call.shape(0, least=1)]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND "
    "LOGICAL_OR MAXIMUM MINIMUM MUL NOT_EQUAL POW RIGHT_SHIFT SQUARED_DIFFERENCE SUB SELECT_V2",
    "TFLite, kernel_util.cc, CalculateShapeForBroadcast (the broadcast rules, size 0 as in numpy); select.cc, "
    "SelectPrepare (version two)",
)
def broadcasting(call: Call) -> Results:
    """The operands broadcast, a condition too."""
    return [broadcast(*call.all_shapes(), labels=call.labels())]


@rule("SELECT", "TFLite, select.cc, SelectPrepare (version one)")
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition has it too, is a scalar, or picks whole rows."""
    shape, condition = call.merged((1, 2)), call.shape(0)
    rows = len(condition) == 1 and len(shape) >= 1 and may_be_equal(condition[0], shape[0])
    fits = condition == () or rows or may_be_alike(condition, shape)
    call.expect(fits, "a condition for each element, or for each row, of the choices")
    return [shape]


@rule("PRELU", "TFLite, activations.cc, PreluPrepare")
def prelu(call: Call) -> Results:
    """The slopes broadcast to the input, whose shape the result has."""
    shape, result = call.shape(0), broadcast(*call.all_shapes(), labels=call.labels())
    call.expect(result is not None and may_be_alike(result, shape), "slopes that broadcast to the input")
    return [shape]


@rule(
    "ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY "
    "STABLEHLO_SHIFT_LEFT ADD_N",
    "TFLite, Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc",
)
def one_shape(call: Call) -> Results:
    """All operands have one shape, the result's; nothing broadcasts."""
    return [call.merged(range(len(call.shapes)))]


@rule("MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", "TFLite, reduce.cc, GetOutputShape")
def reduce(call: Call) -> Results:
    """The axes that input 1 lists are dropped, or kept with size 1 under `keep_dims`."""
    shape, keep = call.shape(0), call.number("keep_dims")
    if shape == ():
        return [()]
    if keep and None in call.elements(1):
        return [(OPEN,) * len(shape)]
    folded = {call.axis_of(0, axis) for axis in call.integers(1)}
    sizes = enumerate(shape)
    return [tuple(1 if axis in folded else size for axis, size in sizes if keep or axis not in folded)]


@rule("ARG_MAX ARG_MIN", "TFLite, arg_min_max.cc, ResizeOutput")
def arg_extreme(call: Call) -> Results:
    """The axis that input 1 gives is dropped."""
    shape, axis = call.shape(0, least=1), call.given_axis(0, 1)
    return [(*shape[:axis], *shape[axis + 1 :])]


@rule("TOPK_V2", "TFLite, topk_v2.cc, ResizeOutput")
def top_k(call: Call) -> Results:
    """The last axis shrinks to the k that input 1 gives, for values and indices alike."""
    shape, k = call.shape(0, least=1), call.scalar(1)
    call.expect(k is None or not 0 <= shape[-1] < k, f"a last axis of {k} or more, its k")
    return [(*shape[:-1], OPEN if k is None else max(k, 0))] * 2


@rule("ONE_HOT", "TFLite, one_hot.cc, OneHotContext and ResizeOutputTensor")
def one_hot(call: Call) -> Results:
    """A new axis, as long as input 1 says, goes in at `axis` (-1: at the end)."""
    shape, axis = call.shape(0), call.number("axis")
    position = len(shape) if axis == -1 else axis
    call.expect(0 <= position <= len(shape), f"an axis from -1 to {len(shape)}, not {axis}")
    return [(*shape[:position], *call.sizes(1), *shape[position:])]


@rule(
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
    "TFLite, unsorted_segment.cc, ResizeOutputTensor",
)
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says."""
    shape, segments = call.shape(0), call.shape(1)
    call.expect(may_be_alike(segments, shape[: len(segments)]), "ids for the first axes")
    return [(*call.sizes(2), *shape[len(segments) :])]


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
    """The result has the shape that input 0 spells out; a FILL repeats a scalar."""
    if call.has(1):
        call.shape(1, rank=0)
    return [call.sizes(0)]


_LONGEST_RANGE = 2**31 - 1


@rule("RANGE", "TFLite, range.cc, GetSize")
def range_(call: Call) -> Results:
    """From start to limit by delta, three scalars: `ceil((limit - start) / delta)` numbers."""
    values = [call.value(index) for index in range(3) if call.shape(index, rank=0) == ()]
    known = [value.item() for value in values if value is not None and value.dtype.kind in "iuf"]
    if len(known) < 3:
        return [(OPEN,)]
    start, limit, delta = known
    if delta == 0 or (start > limit and delta > 0) or (start < limit and delta < 0):
        raise ShapeError(f"from {start} to {limit} by {delta} there is no range")
    steps = Fraction(limit - start, delta) if isinstance(start, int) else (limit - start) / delta
    if not steps <= _LONGEST_RANGE:  # NaN is not a number of steps either
        raise ShapeError(
            f"from {start} to {limit} by {delta} are {steps} numbers: expected {_LONGEST_RANGE} at most"
        )
    return [(math.ceil(steps),)]


@rule("WHERE", "TFLite, where.cc, ResizeOutputTensor")
def where(call: Call) -> Results:
    """A row for each element that is not 0, with one number for each axis."""
    count = int((call.numbers(0) != 0).sum()) if call.is_known(0) else OPEN
    return [(count, len(call.shape(0)))]


@rule("BATCH_MATMUL", "TFLite, batch_matmul.cc, Prepare; the product itself by MatMul-1")
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each."""
    left, right = (call.shape(index, least=2, most=5) for index in (0, 1))
    adj_x, adj_y = (bool(call.number(name)) for name in ("adj_x", "adj_y"))
    return [matmul(left, right, transpose_a=adj_x, transpose_b=adj_y, labels=call.labels())]


@rule("FULLY_CONNECTED", "TFLite, fully_connected.cc, UpdateOutputSize; the product itself by MatMul-1")
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed; a bias has `units` elements.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. The shuffled weights format has a second, scratch output.
    """
    shape, weights = call.shape(0, least=1), call.shape(1, rank=2)
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    _check_bias(call, 2, weights[0])
    rows = shape if call.number("keep_num_dims") else _flatten(call, shape, weights[1])
    return [matmul(rows, weights, transpose_b=True, labels=call.labels()[:2]), *scratch]


def _flatten(call: Call, shape: Shape, depth: int) -> Shape:
    """`[rows, depth]` for an input whose elements are taken in rows of the weights' depth."""
    if depth < 0:
        return shape if len(shape) == 2 else (OPEN, OPEN)
    if shape[-1] == depth or (depth == 0 and shape[-1] < 0):
        return (product(*shape[:-1]), depth)
    count = product(*shape)
    call.expect(
        depth > 0 and (count < 0 or count % depth == 0), "elements that make rows of the weights' depth"
    )
    return (OPEN if count < 0 else count // depth, depth)


def _check_bias(call: Call, index: int, channels: int) -> None:
    """Refuse a bias (input `index`, which may be left out) that has not one element for each channel."""
    fits = not call.has(index) or may_be_equal(product(*call.shape(index)), channels)
    call.expect(fits, f"a bias of {channels} elements, one per channel")


_SAME, _VALID = 0, 1


@rule(
    "AVERAGE_POOL_2D CONV_2D DEPTHWISE_CONV_2D L2_POOL_2D MAX_POOL_2D",
    "TFLite, Prepare of conv.cc and depthwise_conv.cc; pooling.cc, GenericPrepare",
)
def windows(call: Call) -> Results:
    """A window slides over height and width of `[b, h, w, c]`; filters `[o, h, w, i]` or `[1, h, w, o]` change c."""
    batch, *_, channels = call.shape(0, rank=4)
    if call.has(1):
        count, *sizes, depth = call.shape(1, rank=4)
        channels = count if call.name == "CONV_2D" else depth
        dilations = [call.number(f"dilation_{side}_factor") for side in "hw"]
        _check_bias(call, 2, channels)
    else:
        sizes, dilations = [call.number(f"filter_{side}") for side in ("height", "width")], [1, 1]
    return [
        (batch, _places(call, 1, sizes[0], dilations[0]), _places(call, 2, sizes[1], dilations[1]), channels)
    ]


def _places(call: Call, axis: int, window: int, dilation: int) -> int:
    """How many places a window has along an axis: all of them by `SAME`, those that lie inside by `VALID`.

    The window is -1 where the filter's size is open. Source: TFLite, padding.h, ComputeOutSizeChecked.
    """
    size, stride, padding = call.shape(0)[axis], call.number(f"stride_{' hw'[axis]}"), call.number("padding")
    valid = stride > 0 and dilation > 0 and window != 0 and size != 0 and padding in (_SAME, _VALID)
    call.expect(valid, "size, stride and dilation of the window from 1, and SAME (0) or VALID (1) padding")
    if size < 0 or (window < 0 and padding == _VALID):
        return OPEN
    reach = 1 if padding == _SAME else (window - 1) * dilation + 1
    call.expect(reach < size + 2 * stride, f"a window that fits axis {axis}")
    return max((size + stride - reach) // stride, 0)
