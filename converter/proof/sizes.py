"""The cost of a region, and the same region at a fraction of its lengths.

Every size of 64 or more, in shapes and in constants such as axes and sizes, is divided by 8, so both versions still
cut, join and transpose as before. A region with a size of 64 or more that 8 does not divide cannot be shortened.
"""

from copy import deepcopy

import numpy as np

from edge_opt.ir import Buffer, Model, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.schema.data import Data

FACTOR = 8
_LONG = 64
_ELEMENT = 8  # multiply-adds that take as long as computing and comparing one element


def multiply_adds(model: Model) -> int:
    """The multiply-adds of matrix products, plus the equivalent cost of other operators."""
    total = 0
    for operator in model.subgraphs[0]:
        each = _ELEMENT
        if operator.name == "BATCH_MATMUL":
            each = operator.input(0).shape[-2 if operator.option("adj_x") else -1]
        elif operator.name == "FULLY_CONNECTED":
            each = operator.input(1).shape[-1]
        total += each * sum(tensor.elements for tensor in operator.outputs)
    return total


def shrunk(model: Model) -> Model | None:
    """A copy of the model at a fraction of its lengths; None if a long size is not divisible."""
    model = deepcopy(model)
    try:
        for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
            shape = tuple(map(_shorter, tensor.shape))
            if tensor.is_constant:
                tensor.buffer = _part(tensor, shape)
            tensor.shape = shape
        for operator in (operator for graph in model.subgraphs for operator in graph):
            if operator.options is not None and operator.options.fields.get("new_shape") is not None:
                sizes = [_shorter(int(size)) for size in operator.options.get("new_shape")]
                operator.options = operator.options.copy()
                operator.options.set("new_shape", np.array(sizes, np.int32))
    except RefusedError:
        return None
    return model


def _part(tensor: Tensor, shape: tuple[int, ...]) -> Buffer:
    """The first elements along each axis; unquantized integers are sizes and places, which are divided."""
    per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
    if not tensor.has_numbers or (per_axis and shape != tensor.shape):
        raise RefusedError("a constant has no such part")
    array = tensor.array()[tuple(map(slice, shape))]
    if array.dtype.kind in "iu" and not tensor.is_quantized:
        array = np.array([_shorter(int(value)) for value in array.ravel()], array.dtype).reshape(shape)
    return Buffer(Data(np.ascontiguousarray(array).tobytes()))


def _shorter(size: int) -> int:
    if size >= _LONG and size % FACTOR:
        raise RefusedError(f"{size} is not a multiple of {FACTOR}")
    return size // FACTOR if size >= _LONG else size
