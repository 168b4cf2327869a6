"""Describes a model's entry points as the runtime would, from the graph; no runtime is needed."""

from dataclasses import replace

import numpy as np

from edge_opt.ir import Model, Tensor
from edge_opt.ir.walk import has_effects
from edge_opt.runtime.steering import Steering
from edge_opt.runtime.tensors import MAIN, SignatureInfo, TensorInfo


def describe(model: Model) -> dict[str, SignatureInfo]:
    """The signatures by name, arguments in the runtime's order; or subgraph 0 as `main`, which is run by position."""
    described = {}
    steering = Steering(model)

    def given(label: str, tensor: Tensor) -> TensorInfo:
        info = tensor_info(tensor, label)
        return steering.describe(info, tensor) if info.is_plain_integer else info

    for name in [signature.key for signature in model.signatures] or [MAIN]:
        graph, taken, made = model.arguments(name)
        if model.signatures:
            # The runtime sorts their arguments by name.
            taken = dict(sorted(taken.items()))
            made = dict(sorted(made.items()))
        inputs = tuple(given(label, tensor) for label, tensor in taken.items())
        outputs = tuple(tensor_info(tensor, label) for label, tensor in made.items())
        keeps_state = has_effects(graph.operators, model.subgraphs)
        described[name] = SignatureInfo(name, inputs, outputs, not model.signatures, keeps_state)
    return described


def tensor_info(tensor: Tensor, name: str) -> TensorInfo:
    """Describe a tensor as the runtime would describe an argument `name`; types that numpy lacks become `bytes`."""
    dtype = np.dtype(tensor.dtype.numpy or np.bytes_).name
    declared = tensor.shape_signature or tensor.shape
    info = TensorInfo(name, tensor.name, tensor.shape, declared, dtype)
    parameters = tensor.quantization
    if parameters is None or not tensor.is_quantized:
        return info
    return replace(
        info,
        scales=tuple(parameters.scale.tolist()),
        zero_points=tuple(parameters.zero_point.tolist()),
        axis=parameters.dimension,
    )
