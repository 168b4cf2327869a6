"""Give a model's open inputs static shapes, record the shapes that follow, and make known values constants."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from edge_opt.base.errors import UsageError
from edge_opt.ir import Buffer, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import called
from edge_opt.ir.walk import cut_out, makers_of, reads
from edge_opt.schema.data import Data
from edge_opt.shapes.dimension import Shape, ShapeError
from edge_opt.shapes.inference import Disagreement, infer_operator, shape_report
from edge_opt.shapes.rules import Array, recorded_fact

Folded: TypeAlias = tuple[Subgraph, list[Operator]]
"""A subgraph, and the operators that constant folding removed from it; their results are now constants."""


def close_shapes(model: Model, given: Mapping[Tensor, Shape]) -> list[Folded]:
    """Give inputs static shapes, and close the lengths of the subgraphs that read them.

    Lengths that depend on data (as of WHERE), or differ between the callers of a subgraph, stay open. Unread producers
    stay. `folded_regions` gives models to verify the returned operators with.

    Raises:
        UsageError: operators cannot take such inputs; the model is unchanged.
    """
    known = {_place(one) for one in shape_report(model).disagreements}
    report = shape_report(model, resize=given)
    for one in report.disagreements:
        if one.inferred is None and _place(one) not in known:
            raise UsageError(f"the given shapes do not fit together: {one}")
    roots = [graph for graph in model.subgraphs if not given.keys().isdisjoint(graph.inputs)]
    reached = called(model, roots)
    graphs = [graph for graph in model.subgraphs if graph in reached]
    for graph in graphs:
        for tensor in graph.tensors:
            _record(tensor, report.shapes.get(tensor))
    folded = [(graph, _fold(graph)) for graph in graphs]
    return [(graph, operators) for graph, operators in folded if operators]


def _place(one: Disagreement) -> tuple[str, str]:
    return one.subgraph, one.operator


def _record(tensor: Tensor, shape: Shape | None) -> None:
    """Record an inferred shape; the file has 1 for an open size."""
    if shape is None or tensor.is_constant:
        return
    tensor.shape = tuple(1 if size < 0 else size for size in shape)
    tensor.shape_signature = shape if -1 in shape else None


def _fold(graph: Subgraph) -> list[Operator]:
    """Turn known values into constants, and remove the operators that computed them."""
    folded: list[Operator] = []
    for operator in graph.operators:
        if not operator.outputs or any(map(graph.is_output, operator.outputs)):
            continue
        try:
            facts = infer_operator(operator, list(map(recorded_fact, operator.inputs)))
        except ShapeError:
            continue
        values = [fact.value for fact in facts if fact.value is not None]
        if len(values) < len(operator.outputs):
            continue
        for tensor, value in zip(operator.outputs, values, strict=True):
            tensor.buffer = Buffer(Data(value.tobytes()))
        graph.remove(operator)
        folded.append(operator)
    return folded


def folded_regions(model: Model, folded: Sequence[Folded]) -> Iterator[tuple[Model, list[Array]]]:
    """For each subgraph, a model of its folded operators, and the values of its outputs for any inputs.

    Running these models on the reference kernels verifies the folding.
    """
    for _, operators in folded:
        inputs = [tensor for tensor in reads(operators) if not tensor.is_constant]
        results = list(makers_of(operators))
        region = cut_out(model, operators, inputs, results)
        for operator in region.subgraphs[0]:
            for tensor in operator.outputs:
                tensor.buffer = None
        yield region, [tensor.array() for tensor in results]
