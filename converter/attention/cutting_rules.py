"""Rules of operators that take a part of a tensor, or put something around it: a labelled axis must stay whole."""

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.refusal import Refusal, RefusedError
from edge_opt.attention.rule import HeadBuilder as Builder
from edge_opt.attention.rule import (
    Labelled,
    Operands,
    Pieces,
    Rule,
    constant_integers,
    on_axes,
    shared_axes,
    whole_on,
)
from edge_opt.ir import Operator, Tensor


class Slice(Rule):
    """SLICE and STRIDED_SLICE."""

    def operands(self, of: Labelled) -> Operands:
        _begins(of.operator)
        source = of.input(0)
        cut = [axis for axis, size in enumerate(of.tensor.shape) if size != source.shape[axis]]
        return {0: whole_on(of, source, cut, "a slice cuts through the heads")}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        own = self.operands(of)[0]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces(0), own, axes)
        shape = fx.piece_shape_on(of.factored, axes)
        whole = _begins(of.operator)
        begins = [whole[axis] for axis in axes]
        name = of.tensor.name
        steering = {1: build.integers(f"{name}/begin", begins)}
        options = None
        if of.operator.name == "SLICE":
            steering[2] = build.integers(f"{name}/size", shape)
        else:
            ends = [begin + size for begin, size in zip(begins, shape, strict=True)]
            steering[2] = build.integers(f"{name}/end", ends)
            steering[3] = build.integers(f"{name}/strides", [1] * len(axes))
            options = dict.fromkeys(("begin_mask", "end_mask"), 0)
        return build.clone(of, {0: source, **steering}, shape, options)


def _begins(operator: Operator) -> list[int]:
    """Where a SLICE begins on each axis, or a STRIDED_SLICE that only takes ranges."""
    begins, source = constant_integers(operator, 1), operator.input(0)
    if not len(operator.outputs[0].shape) == len(source.shape) == len(begins):
        raise RefusedError(Refusal("a slice must keep the rank", operator, source))
    if operator.name == "SLICE":
        return begins
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "offset")
    if set(constant_integers(operator, 3)) != {1} or any(operator.option(mask) for mask in masks):
        raise RefusedError(Refusal("only plain ranges of a STRIDED_SLICE are followed", operator))
    open_begin = int(operator.option("begin_mask"))
    return [
        0 if open_begin >> axis & 1 else max(begin if begin >= 0 else begin + size, 0)
        for axis, (begin, size) in enumerate(zip(begins, source.shape, strict=True))
    ]


class Pad(Rule):
    """PAD, PADV2 and MIRROR_PAD: rows of relative positions are shifted by padding them and cutting them again."""

    def operands(self, of: Labelled) -> Operands:
        numbers, source = constant_integers(of.operator, 1), of.input(0)
        padded = [axis for axis in range(len(source.shape)) if any(numbers[2 * axis : 2 * axis + 2])]
        return {0: whole_on(of, source, padded, "the axis of the heads is padded")}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        own = self.operands(of)[0]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces(0), own, axes)
        numbers = constant_integers(of.operator, 1)
        around = build.integers(f"{of.tensor.name}/paddings", [numbers[2 * i : 2 * i + 2] for i in axes])
        return build.clone(of, {0: source, 1: around}, fx.piece_shape_on(of.factored, axes))


class Split(Rule):
    """SPLIT and SPLIT_V: each result is a slice; one head's part is split in the same way."""

    def operands(self, of: Labelled) -> Operands:
        data, steering = _places(of.operator)
        axis = constant_integers(of.operator, steering)[0] % len(of.factored)
        source = of.input(data)
        cut = [axis] if of.tensor.shape != source.shape else []
        return {data: whole_on(of, source, cut, "a split cuts through the heads")}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        data, steering = _places(of.operator)
        axis = constant_integers(of.operator, steering)[0] % len(of.factored)
        own = self.operands(of)[data]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces(data), own, axes)
        position = axes.index(axis)
        shapes = []
        for output in of.operator.outputs:
            sizes = list(fx.piece_shape_on(of.factored, axes))
            sizes[position] = output.shape[axis]
            shapes.append(tuple(sizes))
        where = build.integers(f"{of.tensor.name}/axis", np.int32(position))
        return build.clone_all(of, {data: source, steering: where}, shapes)[of.output]

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return len(of.operator.outputs) == 1

    def left(self, of: Labelled, head: int) -> int:
        return _places(of.operator)[0]


def _places(split: Operator) -> tuple[int, int]:
    """Which input of a SPLIT or SPLIT_V is split, and which one says on what axis."""
    return (1, 0) if split.name == "SPLIT" else (0, 2)


class Unpack(Rule):
    """Each result is one step of an axis that it no longer has; one head's part is unpacked in the same way."""

    def operands(self, of: Labelled) -> Operands:
        shape = of.input(0).shape
        axis = of.axis(len(shape))
        return {0: (*of.factored[:axis], *fx.plain((shape[axis],)), *of.factored[axis:])}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Pieces) -> Tensor:
        own = self.operands(of)[0]
        position = fx.piece_axes(own, keep=build.keep_axes).index(of.axis(len(own)))
        shapes = [of.piece_shape(keep=build.keep_axes)] * len(of.operator.outputs)
        return build.clone_all(of, {0: pieces(0)}, shapes, {"axis": position})[of.output]

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return len(of.operator.outputs) == 1
