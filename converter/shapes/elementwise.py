"""Rules of operators that work element by element: the input's shape stays, or the operands broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.broadcast import broadcast_operands
from edge_opt.shapes.dimension import Shape, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results


def merge_equal(call: Call, first: int, second: int) -> Shape | None:
    """Return the shape that two inputs must share, each dimension as far as either knows it.

    Raises:
        ShapeError: the shapes cannot be equal.
    """
    left, right = call.shapes[first], call.shapes[second]
    if left is None or right is None:
        return right if left is None else left
    if len(left) != len(right) or not all(map(may_be_equal, left, right)):
        raise ShapeError(f"{call.described(first)} and {call.described(second)} must have the same shape")
    return tuple(b if a < 0 <= b else a for a, b in zip(left, right, strict=True))


@rule(
    "ABS BUCKETIZE CAST CEIL COMPLEX_ABS COS DENSIFY DEQUANTIZE ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH IMAG "
    "LEAKY_RELU LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX NEG QUANTIZE REAL RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND "
    "RSQRT SIGN SIN SQRT SQUARE TANH ZEROS_LIKE",
    inputs=1,
)
def same_shape(call: Call) -> Results:
    """The result has the shape of the input.

    Source: TFLite, Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file.
    """
    return [call.shapes[0]]


@rule("SOFTMAX L2_NORMALIZATION", inputs=1)
def per_row(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar: each row of the last axis is its own.

    Source: TFLite, activations.cc, SoftmaxPrepare; l2norm.cc, Prepare.
    """
    if call.shapes[0] == ():
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    return [call.shapes[0]]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR "
    "MAXIMUM MINIMUM MUL NOT_EQUAL POW RIGHT_SHIFT SQUARED_DIFFERENCE SUB",
    inputs=2,
)
def binary(call: Call) -> Results:
    """The two operands broadcast.

    Source: TFLite, kernel_util.cc, CalculateShapeForBroadcast (the broadcast rules, size 0 as in numpy).
    """
    left, right = call.shapes
    if left == right and left is not None and min(left, default=0) >= 0:
        return [left]
    return [broadcast_inputs(call)]


def broadcast_inputs(call: Call) -> Shape | None:
    """Return the shape that all inputs broadcast to.

    The trait leaves unranked operands out; one of them may yet be the largest, so here the result is unranked too.
    """
    shape = broadcast_operands(call.shapes, call.labels())
    return None if any(operand is None for operand in call.shapes) else shape


@rule("SELECT_V2", inputs=3)
def select_v2(call: Call) -> Results:
    """Condition and both choices broadcast, to rank 8 at most.

    Source: TFLite, select.cc, SelectPrepare (version two).
    """
    return [broadcast_inputs(call)]


@rule("SELECT", inputs=3)
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition has it too, is a scalar, or picks whole rows.

    Source: TFLite, select.cc, SelectPrepare (version one).
    """
    shape, condition = merge_equal(call, 1, 2), call.shapes[0]
    if shape is None or condition is None or condition in ((), shape):
        return [shape]
    rows = len(condition) == 1 and len(shape) >= 1 and may_be_equal(condition[0], shape[0])
    same = len(condition) == len(shape) and all(map(may_be_equal, condition, shape))
    if not rows and not same:
        raise ShapeError(
            f"the condition {call.described(0)} fits neither the choices {shape_text(shape)} nor their rows"
        )
    return [shape]


@rule("PRELU", inputs=2)
def prelu(call: Call) -> Results:
    """The slopes broadcast to the input, whose shape the result has.

    Source: TFLite, activations.cc, PreluPrepare.
    """
    shape, slopes = call.shapes
    result = broadcast_operands(call.shapes, call.labels())
    if shape is None or slopes is None or result is None:
        return [shape]
    if len(result) != len(shape) or not all(map(may_be_equal, result, shape)):
        raise ShapeError(f"the slopes {call.described(1)} do not broadcast to the input {call.described(0)}")
    return [shape]


@rule("ATAN2", inputs=2)
def atan2(call: Call) -> Results:
    """Both operands have one shape, the result's; they do not broadcast.

    Source: TFLite, atan2.cc, Atan2Prepare.
    """
    return [merge_equal(call, 0, 1)]


@rule("ADD_N", inputs=(2, None))
def add_n(call: Call) -> Results:
    """All addends have one shape, the result's.

    Source: TFLite, add_n.cc, Prepare.
    """
    for index in range(1, len(call.shapes)):
        merge_equal(call, 0, index)
    return [next((shape for shape in call.shapes if shape is not None), None)]
