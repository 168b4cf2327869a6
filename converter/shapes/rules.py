"""All rules, and what one of them says of one operator. It must not walk a graph."""

from collections.abc import Sequence

from edge_opt.ir import Operator
from edge_opt.shapes import (  # noqa: F401 - each enters its rules into the table
    arranging,
    contraction,
    control_flow,
    elementwise,
    generating,
    padding,
    reduction,
    reshaping,
    slicing,
    stablehlo,
    windows,
)
from edge_opt.shapes.call import Call, Constant, Enter, Results
from edge_opt.shapes.dimension import Shape, as_shape
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import RULES, apply

__all__ = ["RULES", "apply", "infer_operator"]


def infer_operator(
    op: Operator,
    input_shapes: Sequence[Shape | None],
    constant: Constant = lambda _: None,
    enter: Enter = lambda *_: None,
) -> Results:
    """Infer the shapes of an operator's results.

    Args:
        op: the operator; only its name, options and the names and dtypes of its tensors are read, recorded
            shapes are not.
        input_shapes: one for each input, -1 (or a `Dim`) a dynamic dimension, None for an unranked tensor and
            for an optional input that is left out.
        constant: gives the value of input i where it is known (the shape operand of a RESHAPE), else None.
        enter: derives the outputs of a subgraph, for control flow and composites; without it those are None.

    Returns:
        One shape for each output, None where not even the rank is known (and for operators without a rule).

    Raises:
        ShapeError: the inputs cannot go together; names the operator, tensors, axes and sizes.
    """
    entry = RULES.get(op.name)
    if entry is None:
        return [None] * len(op.outputs)
    try:
        if len(input_shapes) != len(op.inputs):
            raise ShapeError(f"{len(input_shapes)} input shapes for {len(op.inputs)} inputs")
        shapes = [as_shape(shape, f"input {index}") for index, shape in enumerate(input_shapes)]
        return apply(entry, Call(op, shapes, constant, enter))
    except ShapeError as error:
        raise error.at(op.name) from None
