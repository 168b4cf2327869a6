"""Pairs of products of activations: the matrices that one makes are an operand of another. Knows no heads.

    A x B = [.., M, N] -> anything that leaves M and N in place -> x C     a pair: attention, or something like it
    A x B = [.., M, N] -> a projection that sums over N            -> x C  no pair: the next layer

Where the axes cannot be followed, they are taken to be everywhere.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edge_opt.attention.rules import MOVEMENT, is_weight, multiplies_activations
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import moved_from, walked
from edge_opt.shapes.rules import small_value

_FARTHEST = 120
"""Maximum number of operators that are looked at behind one product."""

_SUMMING = frozenset({Effect.REDUCTION, Effect.PRODUCT, Effect.CONVOLUTION})
_SUMMING_OPERATORS = operators_that(*_SUMMING)
_UNKNOWN = "CUSTOM"
_KEEPING = frozenset({"TILE", "DYNAMIC_UPDATE_SLICE"})
_Axes = tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two activations: `[.., M, C] x [.., C, N] -> [.., M, N]`, a matrix for each index of other axes.

    `matrix` has the axes M and N of `operator`'s result (without those of size 1). `several`: there is more than one
    matrix besides the batch, or rows that may belong to several heads. `is_outer`: C is 1, so nothing is summed.
    """

    operator: Operator
    matrix: _Axes
    several: bool
    is_outer: bool = False

    @property
    def is_sum(self) -> bool:
        """True if it is written as MUL and SUM."""
        return self.operator.name in ("SUM", "MEAN")


class Pair(NamedTuple):
    """Two products: the first one's matrices reach the second.

    `mixed`: the first operator between them that sums over another axis, or that cannot be followed. `lost`: rows or
    columns were summed between them, and the second sums over what was left.
    """

    first: Product
    second: Product
    mixed: Operator | None
    lost: bool = False

    @property
    def is_mixed(self) -> bool:
        """True if an operator between them sums over another axis, which may hold the heads."""
        return self.mixed is not None and self.mixed.name in _SUMMING_OPERATORS

    @property
    def reason(self) -> str:
        """Why the pair is not split, for a pair that is in no block."""
        if self.is_mixed:
            return str(
                RefusedError("heads may be mixed here, between two products of activations", self.mixed)
            )
        if self.mixed is not None:
            return str(
                RefusedError("a product of activations cannot be followed through this operator", self.mixed)
            )
        written = next((end.operator for end in self[:2] if end.is_sum), None)
        if written is not None:
            return str(RefusedError("a product of activations is written as MUL and SUM", written))
        return str(
            RefusedError(
                "one product of activations goes into another, as in linear attention, which is not split",
                self.second.operator,
            )
        )


def product_of(operator: Operator) -> Product | None:
    """The product of activations that an operator computes; for one written as MUL and SUM, the SUM."""
    if operator.name in ("SUM", "MEAN"):
        return _sum_of_products(operator)
    if not multiplies_activations(operator):
        return None
    shape = operator.outputs[0].shape
    rank = len(shape)
    if not _has_known_axes(operator):
        return Product(operator, (), several=True)
    first_row = 0 if operator.name == "FULLY_CONNECTED" else max(rank - 2, 0)  # all rows share the weights
    rows, columns = range(first_row, rank - 1), range(rank - 1, rank)
    several = math.prod(_lead(shape[:first_row], rank)) > 1
    left = operator.input(0).shape
    contracted = left[-2 if operator.name == "BATCH_MATMUL" and operator.option("adj_x") else -1]
    return Product(operator, _wide(shape, rows, columns), several, contracted == 1)


def _lead(sizes: Shape, rank: int) -> Shape:
    """The sizes of the axes beside the matrices, without the batch: the outermost axis of four or more."""
    return sizes[1:] if rank > 3 else sizes


def _wide(shape: Shape, *groups: Iterable[int]) -> _Axes:
    """For each group of axes, those with more than one step; groups without any are left out."""
    wide = [frozenset(axis for axis in group if shape[axis] != 1) for group in groups]
    return tuple(filter(None, wide))


def _has_known_axes(operator: Operator, inputs: Iterable[Tensor | None] | None = None) -> bool:
    """True if all sizes of the operands (or of these inputs) and results are recorded and follow from each other."""
    read = operator.inputs if inputs is None else inputs
    tensors = [tensor for tensor in (*read, *operator.outputs) if tensor is not None]
    return not operator.shape_error and all(tensor.has_rank and not tensor.is_dynamic for tensor in tensors)


def _sum_of_products(operator: Operator) -> Product | None:
    """A SUM over the elements of two activations, of which one is repeated for the other's rows or columns."""
    factors = moved_from(operator.input(0), {"CAST", "QUANTIZE", "DEQUANTIZE"})[0].producer
    summed = small_value(operator.inputs[1]) if len(operator.inputs) > 1 else None
    if factors is None or factors.name != "MUL" or summed is None:
        return None
    if not _has_known_axes(operator) or not _has_known_axes(factors):
        return None
    if any(tensor is None or is_weight(tensor) for tensor in factors.inputs):
        return None
    rank = len(factors.outputs[0].shape)
    left, right = (_repeated_shape(tensor, rank) for tensor in factors.inputs if tensor is not None)
    contracted = {int(axis) % rank for axis in summed.ravel()}
    kept = [axis for axis in range(rank) if axis not in contracted]
    rows = [axis for axis in kept if right[axis] == 1]
    columns = [axis for axis in kept if left[axis] == 1]
    matrix = _wide(left, rows) + _wide(right, columns)
    if not matrix or all(1 in (left[axis], right[axis]) for axis in contracted):
        return None  # a weighted mean, a norm
    shared = [1 if axis in (*rows, *columns) else left[axis] for axis in kept]
    has_rows = len(matrix) > 1 or len(matrix[0]) > 1
    if not operator.option("keep_dims"):
        matrix = tuple(frozenset(map(kept.index, axes)) for axes in matrix)
    return Product(operator, matrix, has_rows or math.prod(_lead(tuple(shared), len(kept))) > 1)


def _repeated_shape(tensor: Tensor, rank: int) -> Shape:
    """The shape of a factor with `rank` axes, before a BROADCAST_TO or TILE."""
    source = tensor
    if tensor.producer is not None and tensor.producer.name in ("BROADCAST_TO", "TILE"):
        source = tensor.producer.input(0)
    return (1,) * (rank - len(source.shape)) + source.shape


def pairs_among(operators: Iterable[Operator]) -> Iterator[Pair]:
    """All pairs of the products, the first ones in the order given."""
    products = {operator: product for operator in operators if (product := product_of(operator)) is not None}
    for product in products.values():
        if not _is_residual(product.operator):
            yield from _reached(product, products)


def _is_residual(product: Operator) -> bool:
    """True if a product is added to what it was made of, `x + x A`: a step of a residual stream, no scores."""
    own = {moved_from(tensor, MOVEMENT)[0] for tensor in product.inputs[:2] if tensor is not None}

    def behind(tensor: Tensor) -> Iterator[Tensor]:
        for reader in tensor.consumers:
            if reader.name in MOVEMENT:
                yield from reader.outputs

    moved = walked(product.outputs[:1], behind, _FARTHEST)
    sums = [reader for tensor in moved for reader in tensor.consumers if reader.name == "ADD"]
    added = [tensor for one in sums for tensor in one.inputs if tensor is not None]
    return any(moved_from(tensor, MOVEMENT)[0] in own for tensor in added)


class _Matrices(NamedTuple):
    """A tensor that holds a product's matrices, and on which axes: None if unknown, or if the matrices are numbers.

    `mixed` as in `Pair`; `lost`: rows or columns were summed, which may have been the heads.
    """

    tensor: Tensor
    axes: _Axes | None
    mixed: Operator | None = None
    lost: bool = False


def _reached(product: Product, products: Mapping[Operator, Product]) -> Iterable[Pair]:
    """The pairs of a product with those that its matrices reach first."""
    found: dict[Operator, Pair] = {}
    looked_at = 0

    def behind(held: _Matrices) -> Iterator[_Matrices]:
        nonlocal looked_at
        for reader in held.tensor.readers:
            looked_at += 1
            if looked_at > _FARTHEST:
                found.setdefault(product.operator, Pair(product, product, reader))  # or any other
                return
            if reader not in products:
                yield from _through(reader, held)
            elif not held.lost or _contracts(reader, held):
                found.setdefault(reader, Pair(product, products[reader], held.mixed, held.lost))

    for _ in walked([_Matrices(product.operator.outputs[0], product.matrix or None)], behind):
        pass
    return found.values()


def _through(reader: Operator, held: _Matrices) -> Iterator[_Matrices]:
    """The results of an operator that still hold the matrices."""
    kind = KINDS[_UNKNOWN if reader.shape_error else reader.name]
    if kind.is_followed and not kind.takes(held.tensor, reader.inputs):
        return  # sizes or positions
    sums = kind.effect in _SUMMING
    if held.axes is None and sums and kind.effect is not Effect.REDUCTION:
        return
    moved = _moved(reader, held.tensor)
    mixed, axes = held.mixed, None
    if moved is None or sums:
        mixed = mixed or reader
    if moved is not None and held.axes is not None:
        axes = tuple(frozenset().union(*(moved[axis] for axis in group)) for group in held.axes)
        axes = tuple(filter(None, axes))
        if not axes:
            return
    lost = held.lost or (axes is not None and held.axes is not None and len(axes) < len(held.axes))
    for result in kind.data_results(reader.outputs) if kind.is_followed else reader.outputs:
        yield _Matrices(result, axes, mixed, lost)


def _contracts(product: Operator, held: _Matrices) -> bool:
    """True if a product sums over an axis of the matrices."""
    if held.axes is None or product.name not in ("BATCH_MATMUL", "FULLY_CONNECTED"):
        return True
    if not _has_known_axes(product):
        return True
    side = product.inputs.index(held.tensor)
    return any(contracted_axis(product, side) in axes for axes in held.axes)


def contracted_axis(product: Operator, side: int) -> int:
    """The axis of an operand that a product sums over."""
    columns = len(product.input(side).shape) - 1
    if product.name == "FULLY_CONNECTED":
        return columns
    return columns - int(bool(product.option("adj_y" if side else "adj_x")) == (side == 0))


def axes_behind(operator: Operator, tensor: Tensor, axes: frozenset[int]) -> frozenset[int]:
    """The axes of an operator's results on which these axes of an operand lie; none if unknown."""
    moved = _moved(operator, tensor)
    return frozenset() if moved is None else frozenset().union(*(moved[axis] for axis in axes))


_AxisMap = list[frozenset[int]]
"""For each axis of an operand, the axes of the result that it lies on; none if the operator sums over it."""


def _moved(operator: Operator, tensor: Tensor) -> _AxisMap | None:
    """Where the axes of an operand lie in the operator's results; None if unknown."""
    if operator.shape_error:
        return None
    effect, shape, result = KINDS[operator.name].effect, tensor.shape, operator.outputs[0].shape
    # One of many tensors that are joined lies on the same axes whatever the others are.
    if not _has_known_axes(operator, [tensor] if effect is Effect.JOINING else operator.inputs):
        return None
    rank = len(shape)
    aligned = [frozenset({axis + len(result) - rank}) for axis in range(rank)]
    if effect is Effect.REARRANGING:
        return _rearranged(operator, shape, result)
    if effect is Effect.REDUCTION:
        return _reduced(operator, rank)
    if effect is Effect.PRODUCT:
        return _projected(operator, tensor)
    if operator.name in ("PACK", "UNPACK"):
        at = int(operator.option("axis")) % max(len(result), rank)
        if operator.name == "PACK":
            return [frozenset({axis + (axis >= at)}) for axis in range(rank)]
        anywhere = frozenset(range(len(result)))
        return [anywhere if axis == at else frozenset({axis - (axis > at)}) for axis in range(rank)]
    if effect is Effect.CONVOLUTION:
        return aligned if operator.name == "DEPTHWISE_CONV_2D" else [*aligned[:-1], frozenset()]
    broadcasts = effect in (Effect.ELEMENTWISE, Effect.ALONG_ROWS) or operator.name == "BROADCAST_TO"
    keeps = effect in (Effect.CUTTING, Effect.PADDING, Effect.JOINING) or operator.name in _KEEPING
    return aligned if broadcasts or (keeps and len(result) == rank) else None


def _rearranged(operator: Operator, shape: Shape, result: Shape) -> _AxisMap | None:
    if operator.name != "TRANSPOSE":
        return _overlapping(shape, result)
    order = small_value(operator.inputs[1])
    if order is None:
        return None
    places = [int(axis) for axis in order.ravel()]
    return [frozenset({places.index(axis)}) for axis in range(len(shape))]


def _overlapping(shape: Shape, result: Shape) -> _AxisMap | None:
    """Row-major order stays: axes overlap if their steps do."""
    if math.prod(shape) != math.prod(result):
        return None
    ends = [[math.prod(sizes[axis:]) for axis in range(len(sizes))] for sizes in (shape, result)]
    steps = [[math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))] for sizes in (shape, result)]
    return [
        frozenset(
            other
            for other in range(len(result))
            if max(steps[0][axis], steps[1][other]) < min(ends[0][axis], ends[1][other])
        )
        for axis in range(len(shape))
    ]


def _reduced(operator: Operator, rank: int) -> _AxisMap | None:
    axes = small_value(operator.inputs[1])
    if axes is None:
        return None
    summed = {int(axis) % rank for axis in axes.ravel()} if rank else set()
    kept = [axis for axis in range(rank) if operator.option("keep_dims") or axis not in summed]
    return [frozenset() if axis in summed else frozenset({kept.index(axis)}) for axis in range(rank)]


def _projected(operator: Operator, tensor: Tensor) -> _AxisMap | None:
    """The axes behind a product with weights."""
    shape, result = tensor.shape, operator.outputs[0].shape
    side, last = operator.inputs.index(tensor), len(operator.outputs[0].shape) - 1
    if operator.name == "FULLY_CONNECTED" and side == 0:
        moved = _overlapping(shape, (*result[:-1], operator.input(1).shape[-1]))
        return moved and [axes - {last} for axes in moved]
    offset = last + 1 - len(shape)
    summed = contracted_axis(operator, side)
    free = 2 * len(shape) - 3 - summed
    moved = [frozenset({axis + offset}) for axis in range(len(shape))]
    moved[summed], moved[free] = frozenset(), frozenset({last if side else last - 1})
    return moved
