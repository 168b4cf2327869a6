"""Rules of operators that take a part of a tensor, or put something around it: a labelled axis must stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rule import (
    Labelled,
    Operands,
    Rule,
    constant_integers,
    known_integers,
    on_axes,
    shared_axes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_opt.attention.assembly import HeadBuilder as Builder
    from edge_opt.attention.factors import Axis, Factored
    from edge_opt.ir import Operator, Tensor


class Slice(Rule):
    """SLICE and STRIDED_SLICE."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        ranges = slice_ranges(of.operator)
        if isinstance(ranges, Refusal):
            return ranges
        source = of.input(0)
        axes: list[Axis] = []
        for axis, (_, size), whole in zip(of.factored, ranges, source.shape, strict=True):
            if size == whole:
                axes.append(axis)
            elif fx.tells_heads(axis):
                return Refusal("a slice cuts through the heads", of.operator, source)
            else:
                axes.append(fx.plain((whole,))[0])
        return {0: tuple(axes)}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        ranges = slice_ranges(of.operator)
        assert not isinstance(ranges, Refusal)
        own = self.known_operands(of)[0]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces[0], own, axes)
        shape = fx.piece_shape_on(of.factored, axes)
        begins = [ranges[axis][0] for axis in axes]
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


class Pad(Rule):
    """PAD, PADV2 and MIRROR_PAD: rows of relative positions are shifted by padding them and cutting them again."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        numbers = constant_integers(of.operator, 1)
        if isinstance(numbers, Refusal):
            return numbers
        axes: list[Axis] = []
        for axis, own in enumerate(of.factored):
            if not any(numbers[2 * axis : 2 * axis + 2]):
                axes.append(own)
            elif fx.tells_heads(own):
                return Refusal("the axis of the heads is padded", of.operator, of.input(0))
            else:
                axes.append(fx.plain((of.input(0).shape[axis],))[0])
        return {0: tuple(axes)}

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        own = self.known_operands(of)[0]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces[0], own, axes)
        numbers = known_integers(of.operator, 1)
        around = build.integers(f"{of.tensor.name}/paddings", [numbers[2 * i : 2 * i + 2] for i in axes])
        return build.clone(of, {0: source, 1: around}, fx.piece_shape_on(of.factored, axes))


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
        masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "offset")
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


class Split(Rule):
    """SPLIT and SPLIT_V: each result is a slice; one head's part is split in the same way."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        axis = self._axis(of)
        if isinstance(axis, Refusal):
            return axis
        source = of.input(self.data(of.operator))
        if of.tensor.shape == source.shape:
            return {self.data(of.operator): of.factored}
        if fx.tells_heads(of.factored[axis]):
            return Refusal("a split cuts through the heads", of.operator, source)
        own = fx.plain((source.shape[axis],))[0]
        return {self.data(of.operator): (*of.factored[:axis], own, *of.factored[axis + 1 :])}

    @staticmethod
    def data(operator: Operator) -> int:
        """Which input is split."""
        return 1 if operator.name == "SPLIT" else 0

    @staticmethod
    def _axis(of: Labelled) -> int | Refusal:
        axis = constant_integers(of.operator, 0 if of.operator.name == "SPLIT" else 2)
        return axis if isinstance(axis, Refusal) else axis[0] % len(of.factored)

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        axis, data = self._axis(of), self.data(of.operator)
        assert isinstance(axis, int)
        own = self.known_operands(of)[data]
        axes = shared_axes(build, of.factored, own)
        source = on_axes(build, of, pieces[data], own, axes)
        position = axes.index(axis)
        shapes = []
        for output in of.operator.outputs:
            sizes = list(fx.piece_shape_on(of.factored, axes))
            sizes[position] = output.shape[axis]
            shapes.append(tuple(sizes))
        where = build.integers(f"{of.tensor.name}/axis", np.int32(position))
        inputs = {data: source, (0 if of.operator.name == "SPLIT" else 2): where}
        return build.clone_all(of, inputs, shapes)[of.output]

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return len(of.operator.outputs) == 1

    def left(self, of: Labelled, head: int) -> int:
        return self.data(of.operator)


class Unpack(Rule):
    """Each result is one step of an axis that it no longer has; one head's part is unpacked in the same way."""

    def operands(self, of: Labelled) -> Operands | Refusal:
        source = of.input(0)
        axis = of.axis(rank=len(source.shape))
        return {0: self._source(of.factored, axis, source.shape[axis])}

    @staticmethod
    def _source(result: Factored, axis: int, size: int) -> Factored:
        return (*result[:axis], fx.plain((size,))[0], *result[axis:])

    def made(self, build: Builder, of: Labelled, head: int, pieces: Mapping[int, Tensor]) -> Tensor:
        axis = of.axis(rank=len(of.input(0).shape))
        position = fx.piece_axes(self.known_operands(of)[0], keep=build.keep_axes).index(axis)
        shapes = [of.piece_shape(keep=build.keep_axes)] * len(of.operator.outputs)
        return build.clone_all(of, pieces, shapes, {"axis": position})[of.output]

    def vanishes(self, of: Labelled, *, keep: bool) -> bool:
        return len(of.operator.outputs) == 1
