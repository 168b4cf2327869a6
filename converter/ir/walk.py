"""Graph traversal (producers, readers, slices), execution orders, and copies of regions."""

from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Signature, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.operators import SUBGRAPH_FIELDS, Effect, operators_that, subgraph_indices
from edge_opt.ir.refusal import RefusedError, Why
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
    return [tensor.producer for tensor in operator.given if tensor.producer is not None]


def makers_of(operators: Iterable[Operator]) -> dict[Tensor, Operator]:
    """The results of the operators, each with the operator that defines it."""
    return {tensor: operator for operator in operators for tensor in operator.outputs}


def reads(operators: Sequence[Operator]) -> tuple[Tensor, ...]:
    """Tensors that the operators read but do not define, each once, in the order of first use."""
    defined = makers_of(operators)
    read = dict.fromkeys(chain.from_iterable(operator.given for operator in operators))
    return tuple(tensor for tensor in read if tensor not in defined)


def read_outside(subgraph: Subgraph, tensor: Tensor, inside: Container[Operator]) -> bool:
    """True if the graph's caller or an operator not in `inside` reads a tensor."""
    return subgraph.is_output(tensor) or any(reader not in inside for reader in tensor.consumers)


MOST_MOVES = 60
"""Maximum number of rearrangements that are followed in a row; models have up to four."""


def only_reader(subgraph: Subgraph, tensor: Tensor) -> Operator | None:
    """The operator that alone reads a tensor; None if the graph's caller or several operators do."""
    if subgraph.is_output(tensor) or len(tensor.readers) != 1:
        return None
    return next(iter(tensor.readers))


def look_through(tensor: Tensor, names: Collection[str]) -> tuple[Tensor, list[Operator]]:
    """Follow first inputs upwards through at most `MOST_MOVES` operators of these names.

    Returns the origin, or the tensor that is reached, and the operators passed.
    """
    passed: list[Operator] = []
    while tensor.producer is not None and tensor.producer.name in names:
        if len(passed) == MOST_MOVES:
            break
        passed.append(tensor.producer)
        tensor = tensor.producer.input(0)
    return tensor, passed


def backward_slice(
    tensors: Iterable[Tensor], stops: Container[Tensor] = ()
) -> tuple[set[Operator], list[Tensor]]:
    """The operators that compute `tensors`, and the non-constant ones they start from: `stops`, or without producer."""
    starts: dict[Tensor, None] = {}

    def above(operator: Operator) -> Iterator[Operator]:
        for tensor in operator.computed:
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


def still_needed(
    subgraph: Subgraph, old: Sequence[Operator], new: Sequence[Operator]
) -> list[Operator]:
    """The `old` operators (in execution order) that must stay when `new` ones replace the others.

    Their results are needed by the graph's caller, by operators outside `old`, or by `new` ones, directly or
    indirectly; tensors that `new` operators define do not count.
    """
    inside = set(old)
    read_anew = set(reads(new))
    defined = makers_of(new)
    wanted: list[Tensor] = []
    for tensor in makers_of(old):
        if tensor in defined:
            continue
        if tensor in read_anew or read_outside(subgraph, tensor, inside):
            wanted.append(tensor)
    return needed_for(wanted, old, defined)


_HANDLES = frozenset({DType.RESOURCE, DType.VARIANT})
_IMPURE = operators_that(Effect.RANDOM, Effect.UNKNOWN)


def is_pure(operator: Operator, subgraphs: Sequence[Subgraph] = ()) -> bool:
    """False if an operator reads or changes state, draws random numbers, or runs unknown code that may do so.

    State is behind a handle (variables, tables) or in a tensor that is kept between runs. An operator that calls
    subgraphs is pure if they are; without `subgraphs` (the model's) it counts as impure.
    """
    if subgraph_indices(operator.options) and not subgraphs:
        return False
    return not has_effects([operator], subgraphs)


def has_effects(operators: Sequence[Operator], subgraphs: Sequence[Subgraph]) -> bool:
    """True if any of the operators is impure (see `is_pure`), or one that they call."""
    return any(map(is_impure, with_called(operators, subgraphs)))


def is_impure(operator: Operator) -> bool:
    """True if the operator itself is impure, whatever it calls."""
    if operator.code.name in _IMPURE:
        return True
    return any(tensor.is_variable or tensor.dtype in _HANDLES for tensor in operator.tensors)


def with_called(operators: Sequence[Operator], subgraphs: Sequence[Subgraph]) -> list[Operator]:
    """The operators and those of all subgraphs that they call, each subgraph once."""
    return [*operators, *chain.from_iterable(called_by(operators, subgraphs))]


def called_by(operators: Iterable[Operator], subgraphs: Sequence[Subgraph]) -> list[Subgraph]:
    """Subgraphs that operators call, directly or indirectly."""

    def called(operators: Iterable[Operator]) -> list[Subgraph]:
        indices = chain.from_iterable(subgraph_indices(one.options) for one in operators)
        return [subgraphs[index] for index in indices]

    return list(walked(called(operators), called))


def placements(
    graph: Subgraph,
    old: Collection[Operator],
    new: Sequence[Operator],
    subgraphs: Sequence[Subgraph] = (),
) -> dict[Operator, Operator | None]:
    """Where operators go when `new` ones replace `old` ones: in front of which operator, or None for the end.

    Operators in both lists keep their places. All added ones go where the last old one was, or before their first
    reader:

        old 1   x   reader of added 1   y   old 2   z   ->   x   added 1   added 2   its reader   y   z

    No other operator moves, and side effects keep their order. `subgraphs` are the model's.

    Raises:
        RefusedError: an added operator needs the result of one that then runs later, or effects change their order.
    """
    staying = set(old).intersection(new)
    removed = dict.fromkeys(operator for operator in old if operator not in staying)
    added = topological(operator for operator in new if operator not in staying)
    last = max(old, key=graph.place)
    before = graph.after(last)
    readers = set(chain.from_iterable(tensor.readers for tensor in makers_of(added)))
    first_reader = min(readers - removed.keys(), key=graph.place, default=None)
    if first_reader is not None and graph.place(first_reader) <= graph.place(last):
        before = first_reader
    for source in (tensor.producer for tensor in reads(added)):
        if source is None or source in removed or before is None:
            continue
        if graph.place(source) >= graph.place(before):
            raise RefusedError(Why.FRAME, "it would run after an operator that needs it", source)
    effects = [one for one in (*removed, *added) if not is_pure(one, subgraphs)]
    first = min(map(graph.place, old))
    for other in graph.operators if effects else ():
        is_between = first <= graph.place(other) <= graph.place(last)
        if is_between and other not in removed and not is_pure(other, subgraphs):
            raise RefusedError(Why.FRAME, "it would change the order of side effects", effects[0])
    return dict.fromkeys(added, before)


def topological(operators: Iterable[Operator]) -> list[Operator]:
    """Sort operators so that producers precede readers (stable, depth first); RefusedError for a cycle."""
    stack = list(operators)[::-1]
    makers = makers_of(stack)
    order: dict[Operator, None] = {}
    opened: set[Operator] = set()
    while stack:
        operator = stack[-1]
        if operator in order:
            stack.pop()
            continue
        sources = [makers[tensor] for tensor in operator.given if tensor in makers]
        missing = [source for source in sources if source not in order]
        if not missing:
            order[stack.pop()] = None
            continue
        if operator in opened:
            raise RefusedError(Why.INVALID_MODEL, "it is part of a cycle", operator)
        opened.add(operator)
        stack += reversed(missing)
    return list(order)


def cut_out(
    model: Model, operators: Sequence[Operator], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Model:
    """A model of these operators and the subgraphs they call. Names are numbers, so equal regions give equal bytes."""
    called = called_by(operators, model.subgraphs)
    # The region itself is subgraph 0.
    places = {model.subgraphs.index(graph): place for place, graph in enumerate(called, 1)}
    region = Model(subgraphs=[_copied_graph("region", operators, inputs, outputs, places)])
    for place, graph in enumerate(called, 1):
        region.subgraphs.append(
            _copied_graph(f"called_{place}", graph.operators, graph.inputs, graph.outputs, places)
        )
    return region


def _copied_graph(
    name: str,
    operators: Sequence[Operator],
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    places: Mapping[int, int],
) -> Subgraph:
    """A new subgraph with copies of these operators; `places`: the new indices of the subgraphs that they call."""
    graph = Subgraph(name)
    copies: dict[Tensor, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in copies:
            kept = tensor.buffer if tensor.is_constant else None
            copy = replace(tensor, name=str(len(copies)), buffer=kept, shape_signature=None)
            copy.table = tensor.table if tensor.is_sparse or tensor.is_outside else None
            copies[tensor] = graph.add_tensor(copy)
        return copies[tensor]

    # In this order, which numbers the tensors.
    graph.inputs = [copied(tensor) for tensor in inputs]
    for operator in operators:
        new = graph.append(operator.on(copied))
        new.table = unmodelled_fields(operator)
        new.options = renumbered(operator.options, places)
    graph.outputs = [copied(tensor) for tensor in outputs]
    return graph


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
    given = zip(inputs, graph.inputs, strict=True)
    taken = zip(outputs, graph.outputs, strict=True)
    region.signatures.append(Signature(key, graph, dict(given), dict(taken)))
    return region


# Fields of an operator's table that an `Operator` has itself, or that count places in the file.
_MODELLED_FIELDS = {
    "opcode_index", "inputs", "outputs", "intermediates", "builtin_options", "builtin_options_type",
    "builtin_options_2", "builtin_options_2_type", "large_custom_options_offset", "large_custom_options_size",
    "debug_metadata_index",
}  # fmt: skip


def unmodelled_fields(operator: Operator) -> Table | None:
    """All other fields of an operator's table, such as custom options; None if there are none."""
    fields = {} if operator.table is None else operator.table.fields
    own = {name: value for name, value in fields.items() if name not in _MODELLED_FIELDS}
    return new_table("Operator", **own) if own else None


def copy_operator(
    operator: Operator, copies: dict[Tensor, Tensor], name: Callable[[Tensor], str]
) -> Operator:
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
    for name in SUBGRAPH_FIELDS[options.name]:
        value = options.fields.get(name)
        if isinstance(value, int):
            table.set(name, places[value])
        elif value is not None:
            table.set(name, [places[index] for index in value.tolist()])
    return table
