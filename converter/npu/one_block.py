"""Cuts one layer around an attention block out of a model, with its real shapes and weights; edits nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_opt.attention.block import Block, find_blocks
from edge_opt.attention.working_set import working_set
from edge_opt.ir import Model, Signature
from edge_opt.ir.extract import cut_out
from edge_opt.ir.region import reads
from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_opt.ir import Operator, Subgraph, Tensor


@dataclass(frozen=True, slots=True)
class OneBlock:
    """A layer as a model of its own, with one signature, and the attention in it as it is in the whole model."""

    signature: str
    model: Model
    attention: Block
    blocks: int


def cut_block(model: Model, signature: str | None = None, *, blocks: int = 1) -> OneBlock:
    """One layer, or several in a row: from where the attention before them ends to the projection of their own result.

    Of the entry point with the largest attention, or of the one that is named; from the middle of it, since the first
    and the last layers may miss something.

    Raises:
        UsageError: there is no such entry point, or it holds no multi-head attention.
    """
    found = {name: list(_matched(graph)) for name, graph in model.entry_points()}
    if signature is not None and signature not in found:
        raise UsageError(f"signature '{signature}' does not exist, there are: {', '.join(found)}")
    wanted = [signature] if signature is not None else list(found)
    sizes = {name: max(map(working_set, found[name]), default=0) for name in wanted}
    chosen = max(sizes, key=lambda name: sizes[name])
    if not found[chosen]:
        place = f"signature '{signature}'" if signature is not None else "the model"
        raise UsageError(f"{place} holds no multi-head attention to tune for: see `edge-opt explain`")
    graph = dict(model.entry_points())[chosen]
    largest = [i for i, block in enumerate(found[chosen]) if working_set(block) == sizes[chosen]]
    first = min(largest[len(largest) // 2], max(len(found[chosen]) - blocks, 0))
    part = found[chosen][first : first + blocks]
    before = found[chosen][first - 1] if first else None
    return OneBlock(chosen, _layer(model, graph, chosen, part, before), part[0], len(part))


def _matched(graph: Subgraph) -> Iterable[Block]:
    return (match for match in find_blocks(graph) if isinstance(match, Block))


def _layer(model: Model, graph: Subgraph, name: str, blocks: Sequence[Block], before: Block | None) -> Model:
    last = blocks[-1].output
    ends = [last, *(op.outputs[0] for op in last.consumers if op.name == "FULLY_CONNECTED")]
    known = set() if before is None else _ancestors([before.output])
    inside = _ancestors(ends) - known
    operators = [operator for operator in graph.operators if operator in inside]
    inputs = [tensor for tensor in reads(operators) if not tensor.is_constant]
    outputs = [
        tensor
        for operator in operators
        for tensor in operator.outputs
        if graph.is_output(tensor) or any(tensor is end for end in ends)
    ]
    cut = cut_out(model, operators, inputs, outputs)
    layer = cut.subgraphs[0]
    cut.signatures.append(
        Signature(
            name,
            layer,
            {f"input_{i}": tensor for i, tensor in enumerate(layer.inputs)},
            {f"output_{i}": tensor for i, tensor in enumerate(layer.outputs)},
        )
    )
    return cut


def _ancestors(tensors: Iterable[Tensor]) -> set[Operator]:
    """All operators that the tensors are made by."""
    found: set[Operator] = set()
    pending = [tensor.producer for tensor in tensors]
    while pending:
        operator = pending.pop()
        if operator is not None and operator not in found:
            found.add(operator)
            pending.extend(tensor.producer for tensor in operator.inputs if tensor is not None)
    return found
