"""Types of results, where the kernels fix them; shapes and quantization are no concern here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from edge_opt.ir.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.shapes.call import OperatorLike

Source: TypeAlias = int | DType | str | None
"""Where a result's type comes from: input i, a type, the option of that name, or nothing that fixes it."""


class Finding(NamedTuple):
    """A result whose type is not what the operator writes."""

    output: int
    expected: DType
    reason: str


class TypeRule(NamedTuple):
    """The sources of the results' types, and the inputs that must share one."""

    results: tuple[Source, ...]
    alike: tuple[int, ...] = ()


_ALL = tuple(range(256))

_UNARY = (
    "ABS", "CEIL", "COS", "CUMSUM", "ELU", "EXP", "FAKE_QUANT", "FLOOR", "GELU", "HARD_SWISH", "L2_NORMALIZATION",
    "LEAKY_RELU", "LOCAL_RESPONSE_NORMALIZATION", "LOG", "LOGICAL_NOT", "LOG_SOFTMAX", "NEG", "RELU", "RELU6",
    "RELU_0_TO_1", "RELU_N1_TO_1", "ROUND", "RSQRT", "SIGN", "SIN", "SQRT", "SQUARE", "ZEROS_LIKE", "LOGISTIC",
    "TANH", "L2_POOL_2D",
)  # fmt: skip
_MOVING = (
    "AVERAGE_POOL_2D", "BATCH_TO_SPACE_ND", "BROADCAST_TO", "CONV_2D", "CONV_3D", "DENSIFY", "DEPTHWISE_CONV_2D",
    "DEPTH_TO_SPACE", "DILATE", "EXPAND_DIMS", "GATHER", "GATHER_ND", "MATRIX_DIAG", "MATRIX_SET_DIAG",
    "MAX_POOL_2D", "MIRROR_PAD", "PAD", "RESHAPE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR",
    "REVERSE_SEQUENCE", "REVERSE_V2", "SEGMENT_SUM", "SLICE", "SPACE_TO_BATCH_ND", "SPACE_TO_DEPTH", "SQUEEZE",
    "STRIDED_SLICE", "TILE", "TRANSPOSE", "PRELU", "UNSORTED_SEGMENT_MAX", "UNSORTED_SEGMENT_MIN",
    "UNSORTED_SEGMENT_PROD", "UNSORTED_SEGMENT_SUM", "STABLEHLO_RESHAPE", "STABLEHLO_TRANSPOSE",
    "STABLEHLO_SLICE", "STABLEHLO_DYNAMIC_SLICE", "STABLEHLO_BROADCAST_IN_DIM",
)  # fmt: skip
_REDUCING = ("MEAN", "REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "SUM")
_BINARY = (
    "ADD", "ATAN2", "BITWISE_XOR", "DIV", "FLOOR_DIV", "FLOOR_MOD", "LOGICAL_AND", "LOGICAL_OR", "MAXIMUM",
    "MINIMUM", "MUL", "POW", "RIGHT_SHIFT", "SQUARED_DIFFERENCE", "SUB", "BROADCAST_ARGS",
    "DYNAMIC_UPDATE_SLICE", "STABLEHLO_ADD", "STABLEHLO_AND", "STABLEHLO_DIVIDE", "STABLEHLO_MAXIMUM",
    "STABLEHLO_MINIMUM", "STABLEHLO_MULTIPLY", "STABLEHLO_OR", "STABLEHLO_POWER", "STABLEHLO_REMAINDER",
    "STABLEHLO_SHIFT_LEFT", "STABLEHLO_SUBTRACT", "STABLEHLO_PAD", "STABLEHLO_DYNAMIC_UPDATE_SLICE",
)  # fmt: skip
_COMPARING = ("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL", "STABLEHLO_COMPARE")

_RULES: dict[str, TypeRule] = {
    **dict.fromkeys((*_UNARY, *_MOVING, *_REDUCING), TypeRule((0,))),
    **dict.fromkeys(_BINARY, TypeRule((0,), (0, 1))),
    **dict.fromkeys(_COMPARING, TypeRule((DType.BOOL,), (0, 1))),
    **dict.fromkeys(("CONCATENATION", "PACK", "ADD_N", "STABLEHLO_CONCATENATE"), TypeRule((0,), _ALL)),
    **dict.fromkeys(("SELECT", "SELECT_V2", "STABLEHLO_SELECT"), TypeRule((1,), (1, 2))),
    "ARG_MAX": TypeRule(("output_type",)),
    "ARG_MIN": TypeRule(("output_type",)),
    "BUCKETIZE": TypeRule((DType.INT32,)),
    "DEQUANTIZE": TypeRule((DType.FLOAT32,)),
    "FILL": TypeRule((1,)),
    "HASHTABLE": TypeRule((DType.RESOURCE,)),
    "HASHTABLE_SIZE": TypeRule((DType.INT64,)),
    "NON_MAX_SUPPRESSION_V4": TypeRule((DType.INT32, DType.INT32)),
    "NON_MAX_SUPPRESSION_V5": TypeRule((DType.INT32, DType.FLOAT32, DType.INT32)),
    "ONE_HOT": TypeRule((2,), (2, 3)),
    "PADV2": TypeRule((0,), (0, 2)),
    "RANGE": TypeRule((0,), (0, 1, 2)),
    "RANK": TypeRule((DType.INT32,)),
    "RFFT2D": TypeRule((DType.COMPLEX64,)),
    "SCATTER_ND": TypeRule((1,)),
    "SHAPE": TypeRule(("out_type",)),
    "SPARSE_TO_DENSE": TypeRule((2,), (2, 3)),
    "TOPK_V2": TypeRule((0, None)),
    "TRANSPOSE_CONV": TypeRule((2,)),
    "UNIQUE": TypeRule((0, "idx_out_type")),
    "WHERE": TypeRule((DType.INT64,)),
}
_SPREADING = {"SPLIT": 1, "SPLIT_V": 0, "UNPACK": 0}
_TYPES = frozenset(DType)
_PRODUCTS = ("BATCH_MATMUL", "FULLY_CONNECTED")
_WIDER_PRODUCTS = frozenset(
    {(DType.INT8, DType.INT32), (DType.UINT8, DType.INT16), (DType.INT8, DType.INT16)}
)


def wrong_types(op: OperatorLike) -> Iterator[Finding]:
    """Every result of the operator whose recorded type is not the one that its kernel writes.

    Source: TFLite, each kernel's Prepare: `output->type = ...`, or TF_LITE_ENSURE_TYPES_EQ on inputs and output.
    """
    rule = _rule_of(op)
    if rule is None:
        return
    for output, source in enumerate(rule.results[: len(op.outputs)]):
        expected, reason = _expected(op, source)
        if expected is not None and op.outputs[output].dtype != expected:
            yield Finding(output, expected, reason)
    yield from _unlike_inputs(op, rule)


def _rule_of(op: OperatorLike) -> TypeRule | None:
    spread = _SPREADING.get(op.name)
    if spread is not None:
        return TypeRule((spread,) * len(op.outputs))
    if op.name in _PRODUCTS:
        return None if _is_wider_product(op) else TypeRule((0,))
    return _RULES.get(op.name)


def _is_wider_product(op: OperatorLike) -> bool:
    """Whether the kernel writes a wider type than it reads; int16 to int8 and back it accepts, and computes garbage."""
    source = op.inputs[0]
    return source is None or (source.dtype, op.outputs[0].dtype) in _WIDER_PRODUCTS


def _expected(op: OperatorLike, source: Source) -> tuple[DType | None, str]:
    if isinstance(source, DType):
        return source, f"{op.name} writes {source.name}"
    if isinstance(source, str):
        return _chosen(op, source), f"its option {source} says so"
    tensor = op.inputs[source] if source is not None and source < len(op.inputs) else None
    if tensor is None:
        return None, ""
    return DType(tensor.dtype), f"it has the type of tensor '{tensor.name}'"


def _chosen(op: OperatorLike, option: str) -> DType | None:
    """The type that an option names; None where it names no type, or the options are another operator's."""
    try:
        chosen = None if op.options is None else op.options.get(option)
    except KeyError:
        return None
    return DType(chosen) if chosen in _TYPES else None


def _unlike_inputs(op: OperatorLike, rule: TypeRule) -> Iterator[Finding]:
    present = [op.inputs[index] for index in rule.alike if index < len(op.inputs)]
    tensors = [tensor for tensor in present if tensor is not None]
    other = next((tensor for tensor in tensors if tensor.dtype != tensors[0].dtype), None)
    if other is not None and op.outputs:
        first, second = DType(tensors[0].dtype), DType(other.dtype)
        names = f"tensor '{tensors[0].name}' is {first.name}, tensor '{other.name}' is {second.name}"
        reason = f"{names}: expected one type"
        yield Finding(0, first, reason)
