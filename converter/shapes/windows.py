"""Rules of operators that multiply by weights or slide a window: matrix products, pools, convolutions."""

from collections.abc import Sequence

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, Shape, ShapeError, may_be_equal, product, shape_text
from edge_opt.shapes.matmul import multiply
from edge_opt.shapes.rules import rule

_SAME, _VALID = 0, 1


@rule("BATCH_MATMUL", "TFLite, batch_matmul.cc, Prepare; the product itself by MatMul-1")
def batch_matmul(call: Call) -> Results:
    """The matrix product of two operands of rank 2 to 5; `adj_x` and `adj_y` swap the last two axes of each."""
    left, right = (call.shape(index, least=2, most=5) for index in (0, 1))
    transposes = (bool(call.number("adj_x")), bool(call.number("adj_y")))
    return [multiply((left, right), transposes=transposes, labels=call.labels())]


@rule("FULLY_CONNECTED", "TFLite, fully_connected.cc, UpdateOutputSize; the product itself by MatMul-1")
def fully_connected(call: Call) -> Results:
    """Rows `[..., depth]` times weights `[units, depth]`, transposed.

    With `keep_num_dims` the result is `[..., units]`; else the input is flattened to `[rows, depth]` first,
    and the result is `[rows, units]`. A bias has `units` elements. The shuffled weights format has a second,
    scratch output.
    """
    shape, weights = call.shape(0, least=1), call.shape(1, rank=2)
    scratch: list[Shape | None] = [None] * (len(call.op.outputs) - 1)
    _check_bias(call, 2, weights[0])
    rows = shape if call.number("keep_num_dims") else _flatten(call, shape, weights)
    return [multiply((rows, weights), transposes=(False, True), labels=call.labels()[:2]), *scratch]


def _flatten(call: Call, shape: Shape, weights: Shape) -> Shape:
    """Return `[rows, depth]` for an input whose elements are taken in rows of the weights' depth."""
    depth = weights[1]
    if depth < 0:
        return shape if len(shape) == 2 else (DYNAMIC, DYNAMIC)
    if shape[-1] == depth or (depth == 0 and shape[-1] < 0):
        return (product(*shape[:-1]), depth)
    count = product(*shape)
    if depth == 0 or (count >= 0 and count % depth):
        text = f"{call.text(0)} has {count} elements, which do not make rows of {depth}"
        raise ShapeError(f"{text}, the depth of the weights {call.text(1)}")
    return (DYNAMIC if count < 0 else count // depth, depth)


def _check_bias(call: Call, index: int, channels: int) -> None:
    """Refuse a bias (input `index`, which may be left out) that has not one element for each channel."""
    if call.has(index) and not may_be_equal(product(*call.shape(index)), channels):
        raise ShapeError(f"the bias {call.text(index)} must have {channels} elements, one per channel")


@rule("AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D", "TFLite, pooling.cc, GenericPrepare")
def pool(call: Call) -> Results:
    """`[b, h, w, c]` keeps batch and channels; a window slides over height and width."""
    shape = call.shape(0, rank=4)
    height = _places(call, 1, "h", call.number("filter_height"), dilation=1)
    width = _places(call, 2, "w", call.number("filter_width"), dilation=1)
    return [(shape[0], height, width, shape[3])]


def _places(call: Call, axis: int, name: str, window: int, dilation: int) -> int:
    """How many places a window has along an axis: all of them by `SAME`, those that lie inside by `VALID`.

    The window is -1 where the filter's size is dynamic. Source: TFLite, padding.h, ComputeOutSizeChecked.
    """
    size, stride = call.shape(0)[axis], call.number(f"stride_{name}")
    if stride <= 0 or dilation <= 0 or window == 0:
        numbers = (window, stride, dilation)
        raise ShapeError(f"size, stride and dilation of the window {numbers} must be 1 or more each")
    padding = call.number("padding")
    if padding not in (_SAME, _VALID):
        raise ShapeError(f"its padding is {padding}: expected SAME (0) or VALID (1)")
    reach = (window - 1) * dilation + 1
    if padding == _SAME:
        return DYNAMIC if size < 0 else -(-size // stride)
    if size < 0 or window < 0:
        return DYNAMIC
    if reach > size + 2 * stride - 1:
        raise ShapeError(f"the window of {reach} does not fit axis {axis} of {call.text(0)}")
    return max((size + stride - reach) // stride, 0)


def _check_filled(call: Call, *indices: int) -> None:
    """Refuse inputs without elements (a batch of none excepted)."""
    for index in indices:
        if 0 in call.shape(index)[1:]:
            raise ShapeError(f"{call.text(index)} has an axis of size 0")


def _convolved(call: Call, windows: Sequence[int], channels: int) -> Results:
    """The filters' window slides over the axes between batch and channels: height and width, or depth too."""
    _check_filled(call, 0, 1)
    _check_bias(call, 2, channels)
    places = (
        _places(call, axis, name, window, call.number(f"dilation_{name}_factor"))
        for axis, (name, window) in enumerate(zip("dhw"[-len(windows) :], windows, strict=True), start=1)
    )
    return [(call.shape(0)[0], *places, channels)]


@rule("CONV_2D", "TFLite, conv.cc, Prepare")
def convolution(call: Call) -> Results:
    """`[b, h, w, i]` with filters `[o, fh, fw, i/groups]` gives `[b, h', w', o]`."""
    (*_, channels), (count, *window, depth) = call.shape(0, rank=4), call.shape(1, rank=4)
    known = channels >= 0 and depth > 0
    if known and (channels % depth or (count >= 0 and count % (channels // depth))):
        raise ShapeError(f"the channels of {call.text(0)} make no groups for the filters {call.text(1)}")
    return _convolved(call, window, count)


@rule("DEPTHWISE_CONV_2D", "TFLite, depthwise_conv.cc, Prepare")
def depthwise_convolution(call: Call) -> Results:
    """`[b, h, w, i]` with filters `[1, fh, fw, i*m]` gives `[b, h', w', i*m]`."""
    (*_, channels), (one, *window, results) = call.shape(0, rank=4), call.shape(1, rank=4)
    if one not in (1, DYNAMIC) or (channels > 0 and results > 0 and results % channels):
        raise ShapeError(
            f"{call.text(1)} must be one filter for a multiple of the channels of {call.text(0)}"
        )
    return _convolved(call, window, results)


@rule("CONV_3D", "TFLite, conv3d.cc, Prepare")
def convolution_3d(call: Call) -> Results:
    """`[b, d, h, w, i]` with filters `[fd, fh, fw, i, o]` gives `[b, d', h', w', o]`."""
    (*_, channels), (*window, depth, results) = call.shape(0, rank=5), call.shape(1, rank=5)
    if not may_be_equal(channels, depth):
        raise ShapeError(f"{call.text(0)} and the filters {call.text(1)} differ in their channels")
    return _convolved(call, window, results)


@rule("TRANSPOSE_CONV", "TFLite, transpose_conv.cc, Prepare")
def transposed_convolution(call: Call) -> Results:
    """The result has the shape that input 0 spells out; input 1 are filters `[o, fh, fw, i]`."""
    result, filters, shape = call.sizes(0), call.shape(1, rank=4), call.shape(2, rank=4)
    if len(result) != 4:
        raise ShapeError(f"{call.label(0)} spells out {shape_text(result)}: expected rank 4")
    _check_filled(call, 1, 2)
    if not may_be_equal(shape[3], filters[3]):
        raise ShapeError(f"{call.text(2)} and the filters {call.text(1)} differ in their channels")
    _check_bias(call, 3, filters[0])
    return [result]
