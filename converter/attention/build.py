"""Builds the single-head version of an attention block aside; edits nothing.

Tensors that carry heads are cut where they come in, what is between is cloned per head, and the heads are joined
where the old graph had them side by side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Block, Form
from edge_opt.attention.composites import with_composites
from edge_opt.attention.cut import Cut, Plan, Planner, Step
from edge_opt.attention.factors import Factored
from edge_opt.attention.labels import OperandFactors
from edge_opt.attention.rule import Labelled, OneHead
from edge_opt.attention.rules import keeps_order
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, DType, Model, Operator, Shape, Subgraph, Tensor, topological
from edge_opt.ir.walk import read_outside, still_needed

# Types that the runtime's kernels take (LiteRT, kernels/split.cc and unpack.cc); others are cut by SLICE, or by SPLIT.
SPLIT_TYPES = frozenset({DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})
_NOT_UNPACKED = frozenset({DType.INT64, DType.BFLOAT16, DType.INT4})


_LEAST_RANK = 3


def split_heads(
    model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
) -> tuple[list[Operator], list[Operator]]:
    """The operators of the block, and those that replace them (detached, in execution order).

    The new ones define `block.output` itself, and what others read of the block: there, too, heads are joined. Old
    operators that lead to the block, and whose results are needed outside, are in both lists.
    """
    flat = any(len(fx.piece_axes(own, keep=False)) < _LEAST_RANK for own in block.logits.values())
    if form.cut == "unpack" and (flat or block.heads_are_rows or block.tiles > 1):
        # Dropping the axis would leave no batch for BATCH_MATMUL, or a vector; and rows are no axis of their own.
        form = replace(form, cut="split")
    operands = with_composites(model) if form.above and form.composites else block.operands
    plan, assembly = Planner(subgraph, block, form, operands).plan(), Assembly(model, constants)
    splitter = Splitter(form, assembly, block, operands, plan)
    pieces = [splitter.piece(block.output, block.factored, head) for head in range(block.pieces)]
    join_heads(assembly, form, pieces, block.output, block.factored)
    assert block.output.producer is not None
    joined = [block.output]
    for tensor, factored in plan.labelled.items():
        if tensor is not block.output and read_outside(subgraph, tensor, plan.old):
            pieces = [splitter.piece(tensor, factored, head) for head in range(block.pieces)]
            join_heads(assembly, form, pieces, tensor, factored)
            joined.append(tensor)
    old, new = topological(plan.old), assembly.finished(*joined)
    return old, [*still_needed(subgraph, old, block.output.producer, new, joined), *new]


@dataclass(eq=False)
class Splitter:
    """Builds what each head sees of a tensor; heads that see the same get the same tensor."""

    form: Form
    assembly: Assembly
    block: Block
    operands: OperandFactors
    plan: Plan

    def __post_init__(self) -> None:
        self._pieces: dict[tuple[Tensor, Factored, tuple[int, ...]], Tensor] = {}
        self._sources: dict[Cut, Tensor] = {}
        self._parts: dict[tuple[Tensor, int, int], tuple[Tensor, ...]] = {}

    def piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """What one head sees of a tensor."""
        if fx.is_shared(factored):
            return tensor
        key = (tensor, factored, fx.piece_key(factored, head))
        if key not in self._pieces:
            cut = self.plan.cuts.get((tensor, factored))
            if cut is None:
                piece = self._emit(Labelled(tensor, factored), head, {})
            else:
                piece = self._cut_off(self._source(cut), cut.factored, head)
                for step in cut.steps:
                    if step.scales:
                        piece = self._scaled(step, piece, head)
                    else:
                        piece = self._emit(step.result, head, {step.operand: piece})
            self._pieces[key] = piece
        return self._pieces[key]

    def _word(self, count: int) -> str:
        """What so many different parts of a tensor are called."""
        return "group" if count < self.block.pieces else "head" if self.block.tiles == 1 else "piece"

    def _name(self, factored: Factored, head: int) -> str:
        """What distinguishes a head's part of a tensor: `head_1`, or `group_1` where several heads see the same."""
        count = fx.piece_count(factored)
        return f"{self._word(count)}_{fx.mixed_index(fx.labels(factored), head)}" if count > 1 else "shared"

    def _emit(self, of: Labelled, head: int, known: Mapping[int, Tensor]) -> Tensor:
        """The operator for one head; `known`: that head's part of operands, where they are there already."""
        operands = self.operands.known(of.tensor, of.factored)

        def piece(index: int) -> Tensor:
            return known.get(index) or self.piece(of.input(index), operands[index], head)

        name = self._name(of.factored, head)
        one = OneHead(self.assembly, of, head, piece, name, keep_axes=self.form.keep_axes)
        return self.operands.rules[of.operator.name].emit(one)

    def _source(self, cut: Cut) -> Tensor:
        """The tensor that is cut: rearranged as the cut says, those moves left out that are a RESHAPE at most."""
        if cut not in self._sources:
            source = cut.source
            for move in cut.moves:
                if not keeps_order(Labelled(move.tensor, fx.plain(move.tensor.shape))):
                    inputs = [self._unscaled(source, move.input(0)), *move.operator.inputs[1:]]
                    name = name_below(move.tensor.name, "unscaled")
                    moved = self.assembly.tensor(name, move.tensor.shape, source)
                    source = self.assembly.copy(move.operator, inputs, moved)
            if cut.moves:
                source = self._unscaled(source, cut.moves[-1].tensor)
            # A scaling may raise the rank: `[N,T,H] * [1,1,1,1]`.
            shape, name = fx.sizes(cut.factored), name_below(source.name, "ranked")
            self._sources[cut] = self.assembly.reshaped(source, shape, name)
        return self._sources[cut]

    def _unscaled(self, source: Tensor, like: Tensor) -> Tensor:
        return self.assembly.reshaped(source, like.shape, name_below(like.name, "unscaled"))

    def _scaled(self, step: Step, piece: Tensor, head: int) -> Tensor:
        """A piece multiplied by a number, whatever rearrangements the cut moved in front of that."""
        of = step.result
        read = list(of.operator.inputs)
        read[step.operand] = piece
        for index, tensor in enumerate(read):
            if index != step.operand and tensor is not None and len(tensor.shape) > len(piece.shape):
                read[index] = self.assembly.constant(tensor, tensor.array().reshape(()))
        name = name_below(of.tensor.name, self._name(of.factored, head))
        return self.assembly.again(of.operator, read, [name], [piece.shape], of.operator.options)[0]

    def _cut_off(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """One head's part of a tensor, cut off."""
        target = fx.piece_shape(factored, keep=self.form.keep_axes)
        axes = fx.labelled_axes(factored)
        if fx.is_shared(factored) or (not axes and target == tensor.shape):
            return tensor
        if tensor.has_numbers:
            return self._part_of_constant(tensor, factored, head)
        if not axes:
            return self.assembly.reshaped(tensor, target, name_below(tensor.name, "squeezed"))
        axis = axes[0]
        lead = fx.leading(factored[axis])
        if not lead:  # `(rows)(heads)` becomes two axes, so that the heads can be cut off
            inner = next(i for i, factor in enumerate(factored[axis]) if factor.stride)
            axes_apart = factored[axis][:inner], factored[axis][inner:]
            exposed = (*factored[:axis], *axes_apart, *factored[axis + 1 :])
            name = name_below(tensor.name, "exposed")
            piece = self._cut_off(self.assembly.reshaped(tensor, fx.sizes(exposed), name), exposed, head)
            return self.assembly.reshaped(piece, target, name_below(tensor.name, "piece"))
        rest = factored[axis][len(lead) :]
        drops = self.form.cut == "unpack" and not rest and tensor.dtype not in _NOT_UNPACKED
        parts = self._split(tensor, axis, fx.sizes((lead,))[0], drops=drops)
        remaining = (*factored[:axis], *(() if drops else (rest,)), *factored[axis + 1 :])
        piece = self._cut_off(parts[fx.mixed_index(lead, head)], remaining, head)
        return self.assembly.reshaped(piece, target, name_below(piece.name, "piece"))

    def _part_of_constant(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        keep, quantization = self.form.keep_axes, tensor.quantization
        values = _head_of(tensor.array(), factored, head).reshape(fx.piece_shape(factored, keep=keep))
        if quantization is not None and quantization.is_per_axis:
            axis, kept = quantization.dimension, fx.piece_axes(factored, keep=keep)
            places = _head_of(np.arange(tensor.shape[axis]), (factored[axis],), head)
            quantization = quantization.along(kept.index(axis) if axis in kept else 0, places)
        return self.assembly.constant(tensor, values, quantization)

    def _split(self, tensor: Tensor, axis: int, count: int, *, drops: bool) -> tuple[Tensor, ...]:
        """The tensor cut into `count` parts along an axis, which they have no longer where it `drops`."""
        key = (tensor, axis, count)
        if key not in self._parts:
            part = self._word(count)
            size = tensor.shape[axis] // count
            between = () if drops else (size,)
            shape = (*tensor.shape[:axis], *between, *tensor.shape[axis + 1 :])
            parts = [
                self.assembly.tensor(name_below(tensor.name, f"{part}_{i}"), shape, tensor)
                for i in range(count)
            ]
            if drops:
                self.assembly.emit("UNPACK", [tensor], *parts, num=count, axis=axis)
            elif tensor.dtype in SPLIT_TYPES:
                where = self.assembly.integers("split/axis", axis)
                self.assembly.emit("SPLIT", [where, tensor], *parts, num_splits=count)
            else:
                for index, made in enumerate(parts):
                    begins = [index * size if i == axis else 0 for i in range(len(tensor.shape))]
                    begin = self.assembly.integers(name_below(made.name, "begin"), begins)
                    extent = self.assembly.integers(name_below(made.name, "size"), made.shape)
                    self.assembly.emit("SLICE", [tensor, begin, extent], made)
            self._parts[key] = tuple(parts)
        return self._parts[key]


def _head_of(values: np.ndarray, factored: Factored, head: int) -> np.ndarray:
    """One head's part of an array, flat."""
    expanded = values.reshape([f.size for axis in factored for f in axis])
    index = tuple((f.digit(head) if f.stride else slice(None)) for axis in factored for f in axis)
    return np.ascontiguousarray(expanded[index]).ravel()


def join_heads(
    assembly: Assembly, form: Form, heads: Sequence[Tensor], output: Tensor, factored: Factored
) -> None:
    """Define `output`, which has the heads where `factored` says, from the pieces of all heads.

    `[.., (N)(H)]` is one CONCATENATION along H; where labels stand apart, as in `[B, (K), H, (G)(T)]`, it is one for
    each: first along T for every k, then along K.
    """
    tensors = dict(enumerate(heads))
    factors = fx.merge_neighbours(factor for axis in factored for factor in axis)
    labelled = [place for place, factor in enumerate(factors) if factor.stride]
    for place in reversed(labelled):
        factor = factors[place]
        front = math.prod(before.size for before in factors[:place] if not before.stride)
        groups: dict[int, list[Tensor]] = {}  # the pieces that differ in this digit of the head only
        for head in sorted(tensors):
            groups.setdefault(head - factor.digit(head) * factor.stride, []).append(tensors[head])
        last = place == labelled[0]
        tensors = {
            head: _side_by_side(assembly, form, parts, front, output, last=last)
            for head, parts in groups.items()
        }


def _side_by_side(
    assembly: Assembly, form: Form, parts: list[Tensor], front: int, output: Tensor, *, last: bool
) -> Tensor:
    """The parts put together behind `front` elements of each; `last`: as the `output` itself.

    A reshape of every part is left out where it can be: the joined ones are reshaped as one.
    """
    sources = [assembly.source(part) for part in parts]
    flat = (front, parts[0].elements // front)
    if not any(_places(each[0].shape, front) for each in (sources, parts)):
        parts = [assembly.reshaped(part, flat, name_below(part.name, "flat")) for part in parts]
    elif _places(sources[0].shape, front):
        parts = sources
    shape, count = parts[0].shape, len(parts)
    places = _places(shape, front)
    if last and form.cut == "unpack" and output.dtype in SPLIT_TYPES:
        for axis in places:
            if output.shape == (*shape[:axis], count, *shape[axis:]):
                return assembly.emit("PACK", parts, output, values_count=count, axis=axis)
    joined = {axis: (*shape[:axis], shape[axis] * count, *shape[axis + 1 :]) for axis in places}
    exact = next((axis for axis, sizes in joined.items() if sizes == output.shape), None)
    if last and exact is not None:
        return assembly.emit("CONCATENATION", parts, output, axis=exact)
    axis = max(joined) if exact is None else exact
    made = assembly.tensor(name_below(output.name, "heads"), joined[axis], output)
    assembly.emit("CONCATENATION", parts, made, axis=axis)
    return assembly.reshape_to(made, output) if last else made


def _places(shape: Shape, front: int) -> list[int]:
    """Axes that a shape has behind `front` elements, i.e. along which something can be put side by side."""
    return [axis for axis in range(len(shape)) if math.prod(shape[:axis]) == front]
