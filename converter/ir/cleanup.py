"""Drops what a rewrite left unused: tensors, buffers, operator codes. What was unused before it came is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.ir.graph import Subgraph, Tensor
    from edge_opt.ir.model import Model


@dataclass(frozen=True, slots=True)
class Usage:
    """Tensors and buffers (by identity) that somebody refers to."""

    tensors: frozenset[int]
    buffers: frozenset[int]

    @classmethod
    def of(cls, model: Model) -> Usage:
        """What the model uses as it stands."""
        tensors = {id(t) for subgraph in model.subgraphs for t in _referenced(subgraph)}
        for signature in model.signatures:
            tensors.update(id(t) for t in (*signature.inputs.values(), *signature.outputs.values()))
        buffers = {id(t.buffer) for subgraph in model.subgraphs for t in subgraph.tensors if id(t) in tensors}
        buffers.update(id(entry.buffer) for entry in model.metadata)
        buffers.update(id(buffer) for buffer in model.metadata_buffers)
        return cls(frozenset(tensors), frozenset(buffers))


def _referenced(subgraph: Subgraph) -> Iterator[Tensor]:
    yield from subgraph.inputs
    yield from subgraph.outputs
    for operator in subgraph.operators:
        yield from (tensor for tensor in operator.inputs if tensor is not None)
        yield from operator.outputs
        yield from operator.intermediates


def remove_unused(model: Model, before: Usage) -> None:
    """Drop tensors and buffers that were used `before` and are not any more, and operator codes that nobody uses.

    Some readers refuse a model that merely lists an operator they don't know. Buffer 0 stays: it is the empty one.
    """
    now = Usage.of(model)
    for subgraph in model.subgraphs:
        subgraph.tensors = [
            tensor
            for tensor in subgraph.tensors
            if id(tensor) in now.tensors or id(tensor) not in before.tensors
        ]
    held = {id(tensor.buffer) for subgraph in model.subgraphs for tensor in subgraph.tensors}
    held |= now.buffers
    model.buffers[1:] = [
        buffer for buffer in model.buffers[1:] if id(buffer) in held or id(buffer) not in before.buffers
    ]
    codes = {id(operator.code) for subgraph in model.subgraphs for operator in subgraph.operators}
    model.operator_codes = [code for code in model.operator_codes if id(code) in codes]
