"""The numbers of constants that are small enough to say something about shapes; large ones stay on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_opt.ir import Tensor
    from edge_opt.shapes.call import Array

_MOST_BYTES = 1 << 16


class ConstantValues:
    """Reads each constant once."""

    def __init__(self) -> None:
        self._read: dict[Tensor, Array | None] = {}

    def value(self, tensor: Tensor) -> Array | None:
        """The constant's numbers; None for other tensors, large ones, and types that numpy does not have."""
        if tensor not in self._read:
            self._read[tensor] = _read(tensor) if tensor.has_numbers else None
        return self._read[tensor]


def _read(tensor: Tensor) -> Array | None:
    data = tensor.buffer.data if tensor.buffer is not None else None
    dtype = tensor.dtype.numpy
    assert data is not None
    assert dtype is not None
    if data.length > _MOST_BYTES or data.length != tensor.elements * dtype.itemsize:
        return None
    return tensor.array()
