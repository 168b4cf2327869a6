"""Shapes in which some sizes are dynamic: arithmetic on sizes, and the error. It knows no operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TypeAlias

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
"""A size that is known only at run time. Sums and products with it are dynamic, comparisons with it prove nothing."""

Element: TypeAlias = int | None
"""One number of a value that shapes depend on, None where unknown: there -1 is a number, e.g. an axis."""


def as_shape(shape: Iterable[int] | None, label: str) -> Shape | None:
    """Return the shape as a tuple of int; None stays None.

    Raises:
        ShapeError: a dimension is not a whole number or lies below -1; names `label`.
    """
    if shape is None:
        return None
    sizes = tuple(shape)
    for size in sizes:
        if not isinstance(size, Integral) or size < DYNAMIC:
            raise ShapeError(f"{label} has the dimension {size!r}: expected a size, or -1 for a dynamic one")
    return tuple(map(int, sizes))


def may_be_equal(left: int, right: int) -> bool:
    """Whether the two sizes can be equal at run time."""
    return left < 0 or right < 0 or left == right


def may_be_alike(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether the two shapes can be equal at run time."""
    return len(left) == len(right) and all(map(may_be_equal, left, right))


def product(*sizes: int) -> int:
    """The number of elements of a shape with these sizes; 0 times a dynamic size is 0."""
    return DYNAMIC if any(size < 0 for size in sizes) and 0 not in sizes else math.prod(sizes)


def total(*sizes: int) -> int:
    """The sum of the sizes."""
    return DYNAMIC if any(size < 0 for size in sizes) else sum(sizes)


def size_of(element: Element) -> int:
    """The size that an element of a shape operand stands for."""
    return DYNAMIC if element is None else element


def shape_text(shape: Sequence[int] | None) -> str:
    """The shape for a sentence: `[1,?,256]`, or "unranked"."""
    if shape is None:
        return "unranked"
    return f"[{','.join(map(size_text, shape))}]"


def size_text(size: int) -> str:
    """The size for a sentence: `256`, or `?`."""
    return "?" if size < 0 else str(size)
