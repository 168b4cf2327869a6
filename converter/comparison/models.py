"""The models that are compared, and what their graphs say and the runtime does not: tables, state.

One model prefills and decodes, with its embedder and its auxiliary model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.ir import DType, Model, Operator, Signature, Tensor
from edge_opt.ir.opening import AUXILIARY_SECTION, EMBEDDER_SECTION, ModelLike, Opened, Part, Readable
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.shapes.dimension import may_be_alike

EMBEDDER, AUXILIARY, MAIN = "embedder", "auxiliary", "main"


def find_parts(
    given: ModelLike, embedder: Readable | None = None, auxiliary: Readable | None = None
) -> dict[str, Part]:
    """The main model and the two that an export may keep apart: those given, else a bundle's, else files beside it.

    Raises:
        ModelFormatError: a file cannot be read.
        UsageError: a bundle holds no prefill/decode model, or it is compiled for an NPU.
    """
    opened = Opened(given)
    parts = {MAIN: opened.main()}
    for name, kind, chosen in (
        (EMBEDDER, EMBEDDER_SECTION, embedder), (AUXILIARY, AUXILIARY_SECTION, auxiliary)
    ):  # fmt: skip
        beside = None if opened.path is None or opened.bundle is not None else _beside(opened.path, name)
        part = opened.find(kind) if chosen is None and beside is None else Part(chosen or beside or b"")
        if part is not None:
            parts[name] = part
    return parts


def name_of(given: ModelLike, role: str) -> str:
    """A model's name for people: its path, or its role."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) else f"<{role}>"


def _beside(given: str | os.PathLike[str], name: str) -> Path | None:
    path = Path(given)
    stem = path.name.split(".", 1)[0]
    files = path.with_name(f"{stem}.{name}.tflite"), path.with_name(f"{name}.tflite")
    return next((file for file in files if file.is_file()), None)


def tensor_info(tensor: Tensor, name: str) -> TensorInfo:
    """What the runtime would say of a tensor of a type that numpy has, as an argument of that name."""
    declared, dtype = tensor.shape_signature or tensor.shape, np.dtype(tensor.dtype.numpy).name
    info = TensorInfo(name, tensor.name, tensor.shape, declared, dtype)
    if tensor.quantization is None or not tensor.is_quantized:
        return info
    scales, zero_points = tensor.quantization.scale.tolist(), tensor.quantization.zero_point.tolist()
    return replace(info, scales=tuple(scales), zero_points=tuple(zero_points))


def signature_info(signature: Signature) -> SignatureInfo:
    """What the runtime would say of a signature; arguments of types that numpy lacks are left out."""
    inputs, outputs = (
        tuple(tensor_info(tensor, name) for name, tensor in side.items() if tensor.dtype.numpy is not None)
        for side in (signature.inputs, signature.outputs)
    )
    return SignatureInfo(signature.key, inputs, outputs)


def with_facts(described: Iterable[SignatureInfo], model: Model) -> dict[str, SignatureInfo]:
    """The signatures that the runtime describes, by name, with how many entries the tables have that inputs index."""
    arguments = {signature.key: signature.inputs for signature in model.signatures}
    with_entries = {}
    for signature in described:
        given = model.subgraphs[0].inputs
        if signature.name in arguments and not signature.positional:
            given = [arguments[signature.name][info.name] for info in signature.inputs]
        inputs = (
            replace(info, entries=_entries(model, tensor))
            for info, tensor in zip(signature.inputs, given, strict=True)
        )
        with_entries[signature.name] = replace(signature, inputs=tuple(inputs))
    return with_entries


def agreed(
    one: TensorInfo, other: TensorInfo, given: Sequence[int] | None
) -> tuple[TensorInfo, TensorInfo] | None:
    """An input of two models, and the smaller of the tables that it indexes; None where its shapes do not go together.

    A length that is open in both is as `given`, else 1, as the runtime has it.
    """
    if not may_be_alike(one.declared, other.declared):
        return None
    declared = tuple(map(max, one.declared, other.declared))
    if given is not None and may_be_alike(declared, given):
        declared = tuple(given)
    elif given is not None:
        return None
    entries = min(filter(None, (one.entries, other.entries)), default=0)
    facts: dict[str, Any] = {
        "shape": tuple(1 if size < 0 else size for size in declared),
        "declared": declared,
        "entries": entries,
    }
    return replace(one, **facts), replace(other, **facts)


def keeps_state(model: Model) -> bool:
    """Whether what one run of the model stores is there for the next: then one run does not show all that it does."""
    tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors)
    return any(tensor.is_variable or tensor.dtype is DType.RESOURCE for tensor in tensors)


def _entries(model: Model, tensor: Tensor) -> int:
    """Entries of the smallest table that the tensor's numbers index; 0 where they index none."""
    pending, seen, sizes = [tensor], set[Tensor](), set[int]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for operator in current.consumers:
            for place in (at for at, given in enumerate(operator.inputs) if given is current):
                sizes.add(_indexed(operator, place))
                pending.extend(_carried(model, operator, place))
    return min(filter(None, sizes), default=0)


def _carried(model: Model, operator: Operator, place: int) -> Iterator[Tensor]:
    """The tensors that have this operand's numbers unchanged, also in subgraphs that it is handed to."""
    kind = KINDS.get(operator.name)
    if kind is not None and (kind.copies or operator.name == "CAST") and kind.has_data_at(place):
        yield from kind.data_results(operator.outputs)
    for index in subgraph_indices(operator.options):
        arguments = model.subgraphs[index].inputs
        # IF has its condition in front of what it hands on.
        argument = place - (len(operator.inputs) - len(arguments))
        if 0 <= argument < len(arguments):
            yield arguments[argument]


def _indexed(operator: Operator, place: int) -> int:
    """Entries of the table that this operand of a lookup indexes; 0 where it is none, or that is not known."""
    if operator.name in ("EMBEDDING_LOOKUP", "EMBEDDING_LOOKUP_SPARSE") and place == 0:
        return _size(operator.inputs[-1], 0)
    if operator.name == "GATHER" and place == 1:
        return _size(operator.inputs[0], int(operator.option("axis")))
    if operator.name == "GATHER_ND" and place == 1:
        return min((_size(operator.inputs[0], i) for i in range(operator.input(1).shape[-1])), default=0)
    if operator.name == "ONE_HOT" and place == 0:
        return int(operator.input(1).array().item()) if operator.input(1).has_numbers else 0
    return 0


def _size(table: Tensor | None, axis: int) -> int:
    if table is None or not -len(table.shape) <= axis < len(table.shape):
        return 0
    declared = table.shape if table.shape_signature is None else table.shape_signature
    return max(declared[axis], 0) if len(declared) == len(table.shape) else 0
