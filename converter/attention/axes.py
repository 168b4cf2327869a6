"""Where the axes of an operand lie in the result of an operator. Knows no heads.

    TRANSPOSE (0,2,1)   [A,B,C] -> [A,C,B]                places of the operand  0, 2, 1
    SUM over axis 1     [A,B,C] -> [A,C]                                         0, None, 1
    BATCH_MATMUL        [A,M,C] x [C,N] -> [A,M,N]        left  0, 1, None       right  None, 2
    RESHAPE             [T,N*H] -> [T,N,H]                axis 0 lies on {0}, axis 1 on {1, 2}

An axis has no place if the operator sums over it. `Places` name one axis for each, an `AxisMap` any number.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import KINDS, Effect
from edge_opt.ir.refusal import RefusedError, Why
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
        raise RefusedError(
            Why.OPERATOR, "an operand with axes or sizes must be constant", operator, tensor
        )
    return [int(number) for number in value.ravel()]


def data_of(operator: Operator) -> list[Tensor]:
    """The operands from which an operator's results take their elements."""
    return KINDS[operator.name].data_operands(operator.inputs)


def aligned(operand: Tensor, rank: int) -> range:
    """The last axes of a result of this rank: operands that broadcast are aligned from the right."""
    return range(rank - len(operand.shape), rank)


def transposed(operator: Operator) -> Places:
    """The places of a TRANSPOSE's axes; raises RefusedError if they are unknown."""
    order = integers(operator, 1)
    if sorted(order) != list(range(len(order))):
        raise RefusedError(Why.OPERATOR, "its order is not a permutation of the axes", operator)
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
        raise RefusedError(
            Why.INVALID_MODEL, "the recorded shapes are inconsistent", product, operand
        )
    summed = contracted_axis(product, side)
    kept = last - 1 if summed == last else last
    places: list[int | None] = [*aligned(operand, rank)]
    places[summed] = None
    places[kept] = rank - 2 + side
    return places


# Axes that may lie on several


Axes: TypeAlias = frozenset[int]
AxisMap: TypeAlias = list[Axes]
"""For each axis of an operand, the axes of the result that it lies on; none if the operator sums over it."""


def axes_behind(operator: Operator, tensor: Tensor, axes: Axes) -> Axes:
    """The axes of an operator's results on which these axes of an operand lie; none if unknown."""
    moved = moved_axes(operator, tensor)
    return frozenset() if moved is None else on_axes(moved, axes)


def on_axes(moved: AxisMap, axes: Axes) -> Axes:
    """The axes of the result on which these axes lie."""
    return frozenset().union(*map(moved.__getitem__, axes))


def has_known_axes(operator: Operator, inputs: Sequence[Tensor] | None = None) -> bool:
    """True if all sizes of the operands (or of these inputs) and results are recorded and follow from each other."""
    if operator.shape_error:
        return False
    read = operator.given if inputs is None else inputs
    return all(tensor.has_rank and not tensor.is_dynamic for tensor in (*read, *operator.outputs))


def moved_axes(operator: Operator, tensor: Tensor) -> AxisMap | None:
    """Where the axes of an operand lie in the operator's results; None if unknown."""
    if operator.shape_error:
        return None
    effect = KINDS[operator.name].effect
    # One of many tensors that are joined lies on the same axes whatever the others are.
    if not has_known_axes(operator, [tensor] if effect is Effect.JOINING else None):
        return None
    mapper = MAPPERS.get(operator.name) or MAPPERS.get(effect)
    try:
        return None if mapper is None else mapper(operator, tensor)
    except RefusedError:
        return None  # axes that are computed


def _at(places: Places) -> AxisMap:
    return [frozenset() if place is None else frozenset({place}) for place in places]


def _broadcast(operator: Operator, tensor: Tensor) -> AxisMap:
    return _at(aligned(tensor, len(operator.outputs[0].shape)))


def _kept(operator: Operator, tensor: Tensor) -> AxisMap | None:
    if len(operator.outputs[0].shape) != len(tensor.shape):
        return None
    return _broadcast(operator, tensor)


def _convolved(operator: Operator, tensor: Tensor) -> AxisMap:
    """A convolution sums over the channels."""
    return [*_broadcast(operator, tensor)[:-1], frozenset()]


def _transposed(operator: Operator, _: Tensor) -> AxisMap:
    return _at(transposed(operator))


def _reduced(operator: Operator, _: Tensor) -> AxisMap:
    return _at(reduced(operator))


def _packed(operator: Operator, tensor: Tensor) -> AxisMap:
    rank = len(tensor.shape)
    new = int(operator.option("axis")) % (rank + 1)
    return _at([axis for axis in range(rank + 1) if axis != new])


def _unpacked(operator: Operator, tensor: Tensor) -> AxisMap:
    """The axis that is unpacked lies anywhere, since each of its steps is a result."""
    rank = len(tensor.shape)
    others = _at(range(rank - 1))
    others.insert(int(operator.option("axis")) % rank, frozenset(range(rank - 1)))
    return others


def _multiplied(operator: Operator, tensor: Tensor) -> AxisMap | None:
    """Axes behind a product with weights."""
    side = operator.inputs.index(tensor)
    if operator.name != "FULLY_CONNECTED" or side > 0:
        return _at(multiplied(operator, side))
    result = operator.outputs[0].shape
    moved = _overlapping(tensor.shape, (*result[:-1], operator.input(1).shape[-1]))
    columns = {len(result) - 1}
    return None if moved is None else [axes - columns for axes in moved]


def _regrouped(operator: Operator, tensor: Tensor) -> AxisMap | None:
    return _overlapping(tensor.shape, operator.outputs[0].shape)


def _overlapping(shape: Shape, result: Shape) -> AxisMap | None:
    """Row-major order stays: axes overlap if their strides do, `[6, 4] -> [2, 12]`: {0, 1} and {1}."""
    if math.prod(shape) != math.prod(result):
        return None
    moved: AxisMap = []
    others = _strides(result)
    for own in _strides(shape):
        overlaps = [max(own.start, other.start) < min(own.stop, other.stop) for other in others]
        moved.append(frozenset(axis for axis, overlap in enumerate(overlaps) if overlap))
    return moved


def _strides(shape: Shape) -> list[range]:
    """For each axis, from the distance of two of its steps to the distance of two steps of the axis before."""
    starts = [math.prod(shape[axis:]) for axis in range(len(shape) + 1)]
    return list(map(range, starts[1:], starts))


MAPPERS: dict[str | Effect, Callable[[Operator, Tensor], AxisMap | None]] = {
    "BROADCAST_TO": _broadcast,
    "DEPTHWISE_CONV_2D": _broadcast,
    "DYNAMIC_UPDATE_SLICE": _kept,
    "PACK": _packed,
    "TILE": _kept,
    "TRANSPOSE": _transposed,
    "UNPACK": _unpacked,
    Effect.ALONG_ROWS: _broadcast,
    Effect.CONVOLUTION: _convolved,
    Effect.CUTTING: _kept,
    Effect.ELEMENTWISE: _broadcast,
    Effect.JOINING: _kept,
    Effect.PADDING: _kept,
    Effect.PRODUCT: _multiplied,
    Effect.REARRANGING: _regrouped,
    Effect.REDUCTION: _reduced,
}
"""By an operator's name, else by its effect; each operator with a rule for heads needs an entry."""
