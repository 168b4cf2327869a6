"""Rules of operators that compute: element by element, matrix products, along rows. They move nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.attention import factors as fx
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rule import (
    Labelled,
    Operands,
    Rule,
    constant_integers,
    on_axes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_opt.attention.assembly import HeadBuilder as Builder
    from edge_opt.attention.factors import Axis
    from edge_opt.ir import Shape, Tensor


class Elementwise(Rule):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        shape = of.tensor.shape
        found: Operands = {}
        for index, tensor in enumerate(of.operator.inputs):
            if tensor is None:
                continue
            if not _broadcasts(tensor.shape, shape):
                return Refusal("operands must broadcast", of.operator, tensor, shape, tensor.shape)
            found[index] = fx.of_operand(of.factored, tensor.shape)
        return found

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        shape = of.piece_shape(keep=build.keep_axes)
        inputs: dict[int, Tensor] = {}
        for index, own in self.known_operands(of).items():
            whole = of.input(index)
            wanted = fx.piece_shape(own, keep=build.keep_axes)
            inputs[index] = whole if _fits_as_it_is(whole.shape, wanted, shape) else pieces[index]
        return build.clone(of, inputs, shape)


def _fits_as_it_is(whole: Shape, wanted: Shape, result: Shape) -> bool:
    """True where an operand needs no RESHAPE, because it only has other leading ones: then all heads share it."""
    return len(whole) <= len(result) and _without_leading_ones(whole) == _without_leading_ones(wanted)


def _without_leading_ones(shape: Shape) -> Shape:
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _broadcasts(operand: Shape, result: Shape) -> bool:
    return len(operand) <= len(result) and all(
        a in (b, 1) for a, b in zip(reversed(operand), reversed(result), strict=False)
    )


class Select(Elementwise):
    """SELECT without broadcasting; its rank-1 condition selects whole rows, which no label survives."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        condition = of.input(0)
        if condition.shape not in ((), of.tensor.shape):
            return Refusal("SELECT's condition must have the result's shape", of.operator, condition)
        return super().operands(of)


class BatchMatMul(Rule):
    """Batch axes broadcast, the left operand's rows and the right one's columns keep theirs.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """

    def operands(self, of: Labelled) -> Operands | Refusal:
        left, right = of.input(0), of.input(1)
        if min(len(left.shape), len(right.shape), len(of.factored)) < 2:
            return Refusal("BATCH_MATMUL needs matrices", of.operator, left)
        adj_x, adj_y = bool(of.operator.option("adj_x")), bool(of.operator.option("adj_y"))
        inner = left.shape[-2 if adj_x else -1]
        if inner != right.shape[-1 if adj_y else -2]:
            return Refusal("inner sizes differ", of.operator, right, str(inner))
        contracted = fx.plain((inner,))[0]
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

    def operands(self, of: Labelled) -> Operands | Refusal:
        left, right = of.input(0), of.input(1)
        *rows, columns = of.factored
        inner = left.shape[-1] if left.shape else 0
        if len(right.shape) != 2 or inner != right.shape[1]:
            return Refusal("inner sizes differ", of.operator, right, str(inner))
        lead = fx.regroup(tuple(rows), left.shape[:-1])
        if isinstance(lead, fx.Mismatch):
            return Refusal("the head axis is cut through the middle", of.operator, left)
        contracted = fx.plain((inner,))[0]
        found: Operands = {0: (*lead, contracted), 1: (columns, contracted)}
        if len(of.operator.inputs) > 2 and of.operator.inputs[2] is not None:
            found[2] = (columns,)
        return found

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        operands = self.known_operands(of)
        # Weights and bias are a matrix and a vector, whatever axes a head drops.
        inputs = {
            index: on_axes(build, of, pieces[index], own, range(len(own))) if index else pieces[index]
            for index, own in operands.items()
        }
        return build.clone(of, inputs, of.piece_shape(keep=build.keep_axes))


class AlongLastAxis(Rule):
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        if fx.tells_heads(of.factored[-1]):
            return Refusal(
                "the heads lie on the axis of the softmax", of.operator, actual=fx.to_text(of.factored)
            )
        return {0: of.factored}


class Reduce(Rule):
    """SUM, MEAN, REDUCE_MAX and the like: the axes that are left keep their labels.

    Backwards a reduced axis is always a plain one; where it holds heads, these end in the sum and no label comes here.
    """

    def operands(self, of: Labelled) -> Operands | Refusal:
        reduced = _reduced_axes(of)
        if isinstance(reduced, Refusal):
            return reduced
        rest = list(of.factored)
        axes: list[Axis] = []
        for axis, size in enumerate(of.input(0).shape):
            if axis not in reduced:
                axes.append(rest.pop(0))
                continue
            if of.operator.option("keep_dims"):
                rest.pop(0)
            axes.append(fx.plain((size,))[0])
        return {0: tuple(axes)}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        reduced, operand = _reduced_axes(of), self.known_operands(of)[0]
        assert not isinstance(reduced, Refusal)
        kept = fx.piece_axes(operand, keep=build.keep_axes)
        sizes = fx.piece_shape_on(operand, kept)
        steering = build.integers(
            f"{of.tensor.name}/axes", [i for i, axis in enumerate(kept) if axis in reduced]
        )
        if of.operator.option("keep_dims"):
            shape = tuple(1 if axis in reduced else size for axis, size in zip(kept, sizes, strict=True))
        else:
            shape = tuple(size for axis, size in zip(kept, sizes, strict=True) if axis not in reduced)
        return build.clone(of, {0: pieces[0], 1: steering}, shape)


def _reduced_axes(of: Labelled) -> set[int] | Refusal:
    axes = constant_integers(of.operator, 1)
    rank = len(of.input(0).shape)
    return axes if isinstance(axes, Refusal) else {axis % rank for axis in axes}
