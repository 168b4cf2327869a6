"""How large the graphs of a file are, before they are built: shared vectors can make them far larger than the file.

It must not check what is in the vectors; the reader of graphs does that.
"""

from collections.abc import Iterable
from typing import Final, NoReturn

from edge_opt.output.errors import ModelFormatError
from edge_opt.schema.reader import MAX_OBJECTS, raise_the_bound
from edge_opt.schema.table import Table

# Tensors, operators and their indices and sizes; Gemma3-1B with prefill and decode has 50,000. The bound keeps what
# the reader lets through within a second.
MAX_EXTENT: Final = 1 << 18

_LITTLE: Final = 20_000
_MOST_SHARED: Final = 4

_GRAPH_VECTORS: Final = ("inputs", "outputs")
_TENSOR_VECTORS: Final = ("shape", "shape_signature")
_OPERATOR_VECTORS: Final = ("inputs", "outputs", "intermediates")


def check_extent(root: Table, max_objects: int = MAX_OBJECTS) -> None:
    """Refuse a model whose graphs hold more than `MAX_EXTENT` things, each counted as often as it is referred to.

    The bound grows with `max_objects`. A thousand subgraphs that share one vector of a hundred thousand tensors take
    little room in a file and very much in memory: a model that shares far more than exporters do is refused earlier.

    Raises:
        ModelFormatError: there are too many.
    """
    total = len(root.fields.get("metadata_buffer", ()))
    sizes: dict[int, int] = {}
    graphs = root.get("subgraphs") or ()
    for graph in graphs:
        total += _lengths(graph, _GRAPH_VECTORS)
        total += _listed(graph.get("tensors"), _TENSOR_VECTORS, sizes)
        total += _listed(graph.get("operators"), _OPERATOR_VECTORS, sizes)
    for signature in root.get("signature_defs") or ():
        total += _lengths(signature, _GRAPH_VECTORS)
    shared = _LITTLE + _MOST_SHARED * (len(graphs) + sum(sizes.values()))
    allowed = MAX_EXTENT * max_objects // MAX_OBJECTS
    if total > shared:
        _refuse(total, shared, "the file is damaged, export or download it again")
    if total > allowed:
        _refuse(total, allowed, raise_the_bound(max_objects))


def _refuse(total: int, most: int, remedy: str) -> NoReturn:
    raise ModelFormatError(
        f"the graphs hold {total} tensors, operators and indices, expected at most {most}: {remedy}",
        table="Model",
        field="subgraphs",
    )


def _listed(tables: list[Table] | None, fields: Iterable[str], sizes: dict[int, int]) -> int:
    if tables is None:
        return 0
    if id(tables) not in sizes:
        sizes[id(tables)] = len(tables) + sum(_lengths(table, fields) for table in tables)
    return sizes[id(tables)]


def _lengths(table: Table, fields: Iterable[str]) -> int:
    present = table.fields
    return sum(len(present[field]) for field in fields if field in present)
