"""Versions of new operators: which version of an operator a set of types needs, and which runtime has it.

Source: `tflite/tools/versioning/op_version.cc` and `runtime_version.cc` of the LiteRT repository, functions
`GetBuiltinOperatorVersion` and `FindMinimumRuntimeVersionForOp`; only operators that a rewrite adds are listed. The
runtime doesn't check the version, other readers do.
"""

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator

# operator -> type of its data operand -> version; other types are version 1.
_VERSIONS: dict[str, dict[DType, int]] = {
    "ADD": {DType.INT8: 2, DType.INT16: 3, DType.INT64: 4},
    "BATCH_MATMUL": {DType.INT8: 2, DType.INT16: 3},
    "CAST": {
        DType.UINT32: 2, DType.INT8: 3, DType.UINT16: 4, DType.FLOAT16: 5, DType.FLOAT64: 5, DType.INT4: 6,
        DType.BFLOAT16: 7,
    },
    "CONCATENATION": {DType.INT8: 2, DType.INT16: 3, DType.UINT32: 4},
    "EQUAL": {DType.INT8: 2, DType.STRING: 3, DType.INT16: 4},
    "LESS": {DType.INT8: 2, DType.INT16: 3},
    "LOGICAL_NOT": {},
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
_RANKS = {"SLICE": ((5, 5),), "SUB": ((5, 3),), "TRANSPOSE": ((5, 4), (6, 6))}

# operator -> the first runtime that has its version 1, 2, ...
_RUNTIMES: dict[str, tuple[str, ...]] = {
    "ADD": ("1.5.0", "1.14.0", "2.4.0", "2.6.0", "2.13.0"),
    "BATCH_MATMUL": ("2.3.0", "2.3.0", "2.4.0", "2.5.0"),
    "CAST": ("1.5.0", "2.7.0", "2.8.0", "2.9.0", "2.12.0", "2.15.0", "2.17.0"),
    "CONCATENATION": ("1.5.0", "1.14.0", "2.3.0", "2.14.0"),
    "EQUAL": ("1.14.0", "1.14.0", "2.3.0", "2.13.0"),
    "LESS": ("1.14.0", "1.14.0", "2.13.0"),
    "LOGICAL_NOT": ("1.11.0",),
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
