"""Rules of operators that rearrange one tensor: RESHAPE and its kin, TRANSPOSE. They neither join nor cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Mismatch
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rule import (
    Labelled,
    Operands,
    Rule,
    constant_integers,
    known_integers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_opt.attention.assembly import HeadBuilder as Builder
    from edge_opt.ir import Tensor


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order stays, so labels stay on their factors."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        source = of.input(0)
        if source.elements != of.tensor.elements:
            return Refusal("a reshape must keep the number of elements", of.operator, source)
        grouped = fx.regroup(of.factored, source.shape)
        if isinstance(grouped, Mismatch):
            return Refusal(
                "the head axis is cut through the middle",
                of.operator,
                source,
                f"a shape that {fx.to_text(of.factored)} refines",
                source.shape,
            )
        return {0: grouped}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        return pieces[0]

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        source = self.known_operands(of)[0]
        return of.piece_shape(keep=keep) == fx.piece_shape(source, keep=keep)


class Transpose(Rule):
    """The label moves with its axis; what only moves axes of size 1 is a RESHAPE, or nothing."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        permutation = constant_integers(of.operator, 1)
        if isinstance(permutation, Refusal):
            return permutation
        if sorted(permutation) != list(range(len(of.factored))):
            return Refusal("not a permutation", of.operator, of.operator.inputs[1], actual=str(permutation))
        axes: list[Axis] = [()] * len(permutation)
        for target, source in enumerate(permutation):
            axes[source] = of.factored[target]
        return {0: tuple(axes)}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        if self.keeps_order(of):
            return pieces[0]
        source = self.known_operands(of)[0]
        kept = fx.piece_axes(source, keep=build.keep_axes)
        order = [kept.index(axis) for axis in known_integers(of.operator, 1) if axis in kept]
        swapped = _swaps_last_two(order, fx.piece_shape_on(source, kept))
        if swapped:
            # Axes of size 1 aside this exchanges rows and columns, which a matrix product can do itself.
            order = [*range(len(order) - 2), len(order) - 1, len(order) - 2]
        steering = build.integers(f"{of.tensor.name}/perm", order)
        sizes = fx.piece_shape_on(source, kept)
        return build.clone(of, {0: pieces[0], 1: steering}, tuple(sizes[axis] for axis in order))

    def keeps_order(self, of: Labelled) -> bool:
        """True where one head's elements stay in row-major order."""
        source = self.known_operands(of)[0]
        sizes = fx.piece_shape_on(source, range(len(source)))
        wide = [axis for axis in known_integers(of.operator, 1) if sizes[axis] > 1]
        return wide == sorted(wide)

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        if not self.keeps_order(of):
            return False
        return of.piece_shape(keep=keep) == fx.piece_shape(self.known_operands(of)[0], keep=keep)


def _swaps_last_two(permutation: list[int], sizes: tuple[int, ...]) -> bool:
    wide = [axis for axis in permutation if sizes[axis] > 1]
    last = len(permutation) - 1
    return wide[-2:] == [last, last - 1] and wide[:-2] == sorted(wide[:-2])


def keeps_order(of: Labelled, rule: Rule) -> bool:
    """True where a movement leaves one head's elements in row-major order."""
    return not isinstance(rule, Transpose) or rule.keeps_order(of)
