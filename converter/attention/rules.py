"""The rules: how the head label passes through each operator, and the operator for a single head.

A rule derives the factors of the operands from those of the result. A labelled axis may move, but must stay whole.
Operators that only join or repeat tensors for the heads are dropped. docs/head-axis.md has the table, and what else a
new rule needs.
"""

import math
from collections.abc import Callable
from itertools import dropwhile

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.axes import Places, aligned, integers, multiplied, reduced, transposed
from edge_opt.attention.factors import Axis, Factored
from edge_opt.attention.labelled import Factors, Labelled, OneHead, Rule
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import producers, reads, walked
from edge_opt.shapes.dimension import with_axis


class ByAxes(Rule):
    """Operands whose axes each correspond to an axis of the result, whose label they take, or to none.

    `places` returns the places of each operand's axes, or raises RefusedError if they are unknown. An axis without a
    place is read whole by every head. With `drops_axes`, an axis of size 1 is broadcast to the result's.
    """

    def __init__(
        self, places: Callable[[Labelled], dict[int, Places]], *, drops_axes: bool = False
    ) -> None:
        self._places = places
        self.drops_axes = drops_axes

    def operands(self, result: Labelled) -> Factors:
        factors: Factors = {}
        for index, places in self._places(result).items():
            source = result.operator.input(index)
            is_beyond = not {*places} <= {None, *range(len(result.factored))}
            if is_beyond or len(places) != len(source.shape):
                raise RefusedError(
                    Why.INVALID_MODEL,
                    "the recorded shapes are inconsistent",
                    result.operator,
                    source,
                )
            axes: list[Axis] = []
            for size, place in zip(source.shape, places, strict=True):
                axes.append(self._axis(result, source, size, place))
            factors[index] = tuple(axes)
        return factors

    def _axis(self, result: Labelled, source: Tensor, size: int, place: int | None) -> Axis:
        """The factors of one axis of an operand, given its size and its place in the result."""
        if place is None:
            return fx.plain_axis(size)
        whole = result.factored[place]
        if size == result.tensor.shape[place]:
            return whole
        if self.drops_axes:
            return fx.unit_axis(whole)
        if fx.tells_heads(whole):
            raise RefusedError(
                Why.HEADS, "an axis of heads changes its length", result.operator, source
            )
        return fx.plain_axis(size)


class Elementwise(ByAxes):
    """Operands aligned from the right; heads share an operand without the labelled axis."""

    def is_read_whole(self, result: Labelled, operand: Labelled) -> bool:
        """Without a RESHAPE, if a head's part differs only in leading axes of size 1."""
        if len(operand.tensor.shape) > len(result.piece_shape):
            return False
        return _without_leading_ones(operand.tensor.shape) == _without_leading_ones(
            operand.piece_shape
        )


def _without_leading_ones(shape: Shape) -> Shape:
    return tuple(dropwhile(lambda size: size == 1, shape))


def _aligned(result: Labelled) -> dict[int, Places]:
    """Elementwise operators: aligned from the right.

    SELECT does not broadcast; its rank-1 condition selects whole rows, which no label survives.
    """
    operator = result.operator
    if operator.name == "SELECT" and operator.input(0).shape not in ((), result.tensor.shape):
        raise RefusedError(
            Why.HEADS,
            "SELECT's condition must have the result's shape",
            operator,
            operator.input(0),
        )
    places: dict[int, Places] = {}
    for index, tensor in enumerate(operator.inputs):
        if tensor is not None:
            places[index] = aligned(tensor, len(result.factored))
    return places


def _of_product(result: Labelled) -> dict[int, Places]:
    """Batch axes broadcast; the left operand's rows and the right operand's columns keep their labels.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """
    return {side: multiplied(result.operator, side) for side in (0, 1)}


def _along_rows(result: Labelled) -> dict[int, Places]:
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""
    if fx.tells_heads(result.factored[-1]):
        text = "the heads lie on the axis of the softmax"
        raise RefusedError(Why.HEADS, text, result.operator)
    return {0: range(len(result.factored))}


def _reduced(result: Labelled) -> dict[int, Places]:
    """SUM, MEAN and other reductions. A reduced axis has no label: a head label does not pass through the sum."""
    return {0: reduced(result.operator)}


def _same_axes(result: Labelled) -> dict[int, Places]:
    """SPLIT, SPLIT_V and PAD operators (which shift rows of relative positions)."""
    operands = {"SPLIT": (1, 0), "SPLIT_V": (0, 2)}
    data, sizes = operands.get(result.operator.name, (0, 1))
    integers(result.operator, sizes)  # refuses computed ones
    return {data: range(len(result.factored))}


def _transposed(result: Labelled) -> dict[int, Places]:
    """TRANSPOSE: the label moves with its axis."""
    return {0: transposed(result.operator)}


def _sliced(result: Labelled) -> dict[int, Places]:
    """SLICE and STRIDED_SLICE, which must take plain ranges and keep the rank."""
    return {0: range(len(_begins(result.operator)))}


class Transpose(ByAxes):
    """A TRANSPOSE that only moves axes of size 1 becomes a RESHAPE, or nothing."""

    def made(self, one: OneHead) -> Tensor:
        source = one.operands[0]
        sizes = source.piece_shape
        kept = fx.piece_axes(source.factored, keep_axes=source.keep_axes)
        order = [kept.index(axis) for axis in integers(one.result.operator, 1) if axis in kept]
        last = len(order) - 1
        wide = [axis for axis in order if sizes[axis] > 1]
        exchanged = [*range(last - 1), last, last - 1]
        if wide == [axis for axis in exchanged if sizes[axis] > 1]:
            # Apart from axes of size 1, this exchanges rows and columns, which a matrix product can absorb.
            order = exchanged
        read = {0: one.piece(0), 1: one.integers("perm", order)}
        return one.clone(read, tuple(sizes[axis] for axis in order))

    def passed_on(self, result: Labelled, head: int) -> int | None:
        order = zip(integers(result.operator, 1), result.full_shape, strict=True)
        wide = [axis for axis, size in order if size > 1]
        return 0 if wide == sorted(wide) else None


class Slice(ByAxes):
    """SLICE and STRIDED_SLICE."""

    def made(self, one: OneHead) -> Tensor:
        begins = _begins(one.result.operator)
        shape = one.result.full_shape
        read = {0: one.full(0), 1: one.integers("begin", begins)}
        if one.result.operator.name == "SLICE":
            read[2] = one.integers("size", shape)
            return one.clone(read, shape)
        read[2] = one.integers("end", np.add(begins, shape))
        read[3] = one.integers("strides", np.ones(len(shape)))
        return one.clone(read, shape, begin_mask=0, end_mask=0)


def _begins(operator: Operator) -> list[int]:
    """The begin on each axis of a SLICE, or of a STRIDED_SLICE of plain ranges."""
    begins = integers(operator, 1)
    source = operator.input(0)
    if not len(operator.outputs[0].shape) == len(source.shape) == len(begins):
        raise RefusedError(Why.OPERATOR, "a slice must keep the rank", operator, source)
    if operator.name == "SLICE":
        return begins
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "offset")
    if set(integers(operator, 3)) != {1} or any(map(operator.option, masks)):
        raise RefusedError(
            Why.OPERATOR, "a STRIDED_SLICE can be followed only if it takes plain ranges", operator
        )
    is_open = int(operator.option("begin_mask"))
    for axis, size in enumerate(source.shape):
        begin = 0 if is_open >> axis & 1 else begins[axis]
        begins[axis] = max(begin if begin >= 0 else begin + size, 0)
    return begins


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order is kept, so labels stay on their factors.

    `[1, (2:K), (4:G)(128), S] -> [1, (2:K)(4:G)(128), S]`, and back.
    """

    def operands(self, result: Labelled) -> Factors:
        source = result.operator.input(0)
        grouped = fx.regroup(result.factored, source.shape)
        if grouped is None:
            raise RefusedError(Why.HEADS, "the operator cuts heads apart", result.operator, source)
        return {0: grouped}

    def passed_on(self, result: Labelled, head: int) -> int | None:
        return 0


class Joining(Rule):
    """CONCATENATION and PACK: the label passes along other axes; on the labelled axis, piece g is just part g.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, result: Labelled) -> Factors:
        axis = self._axis(result)
        whole = result.factored[axis]
        places = range(len(result.operator.inputs))
        cut = self._cut(result)
        if cut is None and fx.tells_heads(whole):
            raise RefusedError(Why.HEADS, "the joined parts are not the heads", result.operator)
        if result.operator.name == "PACK":
            part = with_axis(result.factored, axis)
        elif cut is not None:
            part = with_axis(result.factored, axis, cut.rest or fx.unit_axis(whole))
        else:
            return {index: self._beside(result, axis, index) for index in places}
        return dict.fromkeys(places, part)

    @staticmethod
    def _axis(result: Labelled) -> int:
        return int(result.operator.option("axis")) % len(result.factored)

    @staticmethod
    def _beside(result: Labelled, axis: int, index: int) -> Factored:
        """The layout of a part that is joined along an axis without heads."""
        part = result.operator.input(index)
        if axis >= len(part.shape):
            raise RefusedError(
                Why.INVALID_MODEL, "the recorded shapes are inconsistent", result.operator
            )
        return with_axis(result.factored, axis, fx.plain_axis(part.shape[axis]))

    def _cut(self, result: Labelled) -> fx.Cut | None:
        """The joined axis, cut into the parts; None if it has no label or the parts are not the heads."""
        parts = result.operator.inputs
        whole = result.factored[self._axis(result)]
        if not fx.tells_heads(whole) or len({part.shape for part in result.operator.given}) != 1:
            return None
        cut = fx.cut_axis(whole, len(parts))
        if cut is None or not fx.only_labels(cut.outer):
            return None
        if result.operator.name == "PACK":
            return None if cut.rest else cut
        return None if result.operator.has_activation else cut

    def passed_on(self, result: Labelled, head: int) -> int | None:
        cut = self._cut(result)
        return None if cut is None else fx.index_among(cut.outer, head)


class Broadcast(Rule):
    """BROADCAST_TO and TILE: each head reads the source itself, so a repeat over the heads is dropped."""

    def operands(self, result: Labelled) -> Factors:
        source = result.operator.input(0)
        axes: list[Axis] = []
        for size, place in zip(source.shape, aligned(source, len(result.factored)), strict=True):
            whole = result.factored[place]
            cut = fx.cut_axis(whole, result.tensor.shape[place] // size)
            if cut is not None:
                axes.append(cut.rest or fx.unit_axis(whole))
            elif fx.tells_heads(whole):
                raise RefusedError(
                    Why.HEADS, "the repeat cuts heads apart", result.operator, source
                )
            else:
                axes.append(fx.plain_axis(size))
        return {0: tuple(axes)}

    def passed_on(self, result: Labelled, head: int) -> int | None:
        part = fx.piece_shape(self.operands(result)[0], keep_axes=True)
        return 0 if math.prod(part) == math.prod(result.full_shape) else None

    def made(self, one: OneHead) -> Tensor:
        source = one.full(0)
        shape = one.result.full_shape
        steering: object = shape
        if one.result.operator.name == "TILE":
            steering = np.floor_divide(shape, source.shape)
        return one.clone({0: source, 1: one.integers("shape", steering)}, shape)


class FullyConnected(Rule):
    """A product of two activations if the weights are computed: `[.., C] x [M, C]^T -> [.., M]`, or `[rows, M]`.

    Rows keep their labels, and so do columns, which are the weights' rows. Constant weights are a projection, which
    sums what it reads: there a block ends.
    """

    def operands(self, result: Labelled) -> Factors:
        operator = result.operator
        if not multiplies_activations(operator):
            return {}
        *rows, columns = result.factored
        contracted = fx.plain(operator.input(1).shape[1:])
        left = fx.regroup((*rows, *contracted), operator.input(0).shape)
        if left is None:
            raise RefusedError(
                Why.HEADS, "the operator cuts heads apart", operator, operator.input(0)
            )
        operands: Factors = {0: left, 1: (columns, *contracted)}
        if any(operator.inputs[2:]):
            operands[2] = (columns,)
        return operands


MOVEMENT = operators_that(Effect.REARRANGING)
ELEMENTWISE = operators_that(Effect.ELEMENTWISE)
JOINING = operators_that(Effect.JOINING)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, Elementwise(_aligned, drops_axes=True)),
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), Regroup()),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), ByAxes(_along_rows, drops_axes=True)),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice(_sliced)),
    **dict.fromkeys(("SPLIT", "SPLIT_V", *operators_that(Effect.PADDING)), ByAxes(_same_axes)),
    **dict.fromkeys(operators_that(Effect.REDUCTION), ByAxes(_reduced)),
    **dict.fromkeys(("BROADCAST_TO", "TILE"), Broadcast()),
    "TRANSPOSE": Transpose(_transposed),
    "BATCH_MATMUL": ByAxes(_of_product, drops_axes=True),
    "FULLY_CONNECTED": FullyConnected(),
    **dict.fromkeys(("CONCATENATION", "PACK"), Joining()),
}


_PRODUCTS = operators_that(Effect.PRODUCT)


def is_product(operator: Operator) -> bool:
    """True for a product of matrices: a BATCH_MATMUL, or a FULLY_CONNECTED whose weights are computed."""
    return operator.name == "BATCH_MATMUL" or multiplies_activations(operator)


def multiplies_activations(operator: Operator) -> bool:
    """True for a product of two computed matrices, so not of weights."""
    if operator.name not in _PRODUCTS:
        return False
    return all(tensor and not is_weight(tensor) for tensor in operator.inputs[:2])


PROJECTIONS = _PRODUCTS | {"CONV_2D"}


def is_projection(operator: Operator) -> bool:
    """True for a product with weights, which sums what it reads."""
    return operator.name in PROJECTIONS and is_weight(operator.input(1))


_WEIGHT_STEPS = 8
"""Maximum number of operators, such as DEQUANTIZE and TRANSPOSE, that make a weight of constants."""
_NOT_OF_OPERANDS = operators_that(Effect.RANDOM, Effect.UNKNOWN, Effect.CALLING)


def is_weight(tensor: Tensor) -> bool:
    """True for a constant, and for a tensor that a few operators make of constants alone."""
    if tensor.producer is None:
        return _is_stored(tensor)
    makers = list(walked([tensor.producer], producers, _WEIGHT_STEPS + 1))
    if len(makers) > _WEIGHT_STEPS:
        return False
    if any(maker.name in _NOT_OF_OPERANDS or not maker.inputs for maker in makers):
        return False  # random numbers, variables
    return all(map(_is_stored, reads(makers)))


def _is_stored(tensor: Tensor) -> bool:
    """True if the file, or one beside it, has the tensor's bytes."""
    return tensor.is_constant or tensor.is_outside
