"""A region at a fraction of its lengths, which runs faster and still cuts, joins and transposes as before.

Every size of 64 or more, in shapes and in constants such as axes and sizes, is divided by 8. A constant keeps one
element of each block of 8 along its long axes. Blocks of a whole constant are those of its parts, whether these are the
heads of an axis `(N)(H)` or the segments of an axis `S + T`. Otherwise both versions may differ at a fraction although
they are equal.
"""

import math
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.ir import Buffer, Model, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.schema.data import Data
from edge_opt.shapes.inference import check_operators

FACTOR = 8
_LONG = 64


def shrunk(model: Model) -> Model:
    """A copy of the model at a fraction of its lengths; RefusedError if its sizes do not divide, or then do not fit."""
    model = deepcopy(model)
    for tensor in model.tensors():
        shape = tuple(map(_shorter, tensor.shape))
        if tensor.is_constant:
            tensor.buffer = _part(tensor, shape)
        tensor.shape = shape
    for operator in model.operators():
        options = operator.options
        if options is None or options.fields.get("new_shape") is None:
            continue
        sizes = [_shorter(int(size)) for size in options.get("new_shape")]
        operator.options = options.copy()
        operator.options.set("new_shape", np.array(sizes, np.int32))
    # XNNPACK does not check that a RESHAPE of a constant stays within its bytes.
    check_operators(list(model.operators()), model.subgraphs)
    return model


def _part(tensor: Tensor, shape: tuple[int, ...]) -> Buffer:
    """One element of each block of 8 along long axes; unquantized integers are sizes and places, which are divided."""
    if not tensor.has_numbers or _has_scales_along(tensor, shape):
        raise RefusedError(Why.INCONCLUSIVE, "a constant has no such part")
    array = tensor.array()
    part = _one_of_each_block(array, shape)
    is_plain_integer = array.dtype.kind in "iu" and not tensor.is_quantized
    if is_plain_integer and shape == tensor.shape:
        sizes = [_shorter(int(value)) for value in array.ravel()]
        part = np.array(sizes, array.dtype).reshape(shape)
    elif is_plain_integer and array.max() >= _LONG - 1:  # a table of places along a long axis
        part = part // FACTOR
    return Buffer(Data(part.tobytes()))


def _has_scales_along(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """True if an axis that is shorter in `shape` has a scale for each index."""
    scales = tensor.quantization
    if scales is None or not scales.is_per_axis:
        return False
    return shape[scales.dimension] < len(scales.scale)


def _one_of_each_block(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The first element of each block that differs from the one at its beginning, so a single wrong one is kept."""
    split: list[int] = []
    for whole, part in zip(array.shape, shape, strict=True):
        split += [part, whole // part if part else 1]
    rank = len(shape)
    # [part, block, part, block, ..] -> [part, part, .., elements of one block]
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    blocks = array.reshape(split).transpose(order).reshape(*shape, math.prod(split[1::2]))
    place = (blocks != blocks[..., :1]).argmax(-1)
    return np.take_along_axis(blocks, place[..., None], -1)[..., 0]


def _shorter(size: int) -> int:
    if size < _LONG:
        return size
    if size % FACTOR:
        raise RefusedError(Why.INCONCLUSIVE, f"{size} is not a multiple of {FACTOR}")
    return size // FACTOR
