"""Rules of operators that compute: element by element, matrix products, along rows. They move nothing."""

from itertools import dropwhile

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis
from edge_opt.attention.rule import Labelled, OneHead, Operands, Rule, constant_integers
from edge_opt.ir import Shape, Tensor
from edge_opt.ir.refusal import RefusedError


class Elementwise(Rule):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads."""

    def operands(self, of: Labelled) -> Operands:
        shapes = {i: tensor.shape for i, tensor in enumerate(of.operator.inputs) if tensor is not None}
        return {index: fx.of_operand(of.factored, shape) for index, shape in shapes.items()}

    def parts(self, of: Labelled, *, keep: bool) -> Operands:
        result = of.piece_shape(keep=keep)
        return {
            index: own
            for index, own in self.operands(of).items()
            if not _fits_as_it_is(of.input(index).shape, fx.piece_shape(own, keep=keep), result)
        }


def _fits_as_it_is(whole: Shape, wanted: Shape, result: Shape) -> bool:
    """True where an operand needs no RESHAPE, because it only has other leading ones: then all heads share it."""
    trimmed, expected = (tuple(dropwhile(lambda size: size == 1, shape)) for shape in (whole, wanted))
    return len(whole) <= len(result) and trimmed == expected


class Select(Elementwise):
    """SELECT without broadcasting; its rank-1 condition selects whole rows, which no label survives."""

    def operands(self, of: Labelled) -> Operands:
        condition = of.input(0)
        if condition.shape not in ((), of.tensor.shape):
            text = "SELECT's condition must have the result's shape"
            raise RefusedError(text, of.operator, condition)
        return super().operands(of)


class BatchMatMul(Rule):
    """Batch axes broadcast, the left operand's rows and the right one's columns keep theirs.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """

    def operands(self, of: Labelled) -> Operands:
        left, right = of.input(0), of.input(1)
        adj_x, adj_y = bool(of.operator.option("adj_x")), bool(of.operator.option("adj_y"))
        (contracted,) = fx.plain((left.shape[-2 if adj_x else -1],))
        *batch, rows, columns = of.factored
        a = (contracted, rows) if adj_x else (rows, contracted)
        b = (columns, contracted) if adj_y else (contracted, columns)
        return {
            0: fx.of_operand(tuple(batch), left.shape[:-2]) + a,
            1: fx.of_operand(tuple(batch), right.shape[:-2]) + b,
        }


class FullyConnected(Rule):
    """With computed weights a product of two activations: `[.., C] x [M, C]^T -> [.., M]`, or `[rows, M]`.

    With constant weights it is a projection, whose result mixes all that it reads: there a block ends.
    """

    def operands(self, of: Labelled) -> Operands:
        left = of.input(0)
        *rows, columns = of.factored
        lead = fx.regroup(tuple(rows), left.shape[:-1])
        if lead is None:
            raise RefusedError("the head axis is cut through the middle", of.operator, left)
        (contracted,) = fx.plain(left.shape[-1:])
        operands: Operands = {0: (*lead, contracted), 1: (columns, contracted)}
        if len(of.operator.inputs) > 2 and of.operator.inputs[2] is not None:
            operands[2] = (columns,)
        return operands

    def made(self, one: OneHead) -> Tensor:
        # Weights and bias are a matrix and a vector, whatever axes a head drops.
        inputs = {
            index: one.on_axes(index, own, range(len(own))) if index else one.piece(index)
            for index, own in self.operands(one.of).items()
        }
        return one.clone(inputs)


class AlongLastAxis(Rule):
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""

    def operands(self, of: Labelled) -> Operands:
        if fx.tells_heads(of.factored[-1]):
            text = "the heads lie on the axis of the softmax"
            raise RefusedError(text, of.operator, actual=fx.to_text(of.factored))
        return {0: of.factored}


class Reduce(Rule):
    """SUM, MEAN, REDUCE_MAX and the like: the axes that are left keep their labels.

    Backwards a reduced axis is always a plain one; where it holds heads, these end in the sum and no label comes here.
    """

    def operands(self, of: Labelled) -> Operands:
        reduced = _reduced_axes(of)
        rest = list(of.factored)
        axes: list[Axis] = []
        for axis, size in enumerate(of.input(0).shape):
            if axis not in reduced:
                axes.append(rest.pop(0))
                continue
            if of.operator.option("keep_dims"):
                rest.pop(0)
            axes.extend(fx.plain((size,)))
        return {0: tuple(axes)}

    def made(self, one: OneHead) -> Tensor:
        reduced, operand = _reduced_axes(one.of), self.operands(one.of)[0]
        kept = one.axes(operand)
        steering = one.integers("axes", [i for i, axis in enumerate(kept) if axis in reduced])
        left = operand
        if one.of.operator.option("keep_dims"):
            left = tuple(() if axis in reduced else own for axis, own in enumerate(operand))
        else:
            kept = tuple(axis for axis in kept if axis not in reduced)
        return one.clone({0: one.piece(0), 1: steering}, fx.piece_shape_on(left, kept))


def _reduced_axes(of: Labelled) -> set[int]:
    rank = len(of.input(0).shape)
    # Of a scalar, TFLite takes any axes: there is none to reduce.
    return {axis % rank for axis in constant_integers(of.operator, 1)} if rank else set()
