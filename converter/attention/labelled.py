"""A tensor with the layout of heads in it, and the base class of the rules that pass the layout on.

    result  [1,(N),T,S]  --Rule.operands-->  operands  [1,(N),T,H] and [1,1,S,H]     up: where the heads lie
    pieces  [1,1,T,H]    --Rule.made----->   result    [1,1,T,S] of one head         down: its own operator

The head axis is explained in docs/head-axis.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factor, Factored
from edge_opt.base.words import name_below
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.refusal import RefusedError, Why


class Labelled(NamedTuple):
    """A tensor, and the layout of heads in it.

    With `keep_axes`, a head's tensors keep axes that hold only heads, at size 1.
    """

    tensor: Tensor
    factored: Factored
    keep_axes: bool = True

    @property
    def operator(self) -> Operator:
        """The operator that defines the tensor."""
        assert self.tensor.producer is not None
        return self.tensor.producer

    @property
    def pieces(self) -> int:
        """Number of different pieces that heads see."""
        return fx.piece_count(self.factored)

    @property
    def piece_shape(self) -> Shape:
        """Shape of one head's piece."""
        return fx.piece_shape(self.factored, keep_axes=self.keep_axes)

    @property
    def full_shape(self) -> Shape:
        """Shape of one head's piece with all axes."""
        return fx.piece_shape(self.factored, keep_axes=True)

    def refusal(self, text: str) -> RefusedError:
        """The error that heads are not clear here, with this tensor and the operator that makes it."""
        return RefusedError(Why.HEADS, text, self.tensor.producer, self.tensor)


def along(tensor: Tensor, axis: int) -> Labelled:
    """The tensor with a label for each step of an axis, which is counted from the front."""
    return Labelled(tensor, fx.labelled_axis(tensor.shape, axis, Factor(tensor.shape[axis], 1)))


def unlabelled(tensor: Tensor) -> Labelled:
    """The tensor without labels."""
    return Labelled(tensor, fx.plain(tensor.shape))


Factors = dict[int, Factored]
Operands = dict[int, Labelled]
"""The inputs that carry data, by index; other inputs are settings such as axes and sizes."""


@dataclass(frozen=True, slots=True)
class OneHead:
    """Everything that a rule needs to make an operator for one head.

    `result` is the whole result, `make` makes the head's part of an operand, `suffix` is added to names of results.
    """

    assembly: Assembly
    result: Labelled
    operands: Operands
    head: int
    make: Callable[[Labelled], Tensor]
    suffix: str

    def piece(self, index: int) -> Tensor:
        """The head's part of an operand."""
        return self.make(self.operands[index])

    def full(self, index: int) -> Tensor:
        """The head's part of an operand with all axes, those of the heads at size 1."""
        return self.reshaped(self.piece(index), self.operands[index].full_shape)

    def clone(self, inputs: Mapping[int, Tensor], shape: Shape, **options: object) -> Tensor:
        """A copy of the operator with other inputs and options, and with all its results cut like `shape`."""
        operator = self.result.operator
        table = operator.options
        if options and table is not None:
            table = table.copy()
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(index, tensor) for index, tensor in enumerate(operator.inputs)]
        shapes = [self._cut_like(output.shape, shape) for output in operator.outputs]
        made = self.assembly.copy_resized(operator, read, self.suffix, shapes, table)
        return made[operator.outputs.index(self.result.tensor)]

    def _cut_like(self, other: Shape, shape: Shape) -> Shape:
        """The shape of another result when this one becomes `shape`: the same axes are cut."""
        whole = self.result.tensor.shape
        if other == whole:
            return shape
        sizes = zip(other, whole, shape, strict=True)
        return tuple(piece if size == own else size for size, own, piece in sizes)

    def integers(self, word: str, values: object) -> Tensor:
        """An int32 operand such as axes or sizes."""
        return self.assembly.integers(name_below(self.result.tensor.name, word), values)

    def reshaped(self, source: Tensor, shape: Shape) -> Tensor:
        """`source`, reshaped to `shape` if necessary."""
        return self.assembly.reshaped(
            source, shape, name_below(self.result.tensor.name, self.suffix)
        )


class Rule(ABC):
    """How the head label passes through an operator, whose shapes have been checked."""

    drops_axes = False
    """True if operands may lack the heads' axes, since no option of the operator counts axes."""

    @abstractmethod
    def operands(self, result: Labelled) -> Factors:
        """Factors of the operands, given the factors of one result.

        Raises:
            RefusedError: the label does not pass.
        """

    def passed_on(self, result: Labelled, head: int) -> int | None:
        """The operand that one head's result is a RESHAPE of; None if the operator itself is needed."""
        return None

    def is_read_whole(self, result: Labelled, operand: Labelled) -> bool:
        """True if every head reads the whole operand."""
        return False

    def made(self, one: OneHead) -> Tensor:
        """Make the operator for one head; its result may still have to be reshaped."""
        read: dict[int, Tensor] = {}
        for index, operand in one.operands.items():
            if not self.is_read_whole(one.result, operand):
                read[index] = one.piece(index) if self.drops_axes else one.full(index)
        return one.clone(read, one.result.piece_shape if self.drops_axes else one.result.full_shape)
