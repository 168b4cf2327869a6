"""How many inputs and outputs the operators have that rewrites look at: a graph that says otherwise is refused.

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


_NAMES: Final[dict[Arity, str]] = {
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
ARITIES: Final = {name: arity for arity, names in _NAMES.items() for name in names.split()}


def misformed(name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
    """Why an operator of that name cannot have these inputs and outputs; None where it can, or nobody says."""
    arity = ARITIES.get(name)
    if arity is None:
        return None
    if not outputs:
        return f"has 0 outputs, expected {arity.outputs or '1 or more'}"
    return arity.misfit(inputs, outputs)
