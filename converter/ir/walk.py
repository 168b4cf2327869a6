"""Graph traversal (producers, readers, slices), execution orders, and copies of regions."""

from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Signature, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.operators import SUBGRAPH_FIELDS, Effect, operators_that, subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.schema.table import Table, new_table

_Node = TypeVar("_Node", bound=Hashable)


def walked(
    starts: Iterable[_Node], beside: Callable[[_Node], Iterable[_Node]], most: int | None = None
) -> Iterator[_Node]:
    """Yield the starts and all nodes reachable through `beside`, each once, nearest first, at most `most`.

    Nodes are operators, tensors, or tuples of them with other state. `beside(node)` is called after the node is
    yielded, so the caller can decide where the walk ends.
    """
    seen = dict.fromkeys(starts)
    frontier = deque(seen)
    while frontier and most != 0:
        node = frontier.popleft()
        yield node
        most = None if most is None else most - 1
        for other in beside(node):
            if other not in seen:
                seen[other] = None
                frontier.append(other)


def producers(operator: Operator) -> list[Operator]:
    """The producers of an operator's inputs."""
    return [t.producer for t in operator.inputs if t is not None and t.producer is not None]


def reads(operators: Sequence[Operator]) -> tuple[Tensor, ...]:
    """Tensors that the operators read but do not define, each once, in the order of first use."""
    defined = {tensor for operator in operators for tensor in operator.outputs}
    read = dict.fromkeys(tensor for operator in operators for tensor in operator.inputs if tensor is not None)
    return tuple(tensor for tensor in read if tensor not in defined)


def read_outside(subgraph: Subgraph, tensor: Tensor, inside: Container[Operator]) -> bool:
    """True if the graph's caller or an operator not in `inside` reads a tensor."""
    return subgraph.is_output(tensor) or any(reader not in inside for reader in tensor.consumers)


def only_reader(subgraph: Subgraph, tensor: Tensor) -> Operator | None:
    """The operator that alone reads a tensor; None if the graph's caller or several operators do."""
    if subgraph.is_output(tensor) or len(tensor.readers) != 1:
        return None
    return next(iter(tensor.readers))


def chain_up(tensor: Tensor, carrier: Callable[[Operator], Tensor | None]) -> Iterator[Operator]:
    """The operators above a tensor, nearest first; each makes the operand that `carrier` names of the one before.

    The chain ends at a tensor without a producer, and after an operator without a carrier.
    """
    carried: Tensor | None = tensor
    while carried is not None and carried.producer is not None:
        yield carried.producer
        carried = carrier(carried.producer)


def look_through(tensor: Tensor, names: Collection[str]) -> tuple[Tensor, list[Operator]]:
    """Follow first inputs upwards through operators of these names; return the origin and the operators passed."""
    above = chain_up(tensor, lambda operator: operator.input(0))
    passed = list(takewhile(lambda operator: operator.name in names, above))
    return (passed[-1].input(0) if passed else tensor), passed


def backward_slice(
    tensors: Iterable[Tensor], stops: Container[Tensor] = ()
) -> tuple[set[Operator], list[Tensor]]:
    """The operators that compute `tensors`, and the non-constant ones they start from: `stops`, or without producer."""
    starts: dict[Tensor, None] = {}

    def above(operator: Operator) -> Iterator[Operator]:
        for tensor in operator.inputs:
            if tensor is None or tensor.is_constant:
                continue
            if tensor.producer is None or tensor in stops:
                starts[tensor] = None
            else:
                yield tensor.producer

    ends = [tensor.producer for tensor in tensors if tensor.producer is not None]
    return set(walked(ends, above)), list(starts)


def needed_for(
    tensors: Iterable[Tensor], operators: Sequence[Operator], stops: Container[Tensor] = ()
) -> list[Operator]:
    """Operators that compute `tensors`, like `backward_slice`, from a list in execution order instead of a graph."""
    wanted = set[Tensor | None](tensors)
    needed: list[Operator] = []
    for operator in reversed(operators):
        if not wanted.isdisjoint(operator.outputs):
            needed.append(operator)
            wanted.update(tensor for tensor in operator.inputs if tensor not in stops)
    return needed[::-1]


def still_needed(subgraph: Subgraph, old: Sequence[Operator], new: Sequence[Operator]) -> list[Operator]:
    """The `old` operators (in execution order) that must stay when `new` ones replace the others.

    Their results are needed by the graph's caller, by operators outside `old`, or by `new` ones, directly or
    indirectly; tensors that `new` operators define do not count.
    """
    inside, read_anew = set(old), {tensor for operator in new for tensor in operator.inputs}
    defined = {tensor for operator in new for tensor in operator.outputs}
    left = (tensor for operator in old for tensor in operator.outputs if tensor not in defined)
    wanted = [t for t in left if t in read_anew or read_outside(subgraph, t, inside)]
    return needed_for(wanted, old, defined)


_HANDLES = frozenset({DType.RESOURCE, DType.VARIANT})
_IMPURE = operators_that(Effect.RANDOM, Effect.UNKNOWN)


def is_pure(operator: Operator, subgraphs: Sequence[Subgraph] = ()) -> bool:
    """False if an operator reads or changes state, draws random numbers, or runs unknown code that may do so.

    State is behind a handle (variables, tables) or in a tensor that is kept between runs. An operator that calls
    subgraphs is pure if they are; without `subgraphs` (the model's) it counts as impure.
    """
    calls = subgraph_indices(operator.options)
    if not calls:
        return not _is_impure(operator)
    return bool(subgraphs) and not has_effects([operator], subgraphs)


def has_effects(operators: Sequence[Operator], subgraphs: Sequence[Subgraph]) -> bool:
    """True if any of the operators is impure (see `is_pure`), or one that they call."""
    return any(map(_is_impure, with_called(operators, subgraphs)))


def _is_impure(operator: Operator) -> bool:
    """True if the operator itself is impure, whatever it calls."""
    if operator.code.name in _IMPURE:
        return True
    tensors = (*operator.inputs, *operator.outputs, *operator.intermediates)
    return any(t is not None and (t.is_variable or t.dtype in _HANDLES) for t in tensors)


def with_called(operators: Sequence[Operator], subgraphs: Sequence[Subgraph]) -> list[Operator]:
    """The operators and those of all subgraphs that they call, each subgraph once."""
    return [*operators, *(op for graph in called_by(operators, subgraphs) for op in graph)]


def called_by(operators: Iterable[Operator], subgraphs: Sequence[Subgraph]) -> list[Subgraph]:
    """Subgraphs that operators call, directly or indirectly."""

    def calls(operators: Iterable[Operator]) -> Iterator[int]:
        return (index for operator in operators for index in subgraph_indices(operator.options))

    reached = walked(calls(operators), lambda index: calls(subgraphs[index].operators))
    return [subgraphs[index] for index in reached]


def replaced(
    graph: Subgraph,
    old: Collection[Operator],
    new: Sequence[Operator],
    subgraphs: Sequence[Subgraph] = (),
) -> list[Operator]:
    """Execution order of a graph after `new` operators replace `old` ones; RefusedError if there is none.

    Operators in both lists keep their places; added ones go where the last old one was, or before their first reader.
    Side effects keep their order. `subgraphs` are the model's.
    """
    staying = set(old).intersection(new)
    added = [operator for operator in new if operator not in staying]
    removed = [operator for operator in old if operator not in staying]
    operators, inside = graph.operators, set(old)
    places = [place for place, operator in enumerate(operators) if operator in inside]
    first, last = places[0], places[-1] + 1
    span = [op for op in operators[first:last] if op not in inside or op in staying]
    order = topological([*span, *added])
    moving = next((op for op in (*removed, *added) if not is_pure(op, subgraphs)), None)
    effects = [operator for operator in span if not is_pure(operator, subgraphs)]
    if effects and (moving or [operator for operator in order if operator in effects] != effects):
        text = "it would change the order of side effects"
        raise RefusedError(text, moving or effects[0])
    return [*operators[:first], *order, *operators[last:]]


def topological(operators: Iterable[Operator]) -> list[Operator]:
    """Sort operators so that producers precede readers (stable, depth first); RefusedError for a cycle."""
    pending = list(operators)
    makers = {tensor: operator for operator in pending for tensor in operator.outputs}
    order: dict[Operator, None] = {}
    stack, most = pending[::-1], sum(1 + len(operator.inputs) for operator in pending)
    while stack:
        if len(stack) > most:
            raise RefusedError("it is part of a cycle", stack[-1])
        sources = (makers[tensor] for tensor in stack[-1].inputs if tensor is not None and tensor in makers)
        missing = [source for source in sources if source not in order]
        if missing and stack[-1] not in order:
            stack += reversed(missing)
        else:
            order[stack.pop()] = None
    return list(order)


def cut_out(
    model: Model, operators: Sequence[Operator], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Model:
    """A model of these operators and the subgraphs they call. Names are numbers, so equal regions give equal bytes."""
    region, called = Model(), called_by(operators, model.subgraphs)
    places = {model.subgraphs.index(graph): place for place, graph in enumerate(called, 1)}

    def add(
        name: str, operators: Sequence[Operator], inputs: Iterable[Tensor], outputs: Iterable[Tensor]
    ) -> None:
        graph = Subgraph(name)
        region.subgraphs.append(graph)
        copies: dict[Tensor, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if tensor not in copies:
                kept = tensor.buffer if tensor.is_constant else None
                copy = replace(tensor, name=str(len(copies)), buffer=kept, shape_signature=None)
                copy.table = tensor.table if tensor.is_sparse or tensor.is_outside else None
                copies[tensor] = graph.add_tensor(copy)
            return copies[tensor]

        graph.inputs = [copied(tensor) for tensor in inputs]
        for operator in operators:
            new = graph.append(operator.on(copied))
            new.table, new.options = own_fields(operator), renumbered(operator.options, places)
        graph.outputs = [copied(tensor) for tensor in outputs]

    add("region", operators, inputs, outputs)
    for place, graph in enumerate(called, 1):
        add(f"called_{place}", graph.operators, graph.inputs, graph.outputs)
    return region


def cut_signature(
    model: Model,
    key: str,
    operators: Sequence[Operator],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> Model:
    """Like `cut_out`, with one signature, whose arguments have these names."""
    region = cut_out(model, operators, [*inputs.values()], [*outputs.values()])
    graph = region.subgraphs[0]
    given, taken = zip(inputs, graph.inputs, strict=True), zip(outputs, graph.outputs, strict=True)
    region.signatures.append(Signature(key, graph, dict(given), dict(taken)))
    return region


def with_outputs(model: Model, name: str, outputs: Mapping[str, Tensor]) -> Model:
    """A copy of the model with these tensors, of any operator, as the outputs of an entry point."""
    copies: dict[int, Any] = {}
    copy = deepcopy(model, copies)
    graph, inputs, _ = model.arguments(name)
    own = copies[id(graph)]
    given = {key: copies[id(tensor)] for key, tensor in inputs.items()}
    made = {key: copies[id(tensor)] for key, tensor in outputs.items()}
    # Other signatures of the graph need its outputs.
    own.outputs = [*dict.fromkeys([*own.outputs, *made.values()])]
    copy.signatures[:] = [signature for signature in copy.signatures if signature.key != name]
    copy.signatures.append(Signature(name, own, given, made))
    return copy


# Fields of an operator's table that an `Operator` has itself, or that count places in the file.
_ATTRIBUTES = {
    "opcode_index", "inputs", "outputs", "intermediates", "builtin_options", "builtin_options_type",
    "builtin_options_2", "builtin_options_2_type", "large_custom_options_offset", "large_custom_options_size",
    "debug_metadata_index",
}  # fmt: skip


def own_fields(operator: Operator) -> Table | None:
    """All other fields of an operator's table, such as custom options; None if there are none."""
    fields = {} if operator.table is None else operator.table.fields
    own = {name: value for name, value in fields.items() if name not in _ATTRIBUTES}
    return new_table("Operator", **own) if own else None


def repeated(operator: Operator, copies: dict[Tensor, Tensor], name: Callable[[Tensor], str]) -> Operator:
    """A copy of the operator, in no subgraph, on `copies` of its tensors; missing copies are added."""

    def local(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            own = tensor.name if tensor.is_constant else name(tensor)
            copies[tensor] = replace(tensor, name=own, is_variable=False)
        return copies[tensor]

    return operator.on(local)


def renumbered(options: Table | None, places: Mapping[int, int]) -> Table | None:
    """An operator's options with new subgraph indices."""
    if options is None or not subgraph_indices(options):
        return options
    table = options.copy()
    for field in SUBGRAPH_FIELDS[options.name]:
        value = options.fields.get(field)
        if isinstance(value, int):
            table.set(field, places[value])
        elif value is not None:
            table.set(field, [places[index] for index in value.tolist()])
    return table
