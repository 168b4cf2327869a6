"""What a rule is: how the head label passes through one operator. The rules themselves are in their own modules.

A rule says where the operands carry the label, given where the result does, and what is left for a single head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly, piece_name
from edge_opt.attention.factors import Factored
from edge_opt.attention.refusal import Refusal, RefusedError
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.schema.table import Table

Operands = dict[int, Factored]
"""Which inputs carry numbers that belong to heads, and how each is factored. Other inputs are settings."""

Pieces: TypeAlias = Callable[[int], Tensor]
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


def name_of_piece(of: Labelled, head: int, pieces: int, tiles: int = 1) -> str:
    """As `piece_name`, but `group_1` where several heads see the same piece, and `shared` where all do."""
    count = fx.piece_count(of.factored)
    if count == pieces:
        return piece_name(head, pieces, tiles)
    return f"group_{fx.mixed_index(fx.labels(of.factored), head)}" if count > 1 else "shared"


class HeadBuilder:
    """What the rules see of the assembly, for one head."""

    def __init__(self, assembly: Assembly, suffix: str, *, keep_axes: bool) -> None:
        """`suffix`: what the names of this head's tensors end in."""
        self.keep_axes = keep_axes
        self._assembly = assembly
        self._suffix = suffix

    def clone(
        self,
        of: Labelled,
        inputs: Mapping[int, Tensor],
        shape: Shape,
        options: Mapping[str, object] | None = None,
    ) -> Tensor:
        """The operator for this head."""
        return self.clone_all(of, inputs, [shape], options)[0]

    def clone_all(
        self,
        of: Labelled,
        inputs: Mapping[int, Tensor],
        shapes: Sequence[Shape],
        options: Mapping[str, object] | None = None,
    ) -> tuple[Tensor, ...]:
        """The operator for this head, all its results."""
        table = of.operator.options
        if options and table is not None:
            table = Table(table.spec, dict(table.fields))
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(i, tensor) for i, tensor in enumerate(of.operator.inputs)]
        names = [f"{output.name}/{self._suffix}" for output in of.operator.outputs]
        return self._assembly.again(of.operator, read, names, shapes, table)

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""
        return self._assembly.integers(name, values)

    def reshape(self, of: Labelled, source: Tensor, shape: Shape) -> Tensor:
        """`source` as `shape`, or itself."""
        return self._assembly.reshaped(source, shape, f"{of.tensor.name}/{self._suffix}")


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

    def made(self, build: HeadBuilder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        """The operator for one head, its result perhaps still to be reshaped."""
        read = {index: pieces(index) for index in self.operands(of)}
        return build.clone(of, read, of.piece_shape(keep=build.keep_axes))

    def emit(self, build: HeadBuilder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
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


def shared_axes(build: HeadBuilder, *shapes: Factored) -> tuple[int, ...]:
    """Axes that a head's piece of any of these has; they have the same rank."""
    return tuple(sorted({axis for own in shapes for axis in fx.piece_axes(own, keep=build.keep_axes)}))


def on_axes(
    build: HeadBuilder, of: Labelled, piece: Tensor, factored: Factored, axes: Sequence[int]
) -> Tensor:
    """A piece with exactly these axes, of which it may lack some that have size 1."""
    return build.reshape(of, piece, fx.piece_shape_on(factored, axes))
