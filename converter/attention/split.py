"""Splits an attention block: plans cuts and builds the single-head version; does not edit the graph.

Incoming tensors that carry heads are cut, the operators in between are cloned per head, and the heads are joined where
the old graph had them side by side. The plan depends on the graph alone, not on the order of building.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Block, Form
from edge_opt.attention.composites import Composite
from edge_opt.attention.factors import Factored
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import DEEPEST, OperandFactors
from edge_opt.attention.rules import MOVEMENT, RULES
from edge_opt.base.words import name_below
from edge_opt.ir import Constants, DType, Model, Operator, Shape, Subgraph, Tensor, topological
from edge_opt.ir.composites import COMPOSITE
from edge_opt.ir.walk import read_outside

# Types that the runtime's kernels support (LiteRT, kernels/split.cc and unpack.cc); others use SLICE, or SPLIT.
SPLIT_TYPES = frozenset({DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})
_NOT_UNPACKED = frozenset({DType.INT64, DType.BFLOAT16, DType.INT4})


def split_heads(
    model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
) -> tuple[list[Operator], list[Operator]]:
    """The operators of the block, and those that replace them (detached, in execution order).

    The new ones define `block.output` and all other tensors of the block that are read outside, with heads joined.
    """
    matrices = [axis for own in block.logits.values() for axis in own[-2:] if axis]
    flat = any(len(fx.piece_axes(own, keep=False)) < 3 for own in block.logits.values())
    if not form.keep and (flat or block.tiles > 1 or any(map(fx.only_labels, matrices))):
        # Dropping the axis would leave BATCH_MATMUL no batch, or a vector; tiles of rows have no axis to drop.
        form = replace(form, keep=True)
    operands = block.operands
    if form.above and form.composites:
        operands = OperandFactors({**RULES, COMPOSITE: Composite(model)})
    plan, assembly = _Planner(subgraph, block, form, operands), Assembly(model, constants)
    splitter = _Splitter(assembly, plan)
    joined = {block.output: Labelled(block.output, block.factored, form.keep)}
    for tensor, of in plan.labelled.items():
        if read_outside(subgraph, tensor, plan.old):
            joined.setdefault(tensor, of)
    for tensor, of in joined.items():
        pieces = [splitter.piece(of, head) for head in range(block.pieces)]
        join_heads(assembly, form, pieces, tensor, of.factored)
    return topological(plan.old), assembly.finished(*joined)


@dataclass(eq=False)
class _Planner:
    """Decides which operators are made per head, and which tensors that enter the block are cut.

    `cuts` has the tensors that are cut, each with the steps from the tensor that is cut instead down to it: first all
    rearrangements, once for all heads, then the scalings of each part. All other tensors that carry heads are made per
    head. `old` are the operators that the heads' operators replace, `labelled` the results of the core whose pieces
    differ between all heads.
    """

    subgraph: Subgraph
    block: Block
    form: Form
    operands: OperandFactors
    cuts: dict[Labelled, tuple[Labelled, ...]] = field(default_factory=dict)
    old: dict[Operator, None] = field(default_factory=dict)
    labelled: dict[Tensor, Labelled] = field(default_factory=dict)
    # Layouts of heads in results of operators that are not visited yet, and the depth of these operators.
    _reads: dict[Tensor, dict[Labelled, None]] = field(default_factory=dict)
    _waiting: dict[Operator, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Go up from the merged heads to the tensors that are cut, each after all its readers; then place the cuts."""
        self._read(Labelled(self.block.output, self.block.factored, self.form.keep), 0)
        for operator in reversed(self.subgraph.operators):
            if operator in self._waiting:
                self._decide(operator, self._waiting.pop(operator))
            if not self._waiting:
                break
        replaced, cut = {*self.block.core, *self.old}, list(self.cuts)
        self.cuts.clear()
        for of in cut:
            self._place(of, replaced)

    def _read(self, of: Labelled, depth: int) -> None:
        operator = of.tensor.producer
        if operator is None:
            self.cuts[of] = (of,)
        elif not fx.is_shared(of.factored):
            self._reads.setdefault(of.tensor, {})[of] = None
            self._waiting[operator] = max(depth, self._waiting.get(operator, 0))

    def _decide(self, operator: Operator, depth: int) -> None:
        """Make an operator per head if it is in the core, vanishes or can be made alone; otherwise cut its results."""
        in_core = operator in self.block.core
        alone = self.form.above and depth < DEEPEST and self._is_made_alone(operator)
        for of in (of for tensor in operator.outputs for of in self._reads.pop(tensor, ())):
            vanishes = not self._is_free(of) and self._vanishes(of, DEEPEST)
            if not (in_core or alone or vanishes):
                self.cuts[of] = (of,)
                continue
            self.old[operator] = None
            if in_core and of.pieces == self.block.pieces:
                self.labelled.setdefault(of.tensor, of)
            for operand in self._read_in_part(of):
                self._read(operand, depth + 1)

    def _read_in_part(self, of: Labelled) -> list[Labelled]:
        """Operands of which a head reads a part, or the whole with fewer axes."""
        rule = self.operands.rules[of.operator.name]
        return [one for one in self.operands.above(of).values() if not rule.is_read_whole(of, one)]

    def _is_made_alone(self, operator: Operator) -> bool:
        """True if each head can have its own operator without computing anything twice.

        This requires results that differ between heads and are read only per head. Results that are graph outputs or
        read outside are cut instead.
        """
        for tensor in operator.outputs:
            if not tensor.consumers and not self.subgraph.is_output(tensor):
                continue
            layouts = {fx.canonical(of.factored): of for of in self._reads.get(tensor, ())}
            if len(layouts) != 1 or read_outside(self.subgraph, tensor, self.old):
                return False
            (of,) = layouts.values()
            if of.pieces == 1 or not self.operands.above(of):
                return False
        return True

    def _is_free(self, of: Labelled) -> bool:
        """True if cutting takes no operator."""
        if fx.is_shared(of.factored) or of.tensor.is_constant:
            return True
        return of.pieces == 1 and of.piece_shape == of.tensor.shape

    def _vanishes(self, of: Labelled, depth: int) -> bool:
        """True if the operator only repeats or joins for the heads, or moves such a result, so nothing is left."""
        if self._is_free(of):
            return True
        operands = self.operands.above(of)
        if not operands or not depth:
            return False
        passes = self.operands.rules[of.operator.name].passed_on(of, 0) is not None
        above = operands.values() if of.operator.name in MOVEMENT else ()
        return passes and all(self._vanishes(operand, depth - 1) for operand in above)

    def _place(self, cut: Labelled, replaced: Container[Operator]) -> None:
        """Cut an incoming tensor, or one above it that only operators of the rewrite read.

        SPLIT cuts the nearest tensor whose heads are one run of steps, and moves scalings above it into each head;
        UNPACK cuts the farthest.
        """
        chain = list(self._chain(cut, replaced))
        usable = [place for place, of in enumerate(chain) if self._can_be_cut(of.factored)] or [0]
        place = usable[0 if self.form.keep else -1]
        scalings = [i for i, of in enumerate(chain[:-1]) if i >= place and of.operator.name not in MOVEMENT]
        top = scalings[-1] + 1 if scalings and self.form.keep and self.block.heads > 1 else place
        self.cuts[chain[place]] = tuple(reversed(chain[place : top + 1]))
        self.old.update(dict.fromkeys(of.operator for of in chain[:top]))
        # Scalars beside the chain: a head without the axes of the heads needs them without these axes, too.
        beside = [
            operand for of in chain[:place] for operand in self._read_in_part(of) if operand.pieces == 1
        ]
        self.cuts.update((operand, (operand,)) for operand in beside)

    def _chain(self, of: Labelled, readers: Container[Operator]) -> Iterator[Labelled]:
        """A tensor and those above it, through rearrangements and scalings, while nothing else reads them."""
        for _ in range(DEEPEST):
            yield of
            carriers = [operand for operand in self.operands.above(of).values() if operand.pieces > 1]
            if len(carriers) != 1 or read_outside(self.subgraph, of.tensor, readers):
                return
            if of.operator.name not in MOVEMENT and not _scales(of.operator):
                return
            readers = {of.operator}
            (of,) = carriers

    def _can_be_cut(self, factored: Factored) -> bool:
        """True if one axis begins with all the heads and, for UNPACK, holds nothing else."""
        axes = (axis for axis in filter(fx.tells_heads, factored) if self.form.keep or fx.only_labels(axis))
        return any(fx.labels((fx.leading(axis),)) == fx.labels(factored) for axis in axes)


def _scales(operator: Operator) -> bool:
    """True for a multiplication or division of a whole tensor and a scalar."""
    whole = [t for t in operator.inputs if t is not None and not (t.has_numbers and t.elements == 1)]
    return operator.name in ("MUL", "DIV") and [t.shape for t in whole] == [operator.output.shape]


@dataclass(eq=False)
class _Splitter:
    """Builds each head's piece of a tensor; heads that see the same piece share one tensor."""

    assembly: Assembly
    plan: _Planner
    _pieces: dict[tuple[Labelled, int], Tensor] = field(default_factory=dict)
    _sources: dict[tuple[Labelled, ...], Tensor] = field(default_factory=dict)
    _parts: dict[tuple[Tensor, int, int], tuple[Tensor, ...]] = field(default_factory=dict)

    def piece(self, of: Labelled, head: int) -> Tensor:
        """One head's piece of a tensor."""
        if fx.is_shared(of.factored):
            return of.tensor
        key = (of, fx.piece_index(of.factored, head))
        if key not in self._pieces:
            self._pieces[key] = self._made(of, head)
        return self._pieces[key]

    def _made(self, of: Labelled, head: int) -> Tensor:
        cut, name = self.plan.cuts.get(of), self._name(of.factored, head)
        if cut is None:
            make = partial(self.piece, head=head)
            return self.plan.operands.made(of, head, self.assembly, make, name)
        piece = self._cut_off(self._source(cut), of.factored, head)
        for operator in (step.operator for step in cut[1:] if step.operator.name not in MOVEMENT):
            read = [t and (self._scalar(t, piece) if t.elements == 1 else piece) for t in operator.inputs]
            (piece,) = self.assembly.again(operator, read, name, [piece.shape], operator.options)
        return piece

    def _scalar(self, tensor: Tensor, piece: Tensor) -> Tensor:
        """A constant with one element, with no more axes than the piece that it scales."""
        if len(tensor.shape) <= len(piece.shape):
            return tensor
        return self._part_of_constant(tensor, (), 0)

    def _word(self, count: int) -> str:
        """The name for a part of a tensor with `count` different parts."""
        if count < self.plan.block.pieces:
            return "group"
        return "head" if self.plan.block.tiles == 1 else "piece"

    def _name(self, factored: Factored, head: int) -> str:
        """The suffix for a head's part of a tensor: `head_1`, or `group_1` if several heads see the same."""
        count = fx.piece_count(factored)
        return f"{self._word(count)}_{fx.piece_index(factored, head)}" if count > 1 else "shared"

    def _source(self, cut: tuple[Labelled, ...]) -> Tensor:
        """The tensor to cut, rearranged; steps that keep the order are merged into one RESHAPE."""
        if cut not in self._sources:
            source, make = cut[0].tensor, self.assembly
            for step in (step for step in cut[1:] if step.operator.name in MOVEMENT):
                name, shape = name_below(step.tensor.name, "unscaled"), step.tensor.shape
                whole = Labelled(step.tensor, fx.plain(shape))
                if RULES[step.operator.name].passed_on(whole, 0) is not None:
                    source = make.reshaped(source, shape, name)
                else:
                    read = [source, *step.operator.inputs[1:]]
                    source = make.copy(step.operator, read, make.tensor(name, shape, source))
            self._sources[cut] = source
        return self._sources[cut]

    def _cut_off(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """Cut off one head's part of a tensor."""
        target = fx.piece_shape(factored, keep=self.plan.form.keep)
        axes = fx.labelled_axes(factored)
        if target == tensor.shape:
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
        drops = not self.plan.form.keep and not rest and tensor.dtype not in _NOT_UNPACKED
        parts = self._split(tensor, axis, fx.sizes((lead,))[0], drops=drops)
        remaining = (*factored[:axis], *(() if drops else (rest,)), *factored[axis + 1 :])
        piece = self._cut_off(parts[fx.mixed_index(lead, head)], remaining, head)
        return self.assembly.reshaped(piece, target, name_below(piece.name, "piece"))

    def _part_of_constant(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """One head's part of a constant, by value."""
        expanded = tensor.array().reshape([f.size for axis in factored for f in axis])
        index = tuple(f.digit(head) if f.stride else slice(None) for axis in factored for f in axis)
        values = expanded[index].reshape(fx.piece_shape(factored, keep=self.plan.form.keep))
        make, name = self.assembly.constants.make, name_below(tensor.name, "piece")
        return make(
            name, values, tensor.dtype, Labelled(tensor, factored, self.plan.form.keep).piece_quantization()
        )

    def _split(self, tensor: Tensor, axis: int, count: int, *, drops: bool) -> tuple[Tensor, ...]:
        """Cut the tensor into `count` parts along an axis, which is removed if `drops`."""
        key, make = (tensor, axis, count), self.assembly
        if key in self._parts:
            return self._parts[key]
        size = tensor.shape[axis] // count
        shape = (*tensor.shape[:axis], *(() if drops else (size,)), *tensor.shape[axis + 1 :])
        names = [name_below(tensor.name, f"{self._word(count)}_{i}") for i in range(count)]
        parts = self._parts[key] = tuple(make.tensor(name, shape, tensor) for name in names)
        if drops:
            make.emit("UNPACK", [tensor], *parts, num=count, axis=axis)
        elif tensor.dtype in SPLIT_TYPES:
            make.emit("SPLIT", [make.integers("split/axis", axis), tensor], *parts, num_splits=count)
        else:
            for index, part in enumerate(parts):
                begins = [index * size if i == axis else 0 for i in range(len(shape))]
                begin = make.integers(name_below(part.name, "begin"), begins)
                make.emit("SLICE", [tensor, begin, make.integers(name_below(part.name, "size"), shape)], part)
        return parts


def join_heads(
    assembly: Assembly, form: Form, heads: Sequence[Tensor], output: Tensor, factored: Factored
) -> None:
    """Define `output`, in which heads lie as in `factored`, from the pieces of all heads.

    `[.., (N)(H)]` is one CONCATENATION along H; separate labels, as in `[B, (K), H, (G)(T)]` need one each: first along
    T for every k, then along K.
    """
    tensors = dict(enumerate(heads))
    factors = fx.merge_neighbours(factor for axis in factored for factor in axis)
    labelled = [place for place, factor in enumerate(factors) if factor.stride]
    for place in reversed(labelled):
        factor = factors[place]
        front = math.prod(before.size for before in factors[:place] if not before.stride)
        groups: dict[int, list[Tensor]] = {}  # the pieces that differ only in this digit of the head
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
    """Join the parts along an axis after `front` elements; with `last`, into `output` itself.

    If possible, the joined tensor is reshaped instead of every part.
    """
    sources = [assembly.source(part) for part in parts]
    if _places(sources[0].shape, front):
        parts = sources
    elif not _places(parts[0].shape, front):
        flat = (front, parts[0].elements // front)
        parts = [assembly.reshaped(part, flat, name_below(part.name, "flat")) for part in parts]
    shape, count = parts[0].shape, len(parts)
    places = _places(shape, front)
    if last and not form.keep and output.dtype in SPLIT_TYPES:
        for axis in places:
            if output.shape == (*shape[:axis], count, *shape[axis:]):
                return assembly.emit("PACK", parts, output, values_count=count, axis=axis)
    joined = {axis: (*shape[:axis], shape[axis] * count, *shape[axis + 1 :]) for axis in places}
    axis = next((axis for axis, sizes in joined.items() if sizes == output.shape), max(joined))
    if last and joined[axis] == output.shape:
        return assembly.emit("CONCATENATION", parts, output, axis=axis)
    made = assembly.tensor(name_below(output.name, "heads"), joined[axis], output)
    assembly.emit("CONCATENATION", parts, made, axis=axis)
    return assembly.reshape_to(made, output) if last else made


def _places(shape: Shape, front: int) -> list[int]:
    """Axes with `front` elements before them, along which parts can be joined."""
    return [axis for axis in range(len(shape)) if math.prod(shape[:axis]) == front]
