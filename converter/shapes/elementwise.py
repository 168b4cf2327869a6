"""Rules of operators that work element by element: the input's shape stays, or the operands broadcast."""

from edge_opt.shapes.broadcast import broadcast_operands
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import may_be_alike, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule


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
    return [call.shape(0)]


@rule("SOFTMAX L2_NORMALIZATION", inputs=1)
def per_row(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar: each row of the last axis is its own.

    Source: TFLite, activations.cc, SoftmaxPrepare; l2norm.cc, Prepare.
    """
    return [call.shape(0, least=1)]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR "
    "MAXIMUM MINIMUM MUL NOT_EQUAL POW RIGHT_SHIFT SQUARED_DIFFERENCE SUB",
    inputs=2,
)
@rule("SELECT_V2", inputs=3)
def broadcasting(call: Call) -> Results:
    """The operands broadcast, a condition too.

    Source: TFLite, kernel_util.cc, CalculateShapeForBroadcast (the broadcast rules, size 0 as in numpy); select.cc,
    SelectPrepare (version two).
    """
    return [broadcast_operands(call.all_shapes(), call.labels())]


@rule("SELECT", inputs=3)
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition has it too, is a scalar, or picks whole rows.

    Source: TFLite, select.cc, SelectPrepare (version one).
    """
    shape, condition = call.merged((1, 2)), call.shape(0)
    rows = len(condition) == 1 and len(shape) >= 1 and may_be_equal(condition[0], shape[0])
    if condition != () and not rows and not may_be_alike(condition, shape):
        raise ShapeError(
            f"the condition {call.described(0)} fits neither the choices {shape_text(shape)} nor their rows"
        )
    return [shape]


@rule("PRELU", inputs=2)
def prelu(call: Call) -> Results:
    """The slopes broadcast to the input, whose shape the result has.

    Source: TFLite, activations.cc, PreluPrepare.
    """
    shape, result = call.shape(0), broadcast_operands(call.all_shapes(), call.labels())
    if result is None or not may_be_alike(result, shape):
        raise ShapeError(f"the slopes {call.described(1)} do not broadcast to the input {call.described(0)}")
    return [shape]


@rule(
    "ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_SHIFT_LEFT",
    inputs=2,
)
@rule("ADD_N", inputs=(2, None))
def one_shape(call: Call) -> Results:
    """All operands have one shape, the result's; nothing broadcasts.

    Source: TFLite, Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc; StableHLO specification, elementwise
    operations.
    """
    return [call.merged(range(len(call.shapes)))]
