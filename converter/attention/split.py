"""Splits an attention block: builds the single-head version that `plan` describes; does not edit the graph.

Incoming tensors that carry heads are cut, the operators in between are cloned per head, and the heads are joined where
the old graph had them side by side. See docs/head-axis.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Block, Form
from edge_opt.attention.composites import CompositeRule
from edge_opt.attention.factors import Factored
from edge_opt.attention.joining import SPLIT_TYPES, join_heads
from edge_opt.attention.labelled import Labelled, OneHead, unlabelled
from edge_opt.attention.labels import HeadLayouts
from edge_opt.attention.plan import Plan
from edge_opt.attention.rules import MOVEMENT, RULES
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, DType, Model, Operator, Subgraph, Tensor, topological
from edge_opt.ir.composites import COMPOSITE
from edge_opt.ir.walk import read_outside
from edge_opt.shapes.dimension import with_axis

# Types that the runtime's UNPACK lacks (LiteRT, kernels/unpack.cc); SPLIT or SLICE cuts them.
_NOT_UNPACKED = frozenset({DType.INT64, DType.BFLOAT16, DType.INT4})


def split_heads(
    model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
) -> tuple[list[Operator], list[Operator]]:
    """The operators of the block, and those that replace them (detached, in execution order).

    The new ones define the block's output and all other tensors of the block that are read outside, with heads joined.
    """
    if not form.keep_axes and not _can_drop_axes(block):
        form = replace(form, keep_axes=True)
    layouts = block.layouts
    if form.above and form.composites:
        layouts = HeadLayouts({**RULES, COMPOSITE: CompositeRule(model)})
    plan = Plan(subgraph, block, form, layouts)
    assembly = Assembly(model, constants)
    splitter = _Splitter(assembly, plan)
    merged = block.merged._replace(keep_axes=form.keep_axes)
    joined = {merged.tensor: merged}
    for tensor, labelled in plan.labelled.items():
        if read_outside(subgraph, tensor, plan.old):
            joined.setdefault(tensor, labelled)
    for labelled in joined.values():
        pieces = [splitter.piece(labelled, head) for head in range(merged.pieces)]
        join_heads(assembly, pieces, labelled)
    return topological(plan.old), assembly.finished(*joined)


def _can_drop_axes(block: Block) -> bool:
    """False if a head without the heads' axes would leave BATCH_MATMUL no batch, or a vector.

    Tiles of rows have no axis to drop.
    """
    for result in block.logits.values():
        if len(fx.piece_axes(result.factored, keep_axes=False)) < 3:
            return False
        if any(axis and fx.only_labels(axis) for axis in result.factored[-2:]):
            return False
    return block.tiles == 1


@dataclass(eq=False)
class _Splitter:
    """Builds each head's piece of a tensor; heads that see the same piece share one tensor."""

    assembly: Assembly
    plan: Plan
    _pieces: dict[tuple[Labelled, int], Tensor] = field(default_factory=dict)
    _sources: dict[tuple[Labelled, ...], Tensor] = field(default_factory=dict)
    _parts: dict[tuple[Tensor, int, int], Sequence[Tensor]] = field(default_factory=dict)

    def piece(self, labelled: Labelled, head: int) -> Tensor:
        """One head's piece of a tensor."""
        if fx.is_shared(labelled.factored):
            return labelled.tensor
        key = (labelled, fx.piece_index(labelled.factored, head))
        if key not in self._pieces:
            self._pieces[key] = self._made(labelled, head)
        return self._pieces[key]

    def _made(self, labelled: Labelled, head: int) -> Tensor:
        """Make the piece: by an operator of its own, or cut off a tensor and then scaled, as the plan says."""
        name = self._name(labelled.factored, head)
        if labelled not in self.plan.cuts:
            make = partial(self.piece, head=head)
            layouts = self.plan.layouts
            operands = layouts.above(labelled)
            return layouts.made(OneHead(self.assembly, labelled, operands, head, make, name))
        steps = self.plan.cuts[labelled]
        whole = self._source(steps)
        piece = self._cut_off(whole, labelled.factored, head)
        for step in steps[1:]:
            if step.operator.name not in MOVEMENT:
                piece = self._scaled(step.operator, piece, name)
        return piece

    def _scaled(self, operator: Operator, piece: Tensor, name: str) -> Tensor:
        """A scaling of the whole tensor, repeated for a piece."""
        read = [self._factor(operator.input(side), piece) for side in (0, 1)]
        return self.assembly.copy_resized(operator, read, name, [piece.shape], operator.options)[0]

    def _factor(self, tensor: Tensor, piece: Tensor) -> Tensor:
        """The piece in the place of the whole tensor; the scalar with no more axes than the piece."""
        if tensor.elements > 1:
            return piece
        if len(tensor.shape) <= len(piece.shape):
            return tensor
        # Without any of its axes.
        return self._part_of_constant(tensor, (), 0)

    def _word(self, count: int) -> str:
        """The name for a part of a tensor with `count` different parts."""
        if count < self.plan.block.merged.pieces:
            return "group"
        return "head" if self.plan.block.tiles == 1 else "piece"

    def _name(self, factored: Factored, head: int) -> str:
        """The suffix for a head's part of a tensor: `head_1`, or `group_1` if several heads see the same."""
        count = fx.piece_count(factored)
        return f"{self._word(count)}_{fx.piece_index(factored, head)}" if count > 1 else "shared"

    def _source(self, steps: tuple[Labelled, ...]) -> Tensor:
        """The tensor to cut, rearranged; steps that keep the order are merged into one RESHAPE."""
        if steps in self._sources:
            return self._sources[steps]
        source = steps[0].tensor
        make = self.assembly
        for step in steps[1:]:
            operator = step.operator
            if operator.name not in MOVEMENT:
                continue
            shape = step.tensor.shape
            name = name_below(step.tensor.name, "unscaled")
            if RULES[operator.name].passed_on(unlabelled(step.tensor), 0) is not None:
                source = make.reshaped(source, shape, name)
            else:
                read = [source, *operator.inputs[1:]]
                source = make.copy(operator, read, make.tensor(name, shape, source))
        self._sources[steps] = source
        return source

    def _cut_off(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """Cut off one head's part of a tensor.

        [.., (heads)(rest), ..]    cut along the axis, then along the other axes with labels
        [.., (rows)(heads), ..]    two axes first, [.., (rows), (heads), ..]
        """
        target = fx.piece_shape(factored, keep_axes=self.plan.form.keep_axes)
        if target == tensor.shape:
            return tensor
        if tensor.has_numbers:
            return self._part_of_constant(tensor, factored, head)
        axes = fx.labelled_axes(factored)
        if not axes:
            return self.assembly.reshaped(tensor, target, name_below(tensor.name, "squeezed"))
        if fx.leading(factored[axes[0]]):
            piece = self._cut_along(tensor, factored, axes[0], head)
            return self.assembly.reshaped(piece, target, name_below(piece.name, "piece"))
        exposed = _exposed(factored, axes[0])
        apart = self.assembly.reshaped(
            tensor, fx.sizes(exposed), name_below(tensor.name, "exposed")
        )
        piece = self._cut_off(apart, exposed, head)
        return self.assembly.reshaped(piece, target, name_below(tensor.name, "piece"))

    def _cut_along(self, tensor: Tensor, factored: Factored, axis: int, head: int) -> Tensor:
        """Cut off one head's part along an axis that begins with heads, then along all others."""
        lead = fx.leading(factored[axis])
        rest = factored[axis][len(lead) :]
        drops = not self.plan.form.keep_axes and not rest and tensor.dtype not in _NOT_UNPACKED
        parts = self._split(tensor, axis, fx.axis_size(lead), drops=drops)
        remaining = with_axis(factored, axis) if drops else with_axis(factored, axis, rest)
        return self._cut_off(parts[fx.index_among(lead, head)], remaining, head)

    def _part_of_constant(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """One head's part of a constant, by value."""
        shape = fx.piece_shape(factored, keep_axes=self.plan.form.keep_axes)
        factors = list(fx.all_factors(factored))
        apart = tensor.array().reshape([factor.size for factor in factors])
        index = tuple(factor.digit(head) if factor.stride else slice(None) for factor in factors)
        name = name_below(tensor.name, "piece")
        return self.assembly.constants.make(
            name, apart[index].reshape(shape), tensor.dtype, tensor.quantization
        )

    def _split(self, tensor: Tensor, axis: int, count: int, *, drops: bool) -> Sequence[Tensor]:
        """Cut the tensor into `count` parts along an axis, which is removed if `drops`."""
        key = (tensor, axis, count)
        if key in self._parts:
            return self._parts[key]
        make = self.assembly
        size = tensor.shape[axis] // count
        kept = () if drops else (size,)
        shape = with_axis(tensor.shape, axis, *kept)
        word = self._word(count)
        names = [name_below(tensor.name, f"{word}_{place}") for place in range(count)]
        parts = [make.tensor(name, shape, tensor) for name in names]
        self._parts[key] = parts
        if drops:
            make.emit("UNPACK", [tensor], *parts, num=count, axis=axis)
        elif tensor.dtype in SPLIT_TYPES:
            make.emit(
                "SPLIT", [make.integers("split/axis", axis), tensor], *parts, num_splits=count
            )
        else:
            for place, part in enumerate(parts):
                begins = np.zeros(len(shape))
                begins[axis] = place * size
                begin = make.integers(name_below(part.name, "begin"), begins)
                sizes = make.integers(name_below(part.name, "size"), shape)
                make.emit("SLICE", [tensor, begin, sizes], part)
        return parts


def _exposed(factored: Factored, axis: int) -> Factored:
    """The layout with one axis as two, so that the second begins with heads."""
    inner = next(place for place, factor in enumerate(factored[axis]) if factor.stride)
    return with_axis(factored, axis, factored[axis][:inner], factored[axis][inner:])
