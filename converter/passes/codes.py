"""Conversion between the integers of a quantized tensor and real numbers."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_opt.ir import Tensor


def code_limits(tensor: Tensor) -> tuple[int, int]:
    """The least and the largest integer that a tensor can hold."""
    assert tensor.dtype.numpy is not None
    limits = np.iinfo(tensor.dtype.numpy.name)
    return int(limits.min), int(limits.max)


def step_of(tensor: Tensor) -> float:
    """The distance of the real numbers that neighbouring integers of a tensor with one scale stand for."""
    assert tensor.quantization is not None
    return float(tensor.quantization.scale[0])


def real_range(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest real number that a tensor can hold."""
    assert tensor.quantization is not None
    least, most = code_limits(tensor)
    return tensor.quantization.real(least), tensor.quantization.real(most)


def nearest_codes(values: ArrayLike, tensor: Tensor) -> NDArray[Any]:
    """The integers nearest to real numbers, in the tensor's type; halves go away from zero, as in the kernels."""
    assert tensor.quantization is not None
    numbers = np.asarray(values, np.float64)
    steps = np.floor(np.abs(numbers) / step_of(tensor) + 0.5) * np.sign(numbers)
    codes = np.clip(steps + int(tensor.quantization.zero_point[0]), *code_limits(tensor))
    return np.asarray(codes, tensor.dtype.numpy)
