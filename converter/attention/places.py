"""Where the axes of an operand lie in the result of an operator. Knows no heads.

    TRANSPOSE (0,2,1)   [A,B,C] -> [A,C,B]                places of the operand  0, 2, 1
    SUM over axis 1     [A,B,C] -> [A,C]                                         0, None, 1
    BATCH_MATMUL        [A,M,C] x [C,N] -> [A,M,N]        left  0, 1, None       right  None, 2

An axis has no place if the operator sums over it.
"""

from collections.abc import Sequence
from typing import TypeAlias

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.rules import small_value

Places: TypeAlias = Sequence[int | None]
"""For each axis of an operand its axis in the result, or None."""


def integers(operator: Operator, index: int) -> list[int]:
    """The numbers of a constant operand such as axes or sizes.

    Raises:
        RefusedError: the operand is computed, or too large for such numbers.
    """
    tensor = operator.inputs[index]
    value = small_value(tensor)
    if value is None:
        raise RefusedError("an operand with axes or sizes must be constant", operator, tensor)
    return [int(number) for number in value.ravel()]


def aligned(operand: Tensor, rank: int) -> range:
    """The last axes of a result of this rank: operands that broadcast are aligned from the right."""
    return range(rank - len(operand.shape), rank)


def transposed(operator: Operator) -> Places:
    """The places of a TRANSPOSE's axes; raises RefusedError if they are unknown."""
    order = integers(operator, 1)
    if sorted(order) != list(range(len(order))):
        raise RefusedError("its order is not a permutation of the axes", operator)
    return list(map(order.index, range(len(order))))


def reduced(operator: Operator) -> Places:
    """The places of the axes of a reduction such as SUM or MEAN; raises RefusedError if they are unknown."""
    rank = len(operator.input(0).shape)
    # TFLite accepts any axes for a scalar, which has none to reduce.
    summed = {axis % rank for axis in integers(operator, 1)} if rank else set()
    places: list[int | None] = []
    kept = 0
    for axis in range(rank):
        places.append(None if axis in summed else kept)
        if operator.option("keep_dims") or axis not in summed:
            kept += 1
    return places


def contracted_axis(product: Operator, side: int) -> int:
    """The axis of an operand (0: left, 1: right) that a product sums over."""
    last = len(product.input(side).shape) - 1
    if product.name == "FULLY_CONNECTED":
        return last
    if side == 0:
        return last - 1 if product.option("adj_x") else last
    return last if product.option("adj_y") else last - 1


def multiplied(product: Operator, side: int) -> Places:
    """The places of the axes of an operand of a product: `[.., M, C] x [.., C, N] -> [.., M, N]`."""
    operand = product.input(side)
    rank = len(product.outputs[0].shape)
    last = len(operand.shape) - 1
    if last < 1:
        raise RefusedError("the recorded shapes are inconsistent", product, operand)
    summed = contracted_axis(product, side)
    places: list[int | None] = [*aligned(operand, rank)]
    places[summed] = None
    places[2 * last - 1 - summed] = rank - 2 + side
    return places
