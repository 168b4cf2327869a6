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
    found: list[int] = []
    for field in SUBGRAPH_FIELDS[options.name]:
        value = options.get(field)
        if isinstance(value, int):
            found.append(value)
        elif value is not None:
            found.extend(value.tolist())
    return tuple(found)


def check_references(subgraphs: Sequence[Subgraph]) -> None:
    """Check that there is a subgraph, that every named one exists, and that none leads back to itself or goes too deep.

    The runtime would call itself until its stack ends.

    Raises:
        ModelFormatError: names subgraph and operator.
    """
    if not subgraphs:
        raise ModelFormatError("expected at least one subgraph, found none", table="Model", field="subgraphs")
    called = {index: _called_by(subgraphs, graph) for index, graph in enumerate(subgraphs)}
    try:
        order = list(TopologicalSorter(called).static_order())
    except CycleError as error:
        raise _endless(subgraphs, called, set(error.args[1])) from None
    depths: dict[int, int] = {}
    for index in order:
        depth = depths[index] = 1 + max((depths[callee] for callee in called[index]), default=0)
        if depth > DEEPEST:
            name = subgraphs[index].name
            raise ModelFormatError(
                f"subgraph {index} '{name}': calls go {depth} subgraphs deep, expected at most {DEEPEST}"
            )


def _called_by(subgraphs: Sequence[Subgraph], graph: Subgraph) -> set[int]:
    called: set[int] = set()
    for operator in graph.operators:
        called.update(subgraph_indices(operator.options))
    for index in called:
        if not 0 <= index < len(subgraphs):
            count = len(subgraphs)
            raise ModelFormatError(
                f"{_place(graph, index)}: subgraph {index} does not exist, there are {count}"
            )
    return called


def _endless(
    subgraphs: Sequence[Subgraph], called: dict[int, set[int]], circle: set[int]
) -> ModelFormatError:
    caller = max(circle)
    callee = min(called[caller] & circle)
    place = _place(subgraphs[caller], callee)
    return ModelFormatError(f"{place}: calls subgraph {callee}, which leads back here: it would never end")


def _place(graph: Subgraph, callee: int) -> str:
    position, operator = next(
        (at, caller)
        for at, caller in enumerate(graph.operators)
        if callee in subgraph_indices(caller.options)
    )
    return f"subgraph '{graph.name}', operator {position} ({operator.name})"
