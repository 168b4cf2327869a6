"""What a rule is, how the head label passes through one operator, and the rules of operators that only compute.

A rule says where the operands carry the label, given where the result does, and what is left for a single head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Axis, Factored
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


def name_of_piece(of: Labelled, piece: int, pieces: int, tiles: int = 1) -> str:
    """What distinguishes a piece of a result from the others, of which the tiles are the outer digit.

    It is `head_1` or `rows_3/head_1`, but `group_1` where several heads see the same, and `shared` where all do.
    """
    count = fx.piece_count(of.factored)
    if count < pieces:
        return f"group_{fx.mixed_index(fx.labels(of.factored), piece)}" if count > 1 else "shared"
    tile, head = divmod(piece, pieces // tiles)
    rows = [f"rows_{tile}"] if tiles > 1 else []
    return "/".join([*rows, f"head_{head}"] if pieces > tiles or not rows else rows)


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

    def axes(self, *shapes: Factored) -> tuple[int, ...]:
        """Axes that the head's part of any of these has; they have the same rank."""
        return tuple(sorted({axis for own in shapes for axis in fx.piece_axes(own, keep=self.keep_axes)}))

    def clone(self, inputs: Mapping[int, Tensor], shape: Shape | None = None, **options: object) -> Tensor:
        """The operator with other inputs and options, where it has one result."""
        return self.clone_all(inputs, [self.shape if shape is None else shape], **options)[0]

    def clone_all(
        self, inputs: Mapping[int, Tensor], shapes: Sequence[Shape], **options: object
    ) -> tuple[Tensor, ...]:
        """The operator with other inputs and options, all its results."""
        operator = self.of.operator
        table = operator.options
        if options and table is not None:
            table = table.copy()
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(i, tensor) for i, tensor in enumerate(operator.inputs)]
        names = [name_below(output.name, self.suffix) for output in operator.outputs]
        return self.assembly.again(operator, read, names, shapes, table)

    def integers(self, word: str, values: object) -> Tensor:
        """An int32 constant that steers the operator."""
        return self.assembly.integers(name_below(self.of.tensor.name, word), values)

    def reshaped(self, source: Tensor, shape: Shape) -> Tensor:
        """`source` as `shape`, or itself."""
        return self.assembly.reshaped(source, shape, name_below(self.of.tensor.name, self.suffix))

    def on_axes(self, index: int, own: Factored, axes: Sequence[int]) -> Tensor:
        """The head's part of an operand with exactly these axes, of which it may lack some that have size 1."""
        return self.reshaped(self.piece(index), fx.piece_shape_on(own, axes))


class Rule(ABC):
    """How the head label passes through an operator whose shapes fit, which is looked at before."""

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
        return one.clone({index: one.piece(index) for index in self.parts(one.of, keep=one.keep_axes)})

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


class Elementwise(Rule):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads.

    SELECT does not broadcast; its rank-1 condition selects whole rows, which no label survives.
    """

    def operands(self, of: Labelled) -> Operands:
        if of.operator.name == "SELECT" and of.input(0).shape not in ((), of.tensor.shape):
            text = "SELECT's condition must have the result's shape"
            raise RefusedError(text, of.operator, of.input(0))
        shapes = {i: tensor.shape for i, tensor in enumerate(of.operator.inputs) if tensor is not None}
        return {index: fx.of_operand(of.factored, shape) for index, shape in shapes.items()}

    def parts(self, of: Labelled, *, keep: bool) -> Operands:
        parts = self.operands(of)
        for index, own in list(parts.items()):
            shapes = of.input(index).shape, fx.piece_shape(own, keep=keep)
            whole, piece = (tuple(dropwhile(lambda size: size == 1, shape)) for shape in shapes)
            # Without a RESHAPE all heads share an operand that only has other leading ones.
            if whole == piece and len(shapes[0]) <= len(of.piece_shape(keep=keep)):
                del parts[index]
        return parts


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
