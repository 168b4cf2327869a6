"""Pairs of products of activations: the matrices that one makes are an operand of another. Knows no heads.

    A x B = [.., M, N] -> anything that leaves M and N in place -> x C     a pair: attention, or something like it
    A x B = [.., M, N] -> a projection that sums over N            -> x C  no pair: the next layer

Where the axes cannot be followed, they are taken to be everywhere. docs/head-axis.md says what the pairs are for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from edge_opt.attention.axes import (
    Axes,
    axes_behind,
    contracted_axis,
    has_known_axes,
    moved_axes,
    on_axes,
)
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, is_weight, multiplies_activations
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import MOST_MOVES, look_through, walked

_FARTHEST = 120
"""Maximum number of operators that are looked at behind one product."""
_MOST_BETWEEN = 8
"""Maximum number of operators between the elements of two activations and what sums them, if not only scales."""

# Operators between the elements of two activations and what sums them:
_MULTIPLYING = frozenset(
    {"MUL", "SQUARED_DIFFERENCE"}
)  # a product, even if only rows or columns are repeated
_COMBINING = _MULTIPLYING | {"SUB", "DIV"}  # a product if rows and columns are repeated
_SCALING = MOVEMENT | {"CAST", "QUANTIZE", "DEQUANTIZE", "MUL", "DIV", "NEG"}
_PASSED = ELEMENTWISE | operators_that(
    Effect.REARRANGING, Effect.CUTTING, Effect.PADDING, Effect.REDUCTION
)
_SUMMING = frozenset({Effect.REDUCTION, Effect.PRODUCT, Effect.CONVOLUTION})
_SUMMING_OPERATORS = operators_that(*_SUMMING)
_CONVOLUTIONS = operators_that(Effect.CONVOLUTION)
_UNKNOWN = "CUSTOM"
_Groups: TypeAlias = tuple[Axes, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two activations: `[.., M, C] x [.., C, N] -> [.., M, N]`, a matrix for each index of other axes.

    `matrix` has the axes M and N of `operator`'s result (without those of size 1). `may_hold_heads`: there is more than
    one matrix, even if of a batch only, or rows that may belong to several heads. `is_outer`: C is 1, so nothing is
    summed.
    """

    operator: Operator
    matrix: _Groups
    may_hold_heads: bool
    is_outer: bool = False

    @property
    def is_written_out(self) -> bool:
        """True if it is written as MUL and SUM, or as a convolution."""
        return not multiplies_activations(self.operator)


class Pair(NamedTuple):
    """Two products: the first one's matrices reach the second.

    `mixed_by`: the first operator between them that sums over another axis, or that cannot be followed. `lost_axes`:
    rows or columns were summed between them, and the second sums over what was left.
    """

    first: Product
    second: Product
    mixed_by: Operator | None
    lost_axes: bool = False

    @property
    def products(self) -> tuple[Product, Product]:
        """Both products."""
        return self.first, self.second

    @property
    def is_mixed(self) -> bool:
        """True if an operator between them sums over another axis, which may hold the heads."""
        return self.mixed_by is not None and self.mixed_by.name in _SUMMING_OPERATORS

    def refusal(self) -> RefusedError:
        """Why the pair is not split, for a pair that is in no block."""
        if self.is_mixed:
            text = "heads may be mixed here, between two products of activations"
            return RefusedError(Why.HEADS, text, self.mixed_by)
        if self.mixed_by is not None:
            text = "a product of activations cannot be followed through this operator"
            return RefusedError(Why.OPERATOR, text, self.mixed_by)
        for product in self.products:
            if product.is_written_out:
                text = "a product of activations is neither BATCH_MATMUL nor FULLY_CONNECTED"
                return RefusedError(Why.PATTERN, text, product.operator)
        text = "one product of activations goes into another, as in linear attention, which is not split"
        return RefusedError(Why.PATTERN, text, self.second.operator)


def product_of(operator: Operator) -> Product | None:
    """The product of activations that an operator computes; for one written as MUL and SUM, the SUM."""
    if operator.name in _CONVOLUTIONS and not is_weight(operator.input(1)):
        return Product(operator, (), may_hold_heads=True)
    if not multiplies_activations(operator):
        return _sum_of_products(operator)
    summed = operator.input(0).shape
    if not summed or not has_known_axes(operator):  # a wrong shape may be that of a scalar
        return Product(operator, (), may_hold_heads=True)
    shape = operator.outputs[0].shape
    last = len(shape) - 1
    # The rows of a FULLY_CONNECTED share the weights.
    first_row = 0 if operator.name == "FULLY_CONNECTED" else max(last - 1, 0)
    matrix = _wide(shape, range(first_row, last), [last])
    may_hold_heads = math.prod(shape[:first_row]) > 1
    is_outer = summed[contracted_axis(operator, 0)] == 1
    return Product(operator, matrix, may_hold_heads, is_outer)


def _wide(shape: Shape, *groups: Iterable[int]) -> _Groups:
    """For each group of axes, those with more than one step; groups without any are left out."""
    ones = {axis for axis, size in enumerate(shape) if size == 1}
    return tuple(filter(None, (frozenset(group) - ones for group in groups)))


def _sum_of_products(summed: Operator) -> Product | None:
    """A sum over the elements of two activations, of which one is repeated for the other's rows or columns.

    `SUM([.., M, 1, C] * [.., 1, N, C]) -> [.., M, N]`. In between, numbers may be scaled and rearranged. Where both
    rows and columns are repeated, more may happen to them, and any operator may sum.
    """
    if summed.name not in _SUMMING_OPERATORS:
        return None
    only_scaled = summed.name in ("SUM", "MEAN")
    between: list[Operator] = []
    combining = summed.input(0).producer
    while combining is not None and len(between) < (MOST_MOVES if only_scaled else _MOST_BETWEEN):
        activations = _activations(combining)
        if len(activations) > 1 and combining.name in _COMBINING:
            product = _product_summed(summed, combining, activations[:2], between)
            is_multiplied = only_scaled and combining.name in _MULTIPLYING
            if product is not None and (is_multiplied or len(product.matrix) > 1):
                return product
        if not activations or combining.name not in _PASSED:
            return None
        only_scaled = only_scaled and combining.name in _SCALING and len(activations) == 1
        between.insert(0, combining)
        combining = max(activations, key=lambda tensor: tensor.elements).producer
    return None


def _product_summed(
    summed: Operator, combining: Operator, operands: Iterable[Tensor], between: Sequence[Operator]
) -> Product | None:
    """The product that a sum makes of what `combining` combines, if it is one; `between` lie between the two."""
    if not all(map(has_known_axes, (summed, combining, *between))):
        return None
    sizes = combining.outputs[0].shape
    rank = len(sizes)
    left, right = (_repeated_shape(tensor, rank) for tensor in operands)
    places = [_axes_in_sum(summed, combining, between, axis) for axis in range(rank)]
    contracted = [axis for axis in range(rank) if sizes[axis] > 1 and not places[axis]]
    kept = [axis for axis in range(rank) if axis not in contracted]
    rows = [axis for axis in kept if right[axis] == 1]
    columns = [axis for axis in kept if left[axis] == 1]
    groups = _wide(left, rows) + _wide(right, columns)
    is_weighted = all(1 in (left[axis], right[axis]) for axis in contracted)
    if not groups or is_weighted:
        return None  # a weighted mean, a norm
    lead = [1 if axis in rows + columns else left[axis] for axis in kept]
    may_be_heads = len(groups) > 1 or len(groups[0]) > 1
    matrix = tuple(on_axes(places, axes) for axes in groups)
    return Product(summed, matrix, may_be_heads or math.prod(lead) > 1)


def _activations(operator: Operator) -> list[Tensor]:
    """The operands of an operator that are neither weights nor single numbers."""
    return [tensor for tensor in operator.given if tensor.elements > 1 and not is_weight(tensor)]


def _axes_in_sum(
    summed: Operator, combining: Operator, between: Iterable[Operator], axis: int
) -> Axes:
    """The axes of a SUM's result on which an axis of what it sums lies."""
    axes: Axes = frozenset({axis})
    tensor = combining.outputs[0]
    for operator in (*between, summed):
        axes = axes_behind(operator, tensor, axes)
        tensor = operator.outputs[0]
    return axes


def _repeated_shape(tensor: Tensor, rank: int) -> Shape:
    """The shape of a factor with `rank` axes, before it is repeated."""
    for _ in range(MOST_MOVES):
        source = _repeated(tensor.producer)
        if source is None:
            break
        tensor = source
    return (1,) * (rank - len(tensor.shape)) + tensor.shape


def _repeated(operator: Operator | None) -> Tensor | None:
    """The tensor that an operator repeats: on purpose, by joining it to itself, or for each number of a constant."""
    if operator is None:
        return None
    if operator.name in ("BROADCAST_TO", "TILE"):
        return operator.input(0)
    sources = set(operator.given)
    if operator.name in ("ADD", "MUL"):
        sources = {source for source in sources if not is_weight(source)}
    elif operator.name != "CONCATENATION":
        return None
    return sources.pop() if len(sources) == 1 else None


def products_among(operators: Iterable[Operator]) -> Iterator[Product]:
    """The products of activations among operators."""
    return filter(None, map(product_of, operators))


def pairs_among(given: Iterable[Product]) -> Iterator[Pair]:
    """All pairs of the products, the first ones in the order given."""
    products = {product.operator: product for product in given}
    through = cache(_through)  # once heads are joined, the ways of their products are the same
    for product in products.values():
        if not _is_residual(product):
            yield from _reached(product, products, through)


def _is_residual(product: Product) -> bool:
    """True if a product is added to what it was made of, `x + x A`: a step of a residual stream, no scores."""
    operator = product.operator
    if product.may_hold_heads and len(operator.outputs[0].shape) > 3:
        return False  # several matrices: heads, which have no stream of their own
    own = {_origin(tensor) for tensor in operator.inputs[:2]}

    def behind(tensor: Tensor) -> Iterator[Tensor]:
        for reader in tensor.consumers:
            if reader.name in MOVEMENT:
                yield from reader.outputs

    for tensor in walked(operator.outputs[:1], behind, _FARTHEST):
        for reader in tensor.consumers:
            if reader.name == "ADD" and not own.isdisjoint(map(_origin, reader.inputs)):
                return True
    return False


def _origin(tensor: Tensor | None) -> Tensor | None:
    """The tensor that rearrangements made this one of."""
    return None if tensor is None else look_through(tensor, MOVEMENT)[0]


class _Matrices(NamedTuple):
    """A tensor that holds a product's matrices, and on which axes: None if unknown, or if the matrices are numbers.

    `mixed_by` as in `Pair`; `lost_axes`: rows or columns were summed, which may have been the heads.
    """

    tensor: Tensor
    axes: _Groups | None
    mixed_by: Operator | None = None
    lost_axes: bool = False


_Through: TypeAlias = Callable[[Operator, _Matrices], tuple[_Matrices, ...]]


def _reached(
    product: Product, products: Mapping[Operator, Product], through: _Through
) -> Iterable[Pair]:
    """The pairs of a product with those that its matrices reach first, by `_through`."""
    found: dict[Operator, Pair] = {}
    looked_at = 0

    def behind(held: _Matrices) -> Iterator[_Matrices]:
        nonlocal looked_at
        for reader in held.tensor.readers:
            looked_at += 1
            if looked_at > _FARTHEST:
                # The search ends early: it may be a pair with any product farther behind.
                found.setdefault(product.operator, Pair(product, product, reader))
                return
            if reader not in products:
                yield from through(reader, held)
            elif not held.lost_axes or _contracts(reader, held):
                found.setdefault(
                    reader, Pair(product, products[reader], held.mixed_by, held.lost_axes)
                )

    start = _Matrices(product.operator.outputs[0], product.matrix or None)
    for _ in walked([start], behind):
        pass
    return found.values()


def _through(reader: Operator, held: _Matrices) -> tuple[_Matrices, ...]:
    """The results of an operator that still hold the matrices."""
    kind = KINDS[_UNKNOWN if reader.shape_error else reader.name]
    if kind.is_followed and not kind.takes(held.tensor, reader.inputs):
        return ()  # sizes or positions
    sums = kind.effect in _SUMMING
    if held.axes is None and sums and kind.effect is not Effect.REDUCTION:
        return ()
    moved = moved_axes(reader, held.tensor)
    mixed_by = held.mixed_by
    if mixed_by is None and (moved is None or sums):
        mixed_by = reader
    axes: _Groups | None = None
    lost_axes = held.lost_axes
    if moved is not None and held.axes is not None:
        axes = tuple(filter(None, (on_axes(moved, group) for group in held.axes)))
        if not axes:
            return ()
        lost_axes = lost_axes or len(axes) < len(held.axes)
    results = kind.data_results(reader.outputs) if kind.is_followed else reader.outputs
    return tuple(_Matrices(result, axes, mixed_by, lost_axes) for result in results)


def _contracts(product: Operator, held: _Matrices) -> bool:
    """True if a product sums over an axis of the matrices, or may do so."""
    if held.axes is None or product.name not in ("BATCH_MATMUL", "FULLY_CONNECTED"):
        return True
    if not has_known_axes(product):
        return True
    summed = contracted_axis(product, product.inputs.index(held.tensor))
    return any(summed in axes for axes in held.axes)
