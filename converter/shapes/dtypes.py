"""Types of results, where the kernels fix them; shapes and quantization are no concern here."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from edge_opt.ir import Operator
from edge_opt.ir.dtypes import DType
from edge_opt.shapes.report import WrongResult

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
    """Whether the kernel writes a wider type than it reads; int16 to int8 and back it accepts, and computes garbage."""
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
