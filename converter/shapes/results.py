"""Types and quantization parameters of results, where the kernels fix them."""

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.dtypes import DType
from edge_opt.ir.operators import KINDS, Effect, OperatorKind

Wrong: TypeAlias = tuple[Tensor, str, str, str]
"""A result, what the file records of it, what its kernel writes, and the reason, all in words."""

Parameters: TypeAlias = tuple[float, int]
"""Scale and zero point of one whole tensor."""

_WIDER_PRODUCTS: Final = ((DType.INT8, DType.INT32), (DType.UINT8, DType.INT16), (DType.INT8, DType.INT16))
"""Types of operands and results. Kernels also take int16 to int8 and back: that is garbage."""

_FIXED: Final = {
    "SOFTMAX": {"INT8": (1 / 256, -128), "UINT8": (1 / 256, 0), "INT16": (1 / 32768, 0)},
    "LOGISTIC": {"INT8": (1 / 256, -128), "UINT8": (1 / 256, 0), "INT16": (1 / 32768, 0)},
    "TANH": {"INT16": (1 / 32768, 0)},
    "LOG_SOFTMAX": {"INT8": (16 / 256, 127), "UINT8": (16 / 256, 255)},
    "L2_NORMALIZATION": {"INT8": (1 / 128, 0), "UINT8": (1 / 128, 128)},
}
"""Source: TFLite, activations.cc (SoftmaxPrepare, SigmoidPrepare, TanhPrepare, LogSoftmaxPrepare), l2norm.cc."""

_SYMMETRIC_INT16: Final = (
    "ADD BATCH_MATMUL CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXP FULLY_CONNECTED LEAKY_RELU MEAN REDUCE_MAX "
    "REDUCE_MIN RELU SUB SUM TRANSPOSE_CONV"
)
"""Kernels that refuse an int16 result whose zero point is not 0.

Source: TFLite, the Prepare of each, TF_LITE_ENSURE_EQ(output->params.zero_point, 0)."""

_ROUNDING: Final = 1e-6


def wrong_results(op: Operator) -> Iterator[Wrong]:
    """Every result whose recorded type or parameters are not those that the operator's kernel gives it."""
    kind = KINDS.get(op.name)
    if kind is not None and op.outputs:
        yield from _wrong_types(op, kind)
        if op.outputs[0].dtype in (DType.INT8, DType.UINT8, DType.INT16, DType.INT4):
            yield from _wrong_parameters(op, kind)


def _wrong_types(op: Operator, kind: OperatorKind) -> Iterator[Wrong]:
    data, result, is_product = kind.data_operands(op.inputs), op.outputs[0], kind.effect is Effect.PRODUCT
    types = [tensor.dtype for tensor in data]
    expected, reason = DType.__members__.get(kind.result), f"{op.name} writes this type"
    if is_product and data and (types[0], result.dtype) in _WIDER_PRODUCTS:
        return
    if kind.result == "data":
        expected, reason = (types[0], f"it has the type of tensor '{data[0].name}'") if data else (None, "")
    elif kind.result and expected is None and op.options is not None and op.options.name == kind.options:
        chosen, reason = op.option(kind.result), f"its option {kind.result} says so"
        expected = DType(int(chosen)) if chosen in frozenset(DType) else None
    if expected is None:
        return
    for wrong in (tensor for tensor in kind.data_results(op.outputs) if tensor.dtype != expected):
        yield wrong, wrong.dtype.name, expected.name, reason
    if len(set(types)) > 1 and not is_product:
        texts = (f"tensor '{tensor.name}' is {tensor.dtype.name}" for tensor in data)
        yield result, result.dtype.name, types[0].name, f"{', '.join(texts)}: expected one type"


def _wrong_parameters(op: Operator, kind: OperatorKind) -> Iterator[Wrong]:
    """Parameters per axis are not compared: only weights have them, and no operator computes a constant."""
    result, dtype, data = op.outputs[0], op.outputs[0].dtype, kind.data_operands(op.inputs)
    recorded, fixed = _parameters(result), _FIXED.get(op.name, {}).get(dtype.name)
    tolerance = 1e-3 if op.name == "SOFTMAX" else _ROUNDING
    if fixed and data and data[0].dtype == dtype and not _alike(recorded, fixed, tolerance):
        yield result, _text(recorded), _text(fixed), f"{op.name} always writes {dtype.name} with these"
    if dtype == DType.INT16 and op.name in _SYMMETRIC_INT16 and recorded is not None and recorded[1]:
        reason = f"{op.name} writes INT16 with zero point 0 only"
        yield result, _text(recorded), _text((recorded[0], 0)), reason
    if not kind.copies or (op.name, dtype) == ("CONCATENATION", DType.UINT8):  # which scales its operands
        return
    for copy in kind.data_results(op.outputs):
        for operand in data:
            per_axis = any(t.quantization is not None and t.quantization.is_per_axis for t in (operand, copy))
            here, there = _parameters(copy), _parameters(operand)
            if operand.dtype == copy.dtype and not per_axis and not _alike(here, there):
                reason = f"{op.name} copies the stored numbers of '{operand.name}'"
                yield copy, _text(here), _text(there), reason
                break


def _parameters(tensor: Tensor) -> Parameters | None:
    quantization = tensor.quantization
    if quantization is None or not quantization.is_affine:
        return None
    return float(quantization.scale[0]), int(quantization.zero_point[0])


def _text(parameters: Parameters | None) -> str:
    return "scale {:.9g}, zero point {}".format(*parameters) if parameters else "no parameters"


def _alike(left: Parameters | None, right: Parameters | None, tolerance: float = _ROUNDING) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left[0], right[0], rel_tol=tolerance) and left[1] == right[1]
