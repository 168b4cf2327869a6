"""Rules of operators that fold an axis, or run along one: sums, extremes and their places, one-hot, segments."""

from __future__ import annotations

from edge_opt.shapes.call import Call, Element, Results, as_dimension
from edge_opt.shapes.dimension import DYNAMIC, Dim, may_be_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule


@rule("MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM", inputs=2)
def reduce(call: Call) -> Results:
    """The axes that input 1 lists are folded: dropped, or kept with size 1 under `keep_dims`.

    Source: TFLite, reduce.cc, GetOutputShape.
    """
    shape, axes = call.shapes[0], call.elements(1)
    keep = call.flag("keep_dims")
    if shape is None or shape == ():
        return [shape]
    if axes is None or None in axes:
        return [(DYNAMIC,) * len(shape) if keep else None]
    folded = {call.axis_of(0, as_dimension(axis)) for axis in axes}
    if keep:
        return [tuple(1 if axis in folded else dim for axis, dim in enumerate(shape))]
    return [tuple(dim for axis, dim in enumerate(shape) if axis not in folded)]


@rule("ARG_MAX ARG_MIN", inputs=2)
def arg_extreme(call: Call) -> Results:
    """The axis that input 1 gives is dropped.

    Source: TFLite, arg_min_max.cc, ResizeOutput.
    """
    shape, axis = call.shapes[0], call.scalar(1)
    if shape is None:
        return [None]
    if not shape:
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    if axis is None:
        return [(DYNAMIC,) * (len(shape) - 1)]
    axis = call.axis_of(0, axis)
    return [(*shape[:axis], *shape[axis + 1 :])]


@rule("CUMSUM", inputs=2)
def cumsum(call: Call) -> Results:
    """The result has the shape of the input, which is no scalar.

    Source: TFLite, cumsum.cc, Prepare.
    """
    shape, axis = call.shapes[0], call.scalar(1)
    if shape == ():
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    if shape is not None and axis is not None:
        call.axis_of(0, axis)
    return [shape]


@rule("TOPK_V2", inputs=2, outputs=2)
def top_k(call: Call) -> Results:
    """The last axis shrinks to the k that input 1 gives, for values and indices alike.

    Source: TFLite, topk_v2.cc, ResizeOutput.
    """
    shape, k = call.shapes[0], call.scalar(1)
    if shape is None:
        return [None, None]
    if not shape:
        raise ShapeError(f"{call.described(0)} is a scalar: expected rank 1 or more")
    if k is not None and 0 <= shape[-1] < k:
        raise ShapeError(f"k is {k}, but the last axis of {call.described(0)} has size {shape[-1]}")
    size = DYNAMIC if k is None else k if isinstance(k, Dim) else max(k, 0)
    return [(*shape[:-1], size)] * 2


@rule("ONE_HOT", inputs=4)
def one_hot(call: Call) -> Results:
    """A new axis, as long as input 1 says, goes in at `axis` (-1: at the end).

    Source: TFLite, one_hot.cc, OneHotContext and ResizeOutputTensor.
    """
    for index in (1, 2, 3):
        call.require_single(index)
    shape, depth = call.shapes[0], call.scalar(1)
    if shape is None:
        return [None]
    axis = call.number("axis")
    position = len(shape) if axis == -1 else axis
    if not 0 <= position <= len(shape):
        raise ShapeError(f"its axis {axis} lies outside the result: expected -1 to {len(shape)}")
    return [(*shape[:position], _checked_depth(depth), *shape[position:])]


def _checked_depth(depth: Element) -> int:
    if depth is not None and depth < 0 and not isinstance(depth, Dim):
        raise ShapeError(f"its depth is {depth}: expected 0 or more")
    return as_dimension(depth)


@rule(
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM",
    inputs=3,
)
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says.

    Source: TFLite, unsorted_segment.cc, ResizeOutputTensor.
    """
    shape, segments, count = call.shapes[0], call.shapes[1], call.scalar(2)
    call.require_single(2)
    if shape is None or segments is None:
        return [None]
    if len(segments) > len(shape) or not all(map(may_be_equal, segments, shape)):
        raise ShapeError(
            f"the shape of the ids {call.described(1)} must be the start of that of {call.described(0)}"
        )
    return [(as_dimension(count), *shape[len(segments) :])]
