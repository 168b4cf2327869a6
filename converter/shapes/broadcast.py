"""Broadcasting: the shape that operands give together, and whether a recorded result fits it.

The rules are those of the `Broadcastable` trait of MLIR; nothing here knows an operator or a model.
"""

from collections.abc import Iterable, Sequence

from edge_opt.shapes.dimension import Shape, ShapeError, as_shape, shape_text, size_text


def broadcast(*shapes: Iterable[int] | None) -> Shape | None:
    """Infer the shape of a result from the shapes of its operands.

    Each shape is a tuple, -1 a dynamic dimension, None an unranked operand. Ranks are made equal
    with 1s on the left, then dimension by dimension:

        (?, ?) -> ?    (?, 1) -> ?    (?, n) -> n    (1, 1) -> 1    (1, n) -> n    (n, n) -> n

    Unranked operands are left out; if all are, the result is None. Size 0 counts as an n, as in numpy.

    Source: MLIR's `Broadcastable` trait, `InferResultShape`.

    Raises:
        ShapeError: there is no operand, two static sizes over 1 differ, or a dimension is no size.
    """
    labels = [f"operand {index}" for index in range(len(shapes))]
    ranked = [as_shape(shape, label) for shape, label in zip(shapes, labels, strict=True)]
    return broadcast_operands(ranked, labels)


def broadcast_operands(shapes: Sequence[Shape | None], labels: Sequence[str]) -> Shape | None:
    """Do as `broadcast`; in a refusal the operands go by their `labels`, as many as shapes."""
    if not shapes:
        raise ShapeError("a broadcast needs at least one operand, got none")
    first = shapes[0]
    if first is not None and min(first, default=0) >= 0 and all(shape == first for shape in shapes):
        return first
    ranked = [(shape, label) for shape, label in zip(shapes, labels, strict=True) if shape is not None]
    rank = max((len(shape) for shape, _ in ranked), default=0)
    return tuple(_broadcast_axis(ranked, axis) for axis in range(-rank, 0)) if ranked else None


def _broadcast_axis(ranked: Sequence[tuple[Shape, str]], axis: int) -> int:
    """One dimension of the result; `axis` counts from the end."""
    result, place = 1, ""
    for shape, label in ranked:
        if len(shape) < -axis:
            continue
        size, here = shape[axis], f"{label} (axis {axis + len(shape)})"
        merged = infer_dimension(result, size)
        if merged is None:
            detail = f"sizes do not broadcast: {result} in {place}, {size} in {here}"
            raise ShapeError(f"{detail}: expected equal sizes, or 1 in one of them")
        if merged != result:
            result, place = merged, here
    return result


def infer_dimension(left: int, right: int) -> int | None:
    """Infer one dimension of the result; None where two static sizes exclude each other.

    Source: MLIR's `Broadcastable` trait, `InferDim`.
    """
    if left == 1 or (left < 0 and right != 1):
        return right
    return left if right < 0 or right in (1, left) else None


def verify_broadcast(
    operands: Sequence[Iterable[int] | None], result: Iterable[int] | None, allow_refinement: bool = False
) -> None:
    """Check that `result` is a legal result shape for the operands.

    With nothing inferred (no ranked operand) or an unranked result there is nothing to check. Else the ranks
    must be equal, and each static dimension of the result must equal the inferred one. An inferred dynamic
    dimension against a static one is refused, as the trait's pseudo-code and its third incorrect example have
    it; with `allow_refinement` it passes, as the trait's table has it.

    Source: MLIR's `Broadcastable` trait, `Verify`.

    Raises:
        ShapeError: the operands do not broadcast, or the result does not fit what they give.
    """
    inferred = broadcast(*operands)
    actual = as_shape(result, "the result")
    reason = misfit(inferred, actual, allow_refinement=allow_refinement)
    if reason:
        raise ShapeError(f"the result {shape_text(actual)} does not fit {shape_text(inferred)}: {reason}")


def misfit(inferred: Shape | None, actual: Shape | None, *, allow_refinement: bool) -> str | None:
    """Say why a recorded shape does not fit the inferred one; None where it does, or one of them is not known."""
    if inferred is None or actual is None:
        return None
    if len(inferred) != len(actual):
        return f"rank {len(inferred)} expected, rank {len(actual)} recorded"
    for axis, (expected, recorded) in enumerate(zip(inferred, actual, strict=True)):
        if recorded < 0 or expected == recorded or (expected < 0 and allow_refinement):
            continue
        return f"axis {axis} is {size_text(expected)}, recorded as {recorded}"
    return None
