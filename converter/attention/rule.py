"""What a rule is: how the head label passes through one operator, and what is left of that for a single head.

A rule says where the operands carry the label, given where the result does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.base.words import name_below
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.refusal import RefusedError

Operands = dict[int, Factored]
"""Which inputs carry numbers that belong to heads, and how each is factored. Other inputs are settings."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One result of an operator, and where the heads lie in it."""

    tensor: Tensor
    factored: Factored

    @property
    def operator(self) -> Operator:
        """The operator that defines it."""
        assert self.tensor.producer is not None
        return self.tensor.producer

    def input(self, index: int) -> Tensor:
        """Input `index` of the operator, which its definition requires to be there."""
        return self.operator.input(index)

    def axis(self, rank: int) -> int:
        """The operator's option `axis`, counted from the front of a tensor of that rank."""
        return int(self.operator.option("axis")) % rank

    def piece_shape(self, *, keep: bool) -> Shape:
        """Shape of the result for one head."""
        return fx.piece_shape(self.factored, keep=keep)


@dataclass(frozen=True, slots=True)
class OneHead:
    """One operator for one head, `of` which the whole is known: what a rule makes it with.

    `piece` makes the head's part of an operand; `suffix` is what the names of its results end in. With `keep_axes` its
    tensors keep the axes that only tell heads apart, at size 1.
    """

    assembly: Assembly
    of: Labelled
    head: int
    piece: Callable[[int], Tensor]
    suffix: str
    keep_axes: bool

    @property
    def shape(self) -> Shape:
        """Shape of the result."""
        return self.of.piece_shape(keep=self.keep_axes)

    def whole(self, index: int, own: Factored) -> Tensor:
        """The head's part of an operand with all of its axes, those of the heads at size 1."""
        return self.reshaped(self.piece(index), fx.piece_shape(own, keep=True))

    def clone(self, inputs: Mapping[int, Tensor], shape: Shape, **options: object) -> Tensor:
        """The operator with other inputs and options; its results differ in shape where they did before."""
        operator, whole = self.of.operator, self.of.tensor.shape
        table = operator.options
        if options and table is not None:
            table = table.copy()
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(i, tensor) for i, tensor in enumerate(operator.inputs)]
        names = [name_below(output.name, self.suffix) for output in operator.outputs]
        shapes = [shape] * len(names)
        if len(names) > 1:
            sizes = [zip(output.shape, whole, shape, strict=True) for output in operator.outputs]
            shapes = [tuple(piece if own == of else own for own, of, piece in one) for one in sizes]
        made = self.assembly.again(operator, read, names, shapes, table)
        return made[operator.outputs.index(self.of.tensor)]

    def integers(self, word: str, values: object) -> Tensor:
        """An int32 constant that steers the operator."""
        return self.assembly.integers(name_below(self.of.tensor.name, word), values)

    def reshaped(self, source: Tensor, shape: Shape) -> Tensor:
        """`source` as `shape`, or itself."""
        return self.assembly.reshaped(source, shape, name_below(self.of.tensor.name, self.suffix))


class Rule(ABC):
    """How the head label passes through an operator whose shapes fit, which is looked at before."""

    drops_axes = False
    """True where the operator takes operands without the heads' axes as they are: nothing of it counts axes."""

    @abstractmethod
    def operands(self, of: Labelled) -> Operands:
        """Factors of the operands, given the factors of one result.

        Raises:
            RefusedError: the label does not pass.
        """

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        """The operand that the result is a RESHAPE of, for one head; None where the operator itself is needed."""
        return None

    def parts(self, of: Labelled, *, keep: bool) -> Operands:
        """The operands of which a head reads its own part; others it reads as they are."""
        return self.operands(of)

    def made(self, one: OneHead) -> Tensor:
        """The operator for one head, where it is needed; its result may still have to be reshaped."""
        parts = self.parts(one.of, keep=one.keep_axes)
        if self.drops_axes:
            return one.clone({index: one.piece(index) for index in parts}, one.shape)
        read = {index: one.whole(index, own) for index, own in parts.items()}
        return one.clone(read, one.of.piece_shape(keep=True))

    def emit(self, one: OneHead) -> Tensor:
        """The result for one head."""
        operand = self.passed_on(one.of, one.head, keep=one.keep_axes)
        result = self.made(one) if operand is None else one.piece(operand)
        return one.reshaped(result, one.shape)


def constant_integers(operator: Operator, index: int) -> list[int]:
    """The numbers of a constant operand that steers an operator (axes, sizes)."""
    tensor = operator.inputs[index]
    if tensor is None or not tensor.has_numbers:
        raise RefusedError("an operand that steers the operator must be constant", operator, tensor)
    return [int(value) for value in tensor.array().ravel()]
