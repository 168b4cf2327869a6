"""Describes a model's entry points as the runtime would, from the graph; no runtime is needed."""

from collections.abc import Iterator

import numpy as np

from edge_opt.ir import Model, Operator, Tensor
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.ir.walk import has_effects, walked
from edge_opt.runtime.tensors import MAIN, SignatureInfo, TensorInfo


def describe(model: Model) -> dict[str, SignatureInfo]:
    """The signatures by name, arguments in the runtime's order; or subgraph 0 as `main`, which is run by position."""
    described = {}
    for name in [signature.key for signature in model.signatures] or [MAIN]:
        graph, *sides = model.arguments(name)
        # The runtime sorts the arguments of signatures by name.
        given, made = (sorted(side.items()) if model.signatures else side.items() for side in sides)
        inputs = tuple(tensor_info(tensor, label, _entries(model, tensor)) for label, tensor in given)
        outputs = tuple(tensor_info(tensor, label) for label, tensor in made)
        keeps_state = has_effects(graph.operators, model.subgraphs)
        described[name] = SignatureInfo(name, inputs, outputs, not model.signatures, keeps_state)
    return described


def tensor_info(tensor: Tensor, name: str, entries: int = 0) -> TensorInfo:
    """Describe a tensor as the runtime would describe an argument `name`; types that numpy lacks become `bytes`."""
    dtype, declared = np.dtype(tensor.dtype.numpy or np.bytes_).name, tensor.shape_signature or tensor.shape
    parameters = tensor.quantization if tensor.is_quantized else None
    if parameters is None:
        return TensorInfo(name, tensor.name, tensor.shape, declared, dtype, entries=entries)
    scales, zero_points = tuple(parameters.scale.tolist()), tuple(parameters.zero_point.tolist())
    kind = dtype, scales, zero_points, parameters.dimension
    return TensorInfo(name, tensor.name, tensor.shape, declared, *kind, entries)


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
