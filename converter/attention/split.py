"""Builds the single-head version of an attention block aside; edits nothing.

Tensors that carry heads are cut where they come in, what is between is cloned per head, and the heads are joined
where the old graph had them side by side.
"""

from collections.abc import Container, Mapping
from dataclasses import replace

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Block
from edge_opt.attention.composite_rules import with_composites
from edge_opt.attention.cuts import Cut, Cutter, levels
from edge_opt.attention.factors import Factored
from edge_opt.attention.form import Form
from edge_opt.attention.joins import join_heads
from edge_opt.attention.labelling import DEEPEST, OperandFactors, output_index
from edge_opt.attention.movement_rules import keeps_order
from edge_opt.attention.rule import Labelled, OneHead, name_of_piece
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor, topological
from edge_opt.ir.region import read_outside, still_needed

_OPERATOR = 4
_RESHAPE = 1
_NEVER = 1 << 30
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
    return _Splitter(model, subgraph, block, form, constants).build()


class _Splitter:
    def __init__(
        self, model: Model, subgraph: Subgraph, block: Block, form: Form, constants: Constants
    ) -> None:
        self._subgraph = subgraph
        self._block = block
        self._form = form
        self._operands = block.operands
        if form.position == "above" and form.composites:
            self._operands = with_composites(model)
        self._assembly = Assembly(model, constants)
        self._cutter = Cutter(subgraph, self._operands, form, self._assembly, block.pieces, block.tiles)
        self._old: dict[Operator, None] = {}
        self._pieces: dict[tuple[int, Factored, tuple[int, ...]], Tensor] = {}
        self._ways: dict[tuple[int, Factored], Cut | None] = {}
        self._costs: dict[tuple[int, Factored], int] = {}
        self._labelled: dict[Tensor, Factored] = {}
        self._reached: Container[int] = ()
        if form.position == "above":
            self._reached = above_the_core(subgraph, block, self._operands)

    def build(self) -> tuple[list[Operator], list[Operator]]:
        output, factored = self._block.output, self._block.factored
        heads = []
        for head in range(self._block.pieces):
            heads.append(self.piece(output, factored, head))
            for other, own in self._block.others:
                self.piece(other, own, head)
        join_heads(self._assembly, self._form, heads, output, factored)
        assert output.producer is not None
        old = topological(self._old)
        joined = [output]
        for tensor, own in self._labelled.items():
            if tensor is not output and read_outside(self._subgraph, tensor, self._old):
                pieces = [self.piece(tensor, own, head) for head in range(self._block.pieces)]
                join_heads(self._assembly, self._form, pieces, tensor, own)
                joined.append(tensor)
        new = self._assembly.finished(*joined)
        return old, [*still_needed(self._subgraph, old, output.producer, new, joined), *new]

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
        cut, operator = self._way(tensor, factored, depth), tensor.producer
        if cut is None:
            assert operator is not None
            self._old[operator] = None
            if operator in self._block.core and fx.piece_count(factored) == self._block.pieces:
                self._labelled.setdefault(tensor, factored)
            return self._emit(Labelled(operator, factored, output_index(tensor)), head, depth, {})
        self._old.update(dict.fromkeys(cut.above))
        piece = self._cutter.piece(cut.source, cut.factored, head)
        for step in cut.steps:
            self._old[step.result.operator] = None
            if step.scales:
                piece = self._cutter.scaled(step, piece, head)
            else:
                piece = self._emit(step.result, head, depth, {step.operand: piece})
        return piece

    def _emit(self, of: Labelled, head: int, depth: int, known: Mapping[int, Tensor]) -> Tensor:
        """The operator for one head; `known`: that head's part of operands, where they are there already."""
        operands = self._operands.known(of.operator, of.factored, of.output)

        def piece(index: int) -> Tensor:
            return known.get(index) or self.piece(of.input(index), operands[index], head, depth + 1)

        name = name_of_piece(of, head, self._block.pieces, self._block.tiles)
        one = OneHead(self._assembly, of, head, piece, name, keep_axes=self._form.keep_axes)
        return self._operands.rules[of.operator.name].emit(one)

    def _way(self, tensor: Tensor, factored: Factored, depth: int) -> Cut | None:
        """Where a tensor is cut; None where it is made anew for each head. The same for all heads."""
        key = (id(tensor), factored)
        if key not in self._ways:
            # Once: what the first head needed is known to be ours only when the second one asks.
            if self._passes(tensor, factored, depth):
                self._ways[key] = None
            else:
                self._ways[key] = self._cutter.choose(tensor, factored, {*self._block.core, *self._old})
        return self._ways[key]

    def _passes(self, tensor: Tensor, factored: Factored, depth: int) -> bool:
        if tensor.producer in self._block.core:
            return True
        if depth >= DEEPEST:
            return False
        if id(tensor) in self._reached:
            return True
        return self._pass_cost(tensor, factored, depth) < self._cut_cost(tensor, factored)

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
            same = fx.piece_shape(factored, keep=self._form.keep_axes) == tensor.shape
            return 0 if same else _RESHAPE
        return _OPERATOR * pieces * levels(factored)

    def _pass_cost(self, tensor: Tensor, factored: Factored, depth: int) -> int:
        operator = tensor.producer
        operands = self._operands.of(tensor, factored)
        if operator is None or not isinstance(operands, dict):
            return _NEVER
        of = Labelled(operator, factored, output_index(tensor))
        # A mask that is repeated for the heads by a CONCATENATION is read several times and cut once.
        read = {(operator.input(index), labelled) for index, labelled in operands.items()}
        return self._own_cost(of) + sum(self._cost(source, labelled, depth + 1) for source, labelled in read)

    def _own_cost(self, of: Labelled) -> int:
        rule = self._operands.rules[of.operator.name]
        if rule.vanishes(of, keep=self._form.keep_axes):
            return 0
        reshapes = of.operator.name in MOVEMENT and keeps_order(of)
        return fx.piece_count(of.factored) * (_RESHAPE if reshapes else _OPERATOR)


# How far above an attention its heads can be told apart


def above_the_core(subgraph: Subgraph, block: Block, operands: OperandFactors) -> set[int]:
    """Tensors (by identity) above the block's core that every head can have for itself.

    Heads differ in such a tensor, and whatever reads it is done per head: nothing is computed twice. What the graph's
    caller or operators outside read is cut where it is.
    """
    reach = _Reach(subgraph, operands, {*block.core})
    reach.climb(reach.edges(block))
    return reach.found


class _Reach:
    def __init__(self, subgraph: Subgraph, operands: OperandFactors, replaced: set[Operator]) -> None:
        self.found: set[int] = set()
        self._subgraph = subgraph
        self._operands = operands
        self._replaced = replaced
        self._labels: dict[int, Factored | None] = {}

    def edges(self, block: Block) -> list[Tensor]:
        """What the core reads of heads from outside."""
        found: list[Tensor] = []
        top = [(block.output, block.factored)]
        for tensor, factored, ends in self._operands.upwards(
            top, lambda tensor, _: tensor.producer in block.core
        ):
            if ends:
                self._demand(tensor, factored)
                found.append(tensor)
        return found

    def climb(self, pending: list[Tensor]) -> None:
        """Take in whatever makes one of these tensors and can be done per head, and then what that reads."""
        while pending:
            operator = pending.pop().producer
            if operator is None or operator in self._replaced:
                continue
            read = self._read_per_head(operator)
            if read is None:
                continue
            self._replaced.add(operator)
            self.found.update(id(output) for output in operator.outputs)
            for source, own in read:
                self._demand(source, own)
            # A tensor that is read several times gets its turn with the last of its readers.
            pending.extend(source for source, _ in read)

    def _demand(self, tensor: Tensor, factored: Factored) -> None:
        own = fx.canonical(factored)
        if self._labels.setdefault(id(tensor), own) != own:
            self._labels[id(tensor)] = None

    def _read_per_head(self, operator: Operator) -> list[tuple[Tensor, Factored]] | None:
        """What one head's operator reads; None where it cannot be done per head, or is needed whole as well."""
        read: list[tuple[Tensor, Factored]] = []
        for tensor in operator.outputs:
            if not tensor.consumers and not self._subgraph.is_output(tensor):
                continue
            factored = self._labels.get(id(tensor))
            if factored is None or fx.piece_count(factored) == 1 or self._needed_whole(tensor):
                return None
            operands = self._operands(operator, factored, output_index(tensor))
            if not isinstance(operands, dict):
                return None
            read.extend((operator.input(index), own) for index, own in operands.items())
        return read

    def _needed_whole(self, tensor: Tensor) -> bool:
        per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
        return per_axis or read_outside(self._subgraph, tensor, self._replaced)
