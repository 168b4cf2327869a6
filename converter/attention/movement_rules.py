"""Rules of operators that rearrange one tensor: RESHAPE and its kin, TRANSPOSE. They neither join nor cut."""

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis
from edge_opt.attention.refusal import Refusal, RefusedError
from edge_opt.attention.rule import HeadBuilder as Builder
from edge_opt.attention.rule import Labelled, Operands, Pieces, Rule, constant_integers
from edge_opt.ir import Tensor


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order stays, so labels stay on their factors."""

    def operands(self, of: Labelled) -> Operands:
        source = of.input(0)
        grouped = fx.regroup(of.factored, source.shape)
        if grouped is None:
            expected = f"a shape that {fx.to_text(of.factored)} refines"
            text = "the head axis is cut through the middle"
            raise RefusedError(Refusal(text, of.operator, source, expected, source.shape))
        return {0: grouped}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        return pieces(0)

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return of.piece_shape(keep=keep) == fx.piece_shape(self.operands(of)[0], keep=keep)


class Transpose(Rule):
    """The label moves with its axis; what only moves axes of size 1 is a RESHAPE, or nothing."""

    def operands(self, of: Labelled) -> Operands:
        permutation = constant_integers(of.operator, 1)
        axes: list[Axis] = [()] * len(permutation)
        for target, source in enumerate(permutation):
            axes[source] = of.factored[target]
        return {0: tuple(axes)}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        if self.keeps_order(of):
            return pieces(0)
        source = self.operands(of)[0]
        kept = fx.piece_axes(source, keep=build.keep_axes)
        sizes = fx.piece_shape_on(source, kept)
        order = [kept.index(axis) for axis in constant_integers(of.operator, 1) if axis in kept]
        if _swaps_last_two(order, sizes):
            # Axes of size 1 aside this exchanges rows and columns, which a matrix product can do itself.
            order = [*range(len(order) - 2), len(order) - 1, len(order) - 2]
        steering = build.integers(f"{of.tensor.name}/perm", order)
        return build.clone(of, {0: pieces(0), 1: steering}, tuple(sizes[axis] for axis in order))

    def keeps_order(self, of: Labelled) -> bool:
        """True where one head's elements stay in row-major order."""
        source = self.operands(of)[0]
        sizes = fx.piece_shape_on(source, range(len(source)))
        wide = [axis for axis in constant_integers(of.operator, 1) if sizes[axis] > 1]
        return wide == sorted(wide)

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        same = of.piece_shape(keep=keep) == fx.piece_shape(self.operands(of)[0], keep=keep)
        return same and self.keeps_order(of)


def _swaps_last_two(permutation: list[int], sizes: tuple[int, ...]) -> bool:
    wide = [axis for axis in permutation if sizes[axis] > 1]
    last = len(permutation) - 1
    return wide[-2:] == [last, last - 1] and wide[:-2] == sorted(wide[:-2])


def keeps_order(of: Labelled, rule: Rule) -> bool:
    """True where a movement leaves one head's elements in row-major order."""
    return not isinstance(rule, Transpose) or rule.keeps_order(of)
