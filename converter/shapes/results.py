"""Types and quantization parameters of results, where the kernels fix them."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.dtypes import DType
from edge_opt.ir.operators import KINDS, Effect


class WrongResult(NamedTuple):
    """A result for which the file records something else than its kernel writes, both in words."""

    tensor: Tensor
    expected: str
    recorded: str
    reason: str


class Parameters(NamedTuple):
    """Scale and zero point of one whole tensor."""

    scale: float
    zero_point: int

    def __str__(self) -> str:
        return f"scale {self.scale:.9g}, zero point {self.zero_point}"


_TYPES = frozenset(DType)
_WIDER_PRODUCTS = {(DType.INT8, DType.INT32), (DType.UINT8, DType.INT16), (DType.INT8, DType.INT16)}
"""Types of operands and results. Kernels also take int16 to int8 and back: that is garbage."""

_FIXED: Final = {
    ("SOFTMAX", DType.INT8): Parameters(1 / 256, -128),
    ("SOFTMAX", DType.UINT8): Parameters(1 / 256, 0),
    ("SOFTMAX", DType.INT16): Parameters(1 / 32768, 0),
    ("LOGISTIC", DType.INT8): Parameters(1 / 256, -128),
    ("LOGISTIC", DType.UINT8): Parameters(1 / 256, 0),
    ("LOGISTIC", DType.INT16): Parameters(1 / 32768, 0),
    ("TANH", DType.INT16): Parameters(1 / 32768, 0),
    ("LOG_SOFTMAX", DType.INT8): Parameters(16 / 256, 127),
    ("LOG_SOFTMAX", DType.UINT8): Parameters(16 / 256, 255),
    ("L2_NORMALIZATION", DType.INT8): Parameters(1 / 128, 0),
    ("L2_NORMALIZATION", DType.UINT8): Parameters(1 / 128, 128),
}
"""Source: TFLite, activations.cc (SoftmaxPrepare, SigmoidPrepare, TanhPrepare, LogSoftmaxPrepare), l2norm.cc."""

_SYMMETRIC_INT16 = (
    "ADD BATCH_MATMUL CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXP FULLY_CONNECTED LEAKY_RELU MEAN REDUCE_MAX "
    "REDUCE_MIN RELU SUB SUM TRANSPOSE_CONV"
)
"""Kernels that refuse an int16 result whose zero point is not 0.

Source: TFLite, the Prepare of each, TF_LITE_ENSURE_EQ(output->params.zero_point, 0)."""


def wrong_results(op: Operator) -> Iterator[WrongResult]:
    """Every result whose recorded type or parameters are not those that the operator's kernel gives it."""
    if op.name in KINDS:
        yield from _wrong_types(op)
        if op.outputs and op.outputs[0].dtype in (DType.INT8, DType.UINT8, DType.INT16, DType.INT4):
            yield from _wrong_parameters(op)


def _wrong_types(op: Operator) -> Iterator[WrongResult]:
    kind = KINDS[op.name]
    data, results = kind.data_operands(op.inputs), kind.data_results(op.outputs)
    is_product = kind.effect is Effect.PRODUCT
    if kind.result is None or (
        is_product and data and (data[0].dtype, op.outputs[0].dtype) in _WIDER_PRODUCTS
    ):
        return
    expected, reason = _expected_type(op, kind.result, data)
    for result in results:
        if expected is not None and result.dtype != expected:
            yield WrongResult(result, expected.name, result.dtype.name, reason)
    other = next((tensor for tensor in data if tensor.dtype != data[0].dtype), None)
    if other is not None and results and not is_product:
        dtype = data[0].dtype.name
        names = f"tensor '{data[0].name}' is {dtype}, tensor '{other.name}' is {other.dtype.name}"
        yield WrongResult(results[0], dtype, results[0].dtype.name, f"{names}: expected one type")


def _expected_type(op: Operator, rule: DType | str, data: list[Tensor]) -> tuple[DType | None, str]:
    """The type of an operator's results, by its record; None where its options name none."""
    if isinstance(rule, DType):
        return rule, f"{op.name} writes {rule.name}"
    if rule == "data":
        return (data[0].dtype, f"it has the type of tensor '{data[0].name}'") if data else (None, "")
    try:
        chosen = None if op.options is None else op.options.get(rule)
    except KeyError:  # the options are another operator's
        chosen = None
    return DType(chosen) if chosen in _TYPES else None, f"its option {rule} says so"


def _wrong_parameters(op: Operator) -> Iterator[WrongResult]:
    """Parameters per axis are not compared: only weights have them, and no operator computes a constant."""
    result, kind = op.outputs[0], KINDS[op.name]
    dtype, recorded, fixed = result.dtype, _parameters(result), _FIXED.get((op.name, result.dtype))
    source = op.inputs[0] if op.inputs else None
    if fixed is not None and source is not None and source.dtype == dtype:
        tolerance = 1e-3 if op.name == "SOFTMAX" else _ROUNDING
        if not _alike(recorded, fixed, tolerance):
            yield _wrong(result, fixed, f"{op.name} always writes {dtype.name} with these")
    if (
        dtype == DType.INT16
        and op.name in _SYMMETRIC_INT16
        and recorded is not None
        and recorded.zero_point != 0
    ):
        yield _wrong(
            result, recorded._replace(zero_point=0), f"{op.name} writes INT16 with zero point 0 only"
        )
    if not kind.copies or (op.name, dtype) == ("CONCATENATION", DType.UINT8):  # which scales anew
        return
    for copy in kind.data_results(op.outputs):
        for operand in kind.data_operands(op.inputs):
            per_axis = any(t.quantization is not None and t.quantization.is_per_axis for t in (operand, copy))
            if (
                operand.dtype == copy.dtype
                and not per_axis
                and not _alike(_parameters(operand), _parameters(copy))
            ):
                yield _wrong(
                    copy, _parameters(operand), f"{op.name} copies the stored numbers of '{operand.name}'"
                )
                break


def _parameters(tensor: Tensor) -> Parameters | None:
    """Scale and zero point of a whole tensor; None of others."""
    quantization = tensor.quantization
    if quantization is None or not quantization.is_affine:
        return None
    return Parameters(float(quantization.scale[0]), int(quantization.zero_point[0]))


def _wrong(result: Tensor, expected: Parameters | None, reason: str) -> WrongResult:
    recorded = _parameters(result)
    return WrongResult(result, str(expected or "no parameters"), str(recorded or "no parameters"), reason)


_ROUNDING = 1e-6


def _alike(left: Parameters | None, right: Parameters | None, tolerance: float = _ROUNDING) -> bool:
    if left is None or right is None:
        return left is right
    close = abs(left.scale - right.scale) <= tolerance * max(abs(left.scale), abs(right.scale))
    return close and left.zero_point == right.zero_point
