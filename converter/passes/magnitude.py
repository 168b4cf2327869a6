"""How large the numbers of attention logits can get: where that is unknown, they may be masked. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge_opt.attention.axes import contracted_axis, data_of
from edge_opt.attention.rules import multiplies_activations
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.ir.dtypes import same_quantization
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.passes.codes import code_limits

ORDINARY = 1024.0
"""The logits of trained models, and the numbers that they are computed with, stay far below it; masks do not."""

_PRODUCTS = operators_that(Effect.PRODUCT, Effect.CONVOLUTION)
_LIMITED = frozenset({"COS", "LOGISTIC", "SIN", "SOFTMAX", "TANH"})  # to numbers from -1 to 1
_MOVES = operators_that(
    Effect.REARRANGING, Effect.CUTTING, Effect.JOINING, Effect.REPEATING, Effect.PADDING
)
_COPYING = _MOVES | {"CAST"}
_MIXING = operators_that(Effect.JOINING, Effect.PADDING) | {
    "DYNAMIC_UPDATE_SLICE", "SELECT", "SELECT_V2"
}  # fmt: skip
"""The elements of their results are some of one operand and some of another."""


class Magnitude(NamedTuple):
    """The least and the largest absolute value, and the tensor that makes the largest one so large.

    Activations count as 1, whatever they are. `is_fixed`: computed from constants alone.
    """

    least: float
    most: float
    source: Tensor
    is_fixed: bool = False


class _Node(NamedTuple):
    """A tensor from which logits are computed; `is_operand`: only through one of the operands of their product."""

    tensor: Tensor
    is_operand: bool = False


class Magnitudes:
    """The magnitude of logits; every tensor is visited once, however many logits are computed from it.

    The product of two activations counts as 1, and is followed as it is moved, scaled, capped, and as numbers of known
    magnitude are added; constants are read in full. The magnitude of anything else is infinite, and so is that of a
    product over a single channel, or with an operand that is computed from constants alone or from a number beyond
    `ORDINARY`, or put together of activations and numbers: a product can look up a mask, or carry it along. Operands
    computed in any other way, even from other products (ring buffers are updated so), are taken to be queries and keys.
    """

    def __init__(self) -> None:
        self._known: dict[_Node, Magnitude] = {}

    def of(self, logits: Tensor) -> Magnitude:
        """The magnitude of these logits."""
        pending = [_Node(logits)]
        while pending:
            node = pending.pop()
            read = _read(node)
            missing = [other for other in read if other not in self._known]
            if missing:
                pending += [node, *missing]
            elif node not in self._known:
                self._known[node] = _magnitude(node, [self._known[other] for other in read])
        return self._known[_Node(logits)]


def _read(node: _Node) -> list[_Node]:
    """The nodes from which a node's magnitude follows."""
    maker = None if node.tensor.is_constant else node.tensor.producer
    if maker is None or maker.name in _LIMITED:
        return []
    data = KINDS[maker.code.name].data_operands(maker.inputs)  # also where shapes are wrong
    if node.is_operand:
        return [] if maker.name in _PRODUCTS else [_Node(tensor, True) for tensor in data]
    if multiplies_activations(maker):
        # A bias is added to the product.
        return [_Node(tensor, place < 2) for place, tensor in enumerate(maker.given)]
    return [_Node(tensor) for tensor in data] if maker.name in _RULES else []


def _magnitude(node: _Node, read: Sequence[Magnitude]) -> Magnitude:
    tensor = node.tensor
    if tensor.is_constant or tensor.is_outside:
        return _of_constant(tensor)
    unknown = _up_to(math.inf, tensor)
    if node.is_operand:
        if _carries_a_constant(tensor, read):
            return unknown
        largest = _largest([_up_to(1.0, tensor), *read])
        return largest._replace(is_fixed=bool(read) and all(each.is_fixed for each in read))
    maker = tensor.producer
    if maker is None or not _is_plain(maker, tensor):
        return unknown
    if maker.name in _LIMITED:
        return _up_to(1.0, tensor)
    if not read:
        return unknown
    if not multiplies_activations(maker):
        return _RULES[maker.name](read)
    return unknown if _has_one_channel(maker) else _of_product(*read)


def _has_one_channel(product: Operator) -> bool:
    """True for the product of a column and a row: flags times a mask repeat the mask."""
    left = product.input(0)
    return bool(left.shape) and left.shape[contracted_axis(product, 0)] == 1


def _carries_a_constant(operand: Tensor, parts: Sequence[Magnitude]) -> bool:
    """True if an operand is put together of activations and numbers: `[q, 1] x [k, mask]` adds a mask."""
    maker = operand.producer
    if maker is None or maker.name not in _MIXING:
        return False
    return any(part.is_fixed and part.most > 0 for part in parts)


def _of_constant(tensor: Tensor) -> Magnitude:
    """The magnitude of a constant's real numbers; infinite if they cannot be read, or one is not a number."""
    parameters = tensor.quantization if tensor.is_quantized and not tensor.dtype.is_float else None
    has_one_scale = parameters is None or not (parameters.is_per_axis or parameters.is_blockwise)
    if not tensor.has_numbers or not has_one_scale or tensor.dtype.name.startswith("COMPLEX"):
        return _up_to(math.inf, tensor)._replace(is_fixed=True)
    values = tensor.array() if tensor.elements else np.zeros(1)
    low = float(values.min())
    high = float(values.max())
    if parameters is not None:
        low = parameters.real(low)
        high = parameters.real(high)
    least = max(low, -high, 0.0)
    most = max(-low, high)
    return _up_to(most, tensor)._replace(least=least, is_fixed=True)


def _up_to(most: float, source: Tensor) -> Magnitude:
    return Magnitude(0.0, math.inf if math.isnan(most) else most, source)


def _is_plain(maker: Operator, result: Tensor) -> bool:
    """True if a result holds real numbers, clipped by nothing but a range that includes 0."""
    if maker.has_activation:
        return False
    if maker.name in _COPYING:
        for operand in data_of(maker):
            if not same_quantization(operand.quantization, result.quantization):
                return False
    if result.dtype.is_float:
        return True
    parameters = result.quantization if result.dtype in (DType.INT8, DType.INT16) else None
    if parameters is None or len(parameters.scale) != 1:
        return False
    least, most = code_limits(result)
    return least <= int(parameters.zero_point[0]) <= most


def _of_product(left: Magnitude, right: Magnitude, *biases: Magnitude) -> Magnitude:
    larger = _largest([left, right])
    if left.is_fixed or right.is_fixed or larger.most > ORDINARY:
        return larger._replace(most=math.inf)
    return _sum([larger, *biases])


def _largest(parts: Sequence[Magnitude]) -> Magnitude:
    largest = max(parts, key=lambda part: part.most)
    return Magnitude(min(part.least for part in parts), largest.most, largest.source)


def _sum(parts: Sequence[Magnitude]) -> Magnitude:
    return _up_to(sum(part.most for part in parts), _largest(parts).source)


def _scaled(parts: Sequence[Magnitude]) -> Magnitude:
    return _up_to(math.prod(part.most for part in parts), _largest(parts).source)


def _quotient(parts: Sequence[Magnitude]) -> Magnitude:
    dividend, divisor = parts
    most = dividend.most / divisor.least if divisor.least else math.inf
    return _up_to(most, dividend.source if dividend.most > ORDINARY else divisor.source)


_RULES: dict[str, Callable[[Sequence[Magnitude]], Magnitude]] = {
    **dict.fromkeys((*_COPYING, "QUANTIZE", "DEQUANTIZE"), _largest),
    **dict.fromkeys(("ADD", "SUB"), _sum),
    "MUL": _scaled,
    "DIV": _quotient,
}
