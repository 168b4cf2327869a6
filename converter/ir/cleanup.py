"""What a rewrite leaves to do: unused things go, what was unused before stays, and metadata stays true."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from edge_opt.ir.extract import renumbered
from edge_opt.ir.graph import Buffer, Subgraph, Tensor, used_tensors
from edge_opt.ir.model import Model
from edge_opt.ir.operators import runtime_version
from edge_opt.ir.references import subgraph_indices
from edge_opt.output.errors import UsageError
from edge_opt.schema.data import Data

CONTROL_EDGES: Final = "model_control_dependencies"
"""The metadata entry that says which operators of each subgraph have to wait for which others."""

_RUNTIME: Final = "min_runtime_version"
_VERSION: Final = 1
_NUMBER: Final = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")  # of 64 bits at most


@dataclass(frozen=True, slots=True)
class Usage:
    """Tensors, buffers and subgraphs (by identity) that somebody refers to."""

    tensors: frozenset[int]
    buffers: frozenset[int]
    subgraphs: frozenset[int]

    @classmethod
    def of(cls, model: Model) -> Usage:
        """What the model uses as it stands."""
        tensors = {id(t) for graph in model.subgraphs for t in used_tensors(graph, graph.operators)}
        for signature in model.signatures:
            tensors.update(id(t) for t in (*signature.inputs.values(), *signature.outputs.values()))
        buffers = {id(t.buffer) for subgraph in model.subgraphs for t in subgraph.tensors if id(t) in tensors}
        buffers.update(id(entry.buffer) for entry in model.metadata)
        buffers.update(id(buffer) for buffer in model.metadata_buffers)
        return cls(frozenset(tensors), frozenset(buffers), frozenset(called(model)))


def called(model: Model, roots: Iterable[Subgraph] = ()) -> set[int]:
    """Subgraphs (by identity) that can be reached from the given ones, by default the entry points."""
    pending = [*roots] or [subgraph for _, subgraph in model.entry_points()] + model.subgraphs[:1]
    found: set[int] = set()
    while pending:
        subgraph = pending.pop()
        if id(subgraph) not in found:
            found.add(id(subgraph))
            for operator in subgraph.operators:
                pending.extend(model.subgraphs[index] for index in subgraph_indices(operator.options))
    return found


def remove_unused(model: Model, before: Usage) -> None:
    """Drop what was used `before` and is not any more, and operator codes that nobody uses.

    Some readers refuse a model that merely lists an operator they don't know. Buffer 0 stays: it is the empty one.
    """
    needed = called(model)
    _drop_others(model, [g for g in model.subgraphs if id(g) in needed or id(g) not in before.subgraphs])
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
    if len(model.subgraphs) == listed:
        return
    needed = called(model, model.subgraphs[:listed])
    _drop_others(model, [g for i, g in enumerate(model.subgraphs) if i < listed or id(g) in needed])


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


def _drop_others(model: Model, kept: list[Subgraph]) -> None:
    if len(kept) < len(model.subgraphs):
        _renumber(model, kept)


def _renumber(model: Model, kept: list[Subgraph]) -> None:
    """Keep these subgraphs alone, in this order; operators that call them are told their new places."""
    index = {id(graph): place for place, graph in enumerate(model.subgraphs)}
    places = {index[id(graph)]: place for place, graph in enumerate(kept)}
    for entry in model.metadata:
        if entry.name == CONTROL_EDGES:
            content = b"" if entry.buffer.data is None else bytes(entry.buffer.data.view())
            entry.buffer = Buffer(Data(reordered(content, list(places))))
    model.subgraphs[:] = kept
    for graph in kept:
        for operator in graph.operators:
            if operator.options is not None and subgraph_indices(operator.options):
                operator.options = renumbered(operator.options, places)


def raise_runtime_version(model: Model) -> None:
    """Raise `min_runtime_version` to what the operators that rewrites added need; one that says nothing is left alone.

    The bytes get a buffer of their own, as long as the old one (16 bytes in what TFLite's converters write).
    """
    added = {id(code) for code in model.new_codes.values()}
    used = {op.code for graph in model.subgraphs for op in graph.operators if id(op.code) in added}
    needed = max((_numbers(runtime_version(code.name, code.version)) for code in used), default=())
    for entry in model.metadata:
        if entry.name != _RUNTIME or entry.buffer.data is None:
            continue
        raw = bytes(entry.buffer.data.view())
        recorded = _numbers(raw.rstrip(b"\0").decode("ascii", "replace"))
        if recorded and recorded < needed:
            text = ".".join(map(str, needed)).encode()
            entry.buffer = Buffer(Data(text.ljust(len(raw), b"\0")))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9})*", version) else ()


def reordered(content: bytes, order: Sequence[int]) -> bytes:
    """The control edges' bytes for a model that has the subgraphs `order` (their places before) and no others.

    They are a version, the number of subgraphs, and for each the number of its edges and two operators' places an edge;
    a number takes seven bits of each byte, the eighth says that more follow.
    Source: TensorFlow, compiler/mlir/lite/experimental/remat/metadata_util.cc.

    Raises:
        UsageError: the bytes are no such entry, or of a version that is not known.
    """
    numbers: list[bytes] = _NUMBER.findall(content)
    graphs: list[bytes] = []
    end = 2
    while end < len(numbers):
        begin, end = end, end + 1 + 2 * _value(numbers[end])
        graphs.append(b"".join(numbers[begin:end]))
    complete = b"".join(numbers) == content and end == len(numbers)
    if not complete or [_value(number) for number in numbers[:2]] != [_VERSION, len(graphs)]:
        raise _unreadable()
    if any(place >= len(graphs) for place in order):
        raise _unreadable()
    return b"".join([bytes([_VERSION]), _written(len(order)), *(graphs[place] for place in order)])


def _value(number: bytes) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(number))


def _written(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + _written(rest)


def _unreadable() -> UsageError:
    return UsageError(
        f"the model orders operators by their place (metadata {CONTROL_EDGES}) in a form that is not known, so its "
        "subgraphs cannot be moved: leave extract_signature=... out"
    )
