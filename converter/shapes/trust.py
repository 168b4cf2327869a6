"""Finds operators whose recorded shapes are not what their inputs give, once, so that nobody else has to."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from edge_opt.ir import Operator, Subgraph
from edge_opt.shapes.broadcast import misfit
from edge_opt.shapes.call import constants_of, recorded_shape
from edge_opt.shapes.dimension import ShapeError
from edge_opt.shapes.rules import infer_operator


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, such operators have a `shape_error` and the name UNTRUSTED."""
    checked = [graph for graph in graphs if not graph.is_checked]
    errors = [(operator, _shape_error(operator)) for graph in checked for operator in graph.operators]
    for operator, error in errors:
        operator.shape_error = error
    for graph in checked:
        graph.is_checked = True
    try:
        yield
    finally:
        for operator, _ in errors:
            operator.shape_error = ""
        for graph in checked:
            graph.is_checked = False


def _shape_error(operator: Operator) -> str:
    """Why the shapes of an operator tell nothing; empty where they do."""
    shapes = [None if tensor is None else recorded_shape(tensor) for tensor in operator.inputs]
    try:
        derived = infer_operator(operator, shapes, constants_of(operator))
    except ShapeError as error:
        return error.detail
    for shape, output in zip(derived, operator.outputs, strict=True):
        reason = misfit(shape, recorded_shape(output), allow_refinement=True)
        if reason is not None:
            return f"{reason} of '{output.name}'"
        if 0 in output.shape:
            return f"'{output.name}' is empty"
    return ""
