"""The element types of tensors, and how numpy sees each of them."""

from enum import IntEnum

import numpy as np


class DType(IntEnum):
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

    @property
    def is_float(self) -> bool:
        """True for the IEEE-like types that kernels compute in."""
        return self in _FLOATS

    @property
    def numpy(self) -> np.dtype[np.generic] | None:
        """The numpy type with the same bytes; None where numpy has none (strings, packed and 8-bit floats)."""
        return _NUMPY.get(self)

    @property
    def bits(self) -> int | None:
        """Bits of one element; None where an element has no fixed size (STRING, RESOURCE, VARIANT)."""
        if self in _PACKED_BITS:
            return _PACKED_BITS[self]
        dtype = self.numpy
        return None if dtype is None else dtype.itemsize * 8

    def byte_size(self, elements: int) -> int | None:
        """Bytes of `elements` of this type, packed types rounded up to whole bytes; None without fixed size."""
        bits = self.bits
        return None if bits is None else (elements * bits + 7) // 8


_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.BFLOAT16})
_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType[name.upper()]: np.dtype(name)
    for name in (
        "float32", "float16", "float64", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64", "complex64", "complex128", "bool",
    )
}  # fmt: skip
_PACKED_BITS = {
    DType.INT4: 4,
    DType.UINT4: 4,
    DType.INT2: 2,
    DType.BFLOAT16: 16,
    DType.FLOAT8_E4M3FN: 8,
    DType.FLOAT8_E5M2: 8,
}
