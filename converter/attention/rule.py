"""What a rule is: how the head label passes through one operator. The rules themselves are in their own modules.

A rule says where the operands carry the label, given where the result does, and what is left for a single head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.refusal import Refusal, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from edge_opt.attention.assembly import HeadBuilder as Builder
    from edge_opt.ir import Operator, Shape, Tensor

Operands = dict[int, Factored]
"""Which inputs carry numbers that belong to heads, and how each is factored. Other inputs are settings."""

Pieces: TypeAlias = "Callable[[int], Tensor]"
"""Gives one head's part of an operand, which is made when it is asked for."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One result of an operator, and where the heads lie in it."""

    operator: Operator
    factored: Factored
    output: int = 0

    @property
    def tensor(self) -> Tensor:
        """The result itself."""
        return self.operator.outputs[self.output]

    def input(self, index: int) -> Tensor:
        """Input `index` of the operator, which its definition requires to be there."""
        return self.operator.input(index)

    def axis(self, rank: int) -> int:
        """The operator's option `axis`, counted from the front of a tensor of that rank."""
        return int(self.operator.option("axis")) % rank

    def piece_shape(self, *, keep: bool) -> Shape:
        """Shape of the result for one head."""
        return fx.piece_shape(self.factored, keep=keep)


class Rule(ABC):
    """How the head label passes through an operator whose shapes fit, which is looked at before."""

    @abstractmethod
    def operands(self, of: Labelled) -> Operands:
        """Factors of the operands, given the factors of one result.

        Raises:
            RefusedError: the label does not pass.
        """

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        """True where nothing of the operator is left for a single head, or at most a RESHAPE."""
        return False

    def left(self, of: Labelled, head: int) -> int:
        """Of an operator that vanishes, the operand that the result is a RESHAPE of."""
        return 0

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        """The operator for one head, its result perhaps still to be reshaped."""
        read = {index: pieces(index) for index in self.operands(of)}
        return build.clone(of, read, of.piece_shape(keep=build.keep_axes))

    def emit(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        """The result for one head."""
        gone = self.vanishes(of, keep=build.keep_axes)
        made = pieces(self.left(of, head)) if gone else self.made(build, of, head, pieces)
        return build.reshape(of, made, of.piece_shape(keep=build.keep_axes))


def constant_integers(operator: Operator, index: int) -> list[int]:
    """The numbers of a constant operand that steers an operator (axes, sizes)."""
    tensor = operator.inputs[index]
    if tensor is None or not tensor.has_numbers:
        raise RefusedError(Refusal("an operand that steers the operator must be constant", operator, tensor))
    return [int(value) for value in tensor.array().ravel()]


def whole_on(of: Labelled, source: Tensor, changed: Collection[int], refusal: str) -> Factored:
    """Factors of an operand that has other sizes on the `changed` axes, which may hold no heads: there it is whole."""
    if any(fx.tells_heads(of.factored[axis]) for axis in changed):
        raise RefusedError(Refusal(refusal, of.operator, source))
    plain = fx.plain(source.shape)
    return tuple(plain[axis] if axis in changed else own for axis, own in enumerate(of.factored))


def shared_axes(build: Builder, *shapes: Factored) -> tuple[int, ...]:
    """Axes that a head's piece of any of these has; they have the same rank."""
    return tuple(sorted({axis for own in shapes for axis in fx.piece_axes(own, keep=build.keep_axes)}))


def on_axes(build: Builder, of: Labelled, piece: Tensor, factored: Factored, axes: Sequence[int]) -> Tensor:
    """A piece with exactly these axes, of which it may lack some that have size 1."""
    return build.reshape(of, piece, fx.piece_shape_on(factored, axes))
