"""Operators that rewrites added more than once -> one of them, such as the cuts of a mask that all layers share."""

from collections.abc import Collection, Hashable

from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.walk import is_pure
from edge_opt.verification.audit import Audit, step_key


def merge_equal(graph: Subgraph, added: Collection[Operator], audit: Audit | None = None) -> None:
    """Merge `added` operators that do the same with the same tensors: readers get the first one's results.

    Operators that read state, draw random numbers, call a subgraph or define a result of the graph are never merged.
    """
    if not added:
        return
    chosen = set(added)
    first: dict[Hashable, Operator] = {}
    merged: dict[Tensor | None, Tensor] = {}
    for operator in graph.operators:
        # A reader comes later, so it is changed once, however many of its inputs are merged.
        if not merged.keys().isdisjoint(operator.inputs):
            graph.set_inputs(operator, [merged.get(tensor, tensor) for tensor in operator.inputs])
        is_result = any(map(graph.is_output, operator.outputs))
        if operator not in chosen or is_result or not is_pure(operator):
            continue
        twin = first.setdefault(step_key(operator), operator)
        if twin is operator:
            continue
        if audit is not None:
            audit.merge(operator, twin)
        merged.update(zip(operator.outputs, twin.outputs, strict=True))
    for tensor in merged:
        if tensor is not None and tensor.producer is not None:
            graph.remove(tensor.producer)
