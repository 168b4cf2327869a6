"""What a rule is: how the head label passes through one operator. The rules themselves are in their own modules.

A rule says where the operands carry the label, given where the result does, and what is left for a single head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_opt.attention.assembly import HeadBuilder as Builder
    from edge_opt.ir import Operator, Shape, Tensor

Operands = dict[int, Factored]
"""Which inputs carry numbers that belong to heads, and how each is factored. Other inputs are settings."""


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

    def axis(self, option: str = "axis", rank: int | None = None) -> int:
        """An axis given as an option, counted from the front of a tensor of that rank (of the result's, by default)."""
        axis = int(self.operator.option(option))
        return axis + (len(self.factored) if rank is None else rank) if axis < 0 else axis

    def piece_shape(self, *, keep: bool) -> Shape:
        """Shape of the result for one head."""
        return fx.piece_shape(self.factored, keep=keep)


class Rule(ABC):
    """How the head label passes through an operator."""

    @abstractmethod
    def operands(self, of: Labelled) -> Operands | Refusal:
        """Factors of the operands, given the factors of one result."""

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        """True where nothing of the operator is left for a single head, or at most a RESHAPE."""
        return False

    def left(self, of: Labelled, head: int) -> int:
        """Of an operator that vanishes, the operand that the result is a RESHAPE of."""
        return 0

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        """The operator for one head, its result perhaps still to be reshaped."""
        return build.clone(of, pieces, of.piece_shape(keep=build.keep_axes))

    def emit(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        """The result for one head; `pieces` holds that head's part of each operand."""
        gone = self.vanishes(of, keep=build.keep_axes)
        made = pieces[self.left(of, head)] if gone else self.made(build, of, head, pieces)
        return build.reshape(of, made, of.piece_shape(keep=build.keep_axes))

    def known_operands(self, of: Labelled) -> Operands:
        """As `operands`, where those were asked for before and are known not to be refused."""
        operands = self.operands(of)
        assert not isinstance(operands, Refusal)
        return operands


def constant_integers(operator: Operator, index: int) -> list[int] | Refusal:
    """The numbers of a constant operand that steers an operator (axes, sizes)."""
    tensor = operator.inputs[index] if index < len(operator.inputs) else None
    if tensor is None or not tensor.has_numbers:
        return Refusal("an operand that steers the operator must be constant", operator, tensor)
    return [int(value) for value in tensor.array().ravel()]


def known_integers(operator: Operator, index: int) -> list[int]:
    """As `constant_integers`, where `operands` has already seen that they are there."""
    values = constant_integers(operator, index)
    assert not isinstance(values, Refusal)
    return values


def shared_axes(build: Builder, *shapes: Factored) -> tuple[int, ...]:
    """Axes that a head's piece of any of these has; they have the same rank."""
    return tuple(sorted({axis for own in shapes for axis in fx.piece_axes(own, keep=build.keep_axes)}))


def on_axes(build: Builder, of: Labelled, piece: Tensor, factored: Factored, axes: Sequence[int]) -> Tensor:
    """A piece with exactly these axes, of which it may lack some that have size 1."""
    return build.reshape(of, piece, fx.piece_shape_on(factored, axes))
