"""Builds the single-head version of an attention block aside; edits nothing.

Tensors that carry heads are cut where they come in, what is between is cloned per head, and the heads are joined
where the old graph had them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_opt.attention import factors as fx
from edge_opt.attention.labelling import DEEPEST
from edge_opt.attention.rules import MOVEMENT, RULES, Transpose
from edge_opt.ir import DType, Operator, Tensor, topological
from edge_opt.ir.operators import options_table
from edge_opt.ir.versions import operator_version
from edge_opt.schema.table import Table, new_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.attention.block import Block
    from edge_opt.attention.factors import Factored
    from edge_opt.attention.form import Form
    from edge_opt.ir import Constants, Model, OperatorCode, Shape, Subgraph

_SCALABLE = frozenset({"MUL", "DIV"})


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the chain between a cut and the tensor that the block reads, for one head."""

    operator: Operator
    result: Factored
    operand: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a labelled tensor is cut: `source` with factors `factored`, then `steps` per head."""

    source: Tensor
    factored: Factored
    steps: tuple[Step, ...] = ()


def split_heads(
    model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
) -> tuple[list[Operator], list[Operator]]:
    """The operators of the block, and those that replace them (detached, in execution order).

    The new ones define `block.output` itself. Old operators whose results are needed outside are in both lists.
    """
    if form.cut == "unpack" and block.heads_are_rows:
        # Dropping the axis would leave a vector where BATCH_MATMUL needs a matrix.
        form = replace(form, cut="split")
    return _Splitter(model, subgraph, block, form, constants).build()


class _Splitter:
    def __init__(
        self, model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
    ) -> None:
        self._model = model
        self._subgraph = subgraph
        self.block = block
        self._form = form
        self.keep_axes = form.keep_axes
        self._constants = constants
        self._operands = block.operands
        self._old: dict[Operator, None] = {}
        self._new: list[Operator] = []
        self._pieces: dict[tuple[int, Factored, tuple[int, ...]], Tensor] = {}
        self._cut_pieces: dict[tuple[int, Factored, tuple[int, ...]], Tensor] = {}
        self._parts: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._cuts: dict[tuple[int, Factored], Cut] = {}
        self._costs: dict[tuple[int, Factored], int] = {}

    def build(self) -> tuple[list[Operator], list[Operator]]:
        output = self.block.output
        tensor, factored = self._merge_point()
        heads = [self.piece(tensor, factored, head) for head in range(self.block.heads)]
        self._join(heads, output)
        assert output.producer is not None
        self._old[output.producer] = None
        old = topological(self._old)
        kept = self._kept(old, output.producer)
        return old, [*kept, *self._new]

    def _kept(self, old: Sequence[Operator], replaced: Operator) -> list[Operator]:
        """Old operators whose results somebody outside reads, and the old ones that those need."""
        inside = set(old)
        needed: set[Operator] = set()
        read_anew = {id(tensor) for operator in self._new for tensor in operator.inputs}
        for operator in reversed(old):
            if operator is replaced:
                continue
            for tensor in operator.outputs:
                readers = tensor.consumers
                if (
                    id(tensor) in read_anew
                    or self._subgraph.is_output(tensor)
                    or any(reader not in inside or reader in needed for reader in readers)
                ):
                    needed.add(operator)
        return [operator for operator in old if operator in needed]

    # Joining

    def _merge_point(self) -> tuple[Tensor, Factored]:
        """The earliest tensor behind the value products from which a head reaches the output by reshaping only."""
        tensor, factored = self.block.output, self.block.factored
        best = (tensor, factored)
        passed: list[Operator] = []
        last = fx.plain((self.block.head_size,))[0]
        while True:
            operator = tensor.producer
            if operator is None or operator.name not in MOVEMENT:
                break
            rule = RULES[operator.name]
            operands = self._operands(operator, factored)
            if not isinstance(operands, dict):
                break
            if isinstance(rule, Transpose) and not rule.keeps_order(operator, factored):
                break
            tensor, factored = operator.input(0), operands[0]
            passed.append(operator)
            if factored[-1] == last:
                best = (tensor, factored)
                self._old.update(dict.fromkeys(passed))
                passed.clear()
        return best

    def _join(self, heads: list[Tensor], output: Tensor) -> None:
        rank = len(heads[0].shape)
        if self._form.cut == "unpack" and output.shape == (
            *heads[0].shape[:-1],
            len(heads),
            heads[0].shape[-1],
        ):
            options = new_table("PackOptions", values_count=len(heads), axis=rank - 1)
            self._emit("PACK", heads, [output], options)
            return
        joined = (*heads[0].shape[:-1], sum(head.shape[-1] for head in heads))
        options = new_table("ConcatenationOptions", axis=rank - 1)
        if joined == output.shape:
            self._emit("CONCATENATION", heads, [output], options)
            return
        side_by_side = self.new_tensor(f"{output.name}/heads", joined, output)
        self._emit("CONCATENATION", heads, [side_by_side], options)
        self._reshape_to(side_by_side, output)

    # Pieces

    def piece(self, tensor: Tensor, factored: Factored, head: int, depth: int = 0) -> Tensor:
        """What one head sees of a tensor; heads that see the same get the same tensor."""
        if fx.is_shared(factored):
            return tensor
        key = (id(tensor), factored, fx.piece_key(factored, head))
        known = self._pieces.get(key)
        if known is None:
            known = self._pieces[key] = self._make_piece(tensor, factored, head, depth)
        return known

    def _make_piece(self, tensor: Tensor, factored: Factored, head: int, depth: int) -> Tensor:
        operator = tensor.producer
        if operator is not None and self._passes(tensor, factored, depth):
            self._old[operator] = None
            return self._per_head(operator, factored, head, depth)
        cut = self._cut(tensor, factored)
        piece = self._cut_piece(cut.source, cut.factored, head)
        for step in cut.steps:
            self._old[step.operator] = None
            piece = self._step(step, piece, head)
        return piece

    def _per_head(self, operator: Operator, factored: Factored, head: int, depth: int) -> Tensor:
        operands = self._operands(operator, factored)
        assert isinstance(operands, dict)
        pieces = _Pieces(self, operator, operands, head, depth)
        builder = _HeadBuilder(self, factored, head)
        return RULES[operator.name].emit(builder, operator, factored, head, pieces)

    def _step(self, step: Step, piece: Tensor, head: int) -> Tensor:
        builder = _HeadBuilder(self, step.result, head)
        if step.operator.name in _SCALABLE:
            return builder.clone(step.operator, {step.operand: piece}, piece.shape)
        return RULES[step.operator.name].emit(builder, step.operator, step.result, head, {0: piece})

    def _passes(self, tensor: Tensor, factored: Factored, depth: int) -> bool:
        operator = tensor.producer
        if operator in self.block.core:
            return True
        return depth < DEEPEST and self._pass_cost(tensor, factored, depth) < self._cut_cost(tensor, factored)

    # Cost: how many operators it takes to have every head's piece.

    def _cost(self, tensor: Tensor, factored: Factored, depth: int) -> int:
        if fx.is_shared(factored):
            return 0
        key = (id(tensor), factored)
        if key not in self._costs:
            cut = self._cut_cost(tensor, factored)
            # A tensor can lead to itself only through operators, which a graph in execution order rules out.
            self._costs[key] = min(cut, self._pass_cost(tensor, factored, depth)) if depth < DEEPEST else cut
        return self._costs[key]

    def _cut_cost(self, tensor: Tensor, factored: Factored) -> int:
        if tensor.is_constant:
            return 0
        pieces = fx.piece_count(factored)
        if pieces == 1:
            return int(fx.piece_shape(factored, keep=self.keep_axes) != tensor.shape)
        return pieces * _levels(factored)

    def _pass_cost(self, tensor: Tensor, factored: Factored, depth: int) -> int:
        operator = tensor.producer
        operands = None if operator is None else self._operands(operator, factored)
        if operator is None or not isinstance(operands, dict):
            return 1 << 30
        rule = RULES[operator.name]
        own = 0 if rule.vanishes(operator, factored, keep=self.keep_axes) else fx.piece_count(factored)
        return own + sum(
            self._cost(operator.input(index), labelled, depth + 1) for index, labelled in operands.items()
        )

    # Cuts

    def _cut(self, tensor: Tensor, factored: Factored) -> Cut:
        key = (id(tensor), factored)
        if key not in self._cuts:
            self._cuts[key] = self._choose_cut(tensor, factored)
        return self._cuts[key]

    def _choose_cut(self, tensor: Tensor, factored: Factored) -> Cut:
        """Follow the chain of rearrangements and scalings above the tensor, and choose where on it to cut."""
        here = Cut(tensor, factored)
        if tensor.is_constant or fx.piece_count(factored) == 1:
            return here
        chain = list(self._chain(tensor, factored))
        scalings = [i for i, (step, _, _) in enumerate(chain) if step.operator.name in _SCALABLE]
        if self._form.position == "near":
            if not scalings or not self._form.sink:
                return here
            chain = chain[: scalings[-1] + 1]
        if not chain:
            return here
        chain.reverse()
        return self._cut_on(chain) or here

    def _chain(self, tensor: Tensor, factored: Factored) -> Iterator[tuple[Step, Tensor, Factored]]:
        """Upwards: (step, the tensor it reads, that tensor's factors), while nobody else reads what is between."""
        readers: set[Operator] = {*self.block.core, *self._old}
        for _ in range(DEEPEST):
            operator = tensor.producer
            outside = [reader for reader in tensor.consumers if reader not in readers]
            if operator is None or outside or self._subgraph.is_output(tensor):
                return
            operands = self._operands(operator, factored)
            if not isinstance(operands, dict):
                return
            carriers = [index for index, labelled in operands.items() if not fx.is_shared(labelled)]
            scaling = operator.name in _SCALABLE and _scales(operator, carriers)
            if operator.name not in MOVEMENT and not scaling:
                return
            step = Step(operator, factored, carriers[0])
            tensor, factored = operator.input(carriers[0]), operands[carriers[0]]
            readers = {operator}
            yield step, tensor, factored

    def _cut_on(self, chain: list[tuple[Step, Tensor, Factored]]) -> Cut | None:
        """Cut on a chain given from its top; rearrangements above the cut are made once, on the unscaled tensor."""
        _, source, factored = chain[0]
        places = [(0, factored)]
        for index, (step, _, _) in enumerate(chain):
            places.append((index + 1, step.result))
        usable = [(index, labelled) for index, labelled in places if self._cuttable(labelled)]
        if not usable:
            return None
        index, labelled = usable[0] if self._form.position == "far" else usable[-1]
        above = [step for step, _, _ in chain[:index]]
        # What stands above the first scaling stays as it is, outside the region.
        while above and above[0].operator.name not in _SCALABLE:
            source = above.pop(0).operator.outputs[0]
        moves = [step for step in above if step.operator.name not in _SCALABLE]
        source = self._moved(source, moves)
        self._old.update(dict.fromkeys(step.operator for step in above))
        sunk = [step for step in above if step.operator.name in _SCALABLE]
        return Cut(source, labelled, (*sunk, *(step for step, _, _ in chain[index:])))

    def _cuttable(self, factored: Factored) -> bool:
        axes = fx.labelled_axes(factored)
        if len(axes) != 1:
            return False
        axis = factored[axes[0]]
        if self._form.cut == "unpack":
            return all(factor.stride for factor in axis)
        return fx.take_outer(axis, fx.piece_count(factored)) is not None

    def _moved(self, source: Tensor, moves: Sequence[Step]) -> Tensor:
        """The rearrangements `moves` of another source; those that keep the row-major order become one RESHAPE."""
        for step in moves:
            operator, result = step.operator, step.operator.outputs[0]
            if _keeps_order(operator):
                continue
            read = self._unscaled(source, operator.input(0))
            source = self.new_tensor(f"{result.name}/unscaled", result.shape, source)
            self._new.append(
                Operator(
                    operator.code, (read, *operator.inputs[1:]), [source], operator.options, operator.table
                )
            )
        return self._unscaled(source, moves[-1].operator.outputs[0]) if moves else source

    def _unscaled(self, source: Tensor, like: Tensor) -> Tensor:
        return self.reshaped(source, source, like.shape, f"{like.name}/unscaled")

    def _cut_piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        key = (id(tensor), factored, fx.piece_key(factored, head))
        if key not in self._cut_pieces:
            self._cut_pieces[key] = self._make_cut(tensor, factored, head)
        return self._cut_pieces[key]

    def _make_cut(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        target = fx.piece_shape(factored, keep=self.keep_axes)
        if tensor.is_constant and tensor.dtype.numpy is not None:
            return self._constant_piece(tensor, factored, head, target)
        axes = fx.labelled_axes(factored)
        if not axes:
            return self.reshaped(tensor, tensor, target, f"{tensor.name}/squeezed")
        axis = axes[0]
        lead = _leading(factored[axis])
        if not lead:
            piece = self._cut_piece(*self._exposed(tensor, factored, axis), head)
            return self.reshaped(tensor, piece, target, f"{tensor.name}/piece")
        count = int(np.prod([factor.size for factor in lead]))
        rest = factored[axis][len(lead) :]
        drops = self._form.cut == "unpack" and not rest
        part = self._split(tensor, axis, count, drops=drops)[fx.mixed_index(lead, head)]
        remaining = (rest,) if not drops else ()
        piece = self._cut_piece_or_whole(part, (*factored[:axis], *remaining, *factored[axis + 1 :]), head)
        return self.reshaped(tensor, piece, target, f"{piece.name}/piece")

    def _cut_piece_or_whole(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        return tensor if fx.is_shared(factored) else self._cut_piece(tensor, factored, head)

    def _exposed(self, tensor: Tensor, factored: Factored, axis: int) -> tuple[Tensor, Factored]:
        """The tensor with an axis `(rows)(heads)` as two axes, so that the heads can be cut off."""
        inner = next(i for i, factor in enumerate(factored[axis]) if factor.stride)
        axes = (*factored[:axis], factored[axis][:inner], factored[axis][inner:], *factored[axis + 1 :])
        return self.reshaped(tensor, tensor, fx.sizes(axes), f"{tensor.name}/exposed"), axes

    def _split(self, tensor: Tensor, axis: int, count: int, *, drops: bool) -> tuple[Tensor, ...]:
        key = (id(tensor), axis, count)
        if key not in self._parts:
            part = "head" if count == self.block.heads else "group"
            size = tensor.shape[axis] // count
            between = () if drops else (size,)
            shape = (*tensor.shape[:axis], *between, *tensor.shape[axis + 1 :])
            parts = [
                self.new_tensor(
                    f"{tensor.name}/{part}_{i}", shape, tensor, axis=axis, begin=i * size, size=size
                )
                for i in range(count)
            ]
            if drops:
                options = new_table("UnpackOptions", num=count, axis=axis)
                self._emit("UNPACK", [tensor], parts, options)
            else:
                where = self._constants.make("split/axis", np.array(axis, np.int32), DType.INT32)
                self._emit("SPLIT", [where, tensor], parts, new_table("SplitOptions", num_splits=count))
            self._parts[key] = tuple(parts)
        return self._parts[key]

    def _constant_piece(self, tensor: Tensor, factored: Factored, head: int, target: Shape) -> Tensor:
        expanded = tensor.array().reshape([f.size for axis in factored for f in axis])
        index = tuple((f.index(head) if f.stride else slice(None)) for axis in factored for f in axis)
        values = np.ascontiguousarray(expanded[index]).reshape(target)
        # Per-axis parameters of a labelled axis would need slicing in step; no exporter writes such constants.
        return self._constants.make(f"{tensor.name}/piece", values, tensor.dtype, tensor.quantization)

    # Building blocks

    def new_tensor(
        self, name: str, shape: Shape, like: Tensor, *, axis: int | None = None, begin: int = 0, size: int = 0
    ) -> Tensor:
        """A tensor with the type and quantization of the one it is a part of."""
        quantization = like.quantization
        if quantization is not None and quantization.is_per_axis and axis == quantization.dimension:
            quantization = quantization.sliced(begin, size)
        return Tensor(name, shape, like.dtype, quantization=quantization)

    def clone(
        self, operator: Operator, inputs: Sequence[Tensor | None], output: Tensor, options: Table | None
    ) -> Tensor:
        """The operator again, reading and defining other tensors."""
        self._new.append(Operator(operator.code, inputs, [output], options, operator.table))
        return output

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""
        return self._constants.make(name, np.asarray(values, np.int32), DType.INT32)

    def reshaped(self, like: Tensor, source: Tensor, shape: Shape, name: str) -> Tensor:
        """`source` with another shape; itself where it has that already."""
        if source.shape == shape:
            return source
        return self._reshape_to(source, self.new_tensor(name, shape, like))

    def _reshape_to(self, source: Tensor, output: Tensor) -> Tensor:
        wanted = np.array(output.shape, np.int32)
        steering = self.integers(f"{output.name}/shape", wanted)
        self._emit("RESHAPE", [source, steering], [output], new_table("ReshapeOptions", new_shape=wanted))
        return output

    def _emit(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], options: Table) -> None:
        assert options.spec.name == options_table(name)
        data = inputs[-1] if name == "SPLIT" else inputs[0]
        self._new.append(Operator(self._code(name, data), inputs, outputs, options))

    def _code(self, name: str, data: Tensor) -> OperatorCode:
        return self._model.operator_code(name, operator_version(name, data.dtype, len(data.shape)))


class _Pieces(Mapping[int, Tensor]):
    """One head's part of each operand, made when asked for: a vanishing operator needs only one of them."""

    def __init__(
        self, splitter: _Splitter, operator: Operator, operands: Mapping[int, Factored], head: int, depth: int
    ) -> None:
        self._splitter = splitter
        self._operator = operator
        self._operands = operands
        self._head = head
        self._depth = depth

    def __getitem__(self, index: int) -> Tensor:
        tensor = self._operator.input(index)
        return self._splitter.piece(tensor, self._operands[index], self._head, self._depth + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self._operands)

    def __len__(self) -> int:
        return len(self._operands)


class _HeadBuilder:
    """What the rules see of the splitter, for one head."""

    def __init__(self, splitter: _Splitter, result: Factored, head: int) -> None:
        self._splitter = splitter
        self.keep_axes = splitter.keep_axes
        index = fx.mixed_index(fx.labels(result), head)
        whole = fx.piece_count(result) == splitter.block.heads
        self._suffix = f"head_{index}" if whole else f"group_{index}"

    def clone(
        self,
        operator: Operator,
        inputs: Mapping[int, Tensor],
        shape: Shape,
        options: Mapping[str, object] | None = None,
    ) -> Tensor:
        """The operator for this head."""
        table = operator.options
        if options and table is not None:
            table = Table(table.spec, dict(table.fields))
            for name, value in options.items():
                table.set(name, value)
        read = [inputs.get(i, tensor) for i, tensor in enumerate(operator.inputs)]
        like = operator.outputs[0]
        output = self._splitter.new_tensor(f"{like.name}/{self._suffix}", shape, like)
        return self._splitter.clone(operator, read, output, table)

    def integers(self, name: str, values: object) -> Tensor:
        """An int32 constant."""
        return self._splitter.integers(name, values)

    def reshape(self, like: Tensor, source: Tensor, shape: Shape) -> Tensor:
        """`source` as `shape`, or itself."""
        return self._splitter.reshaped(like, source, shape, f"{like.name}/{self._suffix}")


def _keeps_order(operator: Operator) -> bool:
    """True where a rearrangement is a reshape of the whole tensor."""
    rule = RULES[operator.name]
    whole = fx.plain(operator.outputs[0].shape)
    return not isinstance(rule, Transpose) or rule.keeps_order(operator, whole)


def _levels(factored: Factored) -> int:
    """How many operators after one another it takes to cut the heads apart."""
    levels = 0
    for axis in fx.labelled_axes(factored):
        levels += 1 if _leading(factored[axis]) else 2
    return levels


def _leading(axis: fx.Axis) -> tuple[fx.Factor, ...]:
    lead: list[fx.Factor] = []
    for factor in axis:
        if not factor.stride:
            break
        lead.append(factor)
    return tuple(lead)


def _scales(operator: Operator, carriers: Sequence[int]) -> bool:
    others = [t for i, t in enumerate(operator.inputs) if i not in carriers]
    scalar = all(t is not None and t.is_constant and t.elements == 1 for t in others)
    return len(carriers) == 1 and scalar and not operator.option("fused_activation_function")
