"""Rules of operators that compute: elements, rows, numbers alone, products with weights, windows."""

import math
from collections.abc import Sequence
from fractions import Fraction

from edge_opt.ir.operators import UNARY
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Shape,
    ShapeError,
    broadcast_operands,
    may_be_alike,
    may_be_equal,
    multiply,
    product,
    shape_text,
)
from edge_opt.shapes.rules import Call, Results, rule


@rule(
    f"DENSIFY LOG_SOFTMAX {' '.join(UNARY)}",
    "TFLite, Prepare of elementwise.cc, activations.cc, complex_support.cc and of each operator's own file",
)
def same_shape(call: Call) -> Results:
    """The result has the shape of the input."""
    return [call.shape(0)]


@rule("SOFTMAX L2_NORMALIZATION", "TFLite, activations.cc, SoftmaxPrepare; l2norm.cc, Prepare")
def per_row(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar: each row of the last axis is its own."""
    return [call.shape(0, least=1)]


@rule(
    "ADD BITWISE_XOR DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND "
    "LOGICAL_OR MAXIMUM MINIMUM MUL NOT_EQUAL POW RIGHT_SHIFT SQUARED_DIFFERENCE SUB SELECT_V2",
    "TFLite, kernel_util.cc, CalculateShapeForBroadcast (the broadcast rules, size 0 as in numpy); select.cc, "
    "SelectPrepare (version two)",
)
def broadcasting(call: Call) -> Results:
    """The operands broadcast, a condition too."""
    return [broadcast_operands(call.all_shapes(), call.labels())]


@rule("SELECT", "TFLite, select.cc, SelectPrepare (version one)")
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition has it too, is a scalar, or picks whole rows."""
    shape, condition = call.merged((1, 2)), call.shape(0)
    rows = len(condition) == 1 and len(shape) >= 1 and may_be_equal(condition[0], shape[0])
    if condition != () and not rows and not may_be_alike(condition, shape):
        text = f"the condition {call.text(0)} fits neither the choices {shape_text(shape)} nor their rows"
        raise ShapeError(text)
    return [shape]


@rule("PRELU", "TFLite, activations.cc, PreluPrepare")
def prelu(call: Call) -> Results:
    """The slopes broadcast to the input, whose shape the result has."""
    shape, result = call.shape(0), broadcast_operands(call.all_shapes(), call.labels())
    if result is None or not may_be_alike(result, shape):
        raise ShapeError(f"the slopes {call.text(1)} do not broadcast to the input {call.text(0)}")
    return [shape]


@rule(
    "ATAN2 STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY "
    "STABLEHLO_SHIFT_LEFT ADD_N",
    "TFLite, Prepare of atan2.cc, add_n.cc and stablehlo_elementwise.cc; StableHLO specification, elementwise "
    "operations",
)
def one_shape(call: Call) -> Results:
    """All operands have one shape, the result's; nothing broadcasts."""
    return [call.merged(range(len(call.shapes)))]


@rule("MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", "TFLite, reduce.cc, GetOutputShape")
def reduce(call: Call) -> Results:
    """The axes that input 1 lists are folded: dropped, or kept with size 1 under `keep_dims`."""
    shape = call.shape(0)
    if shape == ():
        return [()]
    keep = call.number("keep_dims")
    if keep and None in call.elements(1):
        return [(DYNAMIC,) * len(shape)]
    folded = {call.axis_of(0, axis) for axis in call.integers(1)}
    sizes = enumerate(shape)
    return [tuple(1 if axis in folded else size for axis, size in sizes if keep or axis not in folded)]


@rule("ARG_MAX ARG_MIN", "TFLite, arg_min_max.cc, ResizeOutput")
def arg_extreme(call: Call) -> Results:
    """The axis that input 1 gives is dropped."""
    shape, axis = call.shape(0, least=1), call.given_axis(0, 1)
    return [(*shape[:axis], *shape[axis + 1 :])]


@rule("CUMSUM", "TFLite, cumsum.cc, Prepare")
def cumsum(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar."""
    shape, axis = call.shape(0, least=1), call.scalar(1)
    if axis is not None:
        call.axis_of(0, axis)
    return [shape]


@rule("TOPK_V2", "TFLite, topk_v2.cc, ResizeOutput")
def top_k(call: Call) -> Results:
    """The last axis shrinks to the k that input 1 gives, for values and indices alike."""
    shape, k = call.shape(0, least=1), call.scalar(1)
    if k is not None and 0 <= shape[-1] < k:
        raise ShapeError(f"k is {k}, but the last axis of {call.text(0)} has size {shape[-1]}")
    return [(*shape[:-1], DYNAMIC if k is None else max(k, 0))] * 2


@rule("ONE_HOT", "TFLite, one_hot.cc, OneHotContext and ResizeOutputTensor")
def one_hot(call: Call) -> Results:
    """A new axis, as long as input 1 says, goes in at `axis` (-1: at the end)."""
    call.require_single(1, 2, 3)
    shape, depth, axis = call.shape(0), call.size(1), call.number("axis")
    position = len(shape) if axis == -1 else axis
    if not 0 <= position <= len(shape):
        raise ShapeError(f"its axis {axis} lies outside the result: expected -1 to {len(shape)}")
    return [(*shape[:position], depth, *shape[position:])]


@rule(
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
    "TFLite, unsorted_segment.cc, ResizeOutputTensor",
)
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says."""
    call.require_single(2)
    shape, segments, count = call.shape(0), call.shape(1), call.size(2)
    if not may_be_alike(segments, shape[: len(segments)]):
        raise ShapeError(f"the shape of the ids {call.text(1)} must be the start of that of {call.text(0)}")
    return [(count, *shape[len(segments) :])]


_LONGEST_RANGE = 2**31 - 1


@rule("SHAPE", "TFLite, shape.cc, Prepare")
def shape_of(call: Call) -> Results:
    """A vector with one number for each axis of the input."""
    return [(len(call.shape(0)),)]


@rule("RANK", "TFLite, rank.cc, Prepare")
def rank(_: Call) -> Results:
    """A scalar."""
    return [()]


@rule("FILL RANDOM_UNIFORM RANDOM_STANDARD_NORMAL", "TFLite, fill.cc, ResizeOutput; random_ops.cc, Prepare")
def fill(call: Call) -> Results:
    """The result has the shape that input 0 spells out; what a FILL is filled with is a scalar."""
    if call.has(1):
        call.shape(1, rank=0)
    return [call.sizes(0)]


@rule("RANGE", "TFLite, range.cc, GetSize")
def range_(call: Call) -> Results:
    """From start to limit by delta, three scalars: `ceil((limit - start) / delta)` numbers."""
    for index in range(3):
        call.shape(index, rank=0)
    if not all(map(call.is_known, range(3))):
        return [(DYNAMIC,)]
    values = [call.numbers(index) for index in range(3)]
    if any(value.dtype.kind not in "iuf" for value in values):
        raise ShapeError(f"the range from {call.text(0)} needs three numbers")
    start, limit, delta = (value.item() for value in values)
    if delta == 0 or (start > limit and delta > 0) or (start < limit and delta < 0):
        raise ShapeError(f"from {start} to {limit} by {delta} there is no range")
    integers = all(value.dtype.kind in "iu" for value in values)
    steps = Fraction(limit - start, delta) if integers else (limit - start) / delta
    if not steps <= _LONGEST_RANGE:  # nor is NaN a number of steps
        text = f"from {start} to {limit} by {delta} are {steps} numbers"
        raise ShapeError(f"{text}: expected {_LONGEST_RANGE} at most")
    return [(math.ceil(steps),)]


@rule("RFFT2D", "TFLite, rfft2d.cc, ResizeOutputandTemporaryTensors")
def rfft2d(call: Call) -> Results:
    """The last two axes become `[h, w / 2 + 1]`, h and w from input 1, powers of two."""
    shape, sizes = call.shape(0, least=2), call.sizes(1)
    if len(sizes) != 2:
        raise ShapeError(f"{call.text(1)} must hold two sizes, height and width")
    if any(size >= 0 and (size == 0 or size & (size - 1)) for size in sizes):
        raise ShapeError(f"{call.label(1)} gives the sizes {list(sizes)}: expected powers of two")
    height, width = sizes
    return [(*shape[:-2], height, DYNAMIC if width < 0 else width // 2 + 1)]


@rule("WHERE", "TFLite, where.cc, ResizeOutputTensor")
def where(call: Call) -> Results:
    """A row for each element that is not 0, with one number for each axis."""
    count = int((call.numbers(0) != 0).sum()) if call.is_known(0) else DYNAMIC
    return [(count, len(call.shape(0)))]


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
