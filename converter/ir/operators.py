"""What the schema does not say of operators: which options table each one carries."""

from functools import cache

from edge_opt.ir.graph import BUILTIN_OPERATORS
from edge_opt.schema.tables import TABLES, UNIONS

# Operators whose options table is not named after them (schema.fbs, union BuiltinOptions).
_SHARED_OPTIONS = {
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "L2_POOL_2D": "Pool2DOptions",
    "L2_NORMALIZATION": "L2NormOptions",
    "SUM": "ReducerOptions",
    "MEAN": "ReducerOptions",
    "REDUCE_PROD": "ReducerOptions",
    "REDUCE_MAX": "ReducerOptions",
    "REDUCE_MIN": "ReducerOptions",
    "REDUCE_ANY": "ReducerOptions",
    "REDUCE_ALL": "ReducerOptions",
    "MAXIMUM": "MaximumMinimumOptions",
    "MINIMUM": "MaximumMinimumOptions",
    "EMBEDDING_LOOKUP_SPARSE": "EmbeddingLookupSparseOptions",
    "CONV_3D_TRANSPOSE": "Conv3DOptions",
    "RANDOM_UNIFORM": "RandomOptions",
    "RANDOM_STANDARD_NORMAL": "RandomOptions",
    "MULTINOMIAL": "RandomOptions",
    "RNN": "RNNOptions",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "SequenceRNNOptions",
}


@cache
def options_table(operator: str) -> str | None:
    """Name of the table that holds an operator's options; None where it has none."""
    assert operator in BUILTIN_OPERATORS, operator
    if operator in _SHARED_OPTIONS:
        return _SHARED_OPTIONS[operator]
    wanted = operator.replace("_", "").lower() + "options"
    for union in ("BuiltinOptions", "BuiltinOptions2"):
        for name in UNIONS[union].values():
            if name.lower() == wanted:
                assert name in TABLES
                return name
    return None
