"""What the schema does not say of operators: their inputs and outputs, what they do with elements, versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Tensor


class Effect(Enum):
    """What an operator does with the elements of its data operands."""

    ELEMENTWISE = auto()  # a result's element is computed from those at its place; operands may broadcast
    ALONG_ROWS = auto()  # a row of the last axis is computed from the operand's row, of the same length
    REDUCTION = auto()  # folds whole axes
    PRODUCT = auto()  # of matrices
    CONVOLUTION = auto()
    REARRANGING = auto()  # all elements, under other axes
    CUTTING = auto()  # parts of the operand; each result is one
    PADDING = auto()
    REPEATING = auto()  # may take elements several times
    JOINING = auto()
    CALLING = auto()  # runs subgraphs
    RANDOM = auto()
    UNKNOWN = auto()  # code that is not the runtime's
    OTHER = auto()  # nothing above; no rewrite looks at it


_UNSEEN: Final = {Effect.CALLING, Effect.RANDOM, Effect.UNKNOWN, Effect.OTHER}


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """What is known of an operator by its name alone.

    It has `least` to `most` inputs (by default exactly `least`, -1 is any number) and `outputs` outputs (None: any
    number). Inputs from `least` to `most` may be left out; without a limit only where there are `gaps`.

    `data` are the inputs that the results are made of (None: all), the others steer. `result` is the type of results:
    "data" that of the first data operand, the name of an option, a type, or None where nothing fixes it. With `copies`
    the results hold the data operands' stored numbers as they are. Only a CUTTING operator has several such results;
    behind the first, those of others hold indices or scratch.
    """

    effect: Effect
    least: int = 1
    most: int | None = None
    outputs: int | None = 1
    data: tuple[int, ...] | None = (0,)
    result: DType | str | None = "data"
    copies: bool = False
    gaps: bool = False

    @property
    def is_followed(self) -> bool:
        """Whether rewrites look at the operator: then a graph where it has another form is refused."""
        return self.effect not in _UNSEEN

    def misfit(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
        """Why an operator cannot have these inputs and outputs; None where it can."""
        least, most = self.least, self.least if self.most is None else self.most
        if len(inputs) < least or 0 <= most < len(inputs):
            wanted = f"{least} or more" if most < 0 else " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {wanted}"
        if self.is_followed and not outputs:
            return f"has 0 outputs, expected {self.outputs or '1 or more'}"
        if self.outputs not in (None, len(outputs)):
            return f"has {len(outputs)} outputs, expected {self.outputs}"
        required = inputs if most < 0 and not self.gaps else inputs[:least]
        return "leaves out an input that it needs" if None in required else None

    def data_operands(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Of an operator's inputs, those that its results are made of."""
        return [
            tensor for place, tensor in enumerate(inputs) if tensor is not None and self.has_data_at(place)
        ]

    def has_data_at(self, place: int) -> bool:
        """Whether the results are made of the input at this place."""
        return self.data is None or place in self.data

    def data_results(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of an operator's outputs, those that are made of its data operands."""
        return outputs if self.effect is Effect.CUTTING else outputs[:1]


# Source: TFLite, each kernel's Prepare: `TF_LITE_ENSURE_EQ(context, NumInputs(node), ...)`, `output->type = ...`,
# TF_LITE_ENSURE_TYPES_EQ. Kernels copy, or compare, stored numbers; concatenation.cc, pack.cc, unpack.cc and
# expand_dims.cc demand equal parameters.
_KINDS: Final[dict[str, OperatorKind]] = {
    (
        "ABS CEIL COS ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGICAL_NOT LOGISTIC NEG RELU RELU6 "
        "RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SQRT SQUARE TANH ZEROS_LIKE"
    ): OperatorKind(Effect.ELEMENTWISE),
    "CAST COMPLEX_ABS IMAG QUANTIZE REAL": OperatorKind(Effect.ELEMENTWISE, result=None),
    "DEQUANTIZE": OperatorKind(Effect.ELEMENTWISE, result=DType.FLOAT32),
    "BUCKETIZE": OperatorKind(Effect.ELEMENTWISE, result=DType.INT32),
    (
        "ADD ATAN2 BITWISE_XOR DIV FLOOR_DIV FLOOR_MOD LOGICAL_AND LOGICAL_OR MUL POW RIGHT_SHIFT SQUARED_DIFFERENCE "
        "STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_SHIFT_LEFT SUB"
    ): OperatorKind(Effect.ELEMENTWISE, 2, data=(0, 1)),
    "MAXIMUM MINIMUM": OperatorKind(Effect.ELEMENTWISE, 2, data=(0, 1), copies=True),
    "EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL": OperatorKind(
        Effect.ELEMENTWISE, 2, data=(0, 1), result=DType.BOOL
    ),
    "PRELU": OperatorKind(Effect.ELEMENTWISE, 2),
    "ADD_N": OperatorKind(Effect.ELEMENTWISE, 2, -1, data=None),
    "SELECT SELECT_V2": OperatorKind(Effect.ELEMENTWISE, 3, data=(1, 2), copies=True),
    "L2_NORMALIZATION LOG_SOFTMAX": OperatorKind(Effect.ALONG_ROWS),
    "SOFTMAX": OperatorKind(Effect.ALONG_ROWS, result=None),
    "MEAN REDUCE_ALL REDUCE_ANY REDUCE_PROD SUM": OperatorKind(Effect.REDUCTION, 2),
    "REDUCE_MAX REDUCE_MIN": OperatorKind(Effect.REDUCTION, 2, copies=True),
    "BATCH_MATMUL": OperatorKind(Effect.PRODUCT, 2, data=(0, 1)),
    "FULLY_CONNECTED": OperatorKind(Effect.PRODUCT, 2, 3, outputs=None),
    "CONV_2D CONV_3D DEPTHWISE_CONV_2D": OperatorKind(Effect.CONVOLUTION, 2, 3),
    "TRANSPOSE_CONV": OperatorKind(Effect.CONVOLUTION, 3, 4, data=(2,)),
    "SQUEEZE": OperatorKind(Effect.REARRANGING, copies=True),
    "RESHAPE": OperatorKind(Effect.REARRANGING, 1, 2, copies=True),
    "EXPAND_DIMS TRANSPOSE": OperatorKind(Effect.REARRANGING, 2, copies=True),
    "SLICE": OperatorKind(Effect.CUTTING, 3, copies=True),
    "STRIDED_SLICE": OperatorKind(Effect.CUTTING, 4, copies=True),
    "SPLIT": OperatorKind(Effect.CUTTING, 2, outputs=None, data=(1,), copies=True),
    "SPLIT_V": OperatorKind(Effect.CUTTING, 3, outputs=None, copies=True),
    "UNPACK": OperatorKind(Effect.CUTTING, outputs=None, copies=True),
    "MIRROR_PAD PAD": OperatorKind(Effect.PADDING, 2, copies=True),
    "PADV2": OperatorKind(Effect.PADDING, 3, data=(0, 2), copies=True),
    "BROADCAST_TO GATHER TILE": OperatorKind(Effect.REPEATING, 2, copies=True),
    "CONCATENATION PACK": OperatorKind(Effect.JOINING, 1, -1, data=None, copies=True),
    "CALL_ONCE": OperatorKind(Effect.CALLING, 0, outputs=0, data=()),
    "CALL STABLEHLO_COMPOSITE": OperatorKind(Effect.CALLING, 0, -1, None, (), None, gaps=True),
    "IF STABLEHLO_CASE": OperatorKind(Effect.CALLING, 1, -1, None, (), None, gaps=True),
    "WHILE": OperatorKind(Effect.CALLING, 1, -1, None, (), None),
    "RANDOM_STANDARD_NORMAL RANDOM_UNIFORM": OperatorKind(Effect.RANDOM, data=(), result=None),
    "MULTINOMIAL": OperatorKind(Effect.RANDOM, 2, data=(), result=None),
    "STABLEHLO_RNG_BIT_GENERATOR": OperatorKind(Effect.RANDOM, outputs=2, data=(), result=None),
    "CUSTOM DELEGATE STABLEHLO_CUSTOM_CALL": OperatorKind(Effect.UNKNOWN, 0, -1, None, (), None, gaps=True),
    "AVERAGE_POOL_2D DENSIFY L2_POOL_2D": OperatorKind(Effect.OTHER),
    "DEPTH_TO_SPACE MAX_POOL_2D SPACE_TO_DEPTH": OperatorKind(Effect.OTHER, copies=True),
    "READ_VARIABLE": OperatorKind(Effect.OTHER, result=None),
    "RANK": OperatorKind(Effect.OTHER, result=DType.INT32),
    "SHAPE": OperatorKind(Effect.OTHER, result="out_type"),
    "WHERE": OperatorKind(Effect.OTHER, result=DType.INT64),
    "VAR_HANDLE": OperatorKind(Effect.OTHER, 0, data=(), result=None),
    "ASSIGN_VARIABLE": OperatorKind(Effect.OTHER, 2, outputs=0, data=()),
    "ARG_MAX ARG_MIN": OperatorKind(Effect.OTHER, 2, result="output_type"),
    "BROADCAST_ARGS STABLEHLO_PAD": OperatorKind(Effect.OTHER, 2, data=(0, 1)),
    "CUMSUM RESIZE_BILINEAR": OperatorKind(Effect.OTHER, 2),
    "GATHER_ND RESIZE_NEAREST_NEIGHBOR REVERSE_V2": OperatorKind(Effect.OTHER, 2, copies=True),
    "EMBEDDING_LOOKUP": OperatorKind(Effect.OTHER, 2, data=(1,), result=None),
    "FILL": OperatorKind(Effect.OTHER, 2, data=(1,), copies=True),
    "RFFT2D": OperatorKind(Effect.OTHER, 2, result=DType.COMPLEX64),
    "STABLEHLO_GATHER": OperatorKind(Effect.OTHER, 2, result=None),
    "TOPK_V2": OperatorKind(Effect.OTHER, 2, outputs=2, copies=True),
    "DYNAMIC_UPDATE_SLICE": OperatorKind(Effect.OTHER, 3, data=(0, 1), copies=True),
    "RANGE": OperatorKind(Effect.OTHER, 3, data=(0, 1, 2)),
    "SCATTER_ND": OperatorKind(Effect.OTHER, 3, data=(1,)),
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM": OperatorKind(
        Effect.OTHER, 3
    ),
    "STABLEHLO_SCATTER": OperatorKind(Effect.OTHER, 3, -1, outputs=None, result=None),
    "ONE_HOT": OperatorKind(Effect.OTHER, 4, data=(2, 3)),
}
KINDS: Final = {name: kind for names, kind in _KINDS.items() for name in names.split()}
"""The one record of each operator: rooms register behaviour for it (a shape rule, say), and no facts of their own."""


def operators_that(*effects: Effect) -> frozenset[str]:
    """Names of the operators with one of these effects."""
    return frozenset(name for name, kind in KINDS.items() if kind.effect in effects)


UNARY: Final = frozenset(name for name in operators_that(Effect.ELEMENTWISE) if KINDS[name].least == 1)
"""Elementwise operators of one operand."""


# operator -> type of its data operand -> version; other types are version 1. Only operators that a rewrite adds are
# listed. The runtime doesn't check the version, other readers do.
# Source: LiteRT, tflite/tools/versioning/op_version.cc, GetBuiltinOperatorVersion.
_VERSIONS: dict[str, dict[DType, int]] = {
    "ADD": {DType.INT8: 2, DType.INT16: 3, DType.INT64: 4},
    "BATCH_MATMUL": {DType.INT8: 2, DType.INT16: 3},
    "CAST": {
        DType.UINT32: 2, DType.INT8: 3, DType.UINT16: 4, DType.FLOAT16: 5, DType.FLOAT64: 5, DType.INT4: 6,
        DType.BFLOAT16: 7,
    },
    "CONCATENATION": {DType.INT8: 2, DType.INT16: 3, DType.UINT32: 4},
    "EQUAL": {DType.INT8: 2, DType.STRING: 3, DType.INT16: 4},
    "GATHER": {DType.INT8: 2, DType.BOOL: 3, DType.INT16: 4},
    "LESS": {DType.INT8: 2, DType.INT16: 3},
    "LOGICAL_NOT": {},
    "MAXIMUM": {DType.INT8: 2, DType.INT16: 4},
    "MINIMUM": {DType.INT8: 2, DType.INT16: 4},
    "MUL": {DType.INT8: 2, DType.INT16: 4, DType.INT64: 5, DType.COMPLEX64: 6, DType.UINT32: 7},
    "NOT_EQUAL": {DType.INT8: 2, DType.STRING: 3},
    "PACK": {DType.INT8: 2, DType.INT16: 3, DType.UINT32: 4},
    "RESHAPE": {},
    "SELECT_V2": {DType.UINT32: 2},
    "SHAPE": {},
    "SLICE": {DType.INT8: 2, DType.STRING: 3, DType.INT16: 4, DType.UINT32: 6},
    "SPLIT": {DType.INT8: 2, DType.INT32: 3, DType.INT16: 4},
    "SQUEEZE": {DType.INT8: 2},
    "SUB": {DType.INT8: 2, DType.INT64: 4, DType.INT16: 5},
    "TRANSPOSE": {DType.INT8: 2, DType.BOOL: 3, DType.INT16: 5, DType.INT4: 7},
    "UNPACK": {DType.INT8: 2, DType.UINT8: 2, DType.BOOL: 3, DType.INT16: 4},
}  # fmt: skip
# Operators that need a higher version from some rank of their data operand on: (rank, version).
_RANKS = {
    "MAXIMUM": ((5, 3),),
    "MINIMUM": ((5, 3),),
    "SLICE": ((5, 5),),
    "SUB": ((5, 3),),
    "TRANSPOSE": ((5, 4), (6, 6)),
}

# operator -> the first runtime that has its version 1, 2, ...
# Source: LiteRT, tflite/tools/versioning/runtime_version.cc, FindMinimumRuntimeVersionForOp.
_RUNTIMES: dict[str, tuple[str, ...]] = {
    "ADD": ("1.5.0", "1.14.0", "2.4.0", "2.6.0", "2.13.0"),
    "BATCH_MATMUL": ("2.3.0", "2.3.0", "2.4.0", "2.5.0"),
    "CAST": ("1.5.0", "2.7.0", "2.8.0", "2.9.0", "2.12.0", "2.15.0", "2.17.0"),
    "CONCATENATION": ("1.5.0", "1.14.0", "2.3.0", "2.14.0"),
    "EQUAL": ("1.14.0", "1.14.0", "2.3.0", "2.13.0"),
    "GATHER": ("1.6.0", "1.14.0", "1.15.0", "2.4.0", "2.5.0"),
    "LESS": ("1.14.0", "1.14.0", "2.13.0"),
    "LOGICAL_NOT": ("1.11.0",),
    "MAXIMUM": ("1.14.0", "1.14.0", "2.3.0", "2.3.0"),
    "MINIMUM": ("1.14.0", "1.14.0", "2.3.0", "2.3.0"),
    "MUL": ("1.5.0", "1.14.0", "1.15.0", "2.3.0", "2.6.0", "2.11.0", "2.13.0"),
    "NOT_EQUAL": ("1.14.0", "1.14.0", "2.3.0"),
    "PACK": ("1.11.0", "1.14.0", "2.3.0", "2.13.0"),
    "RESHAPE": ("1.5.0",),
    "SELECT_V2": ("2.2.0", "2.12.0"),
    "SHAPE": ("1.10.0",),
    "SLICE": ("1.14.0", "1.14.0", "1.14.0", "2.4.0", "2.5.0", "2.14.0"),
    "SPLIT": ("1.5.0", "1.14.0", "1.14.0", "2.3.0"),
    "SQUEEZE": ("1.6.0", "2.5.0"),
    "SUB": ("1.6.0", "1.14.0", "2.3.0", "2.4.0", "2.4.0"),
    "TRANSPOSE": ("1.6.0", "1.14.0", "1.15.0", "2.3.0", "2.4.0", "2.12.0", "2.14.4"),
    "UNPACK": ("1.11.0", "1.14.0", "2.2.0", "2.3.0"),
}


def operator_version(name: str, dtype: DType, rank: int = 0, *, result: DType | None = None) -> int:
    """Version of operator `name` for a data operand of that type and rank; CAST also depends on the result's type.

    Raises:
        KeyError: no rewrite adds this operator.
    """
    versions = _VERSIONS[name]
    version = versions.get(dtype, 1)
    if name == "CAST" and result is not None:
        version = max(version, versions.get(result, 1))
    for least, needed in _RANKS.get(name, ()):
        if rank >= least:
            version = max(version, needed)
    return version


def runtime_version(name: str, version: int) -> str:
    """The first runtime that has this version of an operator, e.g. "2.3.0"; empty for one that no rewrite adds."""
    known = _RUNTIMES.get(name, ())
    return known[version - 1] if 0 < version <= len(known) else ""


def required_version(operator: Operator) -> int:
    """The version that an operator's types need; 1 for one that no rewrite adds."""
    if operator.name not in _VERSIONS:
        return 1
    data = KINDS[operator.name].data_operands(operator.inputs)[0]
    return operator_version(operator.name, data.dtype, len(data.shape), result=operator.outputs[0].dtype)
