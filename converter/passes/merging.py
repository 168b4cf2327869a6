"""What committed rewrites leave behind: operators that nobody reads are removed, equal ones merged."""

from collections.abc import Collection, Hashable, Iterable, Sequence

from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.walk import is_pure


def remove_dead(graph: Subgraph, candidates: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Remove those operators whose results nobody reads any more, and what only they needed.

    What does more than compute its results stays. `subgraphs` are the model's: without them, any call does.
    """
    pending = list(candidates)
    while pending:
        operator = pending.pop()
        is_read = any(tensor.consumers or graph.is_output(tensor) for tensor in operator.outputs)
        if operator.subgraph is not graph or is_read or not is_pure(operator, subgraphs):
            continue
        read = [tensor for tensor in operator.inputs if tensor is not None]
        graph.remove(operator)
        pending.extend(tensor.producer for tensor in read if tensor.producer is not None)


def share_equal(graph: Subgraph, added: Collection[Operator]) -> None:
    """Merge equal operators among the `added` ones.

    Equal: the same operator and options on the same inputs (constants by value), with results of the same type. Such
    operators compute the same bits, so readers of the later one can read the earlier one's result. No proof runs after
    this: so what reads state, draws random numbers or calls a subgraph is never equal to anything.
    """
    chosen = set(added)
    known: dict[Hashable, Operator] = {}
    for operator in graph.operators if chosen else ():
        if operator not in chosen or not is_pure(operator) or any(map(graph.is_output, operator.outputs)):
            continue
        first = known.setdefault(_key(operator), operator)
        if first is operator:
            continue
        for old, new in zip(operator.outputs, first.outputs, strict=True):
            graph.replace_uses(old, new)
        graph.remove(operator)


def _key(operator: Operator) -> Hashable:
    options = operator.options and operator.options.key()
    return (
        operator.code.key(),
        options,
        *map(_operand_key, operator.inputs),
        *map(_type_key, operator.outputs),
    )


def _operand_key(tensor: Tensor | None) -> Hashable:
    if tensor is None or not tensor.has_numbers or tensor.elements > 1 << 12:
        return id(tensor)
    return (tensor.array().tobytes(), _type_key(tensor))


def _type_key(tensor: Tensor) -> Hashable:
    quantization = tensor.quantization
    affine = quantization is not None and quantization.is_affine
    return (tensor.dtype, tensor.shape, quantization.key() if affine and quantization is not None else None)
