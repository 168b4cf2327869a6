"""Facts about inputs and outputs that only the graph has, not the runtime: types, indexed tables, state."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from edge_opt.ir import DType, Model, Operator, Signature, Subgraph, Tensor
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.ir.walk import walked
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo


def tensor_info(tensor: Tensor, name: str) -> TensorInfo:
    """Describe a tensor as the runtime would describe an argument `name`; numpy must have its type."""
    declared, dtype = tensor.shape_signature or tensor.shape, np.dtype(tensor.dtype.numpy).name
    info = TensorInfo(name, tensor.name, tensor.shape, declared, dtype)
    if tensor.quantization is None or not tensor.is_quantized:
        return info
    scales, zero_points = tensor.quantization.scale.tolist(), tensor.quantization.zero_point.tolist()
    return replace(info, scales=tuple(scales), zero_points=tuple(zero_points))


def signature_info(signature: Signature) -> SignatureInfo:
    """Describe a signature as the runtime would, without arguments of types that numpy lacks."""
    inputs, outputs = (
        tuple(tensor_info(tensor, name) for name, tensor in side.items() if tensor.dtype.numpy is not None)
        for side in (signature.inputs, signature.outputs)
    )
    return SignatureInfo(signature.key, inputs, outputs)


def arguments(model: Model, signature: SignatureInfo) -> tuple[Subgraph, list[Tensor], list[Tensor]]:
    """Return the graph of a signature, and its inputs and outputs in the runtime's order."""
    entry = next((one for one in model.signatures if one.key == signature.name), None)
    if entry is None or signature.positional:
        graph = model.subgraphs[0]
        return graph, [*graph.inputs], [*graph.outputs]
    inputs = [entry.inputs[info.name] for info in signature.inputs]
    return entry.subgraph, inputs, [entry.outputs[info.name] for info in signature.outputs]


def with_entries(described: Iterable[SignatureInfo], model: Model) -> dict[str, SignatureInfo]:
    """Return the runtime's signatures by name, with the sizes of the tables that their inputs index."""
    known = {}
    for signature in described:
        both = zip(signature.inputs, arguments(model, signature)[1], strict=True)
        inputs = tuple(replace(info, entries=_entries(model, tensor)) for info, tensor in both)
        known[signature.name] = replace(signature, inputs=inputs)
    return known


def runs_of(*models: Model) -> int:
    """Number of runs to compare: two if a model keeps state, because the second run reads what the first stored."""
    tensors = (tensor for model in models for graph in model.subgraphs for tensor in graph.tensors)
    return 1 + any(tensor.is_variable or tensor.dtype is DType.RESOURCE for tensor in tensors)


def _entries(model: Model, tensor: Tensor) -> int:
    """Entries of the smallest table that the tensor's values index, also in subgraphs; 0 if they index none."""
    sizes: list[int] = []

    def carried(current: Tensor) -> Iterator[Tensor]:
        """Yield tensors that hold the same values."""
        for operator in current.consumers:
            places = [place for place, given in enumerate(operator.inputs) if given is current]
            sizes.extend(_indexed(operator, place) for place in places)
            kind = KINDS.get(operator.name)
            copies = kind is not None and (kind.copies or operator.name == "CAST")
            if kind is not None and copies and any(map(kind.has_data_at, places)):
                yield from kind.data_results(operator.outputs)
            for index in subgraph_indices(operator.options):
                inputs = model.subgraphs[index].inputs
                # IF has its condition before the operands that it passes on.
                first = len(operator.inputs) - len(inputs)
                yield from (inputs[place - first] for place in places if place >= first)

    for _ in walked([tensor], carried):
        pass
    return min(filter(None, sizes), default=0)


def _indexed(operator: Operator, place: int) -> int:
    """Entries of the table that an operand indexes; 0 if it indexes none, or the size is unknown."""
    if operator.name == "GATHER" and place == 1:
        table, axis = operator.input(0), int(operator.option("axis"))
    elif operator.name == "EMBEDDING_LOOKUP" and place == 0:
        table, axis = operator.input(1), 0
    else:
        return 0
    sizes = table.shape_signature or table.shape
    return max(sizes[axis], 0) if -len(sizes) <= axis < len(sizes) else 0
