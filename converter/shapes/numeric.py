"""Shape rules for operators that compute: elementwise, by row, from scalars, matrix products."""

import math

from edge_opt.ir.operators import UNARY, Effect, operators_that
from edge_opt.shapes.dimension import (
    OPEN,
    Shape,
    broadcast,
    matmul,
    may_be_alike,
    may_be_equal,
    product,
)
from edge_opt.shapes.rules import Call, Results, rule


@rule(*UNARY, "CUMSUM L2_NORMALIZATION LOG_SOFTMAX SOFTMAX")
def of_one_shape(call: Call) -> Results:
    """The result has the shape of the input.

    Source: Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file
    """
    return [call.shape(0)]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR "
    "MAXIMUM MINIMUM MUL NOT_EQUAL POW PRELU RIGHT_SHIFT SQUARED_DIFFERENCE SUB SELECT_V2"
)
def broadcasting(call: Call) -> Results:
    """All operands broadcast, including a condition.

    Source: kernel_util.cc, CalculateShapeForBroadcast (size 0 as in numpy); select.cc, SelectPrepare (version two)
    """
    return [broadcast(*call.all_shapes(), labels=call.labels())]


@rule(
    "ADD_N ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY "
    "STABLEHLO_SHIFT_LEFT"
)
def without_broadcasting(call: Call) -> Results:
    """All operands have the result's shape; nothing broadcasts.

    Source: Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc
    """
    return [call.common_shape(range(len(call.inputs)))]


@rule("SHAPE")
def shape_of(call: Call) -> Results:
    """A vector with one number for each axis of the input.

    Source: shape.cc, Prepare
    """
    return [(len(call.shape(0)),)]


@rule("SELECT")
def select(call: Call) -> Results:
    """Both choices have the result's shape; the condition has it too, is a scalar, or picks whole rows.

    Source: select.cc, SelectPrepare (version one)
    """
    shape = call.common_shape((1, 2))
    condition = call.shape(0)
    fitting = ((), shape, shape[:1])
    fits = any(may_be_alike(condition, one) for one in fitting)
    call.expect(fits, "a condition for each element, or for each row, of the choices")
    return [shape]


@rule(*operators_that(Effect.REDUCTION))
def reduce(call: Call) -> Results:
    """The axes in input 1 are removed, or kept with size 1 if `keep_dims` is set.

    Source: reduce.cc, GetOutputShape
    """
    shape = call.shape(0)
    if not shape:
        return [()]  # the runtime accepts any axes for a scalar
    folded = {call.axis(axis, len(shape)) for axis in call.integers(1)}
    sizes: list[int] = []
    for axis, size in enumerate(shape):
        if axis not in folded:
            sizes.append(size)
        elif call.option("keep_dims"):
            sizes.append(1)
    return [tuple(sizes)]


@rule("UNSORTED_SEGMENT_PROD")
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, with the size in input 2.

    Source: unsorted_segment.cc, ResizeOutputTensor
    """
    shape = call.shape(0)
    segments = call.shape(1)
    call.expect(may_be_alike(segments, shape[: len(segments)]), "ids for the first axes")
    return [(*call.sizes(2), *shape[len(segments) :])]


@rule("FILL")
def fill(call: Call) -> Results:
    """The scalar in input 1 is repeated to the shape in input 0.

    Source: fill.cc, ResizeOutput
    """
    call.shape(1, rank=0)
    return [call.sizes(0)]


_LONGEST_RANGE = 2**31 - 1


@rule("RANGE")
def range_(call: Call) -> Results:
    """Three scalars, start, limit and delta, give `ceil((limit - start) / delta)` numbers.

    Source: range.cc, GetSize
    """
    for index in range(len(call.inputs)):
        call.shape(index, rank=0)
    if not all(fact.is_known_scalar for fact in call.inputs):
        return [(OPEN,)]
    start, limit, delta = (call.value(index).item() for index in range(3))
    if delta == 0:
        count = -1.0
    elif isinstance(start, int):
        count = -((start - limit) // delta)  # rounds up, exactly
    else:
        count = (limit - start) / delta
    is_possible = 0 <= count <= _LONGEST_RANGE  # False for NaN, too
    call.expect(is_possible, f"up to {_LONGEST_RANGE} numbers from {start} to {limit} by {delta}")
    return [(math.ceil(count),)]


@rule("ONE_HOT")
def one_hot(call: Call) -> Results:
    """A new axis with the size in input 1 is inserted at `axis` (-1: at the end).

    Source: one_hot.cc, ResizeOutputTensor
    """
    shape = call.shape(0)
    axis = call.axis_option(len(shape) + 1)
    return [(*shape[:axis], *call.sizes(1), *shape[axis:])]


@rule("BATCH_MATMUL")
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each.

    Source: batch_matmul.cc, Prepare; the product itself by MatMul-1
    """
    result = matmul(
        call.shape(0, least=2, most=5),
        call.shape(1, least=2, most=5),
        transpose_a=bool(call.option("adj_x")),
        transpose_b=bool(call.option("adj_y")),
        labels=call.labels(),
    )
    return [result]


@rule("FULLY_CONNECTED")
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed; a bias has `units` elements.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. The shuffled weights format has a second, scratch output.

    Source: fully_connected.cc, UpdateOutputSize; the product itself by MatMul-1
    """
    shape = call.shape(0, least=1)
    weights = call.shape(1, rank=2)
    if call.has(2):
        units = weights[0]
        call.expect(may_be_equal(product(*call.shape(2)), units), f"a bias of {units} elements")
    if not call.option("keep_num_dims"):
        shape = _flat_rows(call, shape, weights[1])
    result = matmul(shape, weights, transpose_b=True, labels=call.labels()[:2])
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    return [result, *scratch]


def _flat_rows(call: Call, shape: Shape, depth: int) -> Shape:
    """The input of a FULLY_CONNECTED, flattened: `[a, b, depth] -> [a*b, depth]`."""
    if shape[-1] == depth or (len(shape) == 2 and may_be_equal(shape[-1], depth)):
        return (product(*shape[:-1]), shape[-1])
    count = product(*shape)
    if count < 0 or depth < 0:
        return (OPEN, depth)
    call.expect(depth > 0 and count % depth == 0, f"rows of {depth} elements")
    return (count // depth, depth)


_SAME = 0  # the padding that keeps the size


@rule("CONV_2D DEPTHWISE_CONV_2D")
def windows(call: Call) -> Results:
    """A window slides over height and width of `[b, h, w, c]`; filters `[o, h, w, i]` or `[1, h, w, o]` change c.

    Source: Prepare of conv.cc and depthwise_conv.cc
    """
    batch, height, width, _ = call.shape(0, rank=4)
    filters, *window, depth = call.shape(1, rank=4)
    rows = _window_count(call, "h", height, window[0])
    columns = _window_count(call, "w", width, window[1])
    return [(batch, rows, columns, filters if call.op.name == "CONV_2D" else depth)]


def _window_count(call: Call, side: str, size: int, span: int) -> int:
    """The number of places of a window of `span` steps along one side of an image."""
    stride = call.option(f"stride_{side}")
    call.expect(stride > 0, "strides from 1")
    if size < 0 or span < 0:
        return OPEN
    is_same = call.option("padding") == _SAME
    reach = 1 if is_same else (span - 1) * call.option(f"dilation_{side}_factor") + 1
    return max((size + stride - reach) // stride, 0)
