"""Shapes with open sizes: arithmetic on sizes, broadcasting and matrix products, independent of operators."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Final, TypeAlias, TypeVar

from edge_opt.base.errors import EdgeOptError


class ShapeError(EdgeOptError):
    """The shapes, types or attributes of an operation do not fit together."""


_Axis = TypeVar("_Axis")

Shape: TypeAlias = tuple[int, ...]
"""Sizes, outermost axis first; -1 is an open size. The shape of an unranked tensor is None."""

OPEN: Final = -1
"""A size that is known only at run time. Sums and products with it are open; it may equal any size."""


def as_shape(shape: Iterable[int] | None, label: str) -> Shape | None:
    """The shape as a tuple of int; ShapeError, with `label`, if a dimension is neither a size nor -1."""
    if shape is None:
        return None
    sizes = tuple(shape)
    for size in sizes:
        if not isinstance(size, Integral) or size < OPEN:
            raise ShapeError(
                f"{label} has the dimension {size!r}: expected a size, or -1 for an open one"
            )
    return tuple(map(int, sizes))


def may_be_equal(left: int, right: int) -> bool:
    """True if the two sizes can be equal at run time."""
    return left < 0 or right < 0 or left == right


def may_be_alike(left: Sequence[int], right: Sequence[int]) -> bool:
    """True if the two shapes can be equal at run time."""
    return len(left) == len(right) and all(map(may_be_equal, left, right))


def product(*sizes: int) -> int:
    """The number of elements of a shape with these sizes; 0 times an open size is 0."""
    is_open = min(sizes, default=0) < 0
    return OPEN if is_open and 0 not in sizes else math.prod(sizes)


def total(*sizes: int) -> int:
    """The sum of the sizes."""
    return OPEN if min(sizes, default=0) < 0 else sum(sizes)


def with_axis(shape: tuple[_Axis, ...], axis: int, *new: _Axis) -> tuple[_Axis, ...]:
    """The shape with these axes, any number of them, in the place of one, which is counted from the front."""
    return (*shape[:axis], *new, *shape[axis + 1 :])


def shape_text(shape: Sequence[int] | None) -> str:
    """The shape as text: `[1,?,256]`, or "unranked"."""
    return "unranked" if shape is None else f"[{','.join(map(size_text, shape))}]"


def size_text(size: int) -> str:
    """The size as text: `256`, or `?`."""
    return "?" if size < 0 else str(size)


def broadcast(*shapes: Iterable[int] | None, labels: Sequence[str] = ()) -> Shape | None:
    """Infer the shape of a result from the shapes of its operands.

    Each shape is a tuple, -1 an open dimension, None an unranked operand. Ranks are made equal with 1s on the left,
    then dimension by dimension:

        (?, ?) -> ?    (?, 1) -> ?    (?, n) -> n    (1, 1) -> 1    (1, n) -> n    (n, n) -> n

    Unranked operands are ignored; if all are unranked, the result is None. Size 0 counts as an n, as in numpy. `labels`
    name the operands in errors.

    Source: MLIR's `Broadcastable` trait, `InferResultShape`.

    Raises:
        ShapeError: there is no operand, two static sizes over 1 differ, or a dimension is not a size.
    """
    if not shapes:
        raise ShapeError("a broadcast needs at least one operand, got none")
    labels = labels or [f"operand {index}" for index in range(len(shapes))]
    ranked: dict[int, Shape] = {}
    for place, given in enumerate(shapes):
        shape = as_shape(given, labels[place])
        if shape is not None:
            ranked[place] = shape
    if not ranked:
        return None
    rank = max(map(len, ranked.values()))
    return tuple(_broadcast_size(ranked, labels, axis) for axis in range(-rank, 0))


def _broadcast_size(ranked: Mapping[int, Shape], labels: Sequence[str], axis: int) -> int:
    """The size of one axis, counted from the end, of the result of a broadcast."""
    size = 1
    source = ""
    for place, shape in ranked.items():
        if len(shape) < -axis:
            continue
        other = shape[axis]
        here = f"{labels[place]} (axis {axis + len(shape)})"
        if size == 1 or (size < 0 and other != 1):
            size = other
            source = here
        elif other >= 0 and other not in (1, size):
            raise ShapeError(
                f"sizes do not broadcast: {size} in {source}, {other} in {here}: "
                "expected equal sizes, or 1 in one of them"
            )
    return size


def verify_broadcast(
    operands: Sequence[Iterable[int] | None],
    result: Iterable[int] | None,
    allow_refinement: bool = False,
) -> None:
    """Check that `result` is a legal result shape for the operands.

    The ranks must be equal, and each static dimension of the result must equal the inferred one. An inferred open
    dimension against a static one is refused, as in the trait's pseudo-code; with `allow_refinement` it passes, as in
    the trait's table. Without a ranked operand, or with an unranked result, there is nothing to check.

    Source: MLIR's `Broadcastable` trait, `Verify`.

    Raises:
        ShapeError: the operands do not broadcast, or the result does not fit the inferred shape.
    """
    inferred = broadcast(*operands)
    actual = as_shape(result, "the result")
    reason = misfit(inferred, actual, allow_refinement=allow_refinement)
    if reason:
        raise ShapeError(
            f"the result {shape_text(actual)} does not fit {shape_text(inferred)}: {reason}"
        )


def misfit(
    inferred: Shape | None, actual: Shape | None, *, allow_refinement: bool = True
) -> str | None:
    """The reason why a recorded shape does not fit the inferred one; None if it fits or either is unknown."""
    if inferred is None or actual is None:
        return None
    if len(inferred) != len(actual):
        return f"rank {len(inferred)} expected, rank {len(actual)} recorded"
    for axis, (expected, recorded) in enumerate(zip(inferred, actual, strict=True)):
        is_refined = allow_refinement and expected < 0
        if recorded >= 0 and expected != recorded and not is_refined:
            return f"axis {axis} is {size_text(expected)}, recorded as {recorded}"
    return None


def matmul(
    a: Iterable[int] | None,
    b: Iterable[int] | None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    labels: Sequence[str] = ("operand 0", "operand 1"),
) -> Shape | None:
    """Infer the shape of `a x b`.

    Each shape is a tuple, -1 an open dimension. With an unranked operand the result is None.

        [X] x [X]                       -> []
        [X] x [B, ..., X, Y]            -> [B, ..., Y]
        [B, ..., X, Y] x [Y]            -> [B, ..., X]
        [B, ..., X, Y] x [B, ..., Y, Z] -> [B, ..., X, Z]

    `transpose_a` and `transpose_b` swap the two last axes; a 1-D operand has nothing to swap. Batch axes broadcast.
    `labels` name the operands in errors.

    Source: OpenVINO, MatMul-1.

    Raises:
        ShapeError: an operand is a scalar, the inner sizes differ, or the batch axes do not broadcast.
    """
    left = _factor(a, labels[0])
    right = _factor(b, labels[1])
    if left is None or right is None:
        return None
    rows, left_inner = _matrix_axes(left, transposed=transpose_a)
    right_inner, columns = _matrix_axes(right, transposed=transpose_b)
    if not may_be_equal(left[left_inner], right[right_inner]):
        raise ShapeError(
            f"inner dimensions differ: {left[left_inner]} in {labels[0]} (axis {left_inner}), "
            f"{right[right_inner]} in {labels[1]} (axis {right_inner})"
        )
    sizes = broadcast(left[:-2], right[:-2], labels=labels) or ()
    if len(left) > 1:
        sizes += (left[rows],)
    if len(right) > 1:
        sizes += (right[columns],)
    return sizes


def _factor(shape: Iterable[int] | None, label: str) -> Shape | None:
    """The shape of a factor of a matrix product."""
    sizes = as_shape(shape, label)
    if sizes == ():
        raise ShapeError(f"{label} is a scalar: a matrix product needs rank 1 or more")
    return sizes


def _matrix_axes(shape: Shape, *, transposed: bool) -> list[int]:
    """The axes of the rows and of the columns; a vector's only axis is the inner one, as either."""
    last = len(shape) - 1
    before = max(last - 1, 0)
    return [last, before] if transposed else [before, last]
