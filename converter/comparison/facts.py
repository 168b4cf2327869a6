"""What graphs say of their inputs and outputs and the runtime does not: types, tables that inputs index, state."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_opt.ir import DType, Model, Operator, Signature, Tensor
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.ir.walk import walked
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.shapes.dimension import may_be_alike


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
    known = {}
    for signature in described:
        given = model.subgraphs[0].inputs
        if signature.name in arguments and not signature.positional:
            given = [arguments[signature.name][info.name] for info in signature.inputs]
        both = zip(signature.inputs, given, strict=True)
        inputs = tuple(replace(info, entries=_entries(model, tensor)) for info, tensor in both)
        known[signature.name] = replace(signature, inputs=inputs)
    return known


def agreed(
    one: TensorInfo, other: TensorInfo, given: Sequence[int] | None
) -> tuple[TensorInfo, TensorInfo] | None:
    """An input of two models, and the smaller of the tables that it indexes; None where its shapes do not go together.

    A length that is open in both is as `given`, else 1, as the runtime has it.
    """
    if not may_be_alike(one.declared, other.declared):
        return None
    declared = tuple(map(max, one.declared, other.declared))
    if given is not None and not may_be_alike(declared, given):
        return None
    declared = declared if given is None else tuple(given)
    facts: dict[str, Any] = {
        "shape": tuple(1 if size < 0 else size for size in declared),
        "declared": declared,
        "entries": min(filter(None, (one.entries, other.entries)), default=0),
    }
    return replace(one, **facts), replace(other, **facts)


def keeps_state(model: Model) -> bool:
    """Whether what one run of the model stores is there for the next: then one run does not show all that it does."""
    tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors)
    return any(tensor.is_variable or tensor.dtype is DType.RESOURCE for tensor in tensors)


def _entries(model: Model, tensor: Tensor) -> int:
    """Entries of the smallest table that the tensor's numbers index; 0 where they index none."""

    def read_at(current: Tensor) -> Iterator[tuple[Operator, int]]:
        for operator in current.consumers:
            yield from ((operator, place) for place, given in enumerate(operator.inputs) if given is current)

    def carried(current: Tensor) -> Iterator[Tensor]:
        for operator, place in read_at(current):
            yield from _carried(model, operator, place)

    sizes = (_indexed(*reading) for current in walked([tensor], carried) for reading in read_at(current))
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
    table, axis = operator.inputs[-1], 0
    if operator.name == "GATHER" and place == 1:
        table, axis = operator.inputs[0], int(operator.option("axis"))
    elif operator.name != "EMBEDDING_LOOKUP" or place:
        return 0
    if table is None or not -len(table.shape) <= axis < len(table.shape):
        return 0
    declared = table.shape if table.shape_signature is None else table.shape_signature
    return max(declared[axis], 0) if len(declared) == len(table.shape) else 0
