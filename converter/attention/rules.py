"""One rule an operator: how the head label passes through it. Nothing here knows what attention looks like.

A rule says where the operands carry the label, given where the result does, and what is left for a single head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Factor, Factored, Mismatch
from edge_opt.attention.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_opt.ir import Operator, Shape, Tensor

Operands = dict[int, Factored]
"""Which inputs carry numbers that belong to heads, and how each is factored. Other inputs are settings."""


class Builder(Protocol):
    """What a rule may ask of the graph that is being built for one head."""

    keep_axes: bool

    def clone(
        self,
        operator: Operator,
        inputs: Mapping[int, Tensor],
        shape: Shape,
        options: Mapping[str, object] | None = None,
    ) -> Tensor:
        """The operator again, with other inputs and options, and a result of `shape`."""

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""

    def reshape(self, like: Tensor, source: Tensor, shape: Shape) -> Tensor:
        """`source` as `shape`, its type that of `like`; the source itself where that is its shape already."""


class Rule(ABC):
    """How the head label passes through an operator."""

    @abstractmethod
    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        """Factors of the operands, given the factors of the (first) result."""

    @abstractmethod
    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        """The operator for one head; `pieces` holds that head's part of each operand."""

    def vanishes(self, operator: Operator, result: Factored, *, keep: bool) -> bool:
        """True where nothing of the operator is left for a single head."""
        return False


def constant_integers(operator: Operator, index: int) -> list[int] | Refusal:
    """The numbers of a constant operand that steers an operator (axes, sizes)."""
    tensor = operator.inputs[index] if index < len(operator.inputs) else None
    if tensor is None or not tensor.is_constant or tensor.dtype.numpy is None:
        return Refusal("an operand that steers the operator must be constant", operator, tensor)
    return [int(value) for value in tensor.array().ravel()]


def kept_position(factored: Factored, axis: int, *, keep: bool) -> int:
    """Where an axis stands among those that a head's piece has."""
    return fx.piece_axes(factored, keep=keep).index(axis)


class Elementwise(Rule):
    """Operands are aligned from the right; one without the labelled axis is shared by the heads."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        shape = operator.outputs[0].shape
        found: Operands = {}
        for index, tensor in enumerate(operator.inputs):
            if tensor is None:
                continue
            if not _broadcasts(tensor.shape, shape):
                return Refusal(
                    "operands must broadcast", operator, tensor, str(list(shape)), str(list(tensor.shape))
                )
            found[index] = fx.spread(result, tensor.shape)
        return found

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        return build.clone(operator, pieces, fx.piece_shape(result, keep=build.keep_axes))


def _broadcasts(operand: Shape, result: Shape) -> bool:
    return len(operand) <= len(result) and all(
        a in (b, 1) for a, b in zip(reversed(operand), reversed(result), strict=False)
    )


class Select(Elementwise):
    """SELECT without broadcasting; its rank-1 condition selects whole rows, which no label survives."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        condition = operator.input(0)
        if condition.shape not in ((), operator.outputs[0].shape):
            return Refusal("SELECT's condition must have the result's shape", operator, condition)
        return super().operands(operator, result)


class Regroup(Rule):
    """RESHAPE, SQUEEZE, EXPAND_DIMS: row-major order stays, so labels stay on their factors."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        source = operator.input(0)
        if source.elements != operator.outputs[0].elements:
            return Refusal("a reshape must keep the number of elements", operator, source)
        grouped = fx.regroup(result, source.shape)
        if isinstance(grouped, Mismatch):
            return Refusal(
                "the head axis is cut through the middle",
                operator,
                source,
                f"a shape that {fx.to_text(result)} refines",
                str(list(source.shape)),
            )
        return {0: grouped}

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        shape = fx.piece_shape(result, keep=build.keep_axes)
        return build.reshape(operator.outputs[0], pieces[0], shape)

    def vanishes(self, operator: Operator, result: Factored, *, keep: bool) -> bool:
        operands = self.operands(operator, result)
        return not isinstance(operands, Refusal) and fx.piece_shape(result, keep=keep) == fx.piece_shape(
            operands[0], keep=keep
        )


class Transpose(Rule):
    """The label moves with its axis; what only moves axes of size 1 is a RESHAPE, or nothing."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        permutation = constant_integers(operator, 1)
        if isinstance(permutation, Refusal):
            return permutation
        if sorted(permutation) != list(range(len(result))):
            return Refusal("not a permutation", operator, operator.inputs[1], actual=str(permutation))
        axes: list[Axis] = [()] * len(result)
        for target, source in enumerate(permutation):
            axes[source] = result[target]
        return {0: tuple(axes)}

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        shape = fx.piece_shape(result, keep=build.keep_axes)
        if self.keeps_order(operator, result):
            return build.reshape(operator.outputs[0], pieces[0], shape)
        source = self._source(operator, result)
        kept = fx.piece_axes(source, keep=build.keep_axes)
        permutation = [kept.index(axis) for axis in constant_integers_or_raise(operator, 1) if axis in kept]
        steering = build.integers(f"{operator.outputs[0].name}/perm", permutation)
        return build.clone(operator, {0: pieces[0], 1: steering}, shape)

    def _source(self, operator: Operator, result: Factored) -> Factored:
        operands = self.operands(operator, result)
        assert not isinstance(operands, Refusal)
        return operands[0]

    def keeps_order(self, operator: Operator, result: Factored) -> bool:
        """True where one head's elements stay in row-major order."""
        source = self._source(operator, result)
        wide = [axis for axis in constant_integers_or_raise(operator, 1) if _piece_size(source[axis]) > 1]
        return wide == sorted(wide)

    def vanishes(self, operator: Operator, result: Factored, *, keep: bool) -> bool:
        if not self.keeps_order(operator, result):
            return False
        source = self._source(operator, result)
        return fx.piece_shape(result, keep=keep) == fx.piece_shape(source, keep=keep)


def constant_integers_or_raise(operator: Operator, index: int) -> list[int]:
    """As `constant_integers`, where `operands` has already seen that they are there."""
    values = constant_integers(operator, index)
    assert not isinstance(values, Refusal)
    return values


def _piece_size(axis: Axis) -> int:
    return int(np.prod([factor.size for factor in axis if not factor.stride], dtype=np.int64))


class BatchMatMul(Rule):
    """Batch axes broadcast, the left operand's rows and the right one's columns keep theirs.

    `[.., M, C] x [.., C, N] -> [.., M, N]`: a label on M never reaches the right operand, which all heads share.
    """

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        left, right = operator.input(0), operator.input(1)
        if min(len(left.shape), len(right.shape), len(result)) < 2:
            return Refusal("BATCH_MATMUL needs matrices", operator, left)
        adj_x, adj_y = bool(operator.option("adj_x")), bool(operator.option("adj_y"))
        inner = left.shape[-2 if adj_x else -1]
        if inner != right.shape[-1 if adj_y else -2]:
            return Refusal("inner sizes differ", operator, right, str(inner))
        contracted: Axis = () if inner == 1 else (Factor(inner),)
        batch = result[:-2]
        a = (contracted, result[-2]) if adj_x else (result[-2], contracted)
        b = (result[-1], contracted) if adj_y else (contracted, result[-1])
        return {
            0: fx.spread(batch, left.shape[:-2]) + a,
            1: fx.spread(batch, right.shape[:-2]) + b,
        }

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        return build.clone(operator, pieces, fx.piece_shape(result, keep=build.keep_axes))


class AlongLastAxis(Rule):
    """SOFTMAX and LOG_SOFTMAX: per row, so rows of different heads never mix."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        if any(factor.stride and factor.size > 1 for factor in result[-1]):
            return Refusal("the heads lie on the axis of the softmax", operator, actual=fx.to_text(result))
        return {0: result}

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        return build.clone(operator, pieces, fx.piece_shape(result, keep=build.keep_axes))


class Concatenation(Rule):
    """On another axis the label passes through; on the labelled axis piece g is part g, and nothing is left.

    `CONCATENATION(mask, mask; axis 2) -> [1, 1, (G)(T), S]`: head g reads part g, which is the mask itself.
    """

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        axis = self.axis(operator)
        if not 0 <= axis < len(result):
            return Refusal("axis out of range", operator, actual=str(axis))
        if self._enumerates(result[axis]):
            cut = self._cut(operator, result[axis])
            if cut is None:
                return Refusal("the parts of a concatenation are not the heads", operator)
            return dict.fromkeys(range(len(operator.inputs)), (*result[:axis], cut[1], *result[axis + 1 :]))
        broadcast = tuple(factor for factor in result[axis] if factor.stride)
        found: Operands = {}
        for index in range(len(operator.inputs)):
            size = operator.input(index).shape[axis]
            own: Axis = broadcast + (() if size == 1 else (Factor(size),))
            found[index] = (*result[:axis], own, *result[axis + 1 :])
        return found

    @staticmethod
    def axis(operator: Operator) -> int:
        """The axis of the concatenation, counted from the front."""
        axis = int(operator.option("axis"))
        return axis + len(operator.outputs[0].shape) if axis < 0 else axis

    @staticmethod
    def _enumerates(axis: Axis) -> bool:
        return any(factor.stride and factor.size > 1 for factor in axis)

    @staticmethod
    def _cut(operator: Operator, axis: Axis) -> tuple[Axis, Axis] | None:
        shapes = {tensor.shape for tensor in operator.inputs if tensor is not None}
        if len(shapes) != 1 or operator.option("fused_activation_function"):
            return None
        return fx.take_outer(axis, len(operator.inputs))

    def part(self, operator: Operator, result: Factored, head: int) -> int | None:
        """Which input is the head's; None where every head needs them all."""
        axis = result[self.axis(operator)]
        if not self._enumerates(axis):
            return None
        cut = self._cut(operator, axis)
        return None if cut is None else fx.mixed_index(cut[0], head)

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        part = self.part(operator, result, head)
        if part is not None:
            return pieces[part]
        axis = kept_position(result, self.axis(operator), keep=build.keep_axes)
        shape = fx.piece_shape(result, keep=build.keep_axes)
        return build.clone(operator, pieces, shape, {"axis": axis})

    def vanishes(self, operator: Operator, result: Factored, *, keep: bool) -> bool:
        return self._enumerates(result[self.axis(operator)])


class Slice(Rule):
    """SLICE and STRIDED_SLICE: a labelled axis must be taken whole."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        ranges = slice_ranges(operator)
        if isinstance(ranges, Refusal):
            return ranges
        source = operator.input(0).shape
        axes: list[Axis] = []
        for axis, (begin, size), whole in zip(result, ranges, source, strict=True):
            if begin == 0 and size == whole:
                axes.append(axis)
            elif any(factor.stride and factor.size > 1 for factor in axis):
                return Refusal("a slice cuts through the heads", operator, operator.input(0))
            else:
                broadcast = tuple(factor for factor in axis if factor.stride)
                axes.append(broadcast + (() if whole == 1 else (Factor(whole),)))
        return {0: tuple(axes)}

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        ranges = slice_ranges(operator)
        assert not isinstance(ranges, Refusal)
        kept = fx.piece_axes(result, keep=build.keep_axes)
        shape = fx.piece_shape(result, keep=build.keep_axes)
        begins = [ranges[axis][0] for axis in kept]
        name = operator.outputs[0].name
        if operator.name == "SLICE":
            steering = {1: build.integers(f"{name}/begin", begins), 2: build.integers(f"{name}/size", shape)}
            return build.clone(operator, {0: pieces[0], **steering}, shape)
        ends = [begin + size for begin, size in zip(begins, shape, strict=True)]
        steering = {
            1: build.integers(f"{name}/begin", begins),
            2: build.integers(f"{name}/end", ends),
            3: build.integers(f"{name}/strides", [1] * len(kept)),
        }
        options = {
            "begin_mask": 0,
            "end_mask": 0,
            "ellipsis_mask": 0,
            "new_axis_mask": 0,
            "shrink_axis_mask": 0,
        }
        return build.clone(operator, {0: pieces[0], **steering}, shape, options)


def slice_ranges(operator: Operator) -> list[tuple[int, int]] | Refusal:
    """(begin, size) per axis of a SLICE, or of a STRIDED_SLICE that only takes ranges."""
    source, result = operator.input(0).shape, operator.outputs[0].shape
    begins = constant_integers(operator, 1)
    if isinstance(begins, Refusal):
        return begins
    if len(begins) != len(source) or len(result) != len(source):
        return Refusal("a slice must keep the rank", operator, operator.input(0))
    if operator.name == "STRIDED_SLICE":
        strides = constant_integers(operator, 3)
        masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
        if isinstance(strides, Refusal) or set(strides) != {1} or any(operator.option(m) for m in masks):
            return Refusal("only plain ranges of a STRIDED_SLICE are followed", operator)
        open_begin = int(operator.option("begin_mask"))
        begins = [
            0 if open_begin >> axis & 1 else begin + (size if begin < 0 else 0)
            for axis, (begin, size) in enumerate(zip(begins, source, strict=True))
        ]
    for axis, (begin, size) in enumerate(zip(begins, result, strict=True)):
        if begin < 0 or begin + size > source[axis]:
            return Refusal("a slice reaches outside", operator, operator.input(0))
    return list(zip(begins, result, strict=True))


class Reduce(Rule):
    """SUM, MEAN, REDUCE_MAX and the like over other axes; over the labelled one heads would mix."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        reduced = self._axes(operator)
        if isinstance(reduced, Refusal):
            return reduced
        source = operator.input(0).shape
        rest = list(result)
        axes: list[Axis] = []
        for axis, size in enumerate(source):
            own: Axis = () if size == 1 else (Factor(size),)
            if axis not in reduced:
                axes.append(rest.pop(0))
            elif operator.option("keep_dims"):
                axes.append(tuple(f for f in rest.pop(0) if f.stride) + own)
            else:
                axes.append(own)
        return {0: tuple(axes)}

    @staticmethod
    def _axes(operator: Operator) -> set[int] | Refusal:
        axes = constant_integers(operator, 1)
        rank = len(operator.input(0).shape)
        return axes if isinstance(axes, Refusal) else {axis % rank for axis in axes}

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        reduced, operands = self._axes(operator), self.operands(operator, result)
        assert not isinstance(reduced, Refusal)
        assert not isinstance(operands, Refusal)
        kept = fx.piece_axes(operands[0], keep=build.keep_axes)
        axes = [kept.index(axis) for axis in sorted(reduced)]
        steering = build.integers(f"{operator.outputs[0].name}/axes", axes)
        shape = fx.piece_shape(result, keep=build.keep_axes)
        return build.clone(operator, {0: pieces[0], 1: steering}, shape)


class Broadcast(Rule):
    """BROADCAST_TO and TILE: a repeat over the heads is what each head has anyway, so it goes."""

    def operands(self, operator: Operator, result: Factored) -> Operands | Refusal:
        source = operator.input(0)
        offset = len(result) - len(source.shape)
        axes: list[Axis] = []
        for i, size in enumerate(source.shape):
            axis = result[offset + i]
            repeats, rest = divmod(operator.outputs[0].shape[offset + i], size)
            cut = fx.take_outer(axis, repeats)
            if rest:
                return Refusal("operands must broadcast", operator, source)
            if cut is not None:
                axes.append(tuple(Factor(1, f.stride) for f in cut[0]) + cut[1])
            elif any(f.stride and f.size > 1 for f in axis):
                return Refusal("a repeat cuts through the heads", operator, source)
            else:
                axes.append(fx.plain((size,))[0])
        return {0: tuple(axes)}

    def vanishes(self, operator: Operator, result: Factored, *, keep: bool) -> bool:
        operands = self.operands(operator, result)
        return not isinstance(operands, Refusal) and fx.piece_shape(operands[0], keep=keep) == fx.piece_shape(
            result, keep=keep
        )

    def emit(
        self, build: Builder, operator: Operator, result: Factored, head: int, pieces: Mapping[int, Tensor]
    ) -> Tensor:
        shape = fx.piece_shape(result, keep=build.keep_axes)
        source = pieces[0].shape
        if source == shape:
            return pieces[0]
        values = list(shape)
        if operator.name == "TILE":
            values = [size // own for size, own in zip(shape, source, strict=True)]
        steering = build.integers(f"{operator.outputs[0].name}/shape", values)
        return build.clone(operator, {0: pieces[0], 1: steering}, shape)


_BINARY = (
    "ADD SUB MUL DIV MAXIMUM MINIMUM POW SQUARED_DIFFERENCE FLOOR_DIV FLOOR_MOD EQUAL NOT_EQUAL LESS LESS_EQUAL "
    "GREATER GREATER_EQUAL LOGICAL_AND LOGICAL_OR ATAN2 BITWISE_XOR RIGHT_SHIFT SELECT_V2 PRELU"
)
_UNARY = (
    "ABS NEG EXP LOG SQRT RSQRT SQUARE SIN COS TANH LOGISTIC RELU RELU6 RELU_N1_TO_1 RELU_0_TO_1 GELU ELU "
    "HARD_SWISH LEAKY_RELU CAST QUANTIZE DEQUANTIZE LOGICAL_NOT FLOOR CEIL ROUND SIGN ZEROS_LIKE"
)
MOVEMENT = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE"})
ELEMENTWISE = frozenset((*_BINARY.split(), *_UNARY.split(), "SELECT"))
UNARY = frozenset(_UNARY.split())

RULES: dict[str, Rule] = {
    **dict.fromkeys((*_BINARY.split(), *_UNARY.split()), Elementwise()),
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), Regroup()),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), AlongLastAxis()),
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), Slice()),
    **dict.fromkeys(("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"), Reduce()),
    **dict.fromkeys(("BROADCAST_TO", "TILE"), Broadcast()),
    "SELECT": Select(),
    "TRANSPOSE": Transpose(),
    "BATCH_MATMUL": BatchMatMul(),
    "CONCATENATION": Concatenation(),
}


def operand_factors(operator: Operator, result: Factored) -> Operands | Refusal | None:
    """Factors of the operands; None where the operator has no rule, which is where a region ends."""
    rule = RULES.get(operator.name)
    if rule is None or len(operator.outputs) != 1:
        return None
    return rule.operands(operator, result)
