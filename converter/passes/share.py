"""Merges operators that rewrites added twice: each site builds what it needs, equal results are kept once."""

from collections.abc import Collection, Hashable

from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.effects import is_pure


def share_equal(graph: Subgraph, added: Collection[Operator]) -> None:
    """Merge equal operators among the `added` ones.

    Equal: the same operator and options on the same inputs (constants by value), with results of the same type. Such
    operators compute the same bits, so readers of the later one can read the earlier one's result. No proof runs after
    this: so what reads state, draws random numbers or calls a subgraph is never equal to anything.
    """
    chosen = set(added)
    known: dict[Hashable, Operator] = {}
    for operator in graph.operators:
        if operator not in chosen or not is_pure(operator):
            continue
        if any(graph.is_output(tensor) for tensor in operator.outputs):
            continue
        first = known.setdefault(_key(operator), operator)
        if first is operator:
            continue
        for old, new in zip(operator.outputs, first.outputs, strict=True):
            graph.replace_uses(old, new)
        graph.remove(operator)


def _key(operator: Operator) -> Hashable:
    return (
        operator.code.key(),
        operator.options and operator.options.key(),
        tuple(_operand_key(tensor) for tensor in operator.inputs),
        tuple(_type_key(tensor) for tensor in operator.outputs),
    )


def _operand_key(tensor: Tensor | None) -> Hashable:
    if tensor is None or not tensor.has_numbers or tensor.elements > 1 << 12:
        return id(tensor)
    return (tensor.array().tobytes(), _type_key(tensor))


def _type_key(tensor: Tensor) -> Hashable:
    quantization = tensor.quantization
    affine = quantization is not None and quantization.is_affine
    return (tensor.dtype, tensor.shape, quantization.key() if affine and quantization is not None else None)
