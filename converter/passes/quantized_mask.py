"""A mask computed in integers from a boolean -> one SELECT_V2 between the only two values that it can have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge_opt.attention.refusal import Refusal
from edge_opt.ir import DType, Operator, Tensor
from edge_opt.ir.region import still_needed
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.passes.spreads import nearest_code

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_CHAIN = frozenset({"LOGICAL_NOT", "CAST", "QUANTIZE", "MUL"})


@dataclass(frozen=True, slots=True)
class QuantizedMask:
    """`chain` makes an integer mask of `condition`; `values` are its numbers for False and True."""

    condition: Tensor
    chain: tuple[Operator, ...]
    values: tuple[float, float]


class QuantizedMaskToSelect(Pass):
    """`NOT -> CAST -> QUANTIZE -> MUL(c)` or `NOT -> CAST -> MUL(c) -> QUANTIZE`: a boolean has two values.

    Both are computed here as the kernels do, and the proof compares every bit. Fires only with a QUANTIZE in the
    chain, so it never meets the masks that `mask_to_add` makes.
    """

    name: ClassVar[str] = "quantized_mask"
    summary: ClassVar[str] = "turns a mask computed in integers into one SELECT between its two values"
    demand: ClassVar[Demand] = Demand("bitwise")

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each chain that ends in an integer mask."""
        for operator in context.subgraph.operators:
            if operator.name in ("MUL", "QUANTIZE"):
                found = match_quantized_mask(operator)
                if isinstance(found, QuantizedMask):
                    yield Site(operator, partial(_build, context, found))
                elif found is not None:
                    yield SkippedSite(operator, str(found))


def match_quantized_mask(last: Operator) -> QuantizedMask | Refusal | None:
    """The chain that ends at an operator, why its two values cannot be told, or None where there is no chain."""
    result = last.outputs[0]
    if result.dtype not in (DType.INT8, DType.INT16, DType.UINT8) or not result.is_quantized:
        return None
    chain: list[Operator] = [last]
    while True:
        source = _carried(chain[-1])
        if source is None:
            return None
        if source.dtype is DType.BOOL and (source.producer is None or source.producer.name != "LOGICAL_NOT"):
            break
        producer = source.producer
        if producer is None or producer.name not in _CHAIN or len(chain) > len(_CHAIN):
            return None
        chain.append(producer)
    names = [operator.name for operator in reversed(chain)]
    ordered = tuple(reversed(chain))
    steps = [name for name in names if name != "LOGICAL_NOT"]
    if steps not in (["CAST", "QUANTIZE", "MUL"], ["CAST", "MUL", "QUANTIZE"]):
        return None
    values = [_evaluate(ordered, flag) for flag in (False, True)]
    for value in values:
        if isinstance(value, Refusal):
            return value
    when_false, when_true = (float(value) for value in values if not isinstance(value, Refusal))
    return QuantizedMask(source, ordered, (when_false, when_true))


def _carried(operator: Operator) -> Tensor | None:
    """The operand that carries the mask: the only one, or the one beside a constant of one element."""
    data = [t for t in operator.inputs if t is not None and not t.is_constant]
    others = [t for t in operator.inputs if t is not None and t.is_constant]
    known = all(t.elements == 1 and t.has_numbers for t in others)
    return data[0] if len(data) == 1 and known else None


def _evaluate(chain: tuple[Operator, ...], flag: bool) -> float | Refusal:
    """The stored number at the end of the chain for one value of the condition, or where that cannot be told."""
    stored: float = float(flag)
    real = stored
    for operator in chain:
        if operator.name == "LOGICAL_NOT":
            real = 1.0 - real
        elif operator.name == "MUL":
            factor = next(t for t in operator.inputs if t is not None and t.is_constant)
            real *= factor.real()
            if operator.option("fused_activation_function"):
                return Refusal("the mask is clipped by a fused activation", operator)
        output = operator.outputs[0]
        if not np.isfinite(real):
            condition = "the mask has a value that no integer stands for"
            return Refusal(condition, operator, output, "a finite one", str(real))
        if output.is_quantized and not output.dtype.is_float:
            assert output.quantization is not None
            if output.quantization.is_per_axis or not output.quantization.scale[0]:
                return Refusal("an integer mask needs one scale", operator, output)
            stored = nearest_code(real, output)
            real = output.quantization.real(stored)
    return stored


def _build(context: Context, mask: QuantizedMask) -> Rewrite | Refusal:
    last = mask.chain[-1]
    result = last.outputs[0]
    assert result.dtype.numpy is not None
    kind = result.dtype.numpy.type

    def constant(value: float) -> Tensor:
        array: NDArray[np.generic] = np.array(kind(value))
        return context.constants.make("mask/value", array, result.dtype, result.quantization)

    when_false, when_true = (constant(value) for value in mask.values)
    select = context.model.new_operator("SELECT_V2", (mask.condition, when_true, when_false), [result])
    kept = still_needed(context.subgraph, mask.chain, last)
    return Rewrite(context.subgraph, mask.chain, (*kept, select), last)
