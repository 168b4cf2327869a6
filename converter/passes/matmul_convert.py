"""BATCH_MATMUL -> QUANTIZE becomes one BATCH_MATMUL that writes the QUANTIZE's quantization itself."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from edge_opt.attention.refusal import Refusal
from edge_opt.ir import DType, Operator
from edge_opt.ir.versions import operator_version
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite

if TYPE_CHECKING:
    from collections.abc import Iterable

_INTEGERS = frozenset({DType.INT8, DType.INT16})


class MatMulConvert(Pass):
    """Rounding once instead of twice: `q2(q1(A B)) ~ q2(A B)`, at most one step of the larger of the two scales apart.

    Legal where the output type equals both operand types (int16 with zero point 0): the interpreter accepts int16
    operands with int8 output and the reverse, and computes garbage.
    """

    name: ClassVar[str] = "matmul_convert"
    summary: ClassVar[str] = "lets a BATCH_MATMUL write the quantization of the QUANTIZE behind it"
    demand: ClassVar[Demand] = Demand("steps", 1)

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each QUANTIZE of integers behind a BATCH_MATMUL."""
        for operator in context.subgraph.operators:
            if operator.name != "QUANTIZE":
                continue
            product = operator.input(0).producer
            if product is None or product.name != "BATCH_MATMUL" or not operator.input(0).is_quantized:
                continue
            reason = _illegal(context, product, operator)
            if reason is None:
                yield Site(operator, partial(_build, context, product, operator), demand=_demand(operator))
            else:
                yield SkippedSite(operator, str(reason))


def _illegal(context: Context, product: Operator, convert: Operator) -> Refusal | None:
    between, result = product.outputs[0], convert.outputs[0]
    if len(between.consumers) > 1 or context.subgraph.is_output(between):
        return Refusal("the product is read elsewhere too, in its own quantization", product, between)
    operands = [product.input(0), product.input(1)]
    types = {tensor.dtype for tensor in operands}
    if types != {result.dtype} or result.dtype not in _INTEGERS:
        found = ", ".join(tensor.dtype.name.lower() for tensor in operands)
        return Refusal(
            "the product must write its operands' type", convert, result, found, result.dtype.name.lower()
        )
    if result.quantization is None or not result.is_quantized or result.quantization.is_per_axis:
        return Refusal("the result needs one scale", convert, result)
    if result.dtype is DType.INT16 and int(result.quantization.zero_point[0]):
        return Refusal(
            "int16 needs zero point 0", convert, result, "0", str(int(result.quantization.zero_point[0]))
        )
    return None


def _scales(convert: Operator) -> tuple[float, float]:
    between, result = convert.input(0).quantization, convert.outputs[0].quantization
    assert between is not None
    assert result is not None
    return float(between.scale[0]), float(result.scale[0])


def _demand(convert: Operator) -> Demand:
    """At most one step of the larger scale, counted in steps of the result's."""
    before, after = _scales(convert)
    return Demand("steps", max(1, math.ceil(before / after)) if after else 1)


def _build(context: Context, product: Operator, convert: Operator) -> Rewrite | Refusal:
    result = convert.outputs[0]
    version = operator_version("BATCH_MATMUL", product.input(0).dtype)
    code = context.model.operator_code("BATCH_MATMUL", max(version, product.code.version))
    fused = Operator(code, product.inputs, [result], product.options, product.table)
    return Rewrite(context.subgraph, (product, convert), (fused,), convert)


def clipped_range(convert: Operator) -> float | None:
    """Largest magnitude that the product kept and the result could hold more of; None where nothing was clipped.

    Values beyond it were saturated before and are not any more.
    """
    before, after = _scales(convert)
    limits = (np.iinfo(np.dtype(t.dtype.name.lower())) for t in (convert.input(0), convert.outputs[0]))
    low, high = (float(limit.max) * scale for limit, scale in zip(limits, (before, after), strict=True))
    return low if low < high else None
