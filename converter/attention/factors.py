"""Factored shapes, which mark the factors of axes that are the head index. Pure arithmetic, no graphs.

An axis is a product of factors, outermost first. `[1, K, G*T, S]` with heads n = k*G + g is
`[1, (K: stride G), (G: stride 1)(T), (S)]`: a labelled factor of size s and stride d holds index (n // d) % s of
head n, so a factor can be cut in two at any point, and each part is still a known digit of the head.

The idea, with pictures: docs/head-axis.md.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple, TypeAlias

from edge_opt.ir.graph import Shape
from edge_opt.shapes.dimension import with_axis


class Factor(NamedTuple):
    """`size` consecutive steps of an axis; `stride` 0 is a plain factor.

    A labelled factor of size 1 marks an axis that is broadcast over the heads, which all read the same.
    """

    size: int
    stride: int = 0

    def digit(self, head: int) -> int:
        """The index of the step that belongs to a head."""
        return head // self.stride % self.size


Axis: TypeAlias = tuple[Factor, ...]
Factored: TypeAlias = tuple[Axis, ...]


class Cut(NamedTuple):
    """An axis in two: the outermost factors, and the rest."""

    outer: Axis
    rest: Axis


def plain_axis(size: int) -> Axis:
    """An axis without labels."""
    return () if size == 1 else (Factor(size),)


def plain(shape: Shape) -> Factored:
    """A shape without labels."""
    return tuple(map(plain_axis, shape))


def labelled_axis(shape: Shape, axis: int, *factors: Factor) -> Factored:
    """A shape with labels on one axis only, which is counted from the front."""
    return with_axis(plain(shape), axis, factors)


def axis_size(axis: Iterable[Factor]) -> int:
    """The product of the factors."""
    return math.prod(factor.size for factor in axis)


def sizes(factored: Factored) -> Shape:
    """The shape, as products of the factors."""
    return tuple(map(axis_size, factored))


def all_factors(factored: Factored) -> Iterator[Factor]:
    """The factors of all axes, outermost first."""
    return chain.from_iterable(factored)


def is_shared(factored: Factored) -> bool:
    """True if no axis carries a label, not even a broadcast one."""
    return not any(factor.stride for factor in all_factors(factored))


def labels(factored: Factored) -> tuple[Factor, ...]:
    """The labelled factors that differ between heads, in axis order."""
    return tuple(factor for factor in all_factors(factored) if factor.stride and factor.size > 1)


def labelled_axes(factored: Factored) -> tuple[int, ...]:
    """The axes that differ between heads."""
    return tuple(place for place, axis in enumerate(factored) if tells_heads(axis))


def piece_count(factored: Factored) -> int:
    """Number of different pieces of the tensor that heads see."""
    return axis_size(labels(factored))


def piece_index(factored: Factored, head: int) -> int:
    """The index of a head's piece, equal for heads that see the same."""
    return index_among(labels(factored), head)


def piece_axes(factored: Factored, *, keep_axes: bool) -> tuple[int, ...]:
    """Axes of a head's piece; without `keep_axes`, drops those that only carry labels."""
    if keep_axes:
        return tuple(range(len(factored)))
    return tuple(place for place, axis in enumerate(factored) if not axis or not only_labels(axis))


def piece_shape(factored: Factored, *, keep_axes: bool) -> Shape:
    """Shape of one head's piece: labelled factors removed."""
    rest = list(map(_own_size, factored))
    return tuple(rest[axis] for axis in piece_axes(factored, keep_axes=keep_axes))


def _own_size(axis: Axis) -> int:
    """The size of an axis in one head's piece: without its labelled factors."""
    return axis_size(factor for factor in axis if not factor.stride)


def merge_neighbours(factors: Iterable[Factor]) -> list[Factor]:
    """Drop factors of size 1, and merge plain neighbours and successive digits of the head."""
    merged: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        if merged and merged[-1].stride == factor.size * factor.stride:
            merged[-1] = Factor(merged[-1].size * factor.size, factor.stride)
        else:
            merged.append(factor)
    return merged


def canonical(factored: Factored) -> Factored:
    """A normal form of factors for a tensor whose pieces keep all axes."""
    return tuple(tuple(merge_neighbours(axis)) for axis in factored)


def regroup(factored: Factored, shape: Shape) -> Factored | None:
    """The factors after a RESHAPE to another shape; labels stay on their factors.

    None if the new shape cuts through a factor unevenly: the shapes share no refinement.
    """
    rest: Axis = tuple(merge_neighbours(all_factors(factored)))
    axes: list[Axis] = []
    for size in shape:
        cut = cut_axis(rest, size)
        if cut is None:
            return None
        outer, rest = cut
        axes.append(tuple(merge_neighbours(outer)))
    return None if rest else tuple(axes)


def unit_axis(axis: Axis) -> Axis:
    """The axis of size 1 that broadcasts to `axis`: with size-1 labels if `axis` holds only heads, else without."""
    if not axis or not only_labels(axis):
        return ()
    return tuple(Factor(1, factor.stride) for factor in axis)


def only_labels(axis: Iterable[Factor]) -> bool:
    """True if an axis consists only of digits of the head."""
    return all(factor.stride for factor in axis)


def cut_axis(axis: Sequence[Factor], count: int) -> Cut | None:
    """Cut an axis so that its outermost factors have `count` steps; None if the cut is not even."""
    outer: list[Factor] = []
    rest = list(axis)
    while count > 1 and rest:
        factor = rest.pop(0)
        taken = math.gcd(count, factor.size)
        inner = factor.size // taken
        count //= taken
        outer.append(Factor(taken, factor.stride * inner))
        if inner > 1:
            # Digit arithmetic keeps both labels right.
            rest.insert(0, Factor(inner, factor.stride))
            break
    return None if count > 1 else Cut(tuple(outer), tuple(rest))


def leading(axis: Axis) -> Axis:
    """The labelled factors that an axis begins with."""
    return tuple(takewhile(lambda factor: factor.stride, axis))


def tells_heads(axis: Iterable[Factor]) -> bool:
    """True if different heads have different steps of the axis."""
    return any(factor.stride and factor.size > 1 for factor in axis)


def index_among(factors: Sequence[Factor], head: int) -> int:
    """A head's index among the steps that the factors span together."""
    position = 0
    for factor in factors:
        position = position * factor.size + factor.digit(head)
    return position
