"""Types and quantization parameters of results, where the kernels fix them."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from edge_opt.ir import Operator, Quantization, Tensor
from edge_opt.ir.dtypes import DType


class WrongResult(NamedTuple):
    """Output `output` of an operator, of which the file says another thing than the kernel does, both in words."""

    output: int
    expected: str
    recorded: str
    reason: str


Source: TypeAlias = int | DType | str | None
"""Where a result's type comes from: input i, a type, the option of that name, or nothing that fixes it."""


class TypeRule(NamedTuple):
    """The sources of the results' types (a single one is that of all), and the inputs that must share one."""

    results: tuple[Source, ...]
    alike: tuple[int, ...] = ()


_ALL = tuple(range(256))

_BY_NAMES: dict[str, TypeRule] = {
    (
        "ABS AVERAGE_POOL_2D BROADCAST_TO CEIL CONV_2D CONV_3D COS CUMSUM DENSIFY DEPTHWISE_CONV_2D DEPTH_TO_SPACE "
        "ELU EXP EXPAND_DIMS FAKE_QUANT FLOOR GATHER GATHER_ND GELU HARD_SWISH L2_NORMALIZATION L2_POOL_2D "
        "LEAKY_RELU LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX MAX_POOL_2D MEAN MIRROR_PAD NEG PAD PRELU REDUCE_ALL "
        "REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 RESHAPE RESIZE_BILINEAR "
        "RESIZE_NEAREST_NEIGHBOR REVERSE_V2 ROUND RSQRT SIGN SIN SLICE SPACE_TO_DEPTH SPLIT_V SQRT SQUARE SQUEEZE "
        "STRIDED_SLICE SUM TANH TILE TRANSPOSE UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD "
        "UNPACK UNSORTED_SEGMENT_SUM ZEROS_LIKE"
    ): TypeRule((0,)),
    (
        "ADD ATAN2 BITWISE_XOR BROADCAST_ARGS DIV DYNAMIC_UPDATE_SLICE FLOOR_DIV FLOOR_MOD LOGICAL_AND LOGICAL_OR "
        "MAXIMUM MINIMUM MUL POW RIGHT_SHIFT SQUARED_DIFFERENCE STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM "
        "STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_PAD STABLEHLO_SHIFT_LEFT SUB"
    ): TypeRule((0,), (0, 1)),
    "RANGE": TypeRule((0,), (0, 1, 2)),
    "PADV2": TypeRule((0,), (0, 2)),
    "ADD_N CONCATENATION PACK": TypeRule((0,), _ALL),
    "BATCH_MATMUL FULLY_CONNECTED TOPK_V2": TypeRule((0, None)),
    "FILL SCATTER_ND SPLIT": TypeRule((1,)),
    "SELECT SELECT_V2": TypeRule((1,), (1, 2)),
    "TRANSPOSE_CONV": TypeRule((2,)),
    "ONE_HOT": TypeRule((2,), (2, 3)),
    "ARG_MAX ARG_MIN": TypeRule(("output_type",)),
    "SHAPE": TypeRule(("out_type",)),
    "EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL": TypeRule((DType.BOOL,), (0, 1)),
    "RFFT2D": TypeRule((DType.COMPLEX64,)),
    "DEQUANTIZE": TypeRule((DType.FLOAT32,)),
    "BUCKETIZE RANK": TypeRule((DType.INT32,)),
    "WHERE": TypeRule((DType.INT64,)),
}
_RULES = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}
_TYPES = frozenset(DType)
_PRODUCTS = ("BATCH_MATMUL", "FULLY_CONNECTED")
_WIDER_PRODUCTS = frozenset(
    {(DType.INT8, DType.INT32), (DType.UINT8, DType.INT16), (DType.INT8, DType.INT16)}
)


def wrong_types(op: Operator) -> Iterator[WrongResult]:
    """Every result of the operator whose recorded type is not the one that its kernel writes.

    Source: TFLite, each kernel's Prepare: `output->type = ...`, or TF_LITE_ENSURE_TYPES_EQ on inputs and output.
    """
    rule = _RULES.get(op.name)
    if rule is None or (op.name in _PRODUCTS and _is_wider_product(op)):
        return
    sources = rule.results * len(op.outputs) if len(rule.results) == 1 else rule.results
    for output, source in enumerate(sources[: len(op.outputs)]):
        expected, reason = _expected(op, source)
        recorded = op.outputs[output].dtype
        if expected is not None and recorded != expected:
            yield WrongResult(output, expected.name, recorded.name, reason)
    yield from _unlike_inputs(op, rule)


def _is_wider_product(op: Operator) -> bool:
    """Whether the kernel writes a wider type than it reads. It also takes int16 to int8 and back: that is garbage."""
    source = op.inputs[0]
    return source is None or (source.dtype, op.outputs[0].dtype) in _WIDER_PRODUCTS


def _expected(op: Operator, source: Source) -> tuple[DType | None, str]:
    if isinstance(source, DType):
        return source, f"{op.name} writes {source.name}"
    if isinstance(source, str):
        return _chosen(op, source), f"its option {source} says so"
    tensor = op.inputs[source] if source is not None and source < len(op.inputs) else None
    if tensor is None:
        return None, ""
    return tensor.dtype, f"it has the type of tensor '{tensor.name}'"


def _chosen(op: Operator, option: str) -> DType | None:
    """The type that an option names; None where it names no type, or the options are another operator's."""
    try:
        chosen = None if op.options is None else op.options.get(option)
    except KeyError:
        return None
    return DType(chosen) if chosen in _TYPES else None


def _unlike_inputs(op: Operator, rule: TypeRule) -> Iterator[WrongResult]:
    present = [op.inputs[index] for index in rule.alike if index < len(op.inputs)]
    tensors = [tensor for tensor in present if tensor is not None]
    other = next((tensor for tensor in tensors if tensor.dtype != tensors[0].dtype), None)
    if other is not None and op.outputs:
        first = tensors[0]
        names = f"tensor '{first.name}' is {first.dtype.name}, tensor '{other.name}' is {other.dtype.name}"
        yield WrongResult(0, first.dtype.name, op.outputs[0].dtype.name, f"{names}: expected one type")


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
    dtype, recorded = op.outputs[0].dtype, _parameters(op.outputs[0].quantization)
    fixed = _FIXED.get((op.name, dtype))
    if fixed is not None and op.inputs[0] is not None and op.inputs[0].dtype == dtype:
        tolerance = _SOFTMAX_TOLERANCE if op.name == "SOFTMAX" else _ROUNDING
        if recorded is None or not _alike(recorded, fixed, tolerance):
            yield _wrong(0, fixed, recorded, f"{op.name} always writes {dtype.name} with these")
    symmetric_only = dtype == DType.INT16 and op.name in _SYMMETRIC_INT16.split()
    if symmetric_only and recorded is not None and recorded.zero_point != 0:
        symmetric = recorded._replace(zero_point=0)
        yield _wrong(0, symmetric, recorded, f"{op.name} writes INT16 with zero point 0 only")
    if op.name in _COPYING and (op.name, dtype) not in _RESCALING:
        yield from _check_copied(op)


def _parameters(quantization: Quantization | None) -> Parameters | None:
    if quantization is None or not quantization.is_affine:
        return None
    return Parameters(float(quantization.scale[0]), int(quantization.zero_point[0]))


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
