"""Which table holds the options of an operator, what they are where they are left out, what subgraphs they name."""

from functools import cache
from typing import Final

from edge_opt.schema.table import ENUMS, UNIONS, Table, new_table

# Operators whose options table is not named after them (schema.fbs, union BuiltinOptions).
_SHARED_OPTIONS = {
    operator: table
    for table, operators in {
        "Conv3DOptions": "CONV_3D_TRANSPOSE",
        "EmbeddingLookupSparseOptions": "EMBEDDING_LOOKUP_SPARSE",
        "L2NormOptions": "L2_NORMALIZATION",
        "MaximumMinimumOptions": "MAXIMUM MINIMUM",
        "Pool2DOptions": "AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D",
        "RNNOptions": "RNN",
        "RandomOptions": "MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM",
        "ReducerOptions": "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM",
        "SequenceRNNOptions": "UNIDIRECTIONAL_SEQUENCE_RNN",
    }.items()
    for operator in operators.split()
}

# Options table -> the fields that hold subgraph indices (schema.fbs names them by these words only).
SUBGRAPH_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "CallOnceOptions": ("init_subgraph_index",),
    "CallOptions": ("subgraph",),
    "IfOptions": ("then_subgraph_index", "else_subgraph_index"),
    "StableHLOCompositeOptions": ("decomposition_subgraph_index",),
    "StablehloCaseOptions": ("branch_subgraph_indices",),
    "StablehloCustomCallOptions": ("called_computations",),
    "StablehloReduceOptions": ("body_subgraph_index",),
    "StablehloReduceWindowOptions": ("body_subgraph_index",),
    "StablehloScatterOptions": ("update_computation_subgraph_index",),
    "StablehloSortOptions": ("comparator_subgraph_index",),
    "StablehloWhileOptions": ("cond_subgraph_index", "body_subgraph_index"),
    "WhileOptions": ("cond_subgraph_index", "body_subgraph_index"),
}


@cache
def options_table(operator: str) -> str | None:
    """Name of the table that holds an operator's options; None where it has none."""
    assert operator in ENUMS["BuiltinOperator"], operator
    wanted = operator.replace("_", "").lower() + "options"
    tables = (*UNIONS["BuiltinOptions"].values(), *UNIONS["BuiltinOptions2"].values())
    named_after_it = (table for table in tables if table.lower() == wanted)
    return _SHARED_OPTIONS.get(operator) or next(named_after_it, None)


@cache
def default_options(operator: str) -> Table | None:
    """Options with nothing but the schema's defaults; None for an operator that has none. Not to be edited."""
    table = options_table(operator)
    return None if table is None else new_table(table)


def subgraph_indices(options: Table | None) -> tuple[int, ...]:
    """The subgraphs that these options name, each as often as they do."""
    if options is None or options.name not in SUBGRAPH_FIELDS:
        return ()
    indices: list[int] = []
    for field in SUBGRAPH_FIELDS[options.name]:
        value = options.get(field)
        if isinstance(value, int):
            indices.append(value)
        elif value is not None:
            indices.extend(value.tolist())
    return tuple(indices)
