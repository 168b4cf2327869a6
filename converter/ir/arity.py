"""How many inputs and outputs operators have. Of those that rewrites look at, a graph that says otherwise is refused.

Source: TFLite, each kernel's Prepare, `TF_LITE_ENSURE_EQ(context, NumInputs(node), ...)`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from edge_opt.ir.graph import Tensor


class Arity(NamedTuple):
    """At least `least` and at most `most` inputs (None: any number), `outputs` outputs (None: any number).

    Inputs from `least` to `most` may be left out; without a limit only where there are `gaps`.
    """

    least: int
    most: int | None
    outputs: int | None
    gaps: bool = False

    def misfit(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
        """Why an operator cannot have these inputs and outputs; None where it can."""
        least, most = self.least, self.most
        if len(inputs) < least or (most is not None and len(inputs) > most):
            wanted = f"{least} or more" if most is None else " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {wanted}"
        if self.outputs not in (None, len(outputs)):
            return f"has {len(outputs)} outputs, expected {self.outputs}"
        required = inputs if most is None and not self.gaps else inputs[:least]
        return "leaves out an input that it needs" if None in required else None


_FOLLOWED: Final[dict[Arity, str]] = {
    Arity(1, 1, 1): (
        "ABS CAST CEIL COS DEQUANTIZE ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX "
        "NEG QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SOFTMAX SQRT SQUARE SQUEEZE TANH "
        "ZEROS_LIKE"
    ),
    Arity(1, 2, 1): "RESHAPE",
    Arity(1, None, 1): "CONCATENATION PACK",
    Arity(1, 1, None): "UNPACK",
    Arity(2, 2, 1): (
        "ADD ATAN2 BATCH_MATMUL BITWISE_XOR BROADCAST_TO DIV EQUAL EXPAND_DIMS FLOOR_DIV FLOOR_MOD GATHER GREATER "
        "GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MAXIMUM MEAN MINIMUM MIRROR_PAD MUL NOT_EQUAL PAD POW "
        "PRELU REDUCE_MAX REDUCE_MIN REDUCE_PROD RIGHT_SHIFT SQUARED_DIFFERENCE SUB SUM TILE TRANSPOSE"
    ),
    Arity(2, 2, None): "SPLIT",
    Arity(2, 3, 1): "CONV_2D",
    Arity(2, 3, None): "FULLY_CONNECTED",
    Arity(2, None, 1): "ADD_N",
    Arity(3, 3, 1): "PADV2 SELECT SELECT_V2 SLICE",
    Arity(3, 3, None): "SPLIT_V",
    Arity(4, 4, 1): "STRIDED_SLICE",
}
_OTHERS: Final[dict[Arity, str]] = {
    Arity(0, 0, 0): "CALL_ONCE",
    Arity(0, 0, 1): "VAR_HANDLE",
    Arity(0, None, None, gaps=True): "CALL STABLEHLO_COMPOSITE",
    Arity(1, 1, 1): (
        "AVERAGE_POOL_2D BITCAST BUCKETIZE COMPLEX_ABS DENSIFY DEPTH_TO_SPACE FAKE_QUANT IMAG L2_NORMALIZATION "
        "L2_POOL_2D MAX_POOL_2D RANDOM_STANDARD_NORMAL RANDOM_UNIFORM RANK READ_VARIABLE REAL SHAPE SPACE_TO_DEPTH "
        "WHERE"
    ),
    Arity(1, 1, 2): "STABLEHLO_RNG_BIT_GENERATOR",
    Arity(1, None, None): "WHILE",
    Arity(1, None, None, gaps=True): "IF STABLEHLO_CASE",
    Arity(2, 2, 0): "ASSIGN_VARIABLE",
    Arity(2, 2, 1): (
        "ARG_MAX ARG_MIN BROADCAST_ARGS CUMSUM EMBEDDING_LOOKUP FILL GATHER_ND REDUCE_ALL REDUCE_ANY RESIZE_BILINEAR "
        "RESIZE_NEAREST_NEIGHBOR REVERSE_V2 RFFT2D STABLEHLO_ADD STABLEHLO_AND STABLEHLO_GATHER STABLEHLO_MAXIMUM "
        "STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_PAD STABLEHLO_SHIFT_LEFT"
    ),
    Arity(2, 2, 2): "TOPK_V2",
    Arity(2, 3, 1): "CONV_3D DEPTHWISE_CONV_2D",
    Arity(2, None, None): "STABLEHLO_REDUCE_WINDOW",
    Arity(3, 3, 1): (
        "DYNAMIC_UPDATE_SLICE RANGE SCATTER_ND UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD "
        "UNSORTED_SEGMENT_SUM"
    ),
    Arity(3, 4, 1): "TRANSPOSE_CONV",
    Arity(3, None, None): "STABLEHLO_SCATTER",
    Arity(4, 4, 1): "ONE_HOT",
}
FOLLOWED: Final = frozenset(" ".join(_FOLLOWED.values()).split())
ARITIES: Final = {
    name: arity for table in (_FOLLOWED, _OTHERS) for arity, names in table.items() for name in names.split()
}


def misformed(name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
    """Why an operator that rewrites look at cannot have these inputs and outputs; None where it can."""
    if name not in FOLLOWED:
        return None
    if not outputs:
        return f"has 0 outputs, expected {ARITIES[name].outputs or '1 or more'}"
    return ARITIES[name].misfit(inputs, outputs)
