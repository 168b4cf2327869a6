"""How much a region computes, and the same region at a fraction of its lengths, where that is another region alike.

Every size of 64 or more, of tensors and in the constants that steer operators, is divided by 8. What cuts, joins and
turns is then told of the smaller sizes, and two versions of a region that differ in it still do. Sizes that do not
divide have no such region.
"""

from copy import deepcopy

import numpy as np

from edge_opt.ir import Buffer, Model, Operator, Subgraph, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.schema.data import Data

FACTOR = 8
_LONG = 64
_ELEMENT = 8  # multiply-adds that take as long as making and comparing an element


def multiply_adds(model: Model) -> int:
    """The multiply-adds of matrix products, and what other operators cost in their place."""
    return sum(map(_operations, model.subgraphs[0].operators))


def shrunk(model: Model) -> Model | None:
    """A copy of the model at a fraction of its lengths; None where a size does not divide."""
    model = deepcopy(model)
    try:
        for graph in model.subgraphs:
            _shrink(graph)
    except RefusedError:
        return None
    return model


def _operations(operator: Operator) -> int:
    elements = sum(tensor.elements for tensor in operator.outputs)
    if operator.name == "BATCH_MATMUL":
        return elements * operator.input(0).shape[-2 if operator.option("adj_x") else -1]
    return elements * (operator.input(1).shape[-1] if operator.name == "FULLY_CONNECTED" else _ELEMENT)


def _shrink(graph: Subgraph) -> None:
    for tensor in graph.tensors:
        shape = tuple(map(_shorter, tensor.shape))
        if tensor.is_constant:
            _shrink_constant(tensor, shape)
        tensor.shape = shape
    for operator in graph.operators:
        sizes = None if operator.options is None else operator.options.fields.get("new_shape")
        if operator.options is not None and sizes is not None:
            operator.options = operator.options.copy()
            operator.options.set("new_shape", np.array([_shorter(int(size)) for size in sizes], np.int32))


def _shrink_constant(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """The first elements along each axis; integers that stand for no reals are sizes and places."""
    per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
    if not tensor.has_numbers or (per_axis and shape != tensor.shape):
        raise RefusedError("a constant has no such part")
    array = tensor.array()[tuple(map(slice, shape))]
    if array.dtype.kind in "iu" and not tensor.is_quantized:
        array = np.array([_shorter(int(value)) for value in array.ravel()], array.dtype).reshape(shape)
    tensor.buffer = Buffer(Data(np.ascontiguousarray(array).tobytes()))


def _shorter(size: int) -> int:
    if size >= _LONG and size % FACTOR:
        raise RefusedError(f"{size} is not a multiple of {FACTOR}")
    return size // FACTOR if size >= _LONG else size
