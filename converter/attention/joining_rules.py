"""Rules of operators that make one tensor of several, or repeat one: where they do so for the heads, they vanish."""

import math
from collections.abc import Sequence

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis
from edge_opt.attention.refusal import Refusal, RefusedError
from edge_opt.attention.rule import HeadBuilder as Builder
from edge_opt.attention.rule import (
    Labelled,
    Operands,
    Pieces,
    Rule,
    constant_integers,
    on_axes,
    shared_axes,
    whole_on,
)
from edge_opt.ir import Tensor


class Concatenation(Rule):
    """On another axis the label passes through; on the labelled axis piece g is part g, and nothing is left.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, of: Labelled) -> Operands:
        axis, count = of.axis(len(of.factored)), len(of.operator.inputs)
        if not fx.tells_heads(of.factored[axis]):
            return {index: whole_on(of, of.input(index), [axis], "") for index in range(count)}
        cut = self._cut(of)
        if cut is None:
            raise RefusedError(Refusal("the parts of a concatenation are not the heads", of.operator))
        own = cut[1] or fx.repeated(of.factored[axis])
        return dict.fromkeys(range(count), (*of.factored[:axis], own, *of.factored[axis + 1 :]))

    @staticmethod
    def _cut(of: Labelled) -> tuple[Axis, Axis] | None:
        shapes = {tensor.shape for tensor in of.operator.inputs if tensor is not None}
        if len(shapes) != 1 or of.operator.option("fused_activation_function"):
            return None
        return fx.take_outer(of.factored[of.axis(len(of.factored))], len(of.operator.inputs))

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        operands = self.operands(of)
        axes = shared_axes(build, of.factored, *operands.values())
        inputs = {index: on_axes(build, of, pieces(index), own, axes) for index, own in operands.items()}
        position = axes.index(of.axis(len(of.factored)))
        return build.clone(of, inputs, fx.piece_shape_on(of.factored, axes), {"axis": position})

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return fx.tells_heads(of.factored[of.axis(len(of.factored))])

    def left(self, of: Labelled, head: int) -> int:
        cut = self._cut(of)
        assert cut is not None
        return fx.mixed_index(cut[0], head)


class Pack(Rule):
    """As CONCATENATION, along an axis that the parts do not have."""

    def operands(self, of: Labelled) -> Operands:
        axis, count = of.axis(len(of.factored)), len(of.operator.inputs)
        own = of.factored[axis]
        if fx.tells_heads(own) and not fx.only_labels(own):
            raise RefusedError(Refusal("the parts of a PACK are not the heads", of.operator))
        return dict.fromkeys(range(count), (*of.factored[:axis], *of.factored[axis + 1 :]))

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        position = fx.piece_axes(of.factored, keep=build.keep_axes).index(of.axis(len(of.factored)))
        read = {index: pieces(index) for index in range(len(of.operator.inputs))}
        return build.clone(of, read, of.piece_shape(keep=build.keep_axes), {"axis": position})

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return len(of.operator.inputs) == 1 or fx.tells_heads(of.factored[of.axis(len(of.factored))])

    def left(self, of: Labelled, head: int) -> int:
        return fx.mixed_index(of.factored[of.axis(len(of.factored))], head)


class Broadcast(Rule):
    """BROADCAST_TO and TILE: a repeat over the heads is what each head has anyway, so it goes."""

    def operands(self, of: Labelled) -> Operands:
        source = of.input(0)
        offset = len(of.factored) - len(source.shape)
        axes: list[Axis] = []
        for size, whole, axis in zip(
            source.shape, of.tensor.shape[offset:], of.factored[offset:], strict=True
        ):
            cut = fx.cut_axis(axis, whole // size)
            if cut is not None:
                axes.append(cut[1] or fx.repeated(axis))
            elif fx.tells_heads(axis):
                raise RefusedError(Refusal("a repeat cuts through the heads", of.operator, source))
            else:
                axes.extend(fx.plain((size,)))
        return {0: tuple(axes)}

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        own = self.operands(of)[0]
        return math.prod(fx.piece_shape(own, keep=keep)) == math.prod(of.piece_shape(keep=keep))

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        shape = of.piece_shape(keep=build.keep_axes)
        own = self.operands(of)[0]
        offset = len(of.factored) - len(own)
        kept = fx.piece_axes(of.factored, keep=build.keep_axes)
        source = on_axes(build, of, pieces(0), own, [axis - offset for axis in kept if axis >= offset])
        values = list(shape)
        if of.operator.name == "TILE":
            values = [size // part for size, part in zip(shape, source.shape, strict=True)]
        steering = build.integers(f"{of.tensor.name}/shape", values)
        return build.clone(of, {0: source, 1: steering}, shape)


class Gather(Rule):
    """GATHER by a constant that repeats the keys of K heads for N: head (k, g) takes k. On another axis it stays.

    With batch axes, `[B,N,T,R]` and positions `[B,N,T,S]` -> `[B,N,T,S]`, every head has positions of its own.
    """

    def operands(self, of: Labelled) -> Operands:
        source, span = of.input(0), self._span(of)
        size, batch = source.shape[span.start], self._batch(of)
        gathered = tuple(factor for axis in of.factored[span] for factor in axis)
        own: Axis | None = fx.plain((size,))[0]
        if fx.tells_heads(gathered) and not batch:
            own = _repeated_part(gathered, constant_integers(of.operator, 1), size)
        if own is None:
            text = "a GATHER does not repeat its operand for the heads"
            raise RefusedError(Refusal(text, of.operator, source))
        found: Operands = {0: (*of.factored[: span.start], own, *of.factored[span.stop :])}
        if batch:
            found[1] = (*of.factored[:batch], *of.factored[span])
        return found

    @staticmethod
    def _batch(of: Labelled) -> int:
        """How many axes the operand and the positions have in common."""
        batch = int(of.operator.option("batch_dims"))
        return batch + len(of.input(1).shape) if batch < 0 else batch

    def _span(self, of: Labelled) -> slice:
        """The axes of the result that stand for the gathered one."""
        axis = of.axis(len(of.input(0).shape))
        return slice(axis, axis + len(of.input(1).shape) - self._batch(of))

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return not self._batch(of) and any(map(fx.tells_heads, of.factored[self._span(of)]))

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        operands = self.operands(of)
        kept = fx.piece_axes(operands[0], keep=build.keep_axes)
        sizes, position = fx.piece_shape_on(operands[0], kept), kept.index(self._span(of).start)
        batch = sum(axis < self._batch(of) for axis in kept)
        positions = fx.piece_shape(operands[1], keep=build.keep_axes) if 1 in operands else of.input(1).shape
        gathered = (*sizes[:position], *positions[batch:], *sizes[position + 1 :])
        options = {"axis": position, "batch_dims": batch}
        return build.clone(of, {index: pieces(index) for index in operands}, gathered, options)


def _repeated_part(gathered: Axis, indices: Sequence[int], size: int) -> Axis | None:
    """What of the gathered positions tells the operand's `size` steps apart, if the rest is nothing but heads.

    The indices must be 0 .. size-1, each `inner` times in a row, and all of that `outer` times over.
    """
    inner = next((i for i, index in enumerate(indices) if index != indices[0]), len(indices))
    outer = len(indices) // (inner * size)
    if [i // inner % size for i in range(len(indices))] != list(indices):
        return None
    first = fx.take_outer(gathered, outer)
    second = first and fx.cut_axis(first[1], size)
    if not second or not fx.only_labels(second[1]):
        return None
    return second[0] or fx.repeated(gathered)
