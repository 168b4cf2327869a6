"""Which axes of an attention hold its heads, where nothing that follows its products tells.

By where its queries come from: there heads stand beside the head size, as `[.., N*H]` or `[.., T, N, H]`. Else by the
products alone: a matrix product treats every index of its batch axes by itself, so each of them may be split, and all
are heads but those that are the model's own batch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.labelling import DEEPEST, OperandFactors, Trace, Weighings, trace_heads
from edge_opt.attention.rules import MOVEMENT, is_turned
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import UNARY
from edge_opt.ir.refusal import RefusedError

Placed: TypeAlias = tuple[tuple[tuple[Tensor, Factored], ...], int]
"""Results of the value products, or their sum, with the factors that say where heads lie; and how many heads."""

# By where the queries come from


def factors_by_origin(
    output: Tensor, values: Weighings, logits: list[Operator], operands: OperandFactors
) -> Factored | None:
    """How heads lie in `output`, the (sum of the) value product(s); None if nothing tells."""
    products = [*values, *logits]
    summed = [] if output.producer is None else [output.producer]
    if any(map(operands.distrusted, products + summed)) or not all(map(_contracted, products)):
        return None
    rows = len(output.shape) + next(iter(values.values())).rows
    for heads in sorted(_head_counts(logits), reverse=True):
        factored = _placement(output.shape, rows, heads)
        if factored is None:
            continue
        labelled = trace_heads([(output, factored)], values, operands).logits
        labelled_everywhere = bool(labelled) and all(
            fx.piece_count(own) == heads for own in labelled.values()
        )
        has_sequence = any(not factor.stride for factor in factored[rows])
        if labelled_everywhere and _come_from_heads(labelled, operands, heads, merged=not has_sequence):
            return factored
    return None


def _head_counts(logits: Iterable[Operator]) -> set[int]:
    """Numbers of heads that some tensor above the queries or keys may have, going by its shape."""
    counts: set[int] = set()
    for product in logits:
        size = _contracted(product)
        for tensor in (*_rising(product.input(0)), *_rising(product.input(1))):
            shape = tensor.shape
            if shape and shape[-1] > size and shape[-1] % size == 0:
                counts.add(shape[-1] // size)
            elif len(shape) > 2 and shape[-1] == size and shape[-2] > 1:
                counts.add(shape[-2])
    return counts


def _contracted(product: Operator) -> int:
    shape = product.input(0).shape
    return shape[-2 if is_turned(product, 0) else -1]


def _rising(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and one after the other those that it is a rearrangement or scaling of."""
    for _ in range(DEEPEST):
        yield tensor
        operator = tensor.producer
        if operator is None:
            return
        varying = [t for t in operator.inputs if t is not None and not t.is_constant]
        if operator.name in UNARY | MOVEMENT | {"PACK", "UNPACK"}:
            tensor = operator.input(0)
        elif operator.name in ("MUL", "DIV") and len(varying) == 1:
            tensor = varying[0]
        else:
            return


def _placement(shape: Shape, rows: int, heads: int) -> Factored | None:
    """Where that many heads may lie in a product: in its batch axes behind the first, and outermost in its rows.

    In three axes `[B*N, T, H]` they are the inner part of the first.
    """
    batch = len(shape) - 2
    lanes = math.prod(shape[1:batch]) if batch > 1 else math.gcd(math.prod(shape[:batch]), heads)
    groups, left = divmod(heads, lanes)
    if left or shape[rows] % groups:
        return None
    axes: list[Axis] = list(fx.plain(shape))
    axes[rows] = tuple(fx.merge_neighbours([Factor(groups, 1), Factor(shape[rows] // groups)]))
    if batch == 1:
        axes[0] = tuple(fx.merge_neighbours([Factor(shape[0] // lanes), Factor(lanes, groups)]))
    stride = groups
    for axis in range(batch - 1, 0, -1):
        axes[axis] = tuple(fx.merge_neighbours([Factor(shape[axis], stride)]))
        stride *= shape[axis]
    return tuple(axes)


def _come_from_heads(
    logits: Mapping[Operator, Factored], operands: OperandFactors, heads: int, *, merged: bool
) -> bool:
    """True where the label of a query or key comes from heads beside the head size.

    `merged`: in one axis with it, nothing less will do. Without a sequence, `[1, N, H]` may be `[1, T, H]` as well.
    """
    for product, factored in logits.items():
        size = _contracted(product)
        for index, by_head in operands.known(product, factored).items():
            for own, by_size in _labelled_twice(product, index, by_head, operands):
                if own[-1][-2:] == (Factor(heads, 1), Factor(size)) and by_size[-1][-1] == Factor(size, 1):
                    return True
                apart = own[-2:] == ((Factor(heads, 1),), (Factor(size),)) and by_size[-1] == (
                    Factor(size, 1),
                )
                if apart and len(own) > 2 and not merged:
                    return True
    return False


def _labelled_twice(
    product: Operator, index: int, by_head: Factored, operands: OperandFactors
) -> Iterator[tuple[Factored, Factored]]:
    """Factors of an operand and of all that it is a rearrangement of: with the heads labelled, and the head size."""
    tensor = product.input(index)
    rank = len(by_head)
    contracted = rank - (1 if is_turned(product, index) == (index == 1) else 2)
    plain = fx.plain(tensor.shape)
    by_size = (*plain[:contracted], (Factor(tensor.shape[contracted], 1),), *plain[contracted + 1 :])
    for source in _rising(tensor):
        if source is not tensor:
            above = [operands.of(tensor, own) for own in (by_head, by_size)]
            read = [own for own in above if isinstance(own, dict)]
            if tensor.producer is None or len(read) < len(above):
                return
            place = tensor.producer.inputs.index(source)
            tensor, by_head, by_size = source, read[0][place], read[1][place]
        yield by_head, by_size


# By the products alone


def placed_by_products(
    outputs: Sequence[Tensor], values: Weighings, operands: OperandFactors
) -> Placed | None:
    """How the heads lie in the products' batch axes; None where these are of size 1, or are the batch.

    Raises:
        RefusedError: the heads do not reach the logits.
    """
    rank = max(len(output.shape) for output in outputs)
    chosen: list[int] = []
    for axis in range(-rank, -2):
        try:
            alone = _placed(outputs, [axis], values, operands)
        except RefusedError:
            if axis == -rank and rank > 3:
                continue
            raise
        if alone is not None and not _is_batch(alone[0], operands):
            chosen.append(axis)
    placed = _placed(outputs, chosen, values, operands)
    return None if placed is None else placed[1]


def _placed(
    outputs: Sequence[Tensor], axes: Sequence[int], values: Weighings, operands: OperandFactors
) -> tuple[Trace, Placed] | None:
    """With the heads in these axes."""
    sizes = {axis: max(_size(output, axis) for output in outputs) for axis in axes}
    heads = math.prod(sizes.values())
    if heads == 1:
        return None
    strides = {axis: math.prod(sizes[inner] for inner in axes if inner > axis) for axis in axes}
    placed = tuple((output, _labelled(output, strides)) for output in outputs)
    trace = trace_heads(placed, values, operands)
    trace.check(heads, (trace.lost or outputs[0]).producer)
    return trace, (placed, heads)


def _size(output: Tensor, axis: int) -> int:
    return output.shape[axis] if -axis <= len(output.shape) else 1


def _labelled(output: Tensor, strides: Mapping[int, int]) -> Factored:
    rank = len(output.shape)
    axes = list(fx.plain(output.shape))
    for axis, stride in strides.items():
        if _size(output, axis) > 1:
            axes[rank + axis] = (Factor(output.shape[axis], stride),)
    return tuple(axes)


def _is_batch(trace: Trace, operands: OperandFactors) -> bool:
    """True where the label is the outermost axis of all that is computed above; weights alone have no batch."""
    computed = [own for tensor, own in _edges(trace, operands) if not tensor.is_constant]
    return bool(computed) and all(bool(own[0]) and own[0][0].stride > 0 for own in computed)


def _edges(trace: Trace, operands: OperandFactors) -> Iterator[tuple[Tensor, Factored]]:
    """Where the label of queries, keys and values comes from: as far up as it can be followed."""
    starts = [
        (product.input(index), labelled)
        for product, own in (*trace.products.items(), *trace.logits.items())
        for index, labelled in operands.known(product, own).items()
        if product.input(index).producer not in trace.core
    ]
    walk = operands.upwards(starts, lambda tensor, own: not tensor.is_constant and fx.piece_count(own) > 1)
    for tensor, own, ends in islice(walk, DEEPEST * len(trace.logits)):
        if ends and fx.piece_count(own) > 1:
            yield tensor, own
