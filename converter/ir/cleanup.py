"""Edits of a whole model that change no number: what rewrites left unused is removed.

What was unused before a rewrite stays. Readers that know older files only find weights and operators where they look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from edge_opt.base.errors import UsageError
from edge_opt.ir.graph import Buffer, OperatorCode, Subgraph, Tensor, used_tensors
from edge_opt.ir.model import Model, deprecated_code
from edge_opt.ir.walk import called_by, renumbered
from edge_opt.schema.data import Data

CONTROL_EDGES: Final = "model_control_dependencies"
"""The metadata entry that says which operators of each subgraph have to wait for which others."""

Part = Tensor | Buffer | Subgraph


def parts_in_use(model: Model) -> set[Part]:
    """The tensors, buffers and subgraphs that something refers to."""
    parts: set[Part] = {*called(model)}
    for graph in model.subgraphs:
        parts.update(used_tensors(graph))
    for signature in model.signatures:
        parts.update((*signature.inputs.values(), *signature.outputs.values()))
    tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors if tensor in parts)
    buffers = {*(tensor.buffer for tensor in tensors if tensor.buffer), *model.metadata_buffers}
    return parts.union(buffers, (entry.buffer for entry in model.metadata))


def called(model: Model, roots: Iterable[Subgraph] = ()) -> set[Subgraph]:
    """The given subgraphs, by default the entry points, and those that can be reached from them."""
    graphs = {*roots} or {*model.subgraphs[:1], *(graph for _, graph in model.entry_points())}
    return graphs.union(called_by((op for graph in graphs for op in graph.operators), model.subgraphs))


def remove_unused(model: Model, before: Collection[Part]) -> None:
    """Drop what was in use `before` and is not any more, and operator codes that nobody uses.

    Some readers refuse a model that merely lists an operator they don't know.
    """
    needed = called(model)
    _renumber(model, [graph for graph in model.subgraphs if graph in needed or graph not in before])
    now = parts_in_use(model)
    for graph in model.subgraphs:
        # The scales of blockwise weights are named by their places, which have to stay what they are.
        if not any(tensor.is_blockwise for tensor in graph.tensors):
            graph.tensors = [tensor for tensor in graph.tensors if tensor in now or tensor not in before]
    held = now.union(tensor.buffer for graph in model.subgraphs for tensor in graph.tensors if tensor.buffer)
    model.buffers[1:] = [buffer for buffer in model.buffers[1:] if buffer in held or buffer not in before]
    codes = {operator.code for graph in model.subgraphs for operator in graph.operators}
    model.operator_codes = [code for code in model.operator_codes if code in codes]


def remove_uncalled(model: Model, listed: int) -> None:
    """Drop subgraphs behind the first `listed` that nothing calls: those of rewrites that were reverted."""
    if len(model.subgraphs) > listed:
        needed = called(model, model.subgraphs[:listed])
        _renumber(model, [graph for graph in model.subgraphs if graph in needed])


def _renumber(model: Model, kept: list[Subgraph]) -> None:
    """Keep these subgraphs alone, in this order; operators that call them get their new places."""
    if kept != model.subgraphs and any(entry.name == CONTROL_EDGES for entry in model.metadata):
        raise UsageError(
            f"the model orders operators by their place (metadata {CONTROL_EDGES}), so its subgraphs cannot be moved"
        )
    index = {graph: place for place, graph in enumerate(model.subgraphs)}
    places = {index[graph]: place for place, graph in enumerate(kept)}
    model.subgraphs[:] = kept
    for operator in (operator for graph in kept for operator in graph.operators):
        operator.options = renumbered(operator.options, places)


def name_apart(model: Model, old: Sequence[Tensor]) -> None:
    """Give tensors that are not among the `old` ones names that no other of the model has.

    ai-edge-quantizer tells tensors apart by name alone, in all subgraphs together, and refuses a model where it cannot.
    """
    kept = set(old)
    taken = {tensor.name for tensor in old}
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors if tensor not in kept):
        name, count = tensor.name, 1
        while tensor.name in taken:
            count += 1
            tensor.name = f"{name}_{count}"
        taken.add(tensor.name)


def external_weights(model: Model) -> list[Buffer]:
    """Weights that are stored after the flatbuffer, where `Buffer.offset` says."""
    return [buffer for buffer in model.buffers if buffer.data is not None and buffer.data.external]


def new_codes(model: Model) -> list[OperatorCode]:
    """Kinds of operators that the deprecated field does not have."""
    field = "deprecated_builtin_code"
    return [
        code for code in model.operator_codes if code.table and code.table.get(field) != deprecated_code(code)
    ]


def take_weights_inside(model: Model) -> bool:
    """Have all weights written inside the flatbuffer, as long as it stays under 2 GB; whether any was not."""
    outside = external_weights(model)
    for buffer in outside:
        data = buffer.data
        if data is not None and data.source is not None:
            buffer.data = Data.region(data.source, data.offset, data.length, external=False)
            buffer.table = None
    return bool(outside)


def fill_old_codes(model: Model) -> bool:
    """Have each operator's kind written in the deprecated field, too; whether any was not."""
    codes = new_codes(model)
    model.operator_codes = [replace(one, table=None) if one in codes else one for one in model.operator_codes]
    return bool(codes)
