"""The rules of operators, and the table of all, by operator.

A labelled axis may move, but it must stay whole. What only joins or repeats tensors for the heads is left out.
"""

import math
from collections.abc import Callable, Sequence
from itertools import dropwhile

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis
from edge_opt.attention.rule import Labelled, OneHead, Operands, Rule, constant_integers
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError

# Operators each axis of whose operands is one of the result's, or none of them

Places = Sequence[int | None]
"""For each axis of an operand the one of the result that it is; None for one that every head reads whole."""


class ByAxes(Rule):
    """The label of an axis is that of the result's axis. An axis of heads is not cut or made longer.

    `places` has the axes of each operand; it raises RefusedError where these cannot be told. With `drops_axes` an axis
    of size 1 is broadcast to the result's.
    """

    def __init__(self, places: Callable[[Labelled], dict[int, Places]], *, drops_axes: bool = False) -> None:
        self._places = places
        self.drops_axes = drops_axes

    def operands(self, of: Labelled) -> Operands:
        found = self._places(of)
        for index, places in found.items():
            if len(places) != len(of.input(index).shape):
                raise RefusedError("the recorded shapes do not fit", of.operator, of.input(index))
        return {
            index: tuple(self._axis(of, index, axis, place) for axis, place in enumerate(places))
            for index, places in found.items()
        }

    def _axis(self, of: Labelled, index: int, axis: int, place: int | None) -> Axis:
        source = of.input(index)
        (plain,) = fx.plain((source.shape[axis],))
        if place is None:
            return plain
        own = of.factored[place]
        if source.shape[axis] == of.tensor.shape[place]:
            return own
        if self.drops_axes:
            return fx.repeated(own)
        if fx.tells_heads(own):
            raise RefusedError("an axis of heads is cut or made longer", of.operator, source)
        return plain

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        # One part is all there is.
        is_whole = of.operator.name in ("SPLIT", "SPLIT_V", "UNPACK") and len(of.operator.outputs) == 1
        return next(iter(self._places(of))) if is_whole else None


class Elementwise(ByAxes):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads."""

    def parts(self, of: Labelled, *, keep: bool) -> Operands:
        parts = self.operands(of)
        for index, own in list(parts.items()):
            shapes = of.input(index).shape, fx.piece_shape(own, keep=keep)
            whole, piece = (tuple(dropwhile(lambda size: size == 1, shape)) for shape in shapes)
            # Without a RESHAPE all heads share an operand that only has other leading ones.
            if whole == piece and len(shapes[0]) <= len(of.piece_shape(keep=keep)):
                del parts[index]
        return parts


def _aligned(of: Labelled) -> dict[int, Places]:
    """SELECT does not broadcast; its rank-1 condition selects whole rows, which no label survives."""
    if of.operator.name == "SELECT" and of.input(0).shape not in ((), of.tensor.shape):
        raise RefusedError("SELECT's condition must have the result's shape", of.operator, of.input(0))
    rank = len(of.factored)
    shapes = {i: tensor.shape for i, tensor in enumerate(of.operator.inputs) if tensor is not None}
    return {index: range(rank - len(shape), rank) for index, shape in shapes.items()}


def _of_product(of: Labelled) -> dict[int, Places]:
    """Batch axes broadcast, the left operand's rows and the right one's columns keep their labels.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """
    last, places = len(of.factored) - 1, dict[int, Places]()
    for index, own in ((0, last - 1), (1, last)):
        batch = range(last + 1 - len(of.input(index).shape), last - 1)
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
    """SUM, MEAN and the like. Backwards a reduced axis is plain: where it holds heads, these end in the sum."""
    rank = len(of.input(0).shape)
    # Of a scalar, TFLite takes any axes: there is none to reduce.
    reduced = {axis % rank for axis in constant_integers(of.operator, 1)} if rank else set()
    kept = [axis for axis in range(rank) if of.operator.option("keep_dims") or axis not in reduced]
    return {0: [None if axis in reduced else kept.index(axis) for axis in range(rank)]}


def _same_axes(of: Labelled) -> dict[int, Places]:
    """SPLIT, SPLIT_V and kinds of PAD, which shifts rows of relative positions."""
    data, steering = {"SPLIT": (1, 0), "SPLIT_V": (0, 2)}.get(of.operator.name, (0, 1))
    constant_integers(of.operator, steering)
    return {data: range(len(of.factored))}


def _unpacked(of: Labelled) -> dict[int, Places]:
    """Each result is one step of an axis that it no longer has."""
    rank = len(of.factored)
    axis = of.axis(rank + 1)
    return {0: [*range(axis), None, *range(axis, rank)]}


def _gathered(of: Labelled) -> dict[int, Places]:
    """GATHER: the gathered axis stays whole, and its places in the result are those of the positions.

    With batch axes, `[B,N,T,R]` and positions `[B,N,T,S]` -> `[B,N,T,S]`, every head has positions of its own.
    """
    rank, positions, batch = len(of.input(0).shape), of.input(1), int(of.operator.option("batch_dims"))
    batch += len(positions.shape) if batch < 0 else 0
    axis = of.axis(rank)
    end = axis + len(positions.shape) - batch
    places: dict[int, Places] = {0: [*range(axis), None, *range(end, len(of.factored))]}
    if batch or any(map(fx.tells_heads, of.factored[axis:end])):
        places[1] = [*range(batch), *range(axis, end)]
    return places


class Transpose(ByAxes):
    """The label moves with its axis; what only moves axes of size 1 is a RESHAPE, or nothing."""

    def __init__(self) -> None:
        super().__init__(lambda of: {0: inverse(constant_integers(of.operator, 1))})

    def made(self, one: OneHead) -> Tensor:
        (source,) = self.operands(one.of).values()
        kept = fx.piece_axes(source, keep=one.keep_axes)
        sizes = fx.piece_shape(source, keep=one.keep_axes)
        order = [kept.index(axis) for axis in constant_integers(one.of.operator, 1) if axis in kept]
        wide, last = [axis for axis in order if sizes[axis] > 1], len(order) - 1
        if wide[-2:] == [last, last - 1] and wide[:-2] == sorted(wide[:-2]):
            # Axes of size 1 aside this exchanges rows and columns, which a matrix product can do itself.
            order = [*range(last - 1), last, last - 1]
        steering = {0: one.piece(0), 1: one.integers("perm", order)}
        return one.clone(steering, tuple(sizes[axis] for axis in order))

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        return 0 if keeps_order(of) else None


def inverse(permutation: Sequence[int]) -> list[int]:
    """Where each axis goes."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def keeps_order(of: Labelled) -> bool:
    """True where a RESHAPE, its kin or a TRANSPOSE leaves one head's elements in row-major order."""
    if of.operator.name != "TRANSPOSE":
        return True
    order = zip(constant_integers(of.operator, 1), of.piece_shape(keep=True), strict=True)
    wide = [axis for axis, size in order if size > 1]
    return wide == sorted(wide)


class Slice(ByAxes):
    """SLICE and STRIDED_SLICE."""

    def __init__(self) -> None:
        super().__init__(lambda of: {0: range(len(_begins(of.operator)))})

    def made(self, one: OneHead) -> Tensor:
        begins, shape = _begins(one.of.operator), one.of.piece_shape(keep=True)
        read = {0: one.whole(0, self.operands(one.of)[0]), 1: one.integers("begin", begins)}
        if one.of.operator.name == "SLICE":
            return one.clone({**read, 2: one.integers("size", shape)}, shape)
        ends = [begin + size for begin, size in zip(begins, shape, strict=True)]
        read |= {2: one.integers("end", ends), 3: one.integers("strides", [1] * len(ends))}
        return one.clone(read, shape, begin_mask=0, end_mask=0)


def _begins(operator: Operator) -> list[int]:
    """Where a SLICE begins on each axis, or a STRIDED_SLICE that only takes ranges."""
    begins, source = constant_integers(operator, 1), operator.input(0)
    if not len(operator.outputs[0].shape) == len(source.shape) == len(begins):
        raise RefusedError("a slice must keep the rank", operator, source)
    if operator.name == "SLICE":
        return begins
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "offset")
    if set(constant_integers(operator, 3)) != {1} or any(operator.option(mask) for mask in masks):
        raise RefusedError("only plain ranges of a STRIDED_SLICE are followed", operator)
    given = [begin if begin >= 0 else begin + size for begin, size in zip(begins, source.shape, strict=True)]
    is_open = int(operator.option("begin_mask"))
    return [0 if is_open >> axis & 1 else max(begin, 0) for axis, begin in enumerate(given)]


# Others


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


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order stays, so labels stay on their factors."""

    def operands(self, of: Labelled) -> Operands:
        source = of.input(0)
        grouped = fx.regroup(of.factored, source.shape)
        if grouped is None:
            expected = f"a shape that {fx.to_text(of.factored)} refines"
            text = "the head axis is cut through the middle"
            raise RefusedError(text, of.operator, source, expected, source.shape)
        return {0: grouped}

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        return 0


class Joining(Rule):
    """CONCATENATION and PACK: the label passes along other axes; on the labelled axis piece g is part g, alone.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, of: Labelled) -> Operands:
        axis = of.axis(len(of.factored))
        before, whole, after = of.factored[:axis], of.factored[axis], of.factored[axis + 1 :]
        cut = self._cut(of)
        if cut is None and fx.tells_heads(whole):
            raise RefusedError("the parts that are joined are not the heads", of.operator)
        if of.operator.name == "PACK":
            return dict.fromkeys(range(len(of.operator.inputs)), (*before, *after))
        if cut is not None:
            return dict.fromkeys(
                range(len(of.operator.inputs)), (*before, cut[1] or fx.repeated(whole), *after)
            )
        sizes = [of.input(index).shape[axis] for index in range(len(of.operator.inputs))]
        return {index: (*before, *fx.plain((size,)), *after) for index, size in enumerate(sizes)}

    @staticmethod
    def _cut(of: Labelled) -> tuple[Axis, Axis] | None:
        """The labelled axis cut into the parts; None where other axes are labelled, or the parts are not the heads."""
        whole, parts = of.factored[of.axis(len(of.factored))], of.operator.inputs
        fused = of.operator.name == "CONCATENATION" and of.operator.option("fused_activation_function")
        if (
            fused
            or not fx.tells_heads(whole)
            or len({tensor.shape for tensor in parts if tensor is not None}) > 1
        ):
            return None
        cut = fx.cut_axis(whole, len(parts))
        is_heads = cut is not None and fx.only_labels(cut[0]) and (of.operator.name != "PACK" or not cut[1])
        return cut if is_heads else None

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        cut = self._cut(of)
        if cut is not None:
            return fx.mixed_index(cut[0], head)
        return 0 if of.operator.name == "PACK" and len(of.operator.inputs) == 1 else None


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
                raise RefusedError("a repeat cuts through the heads", of.operator, source)
            else:
                axes.extend(fx.plain((size,)))
        return {0: tuple(axes)}

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        shapes = fx.piece_shape(self.operands(of)[0], keep=keep), of.piece_shape(keep=keep)
        return 0 if len({*map(math.prod, shapes)}) == 1 else None

    def made(self, one: OneHead) -> Tensor:
        (own,), shape = self.operands(one.of).values(), one.of.piece_shape(keep=True)
        source, sizes = one.whole(0, own), shape
        if one.of.operator.name == "TILE":
            sizes = tuple(size // part for size, part in zip(shape, source.shape, strict=True))
        return one.clone({0: source, 1: one.integers("shape", sizes)}, shape)


PRODUCTS = operators_that(Effect.PRODUCT)
MOVEMENT = operators_that(Effect.REARRANGING)
ELEMENTWISE = operators_that(Effect.ELEMENTWISE)

RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "SELECT"), Elementwise(_aligned, drops_axes=True)),
    **dict.fromkeys(MOVEMENT, Regroup()),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), ByAxes(_along_rows, drops_axes=True)),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice()),
    **dict.fromkeys(("SPLIT", "SPLIT_V", *operators_that(Effect.PADDING)), ByAxes(_same_axes)),
    **dict.fromkeys(operators_that(Effect.REDUCTION), ByAxes(_reduced)),
    **dict.fromkeys(operators_that(Effect.REPEATING), Broadcast()),
    "GATHER": ByAxes(_gathered),
    "TRANSPOSE": Transpose(),
    "BATCH_MATMUL": ByAxes(_of_product, drops_axes=True),
    "FULLY_CONNECTED": FullyConnected(),
    **dict.fromkeys(("CONCATENATION", "PACK"), Joining()),
    "UNPACK": ByAxes(_unpacked),
}


def is_product(operator: Operator) -> bool:
    """True for a product of matrices: a BATCH_MATMUL, or a FULLY_CONNECTED whose weights are computed."""
    return operator.name == "BATCH_MATMUL" or multiplies_activations(operator)


def multiplies_activations(operator: Operator) -> bool:
    """True for a product of two computed matrices: no weights are in it."""
    return operator.name in PRODUCTS and not any(t is None or t.is_constant for t in operator.inputs[:2])


def data_input(operator: Operator) -> Tensor | None:
    """The input that an operator of one data operand rearranges, cuts or maps; the others steer it."""
    return next(iter(KINDS[operator.name].data_operands(operator.inputs)), None)
