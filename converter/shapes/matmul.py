"""Matrix multiplication: the shape of a product, 1-D operands, transposes and batch axes included.

The rules are those of OpenVINO's MatMul-1; nothing here knows a TFLite operator or a model.
"""

from collections.abc import Iterable, Sequence

from edge_opt.shapes.broadcast import broadcast_operands
from edge_opt.shapes.dimension import Shape, ShapeError, as_shape, may_be_equal

_LABELS = ("operand 0", "operand 1")


def matmul(
    a: Iterable[int] | None, b: Iterable[int] | None, *, transpose_a: bool = False, transpose_b: bool = False
) -> Shape | None:
    """Infer the shape of `a x b`.

    Each shape is a tuple, -1 a dynamic dimension. With an unranked operand the result is None.

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
    shapes = (as_shape(a, _LABELS[0]), as_shape(b, _LABELS[1]))
    return multiply(shapes, transposes=(transpose_a, transpose_b), labels=_LABELS)


def multiply(
    shapes: tuple[Shape | None, Shape | None], *, transposes: tuple[bool, bool], labels: Sequence[str]
) -> Shape | None:
    """Do as `matmul`; in a refusal the two operands go by their `labels`."""
    if () in shapes:
        raise ShapeError(f"{labels[shapes.index(())]} is a scalar: a matrix product needs rank 1 or more")
    left, right = shapes
    if left is None or right is None:
        return None
    left_rows, left_columns = _axes(left, transposes[0])
    right_rows, right_columns = _axes(right, transposes[1])
    if not may_be_equal(left[left_columns], right[right_rows]):
        raise ShapeError(
            f"inner dimensions differ: {left[left_columns]} in {labels[0]} (axis {left_columns}), "
            f"{right[right_rows]} in {labels[1]} (axis {right_rows})"
        )
    batch = broadcast_operands((left[:-2], right[:-2]), labels)
    assert batch is not None
    rows = (left[left_rows],) if len(left) > 1 else ()
    columns = (right[right_columns],) if len(right) > 1 else ()
    return batch + rows + columns


def _axes(shape: Shape, transpose: bool) -> tuple[int, int]:
    """Which axes are rows and columns; a vector has one for both, and it is the inner one."""
    last = len(shape) - 1
    if last == 0:
        return 0, 0
    return (last, last - 1) if transpose else (last - 1, last)
