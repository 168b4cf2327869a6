"""A set of operators: what it reads, what others need of it, whether it has effects; and copies of it."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Buffer, Operator, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.options import SUBGRAPH_FIELDS, subgraph_indices
from edge_opt.schema.table import Table, new_table


def reads(operators: Sequence[Operator]) -> tuple[Tensor, ...]:
    """Tensors that the operators read and do not define. Each is there once, the first one that is read comes first."""
    defined = {tensor for operator in operators for tensor in operator.outputs}
    read = dict.fromkeys(tensor for operator in operators for tensor in operator.inputs if tensor is not None)
    return tuple(tensor for tensor in read if tensor not in defined)


def read_outside(subgraph: Subgraph, tensor: Tensor, inside: Container[Operator]) -> bool:
    """True where the graph's caller or another operator than these reads a tensor."""
    return subgraph.is_output(tensor) or any(reader not in inside for reader in tensor.consumers)


def moved_from(tensor: Tensor, names: Collection[str]) -> tuple[Tensor, list[Operator]]:
    """Where a tensor comes from, up the first inputs of operators of these names; and those, the nearest first."""
    passed: list[Operator] = []
    while tensor.producer is not None and tensor.producer.name in names:
        passed.append(tensor.producer)
        tensor = tensor.producer.input(0)
    return tensor, passed


def backward_slice(
    tensors: Iterable[Tensor], stops: Container[Tensor] = ()
) -> tuple[set[Operator], list[Tensor]]:
    """The operators that compute the tensors, and the tensors that this starts from, constants left out.

    It starts from `stops` and from what no operator defines.
    """
    operators: set[Operator] = set()
    starts: dict[Tensor, None] = {}
    pending = [tensor.producer for tensor in tensors if tensor.producer is not None]
    while pending:
        operator = pending.pop()
        if operator in operators:
            continue
        operators.add(operator)
        for tensor in operator.inputs:
            if tensor is None or tensor.is_constant:
                continue
            if tensor.producer is None or tensor in stops:
                starts[tensor] = None
            else:
                pending.append(tensor.producer)
    return operators, list(starts)


def needed_for(
    tensors: Iterable[Tensor], operators: Sequence[Operator], stops: Container[Tensor] = ()
) -> list[Operator]:
    """As `backward_slice` among operators in execution order, which need not be in a graph."""
    wanted = set[Tensor | None](tensors)
    needed: list[Operator] = []
    for operator in reversed(operators):
        if not wanted.isdisjoint(operator.outputs):
            needed.append(operator)
            wanted.update(tensor for tensor in operator.inputs if tensor not in stops)
    return needed[::-1]


def still_needed(
    subgraph: Subgraph,
    old: Sequence[Operator],
    replaced: Operator,
    new: Iterable[Operator] = (),
    redefined: Collection[Tensor] = (),
) -> list[Operator]:
    """Of the `old` operators (in execution order), those that must stay when `replaced` is defined anew.

    They are the ones whose results the graph's caller, operators outside, or the `new` operators read (unless the new
    ones define them, as `redefined` says), and the old ones that those need in turn.
    """
    inside = set(old)
    others = [operator for operator in old if operator is not replaced]
    read_anew = {tensor for operator in new for tensor in operator.inputs}
    wanted = [
        tensor
        for operator in others
        for tensor in operator.outputs
        if tensor not in redefined and (tensor in read_anew or read_outside(subgraph, tensor, inside))
    ]
    return needed_for(wanted, others, redefined)


_HANDLES = frozenset({DType.RESOURCE, DType.VARIANT})
_IMPURE = operators_that(Effect.RANDOM, Effect.UNKNOWN)


def is_pure(operator: Operator, subgraphs: Sequence[Subgraph] = ()) -> bool:
    """False where an operator reads or changes state, draws random numbers, or may do so in code unknown here.

    State is what lies behind a handle (variables, tables) or in a tensor that is kept from one run to the next. An
    operator that calls subgraphs is as pure as those; without `subgraphs` (the model's) it is not.
    """
    if not subgraphs and subgraph_indices(operator.options):
        return False
    return all(map(_only_computes, with_called([operator], subgraphs)))


def _only_computes(operator: Operator) -> bool:
    tensors = (*operator.inputs, *operator.outputs, *operator.intermediates)
    return operator.code.name not in _IMPURE and not any(
        tensor is not None and (tensor.is_variable or tensor.dtype in _HANDLES) for tensor in tensors
    )


def with_called(operators: Iterable[Operator], subgraphs: Sequence[Subgraph]) -> Iterator[Operator]:
    """The operators, and those of all subgraphs that they call; each subgraph once, however often it is called."""
    operators = list(operators)
    yield from operators
    for graph in called_by(operators, subgraphs):
        yield from graph.operators


def called_by(operators: Iterable[Operator], subgraphs: Sequence[Subgraph]) -> list[Subgraph]:
    """Those of the model's `subgraphs` that operators call, and that are called there in turn."""
    pending, called = list(operators), dict[int, Subgraph]()
    while pending:
        for index in subgraph_indices(pending.pop().options):
            if index not in called:
                called[index] = subgraphs[index]
                pending.extend(subgraphs[index].operators)
    return list(called.values())


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
        copies: dict[Tensor, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if tensor not in copies:
                copies[tensor] = graph.add_tensor(_copied(tensor, str(len(copies))))
            return copies[tensor]

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


def repeated(operator: Operator, copies: dict[Tensor, Tensor], name: Callable[[Tensor], str]) -> Operator:
    """The operator once more, in no subgraph yet, on other tensors.

    `copies` has them by those that it has now; renamed copies are added for the rest.
    """

    def local(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            copies[tensor] = renamed(tensor, tensor.name if tensor.is_constant else name(tensor))
        return copies[tensor]

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
