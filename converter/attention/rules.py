"""The rules: how the head label passes through each operator, and the operator for a single head.

A rule derives the factors of the operands from those of the result. A labelled axis may move, but must stay whole.
Operators that only join or repeat tensors for the heads are dropped.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Axis, Factored
from edge_opt.base.words import name_below
from edge_opt.ir import Operator, Quantization, Shape, Tensor
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import producers, walked


class Labelled(NamedTuple):
    """A tensor, and the layout of heads in it.

    With `keep`, a head's tensors keep axes that hold only heads, at size 1.
    """

    tensor: Tensor
    factored: Factored
    keep: bool = True

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
        return fx.piece_shape(self.factored, keep=self.keep)

    @property
    def full_shape(self) -> Shape:
        """Shape of one head's piece with all axes."""
        return fx.piece_shape(self.factored, keep=True)

    def piece_quantization(self) -> Quantization | None:
        """Quantization of one head's piece: several scales stay with their axis.

        Raises:
            RefusedError: the scales, or a tensor with scales that is not a constant, would have to be cut.
        """
        own = self.tensor.quantization
        is_cut = self.piece_shape != self.tensor.shape
        if own is None or not is_cut or not (own.is_per_axis or own.is_blockwise):
            return own
        axis = own.dimension
        sizes = self.tensor.shape[axis : axis + 1]
        if own.is_blockwise or not self.tensor.has_numbers or sizes != (len(own.scale),):
            raise RefusedError("a tensor with several scales cannot be cut", None, self.tensor)
        if fx.tells_heads(self.factored[axis]):
            raise RefusedError("the heads lie on the axis of the scales", None, self.tensor)
        return own.along(fx.piece_axes(self.factored, keep=self.keep).index(axis))


Factors = dict[int, Factored]
Operands = dict[int, Labelled]
"""The inputs that carry data, by index; other inputs are settings such as axes and sizes."""


@dataclass(frozen=True, slots=True)
class OneHead:
    """Everything that a rule needs to make an operator for one head.

    `of` is the whole result, `make` makes the head's part of an operand, `suffix` is added to names of results.
    """

    assembly: Assembly
    of: Labelled
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
        operator, whole = self.of.operator, self.of.tensor.shape
        table = operator.options
        if options and table is not None:
            table = table.copy()
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(i, tensor) for i, tensor in enumerate(operator.inputs)]
        shapes = [shape]
        if len(operator.outputs) > 1:
            sizes = [zip(output.shape, whole, shape, strict=True) for output in operator.outputs]
            shapes = [tuple(piece if own == of else own for own, of, piece in one) for one in sizes]
        made = self.assembly.again(operator, read, self.suffix, shapes, table)
        return made[operator.outputs.index(self.of.tensor)]

    def integers(self, word: str, values: object) -> Tensor:
        """An int32 operand such as axes or sizes."""
        return self.assembly.integers(name_below(self.of.tensor.name, word), values)

    def reshaped(self, source: Tensor, shape: Shape) -> Tensor:
        """`source`, reshaped to `shape` if necessary."""
        return self.assembly.reshaped(source, shape, name_below(self.of.tensor.name, self.suffix))


def reads_each_scale(operator: Operator, tensor: Tensor) -> bool:
    """True if the operator is known to read each scale of an operand: DEQUANTIZE, and BATCH_MATMUL of its columns."""
    if operator.name != "BATCH_MATMUL":
        return operator.name == "DEQUANTIZE"
    columns = len(tensor.shape) - (2 if operator.option("adj_y") else 1)
    own = tensor.quantization
    return tensor is operator.inputs[1] and own is not None and own.dimension == columns


class Rule(ABC):
    """How the head label passes through an operator, whose shapes have been checked."""

    drops_axes = False
    """True if operands may lack the heads' axes, since no option of the operator counts axes."""

    @abstractmethod
    def operands(self, of: Labelled) -> Factors:
        """Factors of the operands, given the factors of one result.

        Raises:
            RefusedError: the label does not pass.
        """

    def passed_on(self, of: Labelled, head: int) -> int | None:
        """The operand that one head's result is a RESHAPE of; None if the operator itself is needed."""
        return None

    def is_read_whole(self, of: Labelled, operand: Labelled) -> bool:
        """True if every head reads the whole operand."""
        return False

    def made(self, one: OneHead) -> Tensor:
        """Make the operator for one head; its result may still have to be reshaped."""
        parts = [i for i, operand in one.operands.items() if not self.is_read_whole(one.of, operand)]
        if self.drops_axes:
            return one.clone({index: one.piece(index) for index in parts}, one.of.piece_shape)
        return one.clone({index: one.full(index) for index in parts}, one.of.full_shape)

    def emit(self, one: OneHead) -> Tensor:
        """Make the result for one head."""
        operand = self.passed_on(one.of, one.head)
        result = self.made(one) if operand is None else one.piece(operand)
        return one.reshaped(result, one.of.piece_shape)


def _integers(operator: Operator, index: int) -> list[int]:
    """The numbers of a constant operand such as axes or sizes."""
    tensor = operator.inputs[index]
    if tensor is None or not tensor.has_numbers:
        raise RefusedError("an operand with axes or sizes must be constant", operator, tensor)
    return [int(value) for value in tensor.array().ravel()]


Places = Sequence[int | None]
"""The axis of the result for each axis of an operand; None for an axis that every head reads whole."""


class ByAxes(Rule):
    """Operands whose axes each correspond to an axis of the result, whose label they take, or to none.

    `places` returns the axes of each operand, or raises RefusedError if they are unknown. With `drops_axes`, an axis of
    size 1 is broadcast to the result's.
    """

    def __init__(self, places: Callable[[Labelled], dict[int, Places]], *, drops_axes: bool = False) -> None:
        self._places = places
        self.drops_axes = drops_axes

    def operands(self, of: Labelled) -> Factors:
        places = self._places(of)
        return {index: self._own(of, of.operator.input(index), own) for index, own in places.items()}

    def _own(self, of: Labelled, source: Tensor, places: Places) -> Factored:
        beyond = any(place is not None and not 0 <= place < len(of.factored) for place in places)
        if beyond or len(places) != len(source.shape):
            raise RefusedError("the recorded shapes are inconsistent", of.operator, source)
        axes = list(fx.plain(source.shape))
        for axis, place in enumerate(places):
            whole = () if place is None else of.factored[place]
            if place is not None and source.shape[axis] == of.tensor.shape[place]:
                axes[axis] = whole
            elif place is not None and self.drops_axes:
                axes[axis] = fx.repeated(whole)
            elif fx.tells_heads(whole):
                raise RefusedError("an axis of heads changes its length", of.operator, source)
        return tuple(axes)


class Elementwise(ByAxes):
    """Operands aligned from the right; heads share an operand without the labelled axis."""

    def is_read_whole(self, of: Labelled, operand: Labelled) -> bool:
        """Without a RESHAPE, if a head's part differs only in leading axes of size 1."""
        shapes = operand.tensor.shape, operand.piece_shape
        whole, piece = (tuple(dropwhile(lambda size: size == 1, shape)) for shape in shapes)
        return whole == piece and len(operand.tensor.shape) <= len(of.piece_shape)


def _aligned(of: Labelled) -> dict[int, Places]:
    """SELECT does not broadcast; its rank-1 condition selects whole rows, which no label survives."""
    if of.operator.name == "SELECT" and of.operator.input(0).shape not in ((), of.tensor.shape):
        text = "SELECT's condition must have the result's shape"
        raise RefusedError(text, of.operator, of.operator.input(0))
    rank = len(of.factored)
    shapes = {i: tensor.shape for i, tensor in enumerate(of.operator.inputs) if tensor is not None}
    return {index: range(rank - len(shape), rank) for index, shape in shapes.items()}


def _of_product(of: Labelled) -> dict[int, Places]:
    """Batch axes broadcast; the left operand's rows and the right operand's columns keep their labels.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """
    last, places = len(of.factored) - 1, dict[int, Places]()
    for index, own in ((0, last - 1), (1, last)):
        batch = range(last + 1 - len(of.operator.input(index).shape), last - 1)
        is_first = bool(of.operator.option("adj_y" if index else "adj_x")) == bool(index)
        places[index] = [*batch, own, None] if is_first else [*batch, None, own]
    return places


def _along_rows(of: Labelled) -> dict[int, Places]:
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""
    if fx.tells_heads(of.factored[-1]):
        text = "the heads lie on the axis of the softmax"
        raise RefusedError(text, of.operator, actual=fx.to_text(of.factored))
    return {0: range(len(of.factored))}


def _reduced(of: Labelled) -> dict[int, Places]:
    """SUM, MEAN and other reductions. A reduced axis has no label: a head label does not pass through the sum."""
    rank = len(of.operator.input(0).shape)
    # TFLite accepts any axes for a scalar, which has none to reduce.
    reduced = {axis % rank for axis in _integers(of.operator, 1)} if rank else set()
    kept = [axis for axis in range(rank) if of.operator.option("keep_dims") or axis not in reduced]
    return {0: [None if axis in reduced else kept.index(axis) for axis in range(rank)]}


def _same_axes(of: Labelled) -> dict[int, Places]:
    """SPLIT, SPLIT_V and PAD operators (which shift rows of relative positions)."""
    data, steering = {"SPLIT": (1, 0), "SPLIT_V": (0, 2)}.get(of.operator.name, (0, 1))
    _integers(of.operator, steering)
    return {data: range(len(of.factored))}


def _moved(of: Labelled) -> dict[int, Places]:
    """TRANSPOSE: the label moves with its axis."""
    order = _integers(of.operator, 1)
    if sorted(order) != list(range(len(order))):
        raise RefusedError("its order is not a permutation of the axes", of.operator)
    return {0: [order.index(axis) for axis in range(len(order))]}


class Transpose(ByAxes):
    """A TRANSPOSE that only moves axes of size 1 becomes a RESHAPE, or nothing."""

    def made(self, one: OneHead) -> Tensor:
        source, sizes = one.operands[0], one.operands[0].piece_shape
        kept = fx.piece_axes(source.factored, keep=source.keep)
        order = [kept.index(axis) for axis in _integers(one.of.operator, 1) if axis in kept]
        wide, last = [axis for axis in order if sizes[axis] > 1], len(order) - 1
        if wide[-2:] == [last, last - 1] and wide[:-2] == sorted(wide[:-2]):
            # Apart from axes of size 1, this exchanges rows and columns, which a matrix product can absorb.
            order = [*range(last - 1), last, last - 1]
        read = {0: one.piece(0), 1: one.integers("perm", order)}
        return one.clone(read, tuple(sizes[axis] for axis in order))

    def passed_on(self, of: Labelled, head: int) -> int | None:
        order = zip(_integers(of.operator, 1), of.full_shape, strict=True)
        wide = [axis for axis, size in order if size > 1]
        return 0 if wide == sorted(wide) else None


class Slice(ByAxes):
    """SLICE and STRIDED_SLICE."""

    def made(self, one: OneHead) -> Tensor:
        begins, shape = _begins(one.of.operator), one.of.full_shape
        read = {0: one.full(0), 1: one.integers("begin", begins)}
        if one.of.operator.name == "SLICE":
            return one.clone({**read, 2: one.integers("size", shape)}, shape)
        ends = [begin + size for begin, size in zip(begins, shape, strict=True)]
        read |= {2: one.integers("end", ends), 3: one.integers("strides", [1] * len(ends))}
        return one.clone(read, shape, begin_mask=0, end_mask=0)


def _begins(operator: Operator) -> list[int]:
    """The begin on each axis of a SLICE, or of a STRIDED_SLICE of plain ranges."""
    begins, source = _integers(operator, 1), operator.input(0)
    if not len(operator.outputs[0].shape) == len(source.shape) == len(begins):
        raise RefusedError("a slice must keep the rank", operator, source)
    if operator.name == "SLICE":
        return begins
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "offset")
    if set(_integers(operator, 3)) != {1} or any(operator.option(mask) for mask in masks):
        raise RefusedError("a STRIDED_SLICE can be followed only if it takes plain ranges", operator)
    given = [begin if begin >= 0 else begin + size for begin, size in zip(begins, source.shape, strict=True)]
    is_open = int(operator.option("begin_mask"))
    return [0 if is_open >> axis & 1 else max(begin, 0) for axis, begin in enumerate(given)]


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order is kept, so labels stay on their factors."""

    def operands(self, of: Labelled) -> Factors:
        source = of.operator.input(0)
        grouped = fx.regroup(of.factored, source.shape)
        if grouped is None:
            expected = f"a shape that {fx.to_text(of.factored)} refines"
            raise RefusedError("the operator cuts heads apart", of.operator, source, expected, source.shape)
        return {0: grouped}

    def passed_on(self, of: Labelled, head: int) -> int | None:
        return 0


class Joining(Rule):
    """CONCATENATION and PACK: the label passes along other axes; on the labelled axis, piece g is just part g.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, of: Labelled) -> Factors:
        (axis, cut), count = self._cut(of), len(of.operator.inputs)
        before, whole, after = of.factored[:axis], of.factored[axis], of.factored[axis + 1 :]
        if cut is None and fx.tells_heads(whole):
            raise RefusedError("the joined parts are not the heads", of.operator)
        if of.operator.name == "PACK":
            return dict.fromkeys(range(count), (*before, *after))
        if cut is not None:
            return dict.fromkeys(range(count), (*before, cut[1] or fx.repeated(whole), *after))
        own = [fx.plain(of.operator.input(index).shape[axis : axis + 1]) for index in range(count)]
        if () in own:
            raise RefusedError("the recorded shapes are inconsistent", of.operator)
        return {index: (*before, *joined, *after) for index, joined in enumerate(own)}

    @staticmethod
    def _cut(of: Labelled) -> tuple[int, tuple[Axis, Axis] | None]:
        """The joined axis, and its cut into the parts; None if it has no label or the parts are not the heads."""
        axis, parts = int(of.operator.option("axis")) % len(of.factored), of.operator.inputs
        whole, is_pack = of.factored[axis], of.operator.name == "PACK"
        fused = not is_pack and of.operator.option("fused_activation_function")
        alike = len({tensor.shape for tensor in parts if tensor is not None}) == 1
        cut = fx.cut_axis(whole, len(parts)) if fx.tells_heads(whole) and alike and not fused else None
        is_heads = cut is not None and fx.only_labels(cut[0]) and not (is_pack and cut[1])
        return axis, cut if is_heads else None

    def passed_on(self, of: Labelled, head: int) -> int | None:
        cut = self._cut(of)[1]
        return None if cut is None else fx.mixed_index(cut[0], head)


class Broadcast(Rule):
    """BROADCAST_TO and TILE: each head reads the source itself, so a repeat over the heads is dropped."""

    def operands(self, of: Labelled) -> Factors:
        source, offset = of.operator.input(0), len(of.factored) - len(of.operator.input(0).shape)
        axes: list[Axis] = []
        triples = zip(source.shape, of.tensor.shape[offset:], of.factored[offset:], strict=True)
        for size, whole, axis in triples:
            cut = fx.cut_axis(axis, whole // size)
            if cut is None and fx.tells_heads(axis):
                raise RefusedError("the repeat cuts heads apart", of.operator, source)
            axes.append(fx.plain((size,))[0] if cut is None else cut[1] or fx.repeated(axis))
        return {0: tuple(axes)}

    def passed_on(self, of: Labelled, head: int) -> int | None:
        shapes = fx.piece_shape(self.operands(of)[0], keep=True), of.full_shape
        return 0 if len({*map(math.prod, shapes)}) == 1 else None

    def made(self, one: OneHead) -> Tensor:
        source, shape = one.full(0), one.of.full_shape
        sizes = shape
        if one.of.operator.name == "TILE":
            sizes = tuple(size // part for size, part in zip(shape, source.shape, strict=True))
        return one.clone({0: source, 1: one.integers("shape", sizes)}, shape)


class FullyConnected(Rule):
    """With computed weights a product of two activations: `[.., C] x [M, C]^T -> [.., M]`, or `[rows, M]`.

    Rows keep their labels, and so do columns, which are the weights' rows. Constant weights are a projection, which
    sums what it reads: there a block ends.
    """

    def operands(self, of: Labelled) -> Factors:
        if not multiplies_activations(of.operator):
            return {}
        left, weights = of.operator.input(0), of.operator.input(1)
        *rows, columns = of.factored
        contracted = fx.plain(weights.shape[1:])
        lead = fx.regroup((*rows, *contracted), left.shape)
        if lead is None:
            raise RefusedError("the operator cuts heads apart", of.operator, left)
        operands: Factors = {0: lead, 1: (columns, *contracted)}
        if of.operator.inputs[2:] and of.operator.inputs[2] is not None:
            operands[2] = (columns,)
        return operands


MOVEMENT = operators_that(Effect.REARRANGING)
ELEMENTWISE = operators_that(Effect.ELEMENTWISE)

RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "SELECT"), Elementwise(_aligned, drops_axes=True)),
    **dict.fromkeys(MOVEMENT, Regroup()),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), ByAxes(_along_rows, drops_axes=True)),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice(lambda of: {0: range(len(_begins(of.operator)))})),
    **dict.fromkeys(("SPLIT", "SPLIT_V", *operators_that(Effect.PADDING)), ByAxes(_same_axes)),
    **dict.fromkeys(operators_that(Effect.REDUCTION), ByAxes(_reduced)),
    **dict.fromkeys(("BROADCAST_TO", "TILE"), Broadcast()),
    "TRANSPOSE": Transpose(_moved),
    "BATCH_MATMUL": ByAxes(_of_product, drops_axes=True),
    "FULLY_CONNECTED": FullyConnected(),
    **dict.fromkeys(("CONCATENATION", "PACK"), Joining()),
}


def is_product(operator: Operator) -> bool:
    """True for a product of matrices: a BATCH_MATMUL, or a FULLY_CONNECTED whose weights are computed."""
    return operator.name == "BATCH_MATMUL" or multiplies_activations(operator)


def multiplies_activations(operator: Operator) -> bool:
    """True for a product of two computed matrices, so not of weights."""
    is_product = operator.name in ("BATCH_MATMUL", "FULLY_CONNECTED")
    return is_product and not any(tensor is None or is_weight(tensor) for tensor in operator.inputs[:2])


_WEIGHT_STEPS = 8
"""Maximum number of operators, such as DEQUANTIZE and TRANSPOSE, that make a weight of constants."""
_NOT_OF_OPERANDS = operators_that(Effect.RANDOM, Effect.UNKNOWN, Effect.CALLING)


def is_weight(tensor: Tensor) -> bool:
    """True for a constant, and for a tensor that a few operators make of constants alone."""
    if tensor.producer is None:
        return tensor.is_constant or tensor.is_outside
    makers = list(walked([tensor.producer], producers, _WEIGHT_STEPS + 1))
    if len(makers) > _WEIGHT_STEPS:
        return False
    if any(maker.name in _NOT_OF_OPERANDS or not maker.inputs for maker in makers):
        return False  # random numbers, variables
    sources = [source for maker in makers for source in maker.inputs if source is not None]
    starts = [source for source in sources if source.producer is None]
    return all(start.is_constant or start.is_outside for start in starts)
