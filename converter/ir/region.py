"""Questions about a set of operators as one piece: what it reads, and which of it the rest of the graph needs."""

from collections.abc import Collection, Sequence

from edge_opt.ir.graph import Operator, Subgraph, Tensor


def reads(operators: Sequence[Operator]) -> tuple[Tensor, ...]:
    """Tensors that the operators read and do not define. Each is there once, the first one that is read comes first."""
    defined = {id(tensor) for operator in operators for tensor in operator.outputs}
    found: dict[int, Tensor] = {}
    for operator in operators:
        for tensor in operator.inputs:
            if tensor is not None and id(tensor) not in defined:
                found.setdefault(id(tensor), tensor)
    return tuple(found.values())


def moved_from(tensor: Tensor, names: Collection[str]) -> tuple[Tensor, list[Operator]]:
    """What operators of these names make a tensor of, by their first inputs; and the operators, the last one first."""
    passed: list[Operator] = []
    while tensor.producer is not None and tensor.producer.name in names:
        passed.append(tensor.producer)
        tensor = tensor.producer.input(0)
    return tensor, passed


def still_needed(
    subgraph: Subgraph,
    old: Sequence[Operator],
    replaced: Operator,
    new: Collection[Operator] = (),
    redefined: Collection[Tensor] = (),
) -> list[Operator]:
    """Of the `old` operators (in execution order), those that must stay when `replaced` is defined anew.

    They are the ones whose results the graph's caller, operators outside, or the `new` operators read (unless the new
    ones define them, as `redefined` says), and the old ones that those need in turn.
    """
    inside = set(old)
    anew = {id(tensor) for tensor in redefined}
    needed: set[Operator] = set()
    read_anew = {id(tensor) for operator in new for tensor in operator.inputs}
    for operator in reversed(old):
        if operator is replaced:
            continue
        for tensor in operator.outputs:
            if id(tensor) not in anew and (
                id(tensor) in read_anew
                or subgraph.is_output(tensor)
                or any(reader not in inside or reader in needed for reader in tensor.consumers)
            ):
                needed.add(operator)
    return [operator for operator in old if operator in needed]
