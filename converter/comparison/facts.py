"""What graphs say of their inputs and outputs and the runtime does not: types, tables that inputs index, state."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_opt.ir import DType, Model, Operator, Signature, Subgraph, Tensor
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


def arguments(model: Model, signature: SignatureInfo) -> tuple[Subgraph, list[Tensor], list[Tensor]]:
    """The graph of a signature, and its inputs and outputs in the order in which the runtime has them."""
    entry = next((one for one in model.signatures if one.key == signature.name), None)
    if entry is None or signature.positional:
        graph = model.subgraphs[0]
        return graph, [*graph.inputs], [*graph.outputs]
    inputs = [entry.inputs[info.name] for info in signature.inputs]
    return entry.subgraph, inputs, [entry.outputs[info.name] for info in signature.outputs]


def with_facts(described: Iterable[SignatureInfo], model: Model) -> dict[str, SignatureInfo]:
    """The signatures that the runtime describes, by name, with how many entries the tables have that inputs index."""
    known = {}
    for signature in described:
        both = zip(signature.inputs, arguments(model, signature)[1], strict=True)
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


def unread_inputs(model: Model, signature: str) -> set[str]:
    """The inputs of a signature that no operator reads: their types decide nothing."""
    given = model.signatures[signature].inputs if model.signatures else {}
    return {name for name, tensor in given.items() if not tensor.consumers}


def keeps_state(model: Model) -> bool:
    """Whether what one run of the model stores is there for the next: then one run does not show all that it does."""
    tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors)
    return any(tensor.is_variable or tensor.dtype is DType.RESOURCE for tensor in tensors)


def _entries(model: Model, tensor: Tensor) -> int:
    """Entries of the smallest table that the tensor's numbers index, also in subgraphs; 0 where they index none."""
    sizes: list[int] = []

    def carried(current: Tensor) -> Iterator[Tensor]:
        """The tensors that have these numbers unchanged."""
        for operator in current.consumers:
            places = [place for place, given in enumerate(operator.inputs) if given is current]
            sizes.extend(_indexed(operator, place) for place in places)
            kind = KINDS.get(operator.name)
            copies = kind is not None and (kind.copies or operator.name == "CAST")
            if kind is not None and copies and any(map(kind.has_data_at, places)):
                yield from kind.data_results(operator.outputs)
            for index in subgraph_indices(operator.options):
                inputs = model.subgraphs[index].inputs
                # IF has its condition in front of what it hands on.
                first = len(operator.inputs) - len(inputs)
                yield from (inputs[place - first] for place in places if 0 <= place - first < len(inputs))

    for _ in walked([tensor], carried):
        pass
    return min(filter(None, sizes), default=0)


def _indexed(operator: Operator, place: int) -> int:
    """Entries of the table that this operand of a lookup indexes; 0 where it is none, or that is not known."""
    if operator.name == "GATHER" and place == 1:
        table, axis = operator.input(0), int(operator.option("axis"))
    elif operator.name == "EMBEDDING_LOOKUP" and place == 0:
        table, axis = operator.input(1), 0
    else:
        return 0
    sizes = table.shape_signature or table.shape
    return max(sizes[axis], 0) if -len(sizes) <= axis < len(sizes) else 0
