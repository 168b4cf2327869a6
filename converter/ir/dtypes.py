"""Tensor element types and quantization parameters."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.schema.table import Table, content_key, new_table

_MOST_PRINTED = 8

# Fields that `Quantization` has, or that change no number.
_COUNTED = ("scale", "zero_point", "quantized_dimension", "min", "max")


class DType(int, Enum):
    """TensorType of TFLite's schema; the values are the file's."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    UINT8 = 3
    INT64 = 4
    STRING = 5
    BOOL = 6
    INT16 = 7
    COMPLEX64 = 8
    INT8 = 9
    FLOAT64 = 10
    COMPLEX128 = 11
    UINT64 = 12
    RESOURCE = 13
    VARIANT = 14
    UINT32 = 15
    UINT16 = 16
    INT4 = 17
    BFLOAT16 = 18
    INT2 = 19
    UINT4 = 20
    FLOAT8_E4M3FN = 21
    FLOAT8_E5M2 = 22

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def is_float(self) -> bool:
        """True for the IEEE-like types that kernels compute in."""
        return self in _FLOATS

    @property
    def numpy(self) -> np.dtype[Any] | None:
        """The numpy type with the same bytes; None if there is none (strings, packed types, bfloat16, 8-bit floats)."""
        return _NUMPY.get(self)

    @property
    def bits(self) -> int | None:
        """Bits per element; None for types without a fixed size (STRING, RESOURCE, VARIANT)."""
        return _PACKED_BITS.get(self, None if self.numpy is None else self.numpy.itemsize * 8)

    def byte_size(self, elements: int) -> int | None:
        """Size of `elements` elements in bytes, rounded up for packed types; None for types without a fixed size."""
        return None if self.bits is None else (elements * self.bits + 7) // 8


_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.BFLOAT16})
_PACKED_BITS = {
    DType.INT4: 4, DType.UINT4: 4, DType.INT2: 2, DType.BFLOAT16: 16, DType.FLOAT8_E4M3FN: 8, DType.FLOAT8_E5M2: 8,
}  # fmt: skip
_WITHOUT_NUMPY = {DType.STRING, DType.RESOURCE, DType.VARIANT, *_PACKED_BITS}
_NUMPY = {dtype: np.dtype(dtype.name.lower()) for dtype in DType if dtype not in _WITHOUT_NUMPY}


class Quantization:
    """A tensor's QuantizationParameters table; never edited in place, so tensors may share one.

    `scale` float32 `[c]`, `zero_point` int64 `[c]` with c = 1 (per tensor) or the size of axis
    `dimension` (per axis); both empty if the table has only calibration ranges.
    """

    __slots__ = ("dimension", "scale", "table", "zero_point")

    def __init__(self, table: Table) -> None:
        scale = table.get("scale")
        zero_point = table.get("zero_point")
        self.table = table
        self.scale: NDArray[np.float32] = np.empty(0, np.float32) if scale is None else scale
        if zero_point is None or not len(zero_point):
            zero_point = np.zeros(len(self.scale), np.int64)
        self.zero_point: NDArray[np.int64] = zero_point
        self.dimension: int = table.get("quantized_dimension")

    @classmethod
    def affine(cls, scale: float, zero_point: int = 0) -> Quantization:
        """Per-tensor parameters."""
        return cls(new_table("QuantizationParameters", scale=[scale], zero_point=[zero_point]))

    @property
    def is_affine(self) -> bool:
        """True if there is a scale, i.e. the stored integers represent real numbers."""
        return len(self.scale) > 0

    @property
    def is_blockwise(self) -> bool:
        """True if the scales are another tensor, referenced by its index in the subgraph."""
        details = self.table.get("details")
        return details is not None and details.name == "BlockwiseQuantization"

    @property
    def is_per_axis(self) -> bool:
        """True if each index of axis `dimension` has its own parameters."""
        return len(self.scale) > 1

    def along(self, dimension: int) -> Quantization:
        """The same parameters along another axis."""
        table = self.table.copy()
        table.set("quantized_dimension", dimension)
        return Quantization(table)

    def real(self, stored: float) -> float:
        """The real value of a stored number, with the first scale and zero point."""
        return (stored - int(self.zero_point[0])) * float(self.scale[0])

    def key(self) -> Hashable:
        """Equal for equal mappings from stored to real numbers, so ranges seen in calibration do not count.

        Parameters in another tensor, which is named by its place in the subgraph, are equal only to themselves.
        """
        if self.is_blockwise:
            return self
        axis = self.dimension if self.is_per_axis else 0
        return content_key(self.scale), content_key(self.zero_point), axis, self.table.key(_COUNTED)

    def __repr__(self) -> str:
        # str of a numpy scalar is the shortest text that reads back as the same number of that type.
        scales = map(str, self.scale)
        points = map(str, self.zero_point)
        if not self.is_per_axis:
            return f"q({', '.join((*scales, *points))})"
        if len(self.scale) > _MOST_PRINTED:
            return f"q({len(self.scale)} scales, axis {self.dimension})"
        return f"q([{', '.join(scales)}], [{', '.join(points)}], axis {self.dimension})"


NOT_QUANTIZED = Quantization(new_table("QuantizationParameters"))
"""No parameters."""


def same_quantization(a: Quantization | None, b: Quantization | None) -> bool:
    """True if both map stored numbers to the same real numbers (no parameters counts as a mapping)."""
    return (a or NOT_QUANTIZED).key() == (b or NOT_QUANTIZED).key()
