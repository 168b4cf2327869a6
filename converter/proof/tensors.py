"""What the runtime says of a model's inputs and outputs, as plain data; must not load the runtime."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kernels = Literal["xnnpack", "reference", "tensorflow"]
"""Which kernels run: XNNPACK, the reference kernels, TensorFlow's own."""

MAIN = "main"
"""The name under which subgraph 0 of a model without signatures is run, by position."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of a signature.

    `name` is the signature's name for it, `tensor` the tensor's own. `shape` has 1 where `declared` has -1 (a
    dynamic dimension). `scales` and `zero_points` are empty without quantization, and run along `axis` when
    there are several. `entries` is the size of the smallest table that an input's numbers index, 0 where they index
    none, or nobody looked.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    declared: tuple[int, ...]
    dtype: str
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    axis: int = 0
    entries: int = 0

    @property
    def quantized(self) -> bool:
        """Whether integers stand for real numbers here, with one scale for all: the kernels give no others."""
        return len(self.scales) == 1 and self.dtype in {"int8", "uint8", "int16", "int32"}

    @property
    def quantization(self) -> tuple[tuple[float, ...], tuple[int, ...], int]:
        """Scales, zero points and axis, to be compared as one."""
        return self.scales, self.zero_points, self.axis if len(self.scales) > 1 else 0

    @property
    def zero_point(self) -> int:
        """The code that stands for 0."""
        return self.zero_points[0] if self.zero_points else 0

    def reals(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """The real numbers that an array of it stands for."""
        numbers = values.astype(np.float64)
        return np.asarray((numbers - self.zero_point) * self.scales[0]) if self.quantized else numbers

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of an array of it."""
        return self.elements * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class SignatureInfo:
    """One entry point; `positional` says that it is subgraph 0 of a model without signatures."""

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    positional: bool = False
