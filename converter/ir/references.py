"""Which subgraphs an operator's options name, and whether running them could ever end. It changes nothing."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final

from edge_opt.ir.graph import Subgraph
from edge_opt.output.errors import ModelFormatError
from edge_opt.schema.table import Table

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

# The runtime prepares nested subgraphs on its stack; exporters nest two or three deep.
DEEPEST: Final = 48


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


def check_references(subgraphs: Sequence[Subgraph]) -> None:
    """Check that there is a subgraph, that every named one exists, and that none leads back to itself or goes too deep.

    The runtime would call itself until its stack ends.

    Raises:
        ModelFormatError: names subgraph and operator.
    """
    if not subgraphs:
        raise ModelFormatError("expected at least one subgraph, found none", table="Model", field="subgraphs")
    called = [_calls(graph, len(subgraphs)) for graph in subgraphs]
    try:
        order = list(TopologicalSorter(dict(enumerate(called))).static_order())
    except CycleError as error:
        circle = set(error.args[1])
        caller = max(circle)
        callee = min(circle.intersection(called[caller]))
        what = f"calls subgraph {callee}, which leads back here: it would never end"
        raise ModelFormatError(f"{called[caller][callee]}: {what}") from None
    depths: dict[int, int] = {}
    for index in order:
        depth = depths[index] = 1 + max((depths[callee] for callee in called[index]), default=0)
        if depth > DEEPEST:
            name = subgraphs[index].name
            raise ModelFormatError(
                f"subgraph {index} '{name}': calls go {depth} subgraphs deep, expected at most {DEEPEST}"
            )


def _calls(graph: Subgraph, count: int) -> dict[int, str]:
    """Each subgraph that operators name, with the first that does."""
    calls: dict[int, str] = {}
    for position, operator in enumerate(graph.operators):
        for index in subgraph_indices(operator.options):
            place = calls.setdefault(index, f"subgraph '{graph.name}', operator {position} ({operator.name})")
            if not 0 <= index < count:
                raise ModelFormatError(f"{place}: subgraph {index} does not exist, there are {count}")
    return calls
