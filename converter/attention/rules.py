"""The rules of operators, and the table of all, by operator.

A labelled axis may move, but it must stay whole. What only joins or repeats tensors for the heads is left out.
"""

import math
from collections.abc import Mapping
from itertools import dropwhile

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Factored
from edge_opt.attention.rule import Labelled, OneHead, Operands, Rule, constant_integers
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError

# What computes


class Elementwise(Rule):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads.

    SELECT does not broadcast; its rank-1 condition selects whole rows, which no label survives.
    """

    drops_axes = True

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

    drops_axes = True

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


class AlongLastAxis(Rule):
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""

    drops_axes = True

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
        shape = of.input(0).shape
        # Of a scalar, TFLite takes any axes: there is none to reduce.
        reduced = {axis % len(shape) for axis in constant_integers(of.operator, 1)} if shape else set()
        rest = list(of.factored)
        axes: list[Axis] = []
        for axis, size in enumerate(shape):
            if axis not in reduced:
                axes.append(rest.pop(0))
                continue
            if of.operator.option("keep_dims"):
                rest.pop(0)
            axes.extend(fx.plain((size,)))
        return {0: tuple(axes)}


# One tensor in another order


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


class Transpose(Rule):
    """The label moves with its axis; what only moves axes of size 1 is a RESHAPE, or nothing."""

    def operands(self, of: Labelled) -> Operands:
        permutation = constant_integers(of.operator, 1)
        axes: list[Axis] = [()] * len(permutation)
        for target, source in enumerate(permutation):
            axes[source] = of.factored[target]
        return {0: tuple(axes)}

    def made(self, one: OneHead) -> Tensor:
        (source,) = self.operands(one.of).values()
        kept, sizes = (
            fx.piece_axes(source, keep=one.keep_axes),
            fx.piece_shape(source, keep=one.keep_axes),
        )
        order = [kept.index(axis) for axis in constant_integers(one.of.operator, 1) if axis in kept]
        wide, last = [axis for axis in order if sizes[axis] > 1], len(order) - 1
        if wide[-2:] == [last, last - 1] and wide[:-2] == sorted(wide[:-2]):
            # Axes of size 1 aside this exchanges rows and columns, which a matrix product can do itself.
            order = [*range(last - 1), last, last - 1]
        steering = {0: one.piece(0), 1: one.integers("perm", order)}
        return one.clone(steering, tuple(sizes[axis] for axis in order))

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        return 0 if keeps_order(of) else None


def keeps_order(of: Labelled) -> bool:
    """True where a RESHAPE, its kin or a TRANSPOSE leaves one head's elements in row-major order."""
    if of.operator.name != "TRANSPOSE":
        return True
    order = zip(constant_integers(of.operator, 1), of.piece_shape(keep=True), strict=True)
    wide = [axis for axis, size in order if size > 1]
    return wide == sorted(wide)


# A part of a tensor, or something around it


def _resized(of: Labelled, source: Tensor, refusal: str) -> Factored:
    """Factors of an operand that is longer or shorter on some axes. They may hold no heads: there it is whole."""
    changed = [axis for axis, size in enumerate(of.tensor.shape) if size != source.shape[axis]]
    if any(fx.tells_heads(of.factored[axis]) for axis in changed):
        raise RefusedError(refusal, of.operator, source)
    plain = fx.plain(source.shape)
    return tuple(plain[axis] if axis in changed else own for axis, own in enumerate(of.factored))


class Slice(Rule):
    """SLICE and STRIDED_SLICE."""

    def operands(self, of: Labelled) -> Operands:
        _begins(of.operator)
        return {0: _resized(of, of.input(0), "a slice cuts through the heads")}

    def steering(self, one: OneHead) -> Mapping[int, Tensor]:
        begins, sizes = _begins(one.of.operator), one.of.piece_shape(keep=True)
        begin = one.integers("begin", begins)
        if one.of.operator.name == "SLICE":
            return {1: begin, 2: one.integers("size", sizes)}
        ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
        return {1: begin, 2: one.integers("end", ends), 3: one.integers("strides", [1] * len(ends))}

    def made(self, one: OneHead) -> Tensor:
        read = {0: one.whole(0, self.operands(one.of)[0]), **self.steering(one)}
        masks = {} if one.of.operator.name == "SLICE" else {"begin_mask": 0, "end_mask": 0}
        return one.clone(read, one.of.piece_shape(keep=True), **masks)


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
    open_begin = int(operator.option("begin_mask"))
    return [
        0 if open_begin >> axis & 1 else max(begin if begin >= 0 else begin + size, 0)
        for axis, (begin, size) in enumerate(zip(begins, source.shape, strict=True))
    ]


class Pad(Rule):
    """PAD, PADV2 and MIRROR_PAD: rows of relative positions are shifted by padding them and cutting them again."""

    def operands(self, of: Labelled) -> Operands:
        constant_integers(of.operator, 1)
        return {0: _resized(of, of.input(0), "the axis of the heads is padded")}


class Split(Rule):
    """SPLIT and SPLIT_V: each result is a slice; one head's part is split in the same way."""

    def operands(self, of: Labelled) -> Operands:
        data, steering = self._places(of)
        constant_integers(of.operator, steering)
        return {data: _resized(of, of.input(data), "a split cuts through the heads")}

    @staticmethod
    def _places(of: Labelled) -> tuple[int, int]:
        """Which input is split, and which says on what axis."""
        return (1, 0) if of.operator.name == "SPLIT" else (0, 2)

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        return self._places(of)[0] if len(of.operator.outputs) == 1 else None


class Unpack(Rule):
    """Each result is one step of an axis that it no longer has; one head's part is unpacked in the same way."""

    def operands(self, of: Labelled) -> Operands:
        shape = of.input(0).shape
        axis = of.axis(len(shape))
        return {0: (*of.factored[:axis], *fx.plain((shape[axis],)), *of.factored[axis:])}

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        return 0 if len(of.operator.outputs) == 1 else None


# One tensor of several, or of one several times


class Concatenation(Rule):
    """On another axis the label passes through; on the labelled axis piece g is part g, and nothing is left.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, of: Labelled) -> Operands:
        axis, parts = of.axis(len(of.factored)), range(len(of.operator.inputs))
        before, whole, after = of.factored[:axis], of.factored[axis], of.factored[axis + 1 :]
        if not fx.tells_heads(whole):
            return {index: (*before, *fx.plain((of.input(index).shape[axis],)), *after) for index in parts}
        cut = self._cut(of)
        if cut is None:
            raise RefusedError("the parts of a concatenation are not the heads", of.operator)
        return dict.fromkeys(parts, (*before, cut[1] or fx.repeated(whole), *after))

    @staticmethod
    def _cut(of: Labelled) -> tuple[Axis, Axis] | None:
        shapes = {tensor.shape for tensor in of.operator.inputs if tensor is not None}
        if len(shapes) != 1 or of.operator.option("fused_activation_function"):
            return None
        return fx.take_outer(of.factored[of.axis(len(of.factored))], len(of.operator.inputs))

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        cut = self._cut(of) if fx.tells_heads(of.factored[of.axis(len(of.factored))]) else None
        return None if cut is None else fx.mixed_index(cut[0], head)


class Pack(Rule):
    """As CONCATENATION, along an axis that the parts do not have."""

    def operands(self, of: Labelled) -> Operands:
        axis = of.axis(len(of.factored))
        if fx.tells_heads(of.factored[axis]) and not fx.only_labels(of.factored[axis]):
            raise RefusedError("the parts of a PACK are not the heads", of.operator)
        part = (*of.factored[:axis], *of.factored[axis + 1 :])
        return dict.fromkeys(range(len(of.operator.inputs)), part)

    def passed_on(self, of: Labelled, head: int, *, keep: bool) -> int | None:
        packed = of.factored[of.axis(len(of.factored))]
        is_needed = len(of.operator.inputs) > 1 and not fx.tells_heads(packed)
        return None if is_needed else fx.mixed_index(packed, head)


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

    def steering(self, one: OneHead) -> Mapping[int, Tensor]:
        sizes = one.of.piece_shape(keep=True)
        if one.of.operator.name == "TILE":
            source = fx.piece_shape(self.operands(one.of)[0], keep=True)
            sizes = tuple(size // part for size, part in zip(sizes, source, strict=True))
        return {1: one.integers("shape", sizes)}


class Gather(Rule):
    """GATHER: the gathered axis stays whole, and its places in the result are those of the positions.

    With batch axes, `[B,N,T,R]` and positions `[B,N,T,S]` -> `[B,N,T,S]`, every head has positions of its own.
    """

    def operands(self, of: Labelled) -> Operands:
        source, positions, batch = of.input(0), of.input(1), int(of.operator.option("batch_dims"))
        batch += len(positions.shape) if batch < 0 else 0
        axis = of.axis(len(source.shape))
        end = axis + len(positions.shape) - batch
        (gathered,) = fx.plain((source.shape[axis],))
        operands: Operands = {0: (*of.factored[:axis], gathered, *of.factored[end:])}
        if batch or any(map(fx.tells_heads, of.factored[axis:end])):
            operands[1] = (*of.factored[:batch], *of.factored[axis:end])
        return operands


PRODUCTS = operators_that(Effect.PRODUCT)
MOVEMENT = operators_that(Effect.REARRANGING)
ELEMENTWISE = operators_that(Effect.ELEMENTWISE)

RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "SELECT"), Elementwise()),
    **dict.fromkeys(MOVEMENT, Regroup()),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), AlongLastAxis()),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice()),
    **dict.fromkeys(("SPLIT", "SPLIT_V"), Split()),
    **dict.fromkeys(operators_that(Effect.PADDING), Pad()),
    **dict.fromkeys(operators_that(Effect.REDUCTION), Reduce()),
    **dict.fromkeys(operators_that(Effect.REPEATING), Broadcast()),
    "GATHER": Gather(),
    "TRANSPOSE": Transpose(),
    "BATCH_MATMUL": BatchMatMul(),
    "FULLY_CONNECTED": FullyConnected(),
    "CONCATENATION": Concatenation(),
    "PACK": Pack(),
    "UNPACK": Unpack(),
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
