"""What the runtime says of a model's inputs and outputs, as plain data; must not load the runtime."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

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
        """Whether integers stand for real numbers here."""
        return bool(self.scales) and self.dtype in {"int8", "uint8", "int16", "int32"}

    @property
    def quantization(self) -> tuple[tuple[float, ...], tuple[int, ...], int]:
        """Scales, zero points and axis, to be compared as one."""
        return self.scales, self.zero_points, self.axis if len(self.scales) > 1 else 0

    @property
    def nbytes(self) -> int:
        """Bytes of an array of it."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class SignatureInfo:
    """One entry point; `positional` says that it is subgraph 0 of a model without signatures."""

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    positional: bool = False
