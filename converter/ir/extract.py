"""Copies parts of a model: some operators as a model of their own, the subgraphs that they call with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edge_opt.ir.graph import Buffer, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.references import SUBGRAPH_FIELDS, subgraph_indices
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table, new_table


def cut_out(
    model: Model,
    operators: Sequence[Operator],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    shapes: Mapping[Tensor, Shape] = MappingProxyType({}),
    values: Mapping[Tensor, NDArray[np.generic]] = MappingProxyType({}),
) -> Model:
    """A model that holds just these operators and what they call. Names are numbers: equal regions give equal bytes.

    `shapes`: of tensors that are to have others than their own. `values`: tensors read from outside that become
    constants.
    """
    copier = _Copier(model, shapes, values)
    copier.copy(Subgraph("region"), operators, inputs, outputs)
    return copier.result


class _Copier:
    def __init__(
        self,
        source: Model,
        shapes: Mapping[Tensor, Shape],
        values: Mapping[Tensor, NDArray[np.generic]],
    ) -> None:
        self._source = source
        self._shapes = shapes
        self._values = values
        self.result = Model()
        self._moved: dict[int, int] = {}

    def copy(
        self,
        graph: Subgraph,
        operators: Sequence[Operator],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self.result.subgraphs.append(graph)
        copies: dict[int, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                name, shape = str(len(copies)), self._shapes.get(tensor, tensor.shape)
                value = self._values.get(tensor)
                copies[id(tensor)] = graph.add_tensor(_copied(tensor, name, shape, value))
            return copies[id(tensor)]

        graph.inputs = [copy(tensor) for tensor in inputs]
        for operator in operators:
            made = graph.append(operator.on(copy))
            made.options, made.table = self._options(operator.options), _custom(operator)
        graph.outputs = [copy(tensor) for tensor in outputs]

    def _options(self, options: Table | None) -> Table | None:
        if options is None or not subgraph_indices(options):
            return options
        for index in subgraph_indices(options):
            self._bring(index)
        return renumbered(options, self._moved)

    def _bring(self, index: int) -> None:
        if index in self._moved:
            return
        called = self._source.subgraphs[index]
        graph = Subgraph(f"called_{index}")
        # Its place is taken before its own callees come, which stand behind it.
        self._moved[index] = len(self.result.subgraphs)
        self.copy(graph, list(called.operators), called.inputs, called.outputs)


def _custom(operator: Operator) -> Table | None:
    """What only an operator's own kernel understands of its table; the rest is indices and made anew."""
    if operator.table is None or not operator.table.has("custom_options"):
        return None
    fields = ("custom_options", "custom_options_format")
    return new_table("Operator", **{name: operator.table.fields.get(name) for name in fields})


def _copied(tensor: Tensor, name: str, shape: Shape, value: NDArray[np.generic] | None) -> Tensor:
    buffer = None if value is None else Buffer(Data(value.tobytes()))
    if tensor.is_constant:
        assert tensor.buffer is not None
        buffer = Buffer(tensor.buffer.data)
    table = tensor.table if tensor.is_sparse else None
    return replace(tensor, name=name, shape=shape, buffer=buffer, shape_signature=None, table=table)


def renamed(tensor: Tensor, name: str) -> Tensor:
    """A tensor of the same type (and bytes) that nothing defines or reads yet."""
    return replace(tensor, name=name, is_variable=False)


def repeated(operator: Operator, known: dict[int, Tensor], name: Callable[[Tensor], str]) -> Operator:
    """The operator once more, in no subgraph yet, on the `known` tensors (by identity of those that it has now).

    Others are renamed copies, and known from then on.
    """

    def local(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = renamed(tensor, tensor.name if tensor.is_constant else name(tensor))
        return known[id(tensor)]

    return operator.on(local)


def renumbered(options: Table, places: Mapping[int, int]) -> Table:
    """Options that name subgraphs, told of their new places."""
    table = options.copy()
    for field in SUBGRAPH_FIELDS[options.name]:
        value = options.fields.get(field)
        if isinstance(value, int):
            table.set(field, places[value])
        elif value is not None:
            table.set(field, np.array([places[int(index)] for index in value], np.int32))
    return table
