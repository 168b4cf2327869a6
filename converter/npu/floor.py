"""The least that a compiled graph has to read from memory, from the model alone; knows no compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.ir import DType

if TYPE_CHECKING:
    from edge_opt.ir import Subgraph, Tensor

_HALF = 2


def read_floor(subgraph: Subgraph) -> int:
    """Bytes of every constant and every input that the subgraph's operators use, each counted once.

    float32 constants count half: NPUs keep them as fp16. Inputs count in the type that the caller hands in. What the
    bodies of composites hold is not counted; it is a few numbers. Dynamic dimensions count as the file records them.
    """
    inputs = sum(_size(tensor) for tensor in subgraph.inputs if tensor.consumers)
    constants = {
        id(tensor.buffer): tensor
        for operator in subgraph.operators
        for tensor in operator.inputs
        if tensor is not None and tensor.is_constant
    }
    return inputs + sum(_weight_size(tensor) for tensor in constants.values())


def _size(tensor: Tensor) -> int:
    return tensor.dtype.byte_size(tensor.elements) or 0


def _weight_size(tensor: Tensor) -> int:
    size = _size(tensor)
    return size // _HALF if tensor.dtype is DType.FLOAT32 else size
