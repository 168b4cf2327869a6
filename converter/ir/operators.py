"""What the schema does not say of operators: numbers of inputs and outputs, versions."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Tensor


class Arity(NamedTuple):
    """At least `least` and at most `most` inputs (None: any number), `outputs` outputs (None: any number).

    Inputs from `least` to `most` may be left out; without a limit only where there are `gaps`.
    """

    least: int
    most: int | None
    outputs: int | None
    gaps: bool = False

    def misfit(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
        """Why an operator cannot have these inputs and outputs; None where it can."""
        least, most = self.least, self.most
        if len(inputs) < least or (most is not None and len(inputs) > most):
            wanted = f"{least} or more" if most is None else " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {wanted}"
        if self.outputs not in (None, len(outputs)):
            return f"has {len(outputs)} outputs, expected {self.outputs}"
        required = inputs if most is None and not self.gaps else inputs[:least]
        return "leaves out an input that it needs" if None in required else None


# Of these, that rewrites look at, a graph that says otherwise is refused; of the others, the shapes are not derived.
# Source: TFLite, each kernel's Prepare, `TF_LITE_ENSURE_EQ(context, NumInputs(node), ...)`.
_FOLLOWED: Final[dict[Arity, str]] = {
    Arity(1, 1, 1): (
        "ABS CAST CEIL COS DEQUANTIZE ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGICAL_NOT LOGISTIC LOG_SOFTMAX "
        "NEG QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SOFTMAX SQRT SQUARE SQUEEZE TANH "
        "ZEROS_LIKE"
    ),
    Arity(1, 2, 1): "RESHAPE",
    Arity(1, None, 1): "CONCATENATION PACK",
    Arity(1, 1, None): "UNPACK",
    Arity(2, 2, 1): (
        "ADD ATAN2 BATCH_MATMUL BITWISE_XOR BROADCAST_TO DIV EQUAL EXPAND_DIMS FLOOR_DIV FLOOR_MOD GATHER GREATER "
        "GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MAXIMUM MEAN MINIMUM MIRROR_PAD MUL NOT_EQUAL PAD POW "
        "PRELU REDUCE_MAX REDUCE_MIN REDUCE_PROD RIGHT_SHIFT SQUARED_DIFFERENCE SUB SUM TILE TRANSPOSE"
    ),
    Arity(2, 2, None): "SPLIT",
    Arity(2, 3, 1): "CONV_2D",
    Arity(2, 3, None): "FULLY_CONNECTED",
    Arity(2, None, 1): "ADD_N",
    Arity(3, 3, 1): "PADV2 SELECT SELECT_V2 SLICE",
    Arity(3, 3, None): "SPLIT_V",
    Arity(4, 4, 1): "STRIDED_SLICE",
}
_OTHERS: Final[dict[Arity, str]] = {
    Arity(0, 0, 0): "CALL_ONCE",
    Arity(0, 0, 1): "VAR_HANDLE",
    Arity(0, None, None, gaps=True): "CALL STABLEHLO_COMPOSITE",
    Arity(1, 1, 1): (
        "AVERAGE_POOL_2D BITCAST BUCKETIZE COMPLEX_ABS DENSIFY DEPTH_TO_SPACE FAKE_QUANT IMAG L2_NORMALIZATION "
        "L2_POOL_2D MAX_POOL_2D RANDOM_STANDARD_NORMAL RANDOM_UNIFORM RANK READ_VARIABLE REAL SHAPE SPACE_TO_DEPTH "
        "WHERE"
    ),
    Arity(1, 1, 2): "STABLEHLO_RNG_BIT_GENERATOR",
    Arity(1, None, None): "WHILE",
    Arity(1, None, None, gaps=True): "IF STABLEHLO_CASE",
    Arity(2, 2, 0): "ASSIGN_VARIABLE",
    Arity(2, 2, 1): (
        "ARG_MAX ARG_MIN BROADCAST_ARGS CUMSUM EMBEDDING_LOOKUP FILL GATHER_ND REDUCE_ALL REDUCE_ANY RESIZE_BILINEAR "
        "RESIZE_NEAREST_NEIGHBOR REVERSE_V2 RFFT2D STABLEHLO_ADD STABLEHLO_AND STABLEHLO_GATHER STABLEHLO_MAXIMUM "
        "STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_PAD STABLEHLO_SHIFT_LEFT"
    ),
    Arity(2, 2, 2): "TOPK_V2",
    Arity(2, 3, 1): "CONV_3D DEPTHWISE_CONV_2D",
    Arity(2, None, None): "STABLEHLO_REDUCE_WINDOW",
    Arity(3, 3, 1): (
        "DYNAMIC_UPDATE_SLICE RANGE SCATTER_ND UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD "
        "UNSORTED_SEGMENT_SUM"
    ),
    Arity(3, 4, 1): "TRANSPOSE_CONV",
    Arity(3, None, None): "STABLEHLO_SCATTER",
    Arity(4, 4, 1): "ONE_HOT",
}
FOLLOWED: Final = frozenset(" ".join(_FOLLOWED.values()).split())
ARITIES: Final = {
    name: arity for table in (_FOLLOWED, _OTHERS) for arity, names in table.items() for name in names.split()
}


def misformed(name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> str | None:
    """Why an operator that rewrites look at cannot have these inputs and outputs; None where it can."""
    if name not in FOLLOWED:
        return None
    if not outputs:
        return f"has 0 outputs, expected {ARITIES[name].outputs or '1 or more'}"
    return ARITIES[name].misfit(inputs, outputs)


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
    data = operator.input(1 if operator.name == "SPLIT" else 0)
    return operator_version(operator.name, data.dtype, len(data.shape), result=operator.outputs[0].dtype)
