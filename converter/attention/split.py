"""Builds the single-head version of an attention block aside; edits nothing.

Tensors that carry heads are cut where they come in, what is between is cloned per head, and the heads are joined
where the old graph had them side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Block
from edge_opt.attention.composite_rules import with_composites
from edge_opt.attention.cuts import Cutter
from edge_opt.attention.factors import Factored
from edge_opt.attention.form import Form
from edge_opt.attention.joins import join_heads
from edge_opt.attention.labelling import OperandFactors, output_index
from edge_opt.attention.plan import Plan, plan_split
from edge_opt.attention.rule import Labelled, OneHead, name_of_piece
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor, topological
from edge_opt.ir.region import read_outside, still_needed

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
    composites = form.position == "above" and form.composites
    operands = with_composites(model) if composites else block.operands
    plan = plan_split(subgraph, block, form, operands)
    assembly = Assembly(model, constants)
    builder = _Builder(
        block, form, operands, plan, assembly, Cutter(form, assembly, block.pieces, block.tiles)
    )
    pieces = []
    for head in range(block.pieces):
        pieces.append(builder.piece(block.output, block.factored, head))
        for other, factored in block.others:
            builder.piece(other, factored, head)
    join_heads(assembly, form, pieces, block.output, block.factored)
    assert block.output.producer is not None
    joined = [block.output]
    for tensor, factored in plan.labelled.items():
        if tensor is not block.output and read_outside(subgraph, tensor, plan.old):
            pieces = [builder.piece(tensor, factored, head) for head in range(block.pieces)]
            join_heads(assembly, form, pieces, tensor, factored)
            joined.append(tensor)
    old, new = topological(plan.old), assembly.finished(*joined)
    return old, [*still_needed(subgraph, old, block.output.producer, new, joined), *new]


@dataclass(eq=False)
class _Builder:
    """Builds what each head sees of a tensor; heads that see the same get the same tensor."""

    block: Block
    form: Form
    operands: OperandFactors
    plan: Plan
    assembly: Assembly
    cutter: Cutter
    _pieces: dict[tuple[Tensor, Factored, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def piece(self, tensor: Tensor, factored: Factored, head: int) -> Tensor:
        """What one head sees of a tensor."""
        if fx.is_shared(factored):
            return tensor
        key = (tensor, factored, fx.piece_key(factored, head))
        if key not in self._pieces:
            cut, operator = self.plan.cuts.get((tensor, factored)), tensor.producer
            if cut is None:
                assert operator is not None
                piece = self._emit(Labelled(operator, factored, output_index(tensor)), head, {})
            else:
                piece = self.cutter.piece(self.cutter.source(cut), cut.factored, head)
                for step in cut.steps:
                    if step.scales:
                        piece = self.cutter.scaled(step, piece, head)
                    else:
                        piece = self._emit(step.result, head, {step.operand: piece})
            self._pieces[key] = piece
        return self._pieces[key]

    def _emit(self, of: Labelled, head: int, known: Mapping[int, Tensor]) -> Tensor:
        """The operator for one head; `known`: that head's part of operands, where they are there already."""
        operands = self.operands.known(of.operator, of.factored, of.output)

        def piece(index: int) -> Tensor:
            return known.get(index) or self.piece(of.input(index), operands[index], head)

        name = name_of_piece(of, head, self.block.pieces, self.block.tiles)
        one = OneHead(self.assembly, of, head, piece, name, keep_axes=self.form.keep_axes)
        return self.operands.rules[of.operator.name].emit(one)
