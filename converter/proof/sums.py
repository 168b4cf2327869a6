"""Sums of int16 by one kernel. The runtime has two, which do not always give the same code.

In TFLite's `add.cc` a sum whose operands have one shape goes to vector instructions (AVX2), which give another code for
one element in a million than its sum with broadcasting and the reference kernel do. A rewrite may turn one into the
other: heads that share a mask broadcast it, a single head does not.
"""

from copy import deepcopy
from dataclasses import replace

from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor


def sums_of_one_shape(model: Model) -> list[tuple[Subgraph, Operator]]:
    """Every sum of int16 without broadcasting, and where it is."""
    return [(graph, add) for graph, add in _sums(model) if not _broadcasts(add)]


def sums_differ(before: Model, after: Model) -> bool:
    """Whether one version broadcasts where the other, in a sum of the same scales, does not."""
    first, second = (
        {(*map(_scale, (*add.inputs, add.output)), _broadcasts(add)) for _, add in _sums(model)}
        for model in (before, after)
    )
    return first != second


def sums_that_broadcast(model: Model) -> Model:
    """The same model, in which every sum of int16 is one with broadcasting; only copies of numbers are added."""
    copy = deepcopy(model)
    for graph, add in sums_of_one_shape(copy):
        _broadcast(copy, graph, add)
    return copy


def _sums(model: Model) -> list[tuple[Subgraph, Operator]]:
    return [
        (graph, operator)
        for graph in model.subgraphs
        for operator in graph.operators
        if operator.name == "ADD" and operator.output.dtype is DType.INT16
    ]


def _broadcasts(add: Operator) -> bool:
    return add.input(0).shape != add.input(1).shape


def _scale(tensor: Tensor | None) -> object:
    return tensor and tensor.quantization and tensor.quantization.key()


def _broadcast(model: Model, graph: Subgraph, add: Operator) -> None:
    """Sum two copies of the left operand, one on the other, with the right one; take the first sum."""
    left, result = add.input(0), add.output

    def like(tensor: Tensor, *more: int) -> Tensor:
        return graph.add_tensor(
            replace(tensor, name=f"sum_{len(graph.tensors)}", shape=(*more, *tensor.shape))
        )

    copies, sums, second = like(left, 2), like(result, 2), like(result)
    following = graph.after(add)
    graph.remove(add)
    for operator in (
        model.new_operator("PACK", [left, left], [copies], values_count=2, axis=0),
        Operator(add.code, [copies, add.input(1)], [sums], add.options, add.table),
        model.new_operator("UNPACK", [sums], [result, second], num=2, axis=0),
    ):
        graph.insert_before(following, operator)
