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
from edge_opt.ir.operators import KINDS, Effect, operators_that

PRODUCTS = operators_that(Effect.PRODUCT)
MOVEMENT = operators_that(Effect.REARRANGING)
CUTTING = operators_that(Effect.CUTTING)
PADDING = operators_that(Effect.PADDING)
REPEATING = operators_that(Effect.REPEATING)
ELEMENTWISE = operators_that(Effect.ELEMENTWISE)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, Elementwise()),
    **dict.fromkeys(MOVEMENT, Regroup()),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), AlongLastAxis()),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice()),
    **dict.fromkeys(("SPLIT", "SPLIT_V"), Split()),
    **dict.fromkeys(PADDING, Pad()),
    **dict.fromkeys(operators_that(Effect.REDUCTION), Reduce()),
    **dict.fromkeys(REPEATING, Broadcast()),
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
    return next(iter(KINDS[operator.name].data_operands(operator.inputs)), None)
