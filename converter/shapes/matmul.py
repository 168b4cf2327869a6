"""Matrix multiplication: the shape of a product, 1-D operands, transposes and batch axes included.

The rules are those of OpenVINO's MatMul-1; nothing here knows a TFLite operator or a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edge_opt.shapes.broadcast import broadcast_operands
from edge_opt.shapes.dimension import Shape, as_shape, may_be_equal
from edge_opt.shapes.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LABELS = ("operand 0", "operand 1")


class _Matrix(NamedTuple):
    """One operand after alignment: `[*batch, rows, columns]`, and the axis that each of the two was."""

    batch: Shape
    rows: int
    columns: int
    rows_axis: int
    columns_axis: int
    temporary: bool


def matmul(
    a: Iterable[int] | None, b: Iterable[int] | None, *, transpose_a: bool = False, transpose_b: bool = False
) -> Shape | None:
    """Infer the shape of `a x b`.

    Each shape is a tuple, -1 (or a `Dim`) a dynamic dimension. With an unranked operand the result is None.

        [X] x [X]                      -> []
        [X] x [B, ..., X, Y]           -> [B, ..., Y]
        [B, ..., X, Y] x [Y]           -> [B, ..., X]
        [B, ..., X, Y] x [B, ..., Y, Z] -> [B, ..., X, Z]

    `transpose_a` and `transpose_b` swap the two last axes; a 1-D operand has nothing to swap. Batch axes
    broadcast.

    Source: OpenVINO, MatMul-1.

    Raises:
        ShapeError: an operand is a scalar, the inner sizes differ, or the batch axes do not broadcast.
    """
    return multiply(
        (as_shape(a, _LABELS[0]), as_shape(b, _LABELS[1])),
        transposes=(transpose_a, transpose_b),
        labels=_LABELS,
    )


def multiply(
    shapes: tuple[Shape | None, Shape | None], *, transposes: tuple[bool, bool], labels: Sequence[str]
) -> Shape | None:
    """Do as `matmul`; in a refusal the two operands go by their `labels`."""
    for shape, label in zip(shapes, labels, strict=True):
        if shape == ():
            raise ShapeError(f"{label} is a scalar: a matrix product needs rank 1 or more")
    left_shape, right_shape = shapes
    if left_shape is None or right_shape is None:
        return None
    left = _align(left_shape, transposes[0], vector_is_row=True)
    right = _align(right_shape, transposes[1], vector_is_row=False)
    if not may_be_equal(left.columns, right.rows):
        raise ShapeError(
            f"inner dimensions differ: {left.columns} in {labels[0]} (axis {left.columns_axis}), "
            f"{right.rows} in {labels[1]} (axis {right.rows_axis})"
        )
    batch = broadcast_operands((left.batch, right.batch), labels)
    assert batch is not None
    rows = () if left.temporary else (left.rows,)
    columns = () if right.temporary else (right.columns,)
    return batch + rows + columns


def _align(shape: Shape, transpose: bool, *, vector_is_row: bool) -> _Matrix:
    """Give the operand its matrix axes; a vector is a row `[1, X]` or a column `[X, 1]`."""
    if len(shape) == 1:
        rows, columns = (1, shape[0]) if vector_is_row else (shape[0], 1)
        return _Matrix((), rows, columns, 0, 0, temporary=True)
    batch, last = shape[:-2], len(shape) - 1
    if transpose:
        return _Matrix(batch, shape[-1], shape[-2], last, last - 1, temporary=False)
    return _Matrix(batch, shape[-2], shape[-1], last - 1, last, temporary=False)
