"""Rules of operators that fold an axis, or run along one: sums, extremes and their places, one-hot, segments."""

from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, as_dimension, is_negative, is_number, may_be_alike
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule


@rule("MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", inputs=2)
def reduce(call: Call) -> Results:
    """The axes that input 1 lists are folded: dropped, or kept with size 1 under `keep_dims`.

    Source: TFLite, reduce.cc, GetOutputShape.
    """
    shape = call.shape(0)
    if shape == ():
        return [()]
    keep = call.flag("keep_dims")
    if keep and not all(map(is_number, call.elements(1))):
        return [(DYNAMIC,) * len(shape)]
    folded = {call.axis_of(0, axis) for axis in call.integers(1)}
    if keep:
        return [tuple(1 if axis in folded else dim for axis, dim in enumerate(shape))]
    return [tuple(dim for axis, dim in enumerate(shape) if axis not in folded)]


@rule("ARG_MAX ARG_MIN", inputs=2)
def arg_extreme(call: Call) -> Results:
    """The axis that input 1 gives is dropped.

    Source: TFLite, arg_min_max.cc, ResizeOutput.
    """
    shape, axis = call.shape(0, least=1), call.given_axis(0, 1)
    return [(*shape[:axis], *shape[axis + 1 :])]


@rule("CUMSUM", inputs=2)
def cumsum(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar.

    Source: TFLite, cumsum.cc, Prepare.
    """
    shape, axis = call.shape(0, least=1), call.scalar(1)
    if axis is not None:
        call.axis_of(0, axis)
    return [shape]


@rule("TOPK_V2", inputs=2, outputs=2)
def top_k(call: Call) -> Results:
    """The last axis shrinks to the k that input 1 gives, for values and indices alike.

    Source: TFLite, topk_v2.cc, ResizeOutput.
    """
    shape, k = call.shape(0, least=1), call.scalar(1)
    if k is not None and 0 <= shape[-1] < k:
        raise ShapeError(f"k is {k}, but the last axis of {call.described(0)} has size {shape[-1]}")
    return [(*shape[:-1], 0 if is_negative(k) else as_dimension(k))] * 2


@rule("ONE_HOT", inputs=4)
def one_hot(call: Call) -> Results:
    """A new axis, as long as input 1 says, goes in at `axis` (-1: at the end).

    Source: TFLite, one_hot.cc, OneHotContext and ResizeOutputTensor.
    """
    for index in (1, 2, 3):
        call.require_single(index)
    shape, depth, axis = call.shape(0), call.scalar(1), call.number("axis")
    position = len(shape) if axis == -1 else axis
    if not 0 <= position <= len(shape):
        raise ShapeError(f"its axis {axis} lies outside the result: expected -1 to {len(shape)}")
    if is_negative(depth):
        raise ShapeError(f"its depth is {depth}: expected 0 or more")
    return [(*shape[:position], as_dimension(depth), *shape[position:])]


@rule(
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
    inputs=3,
)
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says.

    Source: TFLite, unsorted_segment.cc, ResizeOutputTensor.
    """
    call.require_single(2)
    shape, segments, count = call.shape(0), call.shape(1), call.scalar(2)
    if not may_be_alike(segments, shape[: len(segments)]):
        raise ShapeError(
            f"the shape of the ids {call.described(1)} must be the start of that of {call.described(0)}"
        )
    return [(as_dimension(count), *shape[len(segments) :])]
