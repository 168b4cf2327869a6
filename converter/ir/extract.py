"""Copies parts of a model: some operators as a model of their own, the subgraphs that they call with them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from edge_opt.ir.graph import Buffer, Operator, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.options import SUBGRAPH_FIELDS, subgraph_indices
from edge_opt.schema.table import Table, new_table


def cut_out(
    model: Model,
    operators: Sequence[Operator],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Model:
    """A model that holds just these operators and what they call. Names are numbers: equal regions give equal bytes."""
    region, moved = Model(), dict[int, int]()

    def add(
        graph: Subgraph, operators: Iterable[Operator], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        region.subgraphs.append(graph)
        copies: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = graph.add_tensor(_copied(tensor, str(len(copies))))
            return copies[id(tensor)]

        graph.inputs = [copied(tensor) for tensor in inputs]
        for operator in operators:
            new = graph.append(operator.on(copied))
            new.table = _custom(operator)
            for index in subgraph_indices(operator.options):
                bring(index)
            new.options = renumbered(operator.options, moved)
        graph.outputs = [copied(tensor) for tensor in outputs]

    def bring(index: int) -> None:
        if index not in moved:
            called = model.subgraphs[index]
            # Its place is taken before its own callees come, which stand behind it.
            moved[index] = len(region.subgraphs)
            add(Subgraph(f"called_{moved[index]}"), called.operators, called.inputs, called.outputs)

    add(Subgraph("region"), operators, inputs, outputs)
    return region


def _custom(operator: Operator) -> Table | None:
    """What only an operator's own kernel understands of its table; the rest is indices, which change."""
    if operator.table is None or not operator.table.has("custom_options"):
        return None
    fields = ("custom_options", "custom_options_format")
    return new_table("Operator", **{name: operator.table.fields.get(name) for name in fields})


def _copied(tensor: Tensor, name: str) -> Tensor:
    buffer = None
    if tensor.is_constant:
        assert tensor.buffer is not None
        buffer = Buffer(tensor.buffer.data)
    table = tensor.table if tensor.is_sparse else None
    return replace(tensor, name=name, buffer=buffer, shape_signature=None, table=table)


def renamed(tensor: Tensor, name: str) -> Tensor:
    """A tensor of the same type (and bytes) that nothing defines or reads yet."""
    return replace(tensor, name=name, is_variable=False)


def repeated(operator: Operator, copies: dict[int, Tensor], name: Callable[[Tensor], str]) -> Operator:
    """The operator once more, in no subgraph yet, on other tensors.

    `copies` has them by identity of those that it has now; renamed copies are added for the rest.
    """

    def local(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = renamed(tensor, tensor.name if tensor.is_constant else name(tensor))
        return copies[id(tensor)]

    return operator.on(local)


def renumbered(options: Table | None, places: Mapping[int, int]) -> Table | None:
    """An operator's options, with the new places of the subgraphs that they name."""
    if options is None or not subgraph_indices(options):
        return options
    table = options.copy()
    for field in SUBGRAPH_FIELDS[options.name]:
        value = options.fields.get(field)
        if isinstance(value, int):
            table.set(field, places[value])
        elif value is not None:
            table.set(field, np.array([places[int(index)] for index in value], np.int32))
    return table
