"""Shape rules for operators that compute: elementwise, by row, from scalars, matrix products."""

import math

from edge_opt.ir.operators import UNARY, Effect, operators_that
from edge_opt.shapes.dimension import OPEN, Shape, broadcast, matmul, may_be_alike, may_be_equal, product
from edge_opt.shapes.rules import Call, Results, rule

rule(
    f"CUMSUM L2_NORMALIZATION LOG_SOFTMAX SOFTMAX {' '.join(sorted(UNARY))}",
    "Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file",
    "The result has the shape of the input.",
)(lambda call: [call.shape(0)])
rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR "
    "MAXIMUM MINIMUM MUL NOT_EQUAL POW PRELU RIGHT_SHIFT SQUARED_DIFFERENCE SUB SELECT_V2",
    "kernel_util.cc, CalculateShapeForBroadcast (size 0 as in numpy); select.cc, SelectPrepare (version two)",
    "All operands broadcast, including a condition.",
)(lambda call: [broadcast(*call.all_shapes(), labels=call.labels())])
rule(
    "ADD_N ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY "
    "STABLEHLO_SHIFT_LEFT",
    "Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc",
    "All operands have the result's shape; nothing broadcasts.",
)(lambda call: [call.merged(range(len(call.inputs)))])
rule("SHAPE", "shape.cc, Prepare", "A vector with one number for each axis of the input.")(
    lambda call: [(len(call.shape(0)),)]
)


@rule("SELECT", "select.cc, SelectPrepare (version one)")
def select(call: Call) -> Results:
    """Both choices have the result's shape; the condition has it too, is a scalar, or picks whole rows."""
    shape, condition = call.merged((1, 2)), call.shape(0)
    fits = condition == () or may_be_alike(condition, shape) or may_be_alike(condition, shape[:1])
    call.expect(fits, "a condition for each element, or for each row, of the choices")
    return [shape]


@rule(" ".join(sorted(operators_that(Effect.REDUCTION))), "reduce.cc, GetOutputShape")
def reduce(call: Call) -> Results:
    """The axes in input 1 are removed, or kept with size 1 if `keep_dims` is set."""
    shape, keep = call.shape(0), call.number("keep_dims")
    folded = {call.axis(axis, len(shape)) for axis in call.integers(1)} if shape else ()
    sizes = enumerate(shape)
    return [tuple(1 if axis in folded else size for axis, size in sizes if keep or axis not in folded)]


@rule("UNSORTED_SEGMENT_PROD", "unsorted_segment.cc, ResizeOutputTensor")
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, with the size in input 2."""
    shape, segments = call.shape(0), call.shape(1)
    call.expect(may_be_alike(segments, shape[: len(segments)]), "ids for the first axes")
    return [(*call.sizes(2), *shape[len(segments) :])]


@rule("FILL", "fill.cc, ResizeOutput")
def fill(call: Call) -> Results:
    """The scalar in input 1 is repeated to the shape in input 0."""
    call.shape(1, rank=0)
    return [call.sizes(0)]


_LONGEST_RANGE, _SAME = 2**31 - 1, 0


@rule("RANGE", "range.cc, GetSize")
def range_(call: Call) -> Results:
    """Three scalars, start, limit and delta, give `ceil((limit - start) / delta)` numbers."""
    values = [fact.value for index, fact in enumerate(call.inputs) if call.shape(index, rank=0) == ()]
    if any(value is None for value in values):
        return [(OPEN,)]
    start, limit, delta = (value.item() for value in values if value is not None)
    count = -1.0
    if delta:
        count = -((start - limit) // delta) if isinstance(start, int) else (limit - start) / delta
    fine = 0 <= count <= _LONGEST_RANGE  # False for NaN, too
    call.expect(fine, f"up to {_LONGEST_RANGE} numbers from {start} to {limit} by {delta}")
    return [(math.ceil(count),)]


@rule("ONE_HOT", "one_hot.cc, ResizeOutputTensor")
def one_hot(call: Call) -> Results:
    """A new axis with the size in input 1 is inserted at `axis` (-1: at the end)."""
    shape = call.shape(0)
    axis = call.axis(call.number("axis"), len(shape) + 1)
    return [(*shape[:axis], *call.sizes(1), *shape[axis:])]


@rule("BATCH_MATMUL", "batch_matmul.cc, Prepare; the product itself by MatMul-1")
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each."""
    left, right = (call.shape(index, least=2, most=5) for index in (0, 1))
    adj_x, adj_y = (bool(call.number(name)) for name in ("adj_x", "adj_y"))
    return [matmul(left, right, transpose_a=adj_x, transpose_b=adj_y, labels=call.labels())]


@rule("FULLY_CONNECTED", "fully_connected.cc, UpdateOutputSize; the product itself by MatMul-1")
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed; a bias has `units` elements.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. The shuffled weights format has a second, scratch output.
    """
    shape, weights = call.shape(0, least=1), call.shape(1, rank=2)
    fits = not call.has(2) or may_be_equal(product(*call.shape(2)), weights[0])
    call.expect(fits, f"a bias of {weights[0]} elements")
    depth, count = weights[1], product(*shape)
    in_rows = shape[-1] == depth or (len(shape) == 2 and may_be_equal(shape[-1], depth))
    if not call.number("keep_num_dims") and in_rows:
        shape = (product(*shape[:-1]), shape[-1])
    elif not call.number("keep_num_dims"):
        is_open = min(count, depth) < 0
        call.expect(is_open or (depth > 0 and count % depth == 0), f"rows of {depth} elements")
        shape = (OPEN if is_open else count // depth, depth)
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    return [matmul(shape, weights, transpose_b=True, labels=call.labels()[:2]), *scratch]


@rule("CONV_2D DEPTHWISE_CONV_2D", "Prepare of conv.cc and depthwise_conv.cc")
def windows(call: Call) -> Results:
    """A window slides over height and width of `[b, h, w, c]`; filters `[o, h, w, i]` or `[1, h, w, o]` change c."""
    batch, *sides, _ = call.shape(0, rank=4)
    count, *window, depth = call.shape(1, rank=4)
    strides, places = [call.number(f"stride_{side}") for side in "hw"], []
    dilations = [call.number(f"dilation_{side}_factor") for side in "hw"]
    call.expect(min(strides) > 0, "strides from 1")
    for size, span, stride, dilation in zip(sides, window, strides, dilations, strict=True):
        reach = 1 if call.number("padding") == _SAME else (span - 1) * dilation + 1
        places.append(OPEN if min(size, span) < 0 else max((size + stride - reach) // stride, 0))
    return [(batch, *places, count if call.op.name == "CONV_2D" else depth)]
