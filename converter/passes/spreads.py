"""How large the random inputs of a proof should be for integers to tell results apart. Arithmetic on ranges, no runs.

A quantized tensor's random numbers fill its range, and a mask's range is that of its constant: with logits spread over
hundreds, every softmax picks one key, and most of what happens before it could be wrong without a code changing.
"""

import math
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from edge_opt.ir import Operator, Tensor

LOGIT_DEVIATION = 2.0
"""Of masked logits: probabilities then differ, and none is lost in rounding."""


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


def moments(tensor: Tensor) -> tuple[float, float]:
    """Mean and deviation of the real numbers that a proof puts into a tensor: of a constant, its own."""
    if tensor.has_numbers:
        assert tensor.quantization is not None
        zero_point, scale = int(tensor.quantization.zero_point[0]), float(tensor.quantization.scale[0])
        values = (tensor.array().astype(np.float64) - zero_point) * scale
        return float(values.mean()), float(values.std())
    low, high = real_range(tensor)
    return (low + high) / 2, (high - low) / 6


def product_moments(product: Operator) -> tuple[float, float]:
    """Mean and deviation of a BATCH_MATMUL of such numbers.

    Of C pairs of independent numbers with means m, n and deviations s, t: mean C*m*n, variance
    C*(s^2 t^2 + m^2 t^2 + n^2 s^2).
    """
    left, right = product.input(0), product.input(1)
    pairs = left.shape[-2 if product.option("adj_x") else -1]
    (m, s), (n, t) = moments(left), moments(right)
    return pairs * m * n, math.sqrt(pairs * ((s * t) ** 2 + (m * t) ** 2 + (n * s) ** 2))


def product_spreads(product: Operator, room: float) -> dict[Tensor, float]:
    """For a product to stay within `room`: scaling both operands by f scales it by f^2."""
    mean, deviation = product_moments(product)
    typical = abs(mean) + 4 * deviation
    variable = [tensor for tensor in (product.input(0), product.input(1)) if not tensor.is_constant]
    if typical <= room or not variable:
        return {}
    return dict.fromkeys(variable, (room / typical) ** (1 / len(variable)))


def attention_spreads(old: Collection[Operator], softmax: Operator) -> dict[Tensor, float]:
    """For the masked logits in front of a softmax to deviate by about two: inputs of a quantized region.

    What reaches the softmax without a product is a mask; what a product multiplies shares its excess between both.
    """
    inside = set(old)
    spreads: dict[Tensor, float] = {}
    for tensor, gain in _made_of(softmax.input(0), inside, ("BATCH_MATMUL",)):
        product = tensor.producer
        if product is None or product not in inside:
            if is_integer(tensor):
                _lower(spreads, [tensor], LOGIT_DEVIATION / max(moments(tensor)[1] * gain, 1e-30))
            continue
        operands = (product.input(0), product.input(1))
        if all(is_integer(operand) for operand in operands):
            excess = LOGIT_DEVIATION / max(product_moments(product)[1] * gain, 1e-30)
            for operand in operands:
                sources = [source for source, _ in _made_of(operand, inside)]
                _lower(spreads, sources, math.sqrt(min(excess, 1.0)))
    return spreads


def _lower(spreads: dict[Tensor, float], tensors: Iterable[Tensor], spread: float) -> None:
    for tensor in tensors:
        if spread < 1:
            spreads[tensor] = min(spreads.get(tensor, 1.0), spread)


def _made_of(
    tensor: Tensor, inside: set[Operator], stops: Collection[str] = ()
) -> Iterator[tuple[Tensor, float]]:
    """Inputs of the region, and results of operators that end the way up, each with the constant that multiplies it."""
    pending = [(tensor, 1.0)]
    seen: set[Tensor] = set()
    while pending:
        current, factor = pending.pop()
        if current in seen or current.is_constant:
            continue
        seen.add(current)
        operator = current.producer
        if operator is None or operator not in inside or operator.name in stops:
            yield current, factor
            continue
        if operator.name == "MUL":
            factor *= constant_factor(operator)
        pending.extend((source, factor) for source in operator.inputs if source is not None)


def constant_factor(operator: Operator) -> float:
    """What a MUL multiplies by: the sizes of its constants of one element."""
    numbers = [t for t in operator.inputs if t is not None and t.has_numbers and t.elements == 1]
    factor = math.prod(abs(t.real()) for t in numbers if t.dtype.is_float or is_integer(t))
    return factor if math.isfinite(factor) and factor else 1.0
