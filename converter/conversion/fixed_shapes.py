"""Gives inputs of open lengths static shapes: all other shapes are derived again, and what SHAPE gives is folded.

It rewrites no attention and proves nothing: the comparison of whole models does, at the same sizes.
"""

from collections.abc import Iterator, Mapping, Sequence

from edge_opt.ir import Buffer, Model, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.cleanup import called, parts_in_use, remove_unused
from edge_opt.output.errors import UsageError
from edge_opt.passes.rewrite import remove_dead
from edge_opt.schema.data import Data
from edge_opt.shapes import ShapeError, derive, infer_operator
from edge_opt.shapes.call import Array, Call, constants_of, recorded_shape
from edge_opt.shapes.folding import fold


def fix_shapes(model: Model, given: Mapping[Tensor, Shape]) -> None:
    """Edit the model so that these inputs have these shapes, and the subgraphs that read them no open lengths.

    Lengths that follow from data (of WHERE, say), or differ between the callers of one subgraph, stay open.

    Raises:
        UsageError: operators cannot take such inputs; the model is as it was then.
    """
    before = {(found.subgraph, found.operator) for found in derive(model).disagreements}
    report = derive(model, resize=given)
    for found in report.disagreements:
        if found.derived is None and (found.subgraph, found.operator) not in before:
            raise UsageError(f"the given shapes do not go together: {found}")
    roots = [graph for graph in model.subgraphs if any(tensor in given for tensor in graph.inputs)]
    reached = called(model, roots)
    usage = parts_in_use(model)
    for graph in (graph for graph in model.subgraphs if graph in reached):
        for tensor in graph.tensors:
            shape = report.shapes.get(tensor)
            if shape is not None and not tensor.is_constant:
                tensor.shape = tuple(max(size, 1) if size < 0 else size for size in shape)
                tensor.shape_signature = shape if -1 in shape else None
        folded = list(_folded(graph))
        sources = [tensor.producer for operator in folded for tensor in operator.inputs if tensor is not None]
        remove_dead(graph, filter(None, sources), model.subgraphs)
    remove_unused(model, usage)


def _folded(graph: Subgraph) -> Iterator[Operator]:
    """Make whole numbers that are known constants; the operators that computed them, which are taken out."""
    for operator in graph.operators:
        values = _values(operator)
        if not values or any(graph.is_output(tensor) for tensor in operator.outputs):
            continue
        for tensor, value in zip(operator.outputs, values, strict=True):
            tensor.buffer = Buffer(Data(value.tobytes()))
        graph.remove(operator)
        yield operator


def _values(operator: Operator) -> Sequence[Array]:
    """The results of an operator on plain whole numbers or truth values, where all are known; else none.

    Real numbers are left to the kernels, which may round otherwise, and codes of quantized tensors are not what they
    say.
    """
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    kinds = {tensor.dtype.numpy and tensor.dtype.numpy.kind for tensor in operator.outputs}
    if not kinds or kinds - {"i", "u", "b"} or any(tensor.is_quantized for tensor in tensors[1:]):
        return ()
    shapes, results = (
        [None if tensor is None else recorded_shape(tensor) for tensor in listed]
        for listed in (operator.inputs, operator.outputs)
    )
    try:
        if list(infer_operator(operator, shapes, constants_of(operator))) != results:
            return ()
    except ShapeError:
        return ()
    values = fold(Call(operator, shapes, constants_of(operator)), results)
    known = [value for value in values if value is not None and value.dtype != object]
    return known if len(known) == len(operator.outputs) else ()
