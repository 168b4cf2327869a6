"""One operator at a time: the shapes of its results from those of its inputs. It must not walk a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import edge_opt.shapes.rules as _rules
from edge_opt.shapes import registry
from edge_opt.shapes.call import Call, Constant, Enter, OperatorLike, Results, checked_shapes
from edge_opt.shapes.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.shapes.dimension import Shape

assert _rules.LOADED


def infer_operator(
    op: OperatorLike,
    input_shapes: Sequence[Shape | None],
    constant: Constant = lambda _: None,
    enter: Enter | None = None,
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
    entry = registry.find(op.name)
    if entry is None:
        return [None] * len(op.outputs)
    try:
        shapes = checked_shapes(op, input_shapes)
        call = Call(op, shapes, constant) if enter is None else Call(op, shapes, constant, enter)
        return registry.apply(entry, call)
    except ShapeError as error:
        raise error.at(op.name) from None
