"""Quantization parameters of results, where the kernels fix them or copy stored numbers as they are."""

from collections.abc import Iterator
from typing import NamedTuple

from edge_opt.ir import Operator, Quantization, Tensor
from edge_opt.ir.dtypes import DType
from edge_opt.shapes.report import WrongResult

_ROUNDING = 1e-6
_INTEGERS = frozenset({DType.INT8, DType.UINT8, DType.INT16, DType.INT4})


class Parameters(NamedTuple):
    """Scale and zero point of one whole tensor."""

    scale: float
    zero_point: int

    def __str__(self) -> str:
        return f"scale {self.scale:.9g}, zero point {self.zero_point}"


_FIXED: dict[tuple[str, DType], Parameters] = {
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

_SOFTMAX_TOLERANCE = 1e-3

_ARRANGING = (
    "BROADCAST_TO DEPTH_TO_SPACE EXPAND_DIMS GATHER GATHER_ND MAX_POOL_2D MIRROR_PAD PAD REDUCE_MAX REDUCE_MIN "
    "RESHAPE RESIZE_NEAREST_NEIGHBOR REVERSE_V2 SLICE SPACE_TO_DEPTH SPLIT_V SQUEEZE STRIDED_SLICE TILE TOPK_V2 "
    "TRANSPOSE UNPACK"
)
_COPYING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_ARRANGING.split(), (0,)),
    **dict.fromkeys(("SPLIT", "FILL"), (1,)),
    **dict.fromkeys(("DYNAMIC_UPDATE_SLICE", "MAXIMUM", "MINIMUM"), (0, 1)),
    **dict.fromkeys(("SELECT", "SELECT_V2"), (1, 2)),
    **dict.fromkeys(("CONCATENATION", "PACK"), None),
    "PADV2": (0, 2),
}
"""Inputs whose stored numbers the results hold as they are (None: all of them).

Source: TFLite, the kernels named: they copy, or compare, stored numbers; concatenation.cc, pack.cc, unpack.cc and
expand_dims.cc demand equal parameters in Prepare."""

_SYMMETRIC_INT16 = (
    "ADD BATCH_MATMUL CONCATENATION CONV_2D DEPTHWISE_CONV_2D EXP FULLY_CONNECTED LEAKY_RELU MEAN REDUCE_MAX "
    "REDUCE_MIN RELU SUB SUM TRANSPOSE_CONV"
)
"""Kernels that refuse an int16 result whose zero point is not 0.

Source: TFLite, the Prepare of each, TF_LITE_ENSURE_EQ(output->params.zero_point, 0)."""

_FIRST_RESULT_ONLY = frozenset({"TOPK_V2"})
_RESCALING = frozenset({("CONCATENATION", DType.UINT8)})


def wrong_quantization(op: Operator) -> Iterator[WrongResult]:
    """Every result of the operator whose recorded parameters are not those that its kernel gives it.

    Parameters per axis are not compared: only weights have them, and constants are nobody's result.
    """
    if not op.outputs or op.outputs[0].dtype not in _INTEGERS:
        return
    dtype = op.outputs[0].dtype
    fixed = _FIXED.get((op.name, dtype))
    if fixed is not None:
        yield from _check_fixed(op, fixed)
    if op.name in _SYMMETRIC_INT16.split() and dtype == DType.INT16:
        yield from _check_symmetric(op)
    if op.name in _COPYING and (op.name, dtype) not in _RESCALING:
        yield from _check_copied(op)


def _parameters(quantization: Quantization | None) -> Parameters | None:
    if quantization is None or not quantization.is_affine:
        return None
    return Parameters(float(quantization.scale[0]), int(quantization.zero_point[0]))


def _check_fixed(op: Operator, expected: Parameters) -> Iterator[WrongResult]:
    result, source = op.outputs[0], op.inputs[0]
    if source is None or source.dtype != result.dtype:
        return
    recorded = _parameters(result.quantization)
    tolerance = _SOFTMAX_TOLERANCE if op.name == "SOFTMAX" else _ROUNDING
    if recorded is None or not _alike(recorded, expected, tolerance):
        yield _wrong(0, expected, recorded, f"{op.name} always writes {result.dtype.name} with these")


def _check_symmetric(op: Operator) -> Iterator[WrongResult]:
    recorded = _parameters(op.outputs[0].quantization)
    if recorded is not None and recorded.zero_point != 0:
        yield _wrong(
            0, recorded._replace(zero_point=0), recorded, f"{op.name} writes INT16 with zero point 0 only"
        )


def _check_copied(op: Operator) -> Iterator[WrongResult]:
    listed = _COPYING[op.name]
    sources = (
        op.inputs if listed is None else [op.inputs[index] for index in listed if index < len(op.inputs)]
    )
    results = op.outputs[:1] if op.name in _FIRST_RESULT_ONLY else op.outputs
    for output, result in enumerate(results):
        for source in sources:
            finding = None if source is None else _compare(op, output, source, result)
            if finding is not None:
                yield finding
                break


def _compare(op: Operator, output: int, source: Tensor, result: Tensor) -> WrongResult | None:
    per_axis = any(t.quantization is not None and t.quantization.is_per_axis for t in (source, result))
    if source.dtype != result.dtype or per_axis:
        return None
    expected, recorded = _parameters(source.quantization), _parameters(result.quantization)
    if expected == recorded or (expected is not None and recorded is not None and _alike(expected, recorded)):
        return None
    return _wrong(
        output, expected, recorded, f"{op.name} copies the stored numbers of tensor '{source.name}'"
    )


def _wrong(output: int, expected: Parameters | None, recorded: Parameters | None, reason: str) -> WrongResult:
    named, found = (str(stated or "no parameters") for stated in (expected, recorded))
    return WrongResult(output, named, found, reason)


def _alike(left: Parameters, right: Parameters, tolerance: float = _ROUNDING) -> bool:
    close = abs(left.scale - right.scale) <= tolerance * max(abs(left.scale), abs(right.scale))
    return close and left.zero_point == right.zero_point
