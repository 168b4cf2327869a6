"""Rules of matrix products: BATCH_MATMUL and FULLY_CONNECTED, both built on `edge_opt.shapes.matmul`."""

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, Shape, element_count, may_be_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.matmul import multiply
from edge_opt.shapes.registry import rule

_LOWEST_RANK, _HIGHEST_RANK = 2, 5


@rule("BATCH_MATMUL", inputs=2)
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each.

    Source: TFLite, batch_matmul.cc, Prepare; the product itself by MatMul-1.
    """
    left, right = (call.shape(index, least=_LOWEST_RANK, most=_HIGHEST_RANK) for index in (0, 1))
    transposes = (call.flag("adj_x"), call.flag("adj_y"))
    return [multiply((left, right), transposes=transposes, labels=call.labels())]


@rule("FULLY_CONNECTED", inputs=(2, 3), outputs=None)
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. A bias has `units` elements. The shuffled weights format has a second,
    scratch output.

    Source: TFLite, fully_connected.cc, PrepareImpl and UpdateOutputSize; the product itself by MatMul-1.
    """
    shape, weights = call.shape(0, least=1), call.shape(1, rank=2)
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    check_bias(call, 2, weights[0])
    rows = shape if call.flag("keep_num_dims") else _flatten(call, shape, weights)
    return [multiply((rows, weights), transposes=(False, True), labels=call.labels()[:2]), *scratch]


def _flatten(call: Call, shape: Shape, weights: Shape) -> Shape:
    """Return `[rows, depth]` for an input whose elements are taken in rows of the weights' depth."""
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


def check_bias(call: Call, index: int, channels: int) -> None:
    """Refuse a bias (input `index`, which may be left out) that has not one element for each channel."""
    bias = call.shape(index) if call.has(index) else None
    if bias is not None and not may_be_equal(element_count(bias), channels):
        raise ShapeError(f"the bias {call.described(index)} must have {channels} elements, one per channel")
