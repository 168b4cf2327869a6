"""Cleanup that does not change results: remove what rewrites left unused, and store data where older readers look.

Anything unused before a rewrite stays.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from edge_opt.base.errors import UsageError
from edge_opt.base.words import UniqueNames
from edge_opt.ir.graph import Buffer, OperatorCode, Subgraph, Tensor, used_tensors
from edge_opt.ir.model import Model, deprecated_code
from edge_opt.ir.walk import called_by, renumbered
from edge_opt.schema.data import Data

CONTROL_EDGES = "model_control_dependencies"
"""The metadata entry with execution-order constraints between a subgraph's operators."""

ModelPart = Tensor | Buffer | Subgraph
_ModelPart = TypeVar("_ModelPart", Tensor, Buffer, Subgraph)


def parts_in_use(model: Model) -> set[ModelPart]:
    """The referenced tensors, buffers and subgraphs."""
    parts: set[ModelPart] = {*called(model)}
    for graph in model.subgraphs:
        parts.update(used_tensors(graph))
    for signature in model.signatures:
        parts.update(signature.inputs.values(), signature.outputs.values())
    for tensor in model.tensors():
        if tensor in parts and tensor.buffer is not None:
            parts.add(tensor.buffer)
    return parts.union(model.metadata_buffers, (entry.buffer for entry in model.metadata))


def called(model: Model, roots: Iterable[Subgraph] = ()) -> set[Subgraph]:
    """The given subgraphs (by default the entry points) and those that they call, directly or indirectly."""
    graphs = {*roots}
    if not graphs:
        graphs.update(model.subgraphs[:1], (graph for _, graph in model.entry_points()))
    return graphs.union(called_by(chain.from_iterable(graphs), model.subgraphs))


def remove_unused(model: Model, before: Collection[ModelPart]) -> None:
    """Remove parts that were in use `before` and no longer are, and unused operator codes.

    Some readers reject a model that merely lists an unknown operator.
    """
    _renumber(model, _kept(model.subgraphs, called(model), before))
    now = parts_in_use(model)
    for graph in model.subgraphs:
        # Scales of blockwise weights are referenced by index, so indices must not change.
        if not any(tensor.is_blockwise for tensor in graph.tensors):
            graph.tensors = _kept(graph.tensors, now, before)
    held = {*now, *(tensor.buffer for tensor in model.tensors())}
    model.buffers[1:] = _kept(model.buffers[1:], held, before)
    codes = {operator.code for operator in model.operators()}
    model.operator_codes = [code for code in model.operator_codes if code in codes]


def _kept(
    parts: Iterable[_ModelPart], needed: Container[object], before: Collection[ModelPart]
) -> list[_ModelPart]:
    """The parts that are needed, or were not in use before."""
    return [part for part in parts if part in needed or part not in before]


def remove_uncalled(model: Model, listed: int) -> None:
    """Remove uncalled subgraphs after the first `listed`, left by reverted rewrites."""
    if len(model.subgraphs) > listed:
        needed = called(model, model.subgraphs[:listed])
        _renumber(model, [graph for graph in model.subgraphs if graph in needed])


def _renumber(model: Model, kept: list[Subgraph]) -> None:
    """Keep only these subgraphs, in this order, and update the indices in calls."""
    if kept != model.subgraphs and any(entry.name == CONTROL_EDGES for entry in model.metadata):
        raise UsageError(
            f"the model orders operators by their place (metadata {CONTROL_EDGES}), so its subgraphs cannot be moved"
        )
    index = {graph: place for place, graph in enumerate(model.subgraphs)}
    places = {index[graph]: place for place, graph in enumerate(kept)}
    model.subgraphs[:] = kept
    for operator in model.operators():
        operator.options = renumbered(operator.options, places)


def name_apart(model: Model, old: Sequence[Tensor]) -> None:
    """Give tensors not in `old` names that are unique in the model.

    ai-edge-quantizer identifies tensors by name alone, across subgraphs, and rejects models with repeated names.
    """
    kept = set(old)
    names = UniqueNames(tensor.name for tensor in old)
    for tensor in model.tensors():
        if tensor not in kept:
            tensor.name = names.unique(tensor.name)


def external_weights(model: Model) -> list[Buffer]:
    """Weights stored after the flatbuffer, at `Buffer.offset`."""
    return [buffer for buffer in model.buffers if buffer.data is not None and buffer.data.external]


def new_codes(model: Model) -> list[OperatorCode]:
    """Operator codes that are not in the deprecated field."""
    field = "deprecated_builtin_code"
    return [
        code
        for code in model.operator_codes
        if code.table and code.table.get(field) != deprecated_code(code)
    ]


def take_weights_inside(model: Model) -> bool:
    """Store all weights inside the flatbuffer, as long as it stays under 2 GB; return True if any was outside."""
    outside = external_weights(model)
    for buffer in outside:
        assert buffer.data is not None
        buffer.data = Data(*buffer.data.key, external=False)
    return bool(outside)


def fill_old_codes(model: Model) -> bool:
    """Also write each operator code in the deprecated field; return True if any was missing there."""
    codes = new_codes(model)
    model.operator_codes = [
        replace(one, table=None) if one in codes else one for one in model.operator_codes
    ]
    return bool(codes)
