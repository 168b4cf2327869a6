"""Rules of matrix products: BATCH_MATMUL and FULLY_CONNECTED, both built on `edge_opt.shapes.matmul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.dimension import DYNAMIC, Shape, element_count, may_be_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.matmul import multiply
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results

_LOWEST_RANK, _HIGHEST_RANK = 2, 5


@rule("BATCH_MATMUL", inputs=2)
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each.

    Source: TFLite, batch_matmul.cc, Prepare; the product itself by MatMul-1.
    """
    left = call.require_rank(0, _LOWEST_RANK, _HIGHEST_RANK)
    right = call.require_rank(1, _LOWEST_RANK, _HIGHEST_RANK)
    transposes = (call.flag("adj_x"), call.flag("adj_y"))
    return [multiply((left, right), transposes=transposes, labels=call.labels())]


@rule("FULLY_CONNECTED", inputs=(2, 3), optional=(2,), outputs=None)
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. A bias has `units` elements. The shuffled weights format has a second,
    scratch output.

    Source: TFLite, fully_connected.cc, PrepareImpl and UpdateOutputSize; the product itself by MatMul-1.
    """
    shape, weights = call.shapes[0], call.require_rank(1, 2)
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    _check_bias(call, weights)
    if shape == ():
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    rows = shape if call.flag("keep_num_dims") else _flatten(call, shape, weights)
    if rows is None or weights is None:
        return [None, *scratch]
    return [multiply((rows, weights), transposes=(False, True), labels=call.labels()[:2]), *scratch]


def _flatten(call: Call, shape: Shape | None, weights: Shape | None) -> Shape | None:
    """Return `[rows, depth]` for an input whose elements are taken in rows of the weights' depth."""
    if weights is None or shape is None:
        return (DYNAMIC, DYNAMIC if weights is None else weights[1])
    depth = weights[1]
    if depth < 0:
        return (element_count(shape[:-1]), shape[-1]) if len(shape) == 2 else (DYNAMIC, DYNAMIC)
    if shape[-1] == depth or (depth == 0 and shape[-1] < 0):
        return (element_count(shape[:-1]), depth)
    count = element_count(shape)
    if depth == 0 or (count >= 0 and count % depth):
        raise ShapeError(
            f"{call.described(0)} has {count} elements, which do not make rows of {depth}, the depth of the "
            f"weights {call.described(1)}"
        )
    return (DYNAMIC if count < 0 else count // depth, depth)


def _check_bias(call: Call, weights: Shape | None) -> None:
    bias = call.shapes[2] if call.has(2) else None
    if bias is None or weights is None:
        return
    count = element_count(bias)
    if not may_be_equal(count, weights[0]):
        raise ShapeError(
            f"the bias {call.described(2)} has {count} elements: expected {weights[0]}, the units of the "
            f"weights {call.described(1)}"
        )
