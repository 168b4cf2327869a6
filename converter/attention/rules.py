"""The table of rules: which one holds for which operator. Nothing here knows what attention looks like."""

from collections.abc import Mapping

from edge_opt.attention.arithmetic_rules import (
    AlongLastAxis,
    BatchMatMul,
    Elementwise,
    FullyConnected,
    Reduce,
    Select,
)
from edge_opt.attention.movement_rules import (
    Broadcast,
    Concatenation,
    Gather,
    Pack,
    Pad,
    Regroup,
    Slice,
    Split,
    Transpose,
    Unpack,
)
from edge_opt.attention.rule import Rule
from edge_opt.ir import Operator, Tensor

_BINARY = (
    "ADD SUB MUL DIV MAXIMUM MINIMUM POW SQUARED_DIFFERENCE FLOOR_DIV FLOOR_MOD EQUAL NOT_EQUAL LESS LESS_EQUAL "
    "GREATER GREATER_EQUAL LOGICAL_AND LOGICAL_OR ATAN2 BITWISE_XOR RIGHT_SHIFT SELECT_V2 PRELU ADD_N"
)
_UNARY = (
    "ABS NEG EXP LOG SQRT RSQRT SQUARE SIN COS TANH LOGISTIC RELU RELU6 RELU_N1_TO_1 RELU_0_TO_1 GELU ELU "
    "HARD_SWISH LEAKY_RELU CAST QUANTIZE DEQUANTIZE LOGICAL_NOT FLOOR CEIL ROUND SIGN ZEROS_LIKE"
)
PRODUCTS = frozenset({"BATCH_MATMUL", "FULLY_CONNECTED"})
MOVEMENT = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE"})
CUTTING = frozenset({"SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V"})
PADDING = frozenset({"PAD", "PADV2", "MIRROR_PAD"})
REPEATING = frozenset({"BROADCAST_TO", "TILE", "GATHER"})
UNARY = frozenset(_UNARY.split())
ELEMENTWISE = frozenset((*_BINARY.split(), *UNARY, "SELECT"))

RULES: dict[str, Rule] = {
    **dict.fromkeys((*_BINARY.split(), *UNARY), Elementwise()),
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), Regroup()),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), AlongLastAxis()),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice()),
    **dict.fromkeys(("SPLIT", "SPLIT_V"), Split()),
    **dict.fromkeys(PADDING, Pad()),
    **dict.fromkeys(("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"), Reduce()),
    **dict.fromkeys(("BROADCAST_TO", "TILE"), Broadcast()),
    "GATHER": Gather(),
    "SELECT": Select(),
    "TRANSPOSE": Transpose(),
    "BATCH_MATMUL": BatchMatMul(),
    "FULLY_CONNECTED": FullyConnected(),
    "CONCATENATION": Concatenation(),
    "PACK": Pack(),
    "UNPACK": Unpack(),
}


def rule_of(operator: Operator, rules: Mapping[str, Rule] = RULES) -> Rule | None:
    """None where the operator has no rule, which is where a region ends: a projection mixes all that it reads."""
    if operator.name == "FULLY_CONNECTED" and not is_product(operator):
        return None
    return rules.get(operator.name)


def is_product(operator: Operator) -> bool:
    """True for a product of matrices: a BATCH_MATMUL, or a FULLY_CONNECTED whose weights are computed."""
    return operator.name == "BATCH_MATMUL" or multiplies_activations(operator)


def multiplies_activations(operator: Operator) -> bool:
    """True for a product of two computed matrices: no weights are in it."""
    return operator.name in PRODUCTS and not any(t is None or t.is_constant for t in operator.inputs[:2])


def is_turned(product: Operator, index: int) -> bool:
    """True where operand `index` of a product is stored the other way round."""
    if product.name == "FULLY_CONNECTED":
        return index == 1
    return bool(product.option("adj_y" if index else "adj_x"))


def data_input(operator: Operator) -> Tensor | None:
    """The input that an operator of one data operand rearranges, cuts or maps; the others steer it."""
    index = 1 if operator.name == "SPLIT" else 0
    return operator.inputs[index] if index < len(operator.inputs) else None
