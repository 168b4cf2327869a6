"""The numbers of constants that are small enough to say something about shapes; large ones stay on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_opt.ir import Operator, Tensor
    from edge_opt.shapes.call import Array, Constant

_MOST_BYTES = 1 << 16


def small_value(tensor: Tensor | None) -> Array | None:
    """The constant's numbers; None for other tensors, large ones, and types that numpy does not have."""
    if tensor is None or not tensor.has_numbers or tensor.wrong_size is not None:
        return None
    assert tensor.buffer is not None
    assert tensor.buffer.data is not None
    return tensor.array() if tensor.buffer.data.length <= _MOST_BYTES else None


def constants_of(operator: Operator) -> Constant:
    """Gives the values of the operator's small constant inputs."""
    return lambda index: small_value(operator.inputs[index])
