"""BATCH_MATMUL -> QUANTIZE becomes one BATCH_MATMUL that writes the QUANTIZE's quantization itself."""

import math
from collections.abc import Iterable
from functools import partial

from edge_opt.ir import DType, Operator
from edge_opt.ir.operators import KINDS
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import only_reader
from edge_opt.passes.codes import code_limits, nearest_codes, real_range
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.verification.check import Steps
from edge_opt.verification.rewrite import Rewrite


class MatMulConvert(Pass):
    """Rounding once instead of twice: `q2(q1(A B)) ~ q2(A B)`, at most one step of the larger of the two scales apart.

    For int16 it is one more, because its kernels multiply by 15-bit numbers.

    Legal if the output type equals both operand types (int16 with zero point 0): the interpreter accepts int16
    operands with int8 output and the reverse, but computes wrong numbers.
    """

    name = "matmul_convert"
    summary = "fuses a QUANTIZE into the BATCH_MATMUL before it"
    check = Steps(1)

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each QUANTIZE of integers after a BATCH_MATMUL."""
        for operator in context.subgraph.operators:
            if operator.name == "QUANTIZE" and operator.input(0).is_quantized:
                product = operator.input(0).producer
                if product is not None and product.name == "BATCH_MATMUL":
                    yield Site(operator, partial(_build, context, product, operator))


def _build(context: Context, product: Operator, convert: Operator) -> Rewrite:
    between = product.outputs[0]
    result = convert.outputs[0]
    if only_reader(context.subgraph, between) is None:
        text = "another operator reads the product too, in its own quantization"
        raise RefusedError(Why.SHARED_RESULT, text, product, between)
    operands = [product.input(0).dtype, product.input(1).dtype]
    if {*operands} != {result.dtype} or result.dtype not in (DType.INT8, DType.INT16):
        text = "the product must write its operands' type"
        expected = ", ".join(map(str, operands))
        raise RefusedError(Why.QUANTIZATION, text, convert, result, expected, str(result.dtype))
    ratio = _one_scale(product) / _one_scale(convert)
    version = KINDS["BATCH_MATMUL"].version_for(product.input(0).dtype)
    code = context.model.operator_code("BATCH_MATMUL", max(version, product.code.version))
    fused = Operator(code, product.inputs, convert.outputs, product.options, product.table)
    # Scales are float32: a ratio of 3 may come out as 2.9999998.
    steps = max(1, math.floor(ratio * (1 + 1e-6))) + (result.dtype is DType.INT16)
    # The codes of the result at which the product was clipped, if the result can hold more.
    low, high = real_range(between)
    first, last = nearest_codes((low, high), result).tolist()
    is_clipped = (first, last) != code_limits(result)
    kept = f"the product '{between.name}' was clipped to {low:.4g} .. {high:.4g}; values beyond are now kept"
    return context.rewrite(
        [product, convert],
        [fused],
        check=Steps(steps, clipped=(first, last) if is_clipped else None),
        note=kept if is_clipped else "",
    )


def _one_scale(operator: Operator) -> float:
    """The only scale of a result; RefusedError if it does not have exactly one, or int16 has a zero point."""
    tensor = operator.outputs[0]
    parameters = tensor.quantization
    if parameters is None or len(parameters.scale) != 1 or not parameters.scale[0]:
        raise RefusedError(
            Why.QUANTIZATION, "product and result need one scale each", operator, tensor
        )
    zero_point = int(parameters.zero_point[0])
    if tensor.dtype is DType.INT16 and zero_point:
        raise RefusedError(
            Why.QUANTIZATION, "int16 needs zero point 0", operator, tensor, "0", str(zero_point)
        )
    return float(parameters.scale[0])
