"""The integers of a quantized tensor and the real numbers that they stand for."""

import numpy as np

from edge_opt.ir import Tensor


def is_integer(tensor: Tensor) -> bool:
    """True for a tensor whose integers stand for real numbers, all on one scale."""
    parameters = tensor.quantization
    return (
        not tensor.dtype.is_float
        and tensor.dtype.numpy is not None
        and tensor.dtype.numpy.kind in "iu"
        and parameters is not None
        and len(parameters.scale) == 1
    )


def code_limits(tensor: Tensor) -> tuple[int, int]:
    """The least and the largest integer that a tensor holds."""
    assert tensor.dtype.numpy is not None
    limits = np.iinfo(tensor.dtype.numpy.name)
    return int(limits.min), int(limits.max)


def real_range(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest real number that a tensor holds."""
    assert tensor.quantization is not None
    least, most = map(tensor.quantization.real, code_limits(tensor))
    return least, most


def nearest_code(value: float, tensor: Tensor) -> int:
    """The integer that stands for a real number, or is nearest to it; halves go away from zero, as in the kernels."""
    assert tensor.quantization is not None
    steps = np.floor(abs(value) / float(tensor.quantization.scale[0]) + 0.5) * np.sign(value)
    least, most = code_limits(tensor)
    return int(np.clip(steps + int(tensor.quantization.zero_point[0]), least, most))
