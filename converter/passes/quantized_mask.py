"""A mask computed in integers from a boolean -> one SELECT_V2 between its only two values."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from edge_opt.ir import DType, Operator, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.passes.codes import nearest_codes, step_of
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.verification.rewrite import Rewrite

# In steps; conversion to int32 comes before clipping, and overflows to either end of it.
_INT32 = 2.0**31
_ORDERS = (["CAST", "QUANTIZE", "MUL"], ["CAST", "MUL", "QUANTIZE"])


class QuantizedMaskToSelect(Pass):
    """`NOT -> CAST -> QUANTIZE -> MUL(c)` or `NOT -> CAST -> MUL(c) -> QUANTIZE`: a boolean has two values.

    Both are computed here as the kernels do, and the proof compares every bit. The chain must have a QUANTIZE, so masks
    made by `mask_to_add` never match.
    """

    name = "quantized_mask"
    summary = "turns a mask computed in integers into one SELECT between its two values"

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each chain that ends in an integer mask."""
        for operator in context.subgraph.operators:
            chain = _mask_chain(operator)
            if chain:
                yield Site(operator, partial(_build, context, chain))


def _mask_chain(last: Operator) -> list[Operator]:
    """The operators from a boolean to the integer mask that this operator makes; empty if it makes none."""
    types = [tensor.dtype for tensor in last.outputs if tensor.is_quantized]
    if types not in ([DType.INT8], [DType.INT16], [DType.UINT8]):
        return []
    chain = [last]
    source = _carried(last)
    while source is not None and source.producer is not None:
        expected = ("LOGICAL_NOT",) if source.dtype is DType.BOOL else _ORDERS[0]
        if source.producer.name not in expected:
            break
        chain.insert(0, source.producer)
        source = _carried(source.producer)
    if source is None or source.dtype is not DType.BOOL:
        return []
    names = [operator.name for operator in chain if operator.name != "LOGICAL_NOT"]
    return chain if names in _ORDERS else []


def _carried(operator: Operator) -> Tensor | None:
    """The operand that carries the mask: the only one, or the one beside a constant of one element."""
    data: list[Tensor] = []
    for tensor in filter(None, operator.inputs):
        if not tensor.is_constant:
            data.append(tensor)
        elif tensor.elements != 1 or not tensor.has_numbers:
            return None
    return data[0] if len(data) == 1 else None


def _build(context: Context, chain: Sequence[Operator]) -> Rewrite:
    condition = _carried(chain[0])
    last = chain[-1]
    assert condition is not None
    values = (_evaluated(chain, 0), _evaluated(chain, 1))
    when_false, when_true = two_values(context, last.outputs[0], values)
    select = context.model.new_operator(
        "SELECT_V2", (condition, when_true, when_false), last.outputs
    )
    return context.rewrite(chain, [select])


def two_values(context: Context, like: Tensor, stored: Iterable[int]) -> list[Tensor]:
    """Constants to select a mask from, given as stored integers."""
    arrays = [np.asarray(value, like.dtype.numpy) for value in stored]
    return [
        context.constants.make("mask/value", array, like.dtype, like.quantization)
        for array in arrays
    ]


def _evaluated(chain: Iterable[Operator], flag: int) -> int:
    """The integer at the end of the chain for one value of the condition."""
    real = float(flag)
    stored = flag
    for operator in chain:
        output = operator.outputs[0]
        if operator.name == "LOGICAL_NOT":
            real = 1.0 - real
        elif operator.name == "MUL":
            factor = next(tensor for tensor in operator.given if tensor.is_constant)
            real *= factor.real()
            if operator.has_activation:
                raise RefusedError(Why.MASK, "the mask is clipped by a fused activation", operator)
        if not np.isfinite(real):
            text = "the mask has a value that no integer represents"
            raise RefusedError(Why.MASK, text, operator, output, "a finite one", str(real))
        parameters = output.quantization
        if parameters is None or not output.is_quantized or output.dtype.is_float:
            continue
        if parameters.is_per_axis or not parameters.scale[0]:
            text = "an integer mask needs one scale"
            raise RefusedError(Why.QUANTIZATION, text, operator, output)
        if abs(real / step_of(output)) >= _INT32:
            text = "the mask has a value that kernels do not clip alike"
            raise RefusedError(
                Why.MASK, text, operator, output, "less than 2^31 steps", f"{real:g}"
            )
        stored = int(nearest_codes(real, output))
        real = parameters.real(stored)
    return stored
