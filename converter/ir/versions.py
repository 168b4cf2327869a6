"""Versions of new operators: which version of an operator a set of types needs.

Source: `tflite/tools/versioning/op_version.cc` of the LiteRT repository, function `GetBuiltinOperatorVersion`; only
operators that a rewrite adds are listed. The runtime doesn't check the version, other readers do.
"""

from __future__ import annotations

from edge_opt.ir.dtypes import DType

# operator -> type of its data operand -> version; other types are version 1.
_VERSIONS: dict[str, dict[DType, int]] = {
    "ADD": {DType.INT8: 2, DType.INT16: 3, DType.INT64: 4},
    "BATCH_MATMUL": {DType.INT8: 2, DType.INT16: 3},
    "CAST": {},
    "CONCATENATION": {DType.INT8: 2, DType.INT16: 3, DType.UINT32: 4},
    "EQUAL": {DType.INT8: 2, DType.STRING: 3, DType.INT16: 4},
    "LOGICAL_NOT": {},
    "MUL": {DType.INT8: 2, DType.INT16: 4, DType.INT64: 5},
    "NOT_EQUAL": {DType.INT8: 2, DType.STRING: 3},
    "PACK": {DType.INT8: 2, DType.INT16: 3, DType.UINT32: 4},
    "RESHAPE": {},
    "SELECT_V2": {DType.UINT32: 2},
    "SLICE": {DType.INT8: 2, DType.STRING: 3, DType.INT16: 4, DType.UINT32: 6},
    "SPLIT": {DType.INT8: 2, DType.INT32: 3, DType.INT16: 4},
    "TRANSPOSE": {DType.INT8: 2, DType.BOOL: 3, DType.INT16: 5},
    "UNPACK": {DType.INT8: 2, DType.UINT8: 2, DType.BOOL: 3, DType.INT16: 4},
}
# Operators that need a higher version from some rank of their data operand on: (rank, version).
_RANKS = {"SLICE": ((5, 5),), "TRANSPOSE": ((5, 4), (7, 6))}


def operator_version(name: str, dtype: DType, rank: int = 0) -> int:
    """Version of operator `name` for a data operand of that type and rank.

    Raises:
        KeyError: no rewrite adds this operator.
    """
    version = _VERSIONS[name].get(dtype, 1)
    for least, needed in _RANKS.get(name, ()):
        if rank >= least:
            version = max(version, needed)
    return version
