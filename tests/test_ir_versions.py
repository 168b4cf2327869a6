"""Versions of the operators that rewrites add, against the rules that TFLite's own tools apply."""

import pytest

from edge_opt.ir import DType
from edge_opt.ir.operators import KINDS

F32, F16, I8, I16, I32, I64, U8, BOOL = (
    DType.FLOAT32, DType.FLOAT16, DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.BOOL,
)  # fmt: skip

# GetBuiltinOperatorVersion, read case by case: type of its data operand, rank, version. ADD, MUL and SUB of int16 are
# quantized, without pot_scale_int16; SUB of rank 5 broadcasts.
RULES = {
    "ADD": [(F32, 4, 1), (I8, 4, 2), (I16, 4, 3), (I64, 4, 4)],
    "BATCH_MATMUL": [(F32, 4, 1), (I8, 4, 2), (I16, 4, 3)],
    "CONCATENATION": [(F32, 4, 1), (I8, 4, 2), (I16, 4, 3), (DType.UINT32, 4, 4)],
    "EQUAL": [(F32, 3, 1), (I8, 3, 2), (DType.STRING, 3, 3), (I16, 3, 4)],
    "LESS": [(F32, 4, 1), (I8, 4, 2), (I16, 4, 3)],
    "LOGICAL_NOT": [(BOOL, 4, 1)],
    "MUL": [(F32, 4, 1), (I8, 4, 2), (I16, 4, 4), (I64, 4, 5)],
    "NOT_EQUAL": [(F32, 3, 1), (I8, 3, 2), (I16, 3, 1)],
    "PACK": [(F32, 3, 1), (U8, 3, 1), (I8, 3, 2), (I16, 3, 3)],
    "RESHAPE": [(F32, 4, 1), (I16, 6, 1)],
    "SELECT_V2": [(F32, 4, 1), (I16, 4, 1)],
    "SLICE": [
        (F32, 4, 1), (I8, 4, 2), (DType.STRING, 1, 3), (I16, 4, 4), (I16, 5, 5), (F32, 5, 5),
        (DType.UINT32, 5, 6),
    ],
    "SPLIT": [(F32, 4, 1), (I8, 4, 2), (I32, 4, 3), (I16, 4, 4)],
    "SUB": [(F32, 4, 1), (F32, 5, 3), (I8, 4, 2), (I64, 4, 4), (I16, 4, 5)],
    "TRANSPOSE": [
        (F32, 4, 1), (I8, 4, 2), (BOOL, 4, 3), (F32, 5, 4), (I8, 5, 4), (I16, 4, 5), (I16, 5, 5), (F32, 6, 6),
        (I16, 6, 6), (DType.INT4, 2, 7),
    ],
    "UNPACK": [(F32, 4, 1), (I8, 4, 2), (U8, 4, 2), (BOOL, 4, 3), (I16, 4, 4)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "rank", "version"), [(name, *row) for name, rows in RULES.items() for row in rows]
)
def test_version_of_a_new_operator(name: str, dtype: DType, rank: int, version: int) -> None:
    assert KINDS[name].version_for(dtype, rank=rank) == version


@pytest.mark.parametrize(
    ("source", "result", "version"),
    [
        (BOOL, F32, 1), (BOOL, F16, 5), (F16, F32, 5), (BOOL, DType.FLOAT64, 5), (I8, F32, 3), (BOOL, I8, 3),
        (DType.UINT16, I8, 4), (DType.UINT32, F32, 2), (DType.BFLOAT16, F32, 7), (DType.INT4, F32, 6), (I16, I32, 1),
    ],
)  # fmt: skip
def test_version_of_a_cast_depends_on_both_types(source: DType, result: DType, version: int) -> None:
    assert KINDS["CAST"].version_for(source, result) == version


# Of the runtime's flatbuffer_conversions.cc, which reads them.
@pytest.mark.parametrize(
    ("table", "operators"),
    [
        ("L2NormOptions", "L2_NORMALIZATION"),
        ("MaximumMinimumOptions", "MAXIMUM MINIMUM"),
        ("Pool2DOptions", "AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D"),
        ("RandomOptions", "RANDOM_UNIFORM RANDOM_STANDARD_NORMAL MULTINOMIAL"),
        ("ReducerOptions", "SUM MEAN REDUCE_MAX REDUCE_MIN REDUCE_PROD REDUCE_ANY REDUCE_ALL"),
        ("Conv3DOptions", "CONV_3D CONV_3D_TRANSPOSE"),
        ("SequenceRNNOptions", "UNIDIRECTIONAL_SEQUENCE_RNN"),
        ("BatchMatMulOptions", "BATCH_MATMUL"),
        ("StableHLOCompositeOptions", "STABLEHLO_COMPOSITE"),
        (None, "LOGISTIC"),
    ],
)
def test_options_lie_in_the_table_that_the_runtime_reads(table: str | None, operators: str) -> None:
    assert {KINDS[name].options for name in operators.split()} == {table}
