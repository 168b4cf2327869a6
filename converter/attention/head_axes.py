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
from edge_opt.attention.labelling import DEEPEST, Labelling, OperandFactors, Weighings
from edge_opt.attention.rules import MOVEMENT, UNARY, is_turned
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.refusal import Refusal

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
        labelling = Labelling(values, operands)
        labelling.core(output, factored)
        found = labelling.logits
        everywhere = found and all(fx.piece_count(own) == heads for own in found.values())
        sequence = any(not factor.stride for factor in factored[rows])
        if everywhere and _told(labelling, operands, heads, merged=not sequence):
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


def _told(labelling: Labelling, operands: OperandFactors, heads: int, *, merged: bool) -> bool:
    """True where the label comes from heads beside the head size.

    `merged`: in one axis with it, nothing less will do. Without a sequence, `[1, N, H]` may be `[1, T, H]` as well.
    """
    for product, factored in labelling.logits.items():
        size = _contracted(product)
        for index, own in operands.known(product, factored).items():
            tensor, labelled = product.input(index), _with_size(product, index, own, size)
            for source in _rising(tensor):
                if source is not tensor:
                    operator, above = tensor.producer, operands.of(tensor, labelled)
                    if operator is None or not isinstance(above, dict):
                        break
                    tensor, labelled = source, above[operator.inputs.index(source)]
                if _beside(labelled, size, heads, merged=merged):
                    return True
    return False


def _with_size(product: Operator, index: int, own: Factored, size: int) -> Factored:
    """The factors of an operand, with the head size labelled too: as the innermost digit of `head * H + h`."""
    turned = is_turned(product, index)
    contracted = len(own) - (1 if turned == (index == 1) else 2)
    return tuple(
        (Factor(size, 1),)
        if axis == contracted
        else tuple(Factor(factor.size, factor.stride * size) for factor in factors)
        for axis, factors in enumerate(own)
    )


def _beside(factored: Factored, size: int, heads: int, *, merged: bool) -> bool:
    last = factored[-1]
    if last and last[-1] == Factor(heads * size, 1):
        return True
    apart = len(factored) > 2 and last == (Factor(size, 1),) and factored[-2] == (Factor(heads, size),)
    return apart and not merged


# By the products alone


def placed_by_products(
    outputs: Sequence[Tensor], values: Weighings, operands: OperandFactors
) -> Placed | Refusal | None:
    """How the heads lie in the products' batch axes; None where these are of size 1, or are the batch."""
    rank = max(len(output.shape) for output in outputs)
    chosen: list[int] = []
    for axis in range(-rank, -2):
        alone = _placed(outputs, [axis], values, operands)
        if alone is None:
            continue
        if isinstance(alone, Refusal):
            if axis == -rank and rank > 3:
                continue
            return alone
        if not _is_batch(alone[0], operands):
            chosen.append(axis)
    placed = _placed(outputs, chosen, values, operands)
    return placed if placed is None or isinstance(placed, Refusal) else placed[1]


def _placed(
    outputs: Sequence[Tensor], axes: Sequence[int], values: Weighings, operands: OperandFactors
) -> tuple[Labelling, Placed] | Refusal | None:
    """With the heads in these axes."""
    sizes = {axis: max(_size(output, axis) for output in outputs) for axis in axes}
    heads = math.prod(sizes.values())
    if heads == 1:
        return None
    strides = {axis: math.prod(sizes[inner] for inner in axes if inner > axis) for axis in axes}
    labelling = Labelling(values, operands)
    placed = tuple((output, _labelled(output, strides)) for output in outputs)
    missed = next((output for output, factored in placed if not labelling.core(output, factored)), None)
    end = (missed or outputs[0]).producer
    return labelling.refusal(heads, end, core=missed is None) or (labelling, (placed, heads))


def _size(output: Tensor, axis: int) -> int:
    return output.shape[axis] if -axis <= len(output.shape) else 1


def _labelled(output: Tensor, strides: Mapping[int, int]) -> Factored:
    rank = len(output.shape)
    axes = list(fx.plain(output.shape))
    for axis, stride in strides.items():
        if _size(output, axis) > 1:
            axes[rank + axis] = (Factor(output.shape[axis], stride),)
    return tuple(axes)


def _is_batch(labelling: Labelling, operands: OperandFactors) -> bool:
    """True where the label is the outermost axis of all that is computed above; weights alone have no batch."""
    computed = [own for tensor, own in _edges(labelling, operands) if not tensor.is_constant]
    return bool(computed) and all(bool(own[0]) and own[0][0].stride > 0 for own in computed)


def _edges(labelling: Labelling, operands: OperandFactors) -> Iterator[tuple[Tensor, Factored]]:
    """Where the label of queries, keys and values comes from: as far up as it can be followed."""
    starts = [
        (product.input(index), labelled)
        for product, own in (*labelling.products.items(), *labelling.logits.items())
        for index, labelled in operands.known(product, own).items()
        if not labelling.is_core(product.input(index))
    ]
    walk = operands.upwards(starts, lambda tensor, own: not tensor.is_constant and fx.piece_count(own) > 1)
    for tensor, own, ends in islice(walk, DEEPEST * len(labelling.logits)):
        if ends and fx.piece_count(own) > 1:
            yield tensor, own
