"""Dimensions and shapes: what -1 and None mean, the arithmetic that keeps both, the errors. It knows no operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeGuard

from edge_opt.output.errors import EdgeOptError


class ShapeError(EdgeOptError):
    """The shapes, types or attributes of an operation cannot go together.

    `detail` is the sentence itself, `where` the place ("subgraph 'decode', operator 34 (BATCH_MATMUL)") or
    None.
    """

    def __init__(self, detail: str, where: str | None = None) -> None:
        super().__init__(f"{where}: {detail}" if where else detail)
        self.detail = detail
        self.where = where

    def at(self, where: str) -> ShapeError:
        """Return the same error with its place; a place that is already known stays."""
        return self if self.where else ShapeError(self.detail, where)


Shape: TypeAlias = tuple[int, ...]
"""Sizes from the outermost axis in; -1 is a dynamic one. An unranked tensor's shape is None."""

DYNAMIC = -1

Element: TypeAlias = int | None
"""One number of a value that shapes depend on; None where it is unknown, as the size of a dynamic dimension is."""


def as_shape(shape: Iterable[int] | None, label: str) -> Shape | None:
    """Return the shape as a tuple of int; None stays None.

    Raises:
        ShapeError: a dimension is not a whole number or lies below -1; names `label`.
    """
    if shape is None:
        return None
    return tuple(_as_dimension(dim, label) for dim in shape)


def _as_dimension(dim: int, label: str) -> int:
    try:
        size = int(operator.index(dim))
    except TypeError:
        raise ShapeError(
            f"{label} has the dimension {dim!r}: expected a whole number, or -1 for a dynamic one"
        ) from None
    if size < DYNAMIC:
        raise ShapeError(f"{label} has the dimension {size}: expected a size, or -1 for a dynamic one")
    return size


def may_be_equal(left: int, right: int) -> bool:
    """Whether the two dimensions can be equal at run time."""
    return left < 0 or right < 0 or left == right


def may_be_alike(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether the two shapes can be equal at run time."""
    return len(left) == len(right) and all(map(may_be_equal, left, right))


def is_number(element: Element) -> TypeGuard[int]:
    """Whether the element is known."""
    return element is not None


def is_negative(element: Element) -> bool:
    """Whether the element is known to be below 0."""
    return is_number(element) and element < 0


def as_dimension(element: Element) -> int:
    """The dimension that an element of a shape operand stands for."""
    return DYNAMIC if element is None else element


def element_count(dims: Iterable[int]) -> int:
    """The product of the dimensions; -1 where it depends on a dynamic one (0 times anything is 0)."""
    dims = tuple(dims)
    return DYNAMIC if any(dim < 0 for dim in dims) and 0 not in dims else math.prod(dims)


def add_sizes(dims: Iterable[int]) -> int:
    """The sum of the dimensions; -1 where one of them is dynamic."""
    dims = tuple(dims)
    return DYNAMIC if any(dim < 0 for dim in dims) else sum(dims)


def divide_size(dim: int, count: int) -> int:
    """The dimension cut into `count` parts."""
    return dim if count == 1 else DYNAMIC if dim < 0 else dim // count


def shape_text(shape: Sequence[int] | None) -> str:
    """The shape for a sentence: `[1,?,256]`, or "unranked"."""
    if shape is None:
        return "unranked"
    return "[" + ",".join(dimension_text(dim) for dim in shape) + "]"


def dimension_text(dim: int) -> str:
    """The dimension for a sentence: its size, or `?`."""
    return "?" if dim < 0 else str(dim)
