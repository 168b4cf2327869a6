"""Which axes of an attention's products hold its heads, by the products alone: for heads that nothing else tells of.

A matrix product treats every index of its batch axes by itself, so each of them may be split; all are heads but those
that are the model's own batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.labelling import DEEPEST, Labelling, OperandFactors, Weighings
from edge_opt.attention.refusal import Refusal
from edge_opt.ir import Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the heads lie in each of `outputs`, the results of the value products or their sum."""

    labelling: Labelling
    outputs: tuple[tuple[Tensor, Factored], ...]
    heads: int


def labelling_by_products(
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
        if not _is_batch(alone.labelling, operands):
            chosen.append(axis)
    return _placed(outputs, chosen, values, operands)


def _placed(
    outputs: Sequence[Tensor], axes: Sequence[int], values: Weighings, operands: OperandFactors
) -> Placed | Refusal | None:
    sizes = {axis: max(_size(output, axis) for output in outputs) for axis in axes}
    heads = math.prod(sizes.values())
    if heads == 1:
        return None
    strides = {axis: math.prod(sizes[inner] for inner in axes if inner > axis) for axis in axes}
    labelling = Labelling(values, operands)
    placed = tuple((output, _labelled(output, strides)) for output in outputs)
    for output, factored in placed:
        if not labelling.core(output, factored):
            reason = labelling.first_refusal
            return reason or Refusal("no product of queries and keys carries the heads", output.producer)
    for product, own in labelling.logits.items():
        count = fx.piece_count(own)
        if count != heads:
            return Refusal("not every head reaches the logits", product, None, str(heads), str(count))
    return Placed(labelling, placed, heads)


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
