"""Whether an operator does nothing but compute its outputs from its inputs: what may be merged, moved or dropped."""

from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Subgraph
from edge_opt.ir.references import subgraph_indices

_HANDLES = frozenset({DType.RESOURCE, DType.VARIANT})
_UNKNOWN = frozenset({"CUSTOM", "DELEGATE", "STABLEHLO_CUSTOM_CALL"})
_RANDOM = frozenset(
    {"RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL", "STABLEHLO_RNG_BIT_GENERATOR"}
)


def is_pure(operator: Operator, subgraphs: Sequence[Subgraph] = ()) -> bool:
    """False where an operator reads or changes state, draws random numbers, or may do so in code unknown here.

    State is what lies behind a handle (variables, tables) or in a tensor that is kept from one run to the next. An
    operator that calls subgraphs is as pure as those; without `subgraphs` (the model's) it is not.
    """
    if operator.name in _UNKNOWN or operator.name in _RANDOM:
        return False
    tensors = (*operator.inputs, *operator.outputs, *operator.intermediates)
    if any(t is not None and (t.is_variable or t.dtype in _HANDLES) for t in tensors):
        return False
    called = subgraph_indices(operator.options)
    if called and not subgraphs:
        return False
    return all(is_pure(inner, subgraphs) for index in called for inner in subgraphs[index].operators)
