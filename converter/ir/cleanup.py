"""Drops what a rewrite left unused: subgraphs, tensors, buffers, operator codes. What was unused before is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edge_opt.ir import control_edges
from edge_opt.ir.extract import renumbered
from edge_opt.ir.graph import Buffer, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.references import subgraph_indices
from edge_opt.schema.data import Data


@dataclass(frozen=True, slots=True)
class Usage:
    """Tensors, buffers and subgraphs (by identity) that somebody refers to."""

    tensors: frozenset[int]
    buffers: frozenset[int]
    subgraphs: frozenset[int]

    @classmethod
    def of(cls, model: Model) -> Usage:
        """What the model uses as it stands."""
        tensors = {id(t) for subgraph in model.subgraphs for t in _referenced(subgraph)}
        for signature in model.signatures:
            tensors.update(id(t) for t in (*signature.inputs.values(), *signature.outputs.values()))
        buffers = {id(t.buffer) for subgraph in model.subgraphs for t in subgraph.tensors if id(t) in tensors}
        buffers.update(id(entry.buffer) for entry in model.metadata)
        buffers.update(id(buffer) for buffer in model.metadata_buffers)
        return cls(frozenset(tensors), frozenset(buffers), frozenset(_called(model)))


def _called(model: Model, roots: Iterable[Subgraph] = ()) -> set[int]:
    """Subgraphs that can be reached from the given ones, by default the entry points."""
    pending = [*roots] or [subgraph for _, subgraph in model.entry_points()] + model.subgraphs[:1]
    found: set[int] = set()
    while pending:
        subgraph = pending.pop()
        if id(subgraph) not in found:
            found.add(id(subgraph))
            for operator in subgraph.operators:
                pending.extend(model.subgraphs[index] for index in subgraph_indices(operator.options))
    return found


def _referenced(subgraph: Subgraph) -> Iterator[Tensor]:
    yield from subgraph.inputs
    yield from subgraph.outputs
    for operator in subgraph.operators:
        yield from (tensor for tensor in operator.inputs if tensor is not None)
        yield from operator.outputs
        yield from operator.intermediates


def remove_unused(model: Model, before: Usage) -> None:
    """Drop what was used `before` and is not any more, and operator codes that nobody uses.

    Some readers refuse a model that merely lists an operator they don't know. Buffer 0 stays: it is the empty one.
    """
    _remove_subgraphs(model, before)
    now = Usage.of(model)
    for subgraph in model.subgraphs:
        if any(tensor.is_blockwise for tensor in subgraph.tensors):
            continue  # scales are named by their places, which have to stay what they are
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


def remove_uncalled(model: Model, listed: int) -> None:
    """Drop subgraphs behind the first `listed` that nothing calls: made for rewrites of which nothing came."""
    called = _called(model, model.subgraphs[:listed])
    kept = [graph for place, graph in enumerate(model.subgraphs) if place < listed or id(graph) in called]
    if len(kept) < len(model.subgraphs):
        _renumber(model, kept)


def name_apart(model: Model, old: Sequence[Tensor]) -> None:
    """Give tensors that are not among the `old` ones names that no other of the model has.

    ai-edge-quantizer tells tensors apart by name alone, in all subgraphs together, and refuses a model where it cannot.
    """
    known = {id(tensor) for tensor in old}
    taken = {tensor.name for tensor in old}
    for subgraph in model.subgraphs:
        for tensor in subgraph.tensors:
            if id(tensor) in known:
                continue
            name, count = tensor.name, 1
            while tensor.name in taken:
                count += 1
                tensor.name = f"{name}_{count}"
            taken.add(tensor.name)


def keep_signature(model: Model, key: str) -> None:
    """Leave one entry point, as subgraph 0, and what it calls; for readers that look at nothing else.

    Raises:
        KeyError: there is no such signature.
        UsageError: the model orders operators of its subgraphs in a form that is not known.
    """
    chosen = next((signature for signature in model.signatures if signature.key == key), None)
    if chosen is None:
        raise KeyError(key)
    usage = Usage.of(model)
    _renumber(model, [chosen.subgraph, *(g for g in model.subgraphs if g is not chosen.subgraph)])
    model.signatures[:] = [chosen]
    remove_unused(model, usage)


def _remove_subgraphs(model: Model, before: Usage) -> None:
    """Bodies of composites that were opened everywhere go; operators that call the others are told their new places."""
    called = _called(model)
    kept = [graph for graph in model.subgraphs if id(graph) in called or id(graph) not in before.subgraphs]
    if len(kept) < len(model.subgraphs):
        _renumber(model, kept)


def _renumber(model: Model, kept: list[Subgraph]) -> None:
    index = {id(graph): place for place, graph in enumerate(model.subgraphs)}
    places = {index[id(graph)]: place for place, graph in enumerate(kept)}
    for entry in model.metadata:
        if entry.name == control_edges.ENTRY:
            content = b"" if entry.buffer.data is None else bytes(entry.buffer.data.view())
            entry.buffer = Buffer(Data(control_edges.reordered(content, list(places))))
    model.subgraphs[:] = kept
    for graph in kept:
        for operator in graph.operators:
            if operator.options is not None and subgraph_indices(operator.options):
                operator.options = renumbered(operator.options, places)
