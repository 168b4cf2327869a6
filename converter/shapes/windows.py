"""Rules of operators that slide a window: pools, convolutions, transposed convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edge_opt.shapes.dimension import DYNAMIC, element_count, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.shapes.call import Call, Results
    from edge_opt.shapes.dimension import Shape

_SAME, _VALID = 0, 1


class _Window(NamedTuple):
    """A window's extent along one axis, -1 where the filter's size is dynamic."""

    size: int
    stride: int
    dilation: int


def _window_count(call: Call, axis: int, size: int, window: _Window) -> int:
    """How many places a window has along an axis: all of them by `SAME`, those that lie inside by `VALID`.

    Source: TFLite, padding.h, ComputeOutSizeChecked.

    Raises:
        ShapeError: window, stride or dilation is below 1, or the window does not fit.
    """
    stride = window.stride
    if stride <= 0 or window.dilation <= 0 or window.size == 0:
        raise ShapeError(f"size, stride and dilation of the window {tuple(window)} must be 1 or more each")
    padding = call.number("padding")
    if padding not in (_SAME, _VALID):
        raise ShapeError(f"its padding is {padding}: expected SAME (0) or VALID (1)")
    reach = (window.size - 1) * window.dilation + 1
    if padding == _SAME:
        return size if stride == 1 else DYNAMIC if size < 0 else -(-size // stride)
    if size < 0 or window.size < 0:
        return size if reach == stride == 1 else DYNAMIC
    if reach > size + 2 * stride - 1:
        raise ShapeError(f"the window of {reach} does not fit axis {axis} of {call.described(0)}")
    return max((size + stride - reach) // stride, 0)


@rule("AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D", inputs=1)
def pool(call: Call) -> Results:
    """`[b, h, w, c]` keeps batch and channels; a window slides over height and width.

    Source: TFLite, pooling.cc, GenericPrepare.
    """
    shape = call.require_rank(0, 4)
    if shape is None:
        return [(DYNAMIC,) * 4]
    windows = (call.number("filter_height"), call.number("filter_width"))
    return [(shape[0], *_slide(call, shape, windows, dilated=False), shape[3])]


def _slide(call: Call, shape: Shape, sizes: Sequence[int], *, dilated: bool = True) -> list[int]:
    """The places of a window of these sizes along the axes behind the first: height and width, or depth too."""
    windows = [
        _Window(size, call.number(f"stride_{axis}"), call.number(f"dilation_{axis}_factor") if dilated else 1)
        for axis, size in zip("dhw"[-len(sizes) :], sizes, strict=True)
    ]
    return [_window_count(call, axis, shape[axis], window) for axis, window in enumerate(windows, start=1)]


def _check_filled(call: Call, *indices: int) -> None:
    """Refuse inputs without elements (a batch of none excepted)."""
    for index in indices:
        shape = call.shapes[index]
        if shape is not None and 0 in shape[1:]:
            raise ShapeError(f"{call.described(index)} has an axis of size 0")


def _check_bias(call: Call, index: int, channels: int) -> None:
    bias = call.shapes[index] if call.has(index) else None
    if bias is not None and not may_be_equal(element_count(bias), channels):
        raise ShapeError(f"the bias {call.described(index)} must have {channels} elements, one per channel")


@rule("CONV_2D", inputs=(2, 3), optional=(2,))
def convolution(call: Call) -> Results:
    """`[b, h, w, i]` with filters `[o, fh, fw, i/groups]` gives `[b, h', w', o]`.

    Source: TFLite, conv.cc, Prepare.
    """
    shape, filters = call.require_rank(0, 4), call.require_rank(1, 4)
    if shape is None or filters is None:
        return [(shape[0] if shape else DYNAMIC, DYNAMIC, DYNAMIC, filters[0] if filters else DYNAMIC)]
    _check_filled(call, 0, 1)
    _check_groups(call, shape, filters)
    _check_bias(call, 2, filters[0])
    return [(shape[0], *_slide(call, shape, filters[1:3]), filters[0])]


def _check_groups(call: Call, shape: Shape, filters: Shape) -> None:
    channels, depth, count = shape[3], filters[3], filters[0]
    if channels < 0 or depth <= 0:
        return
    if channels % depth or (count >= 0 and count % (channels // depth)):
        raise ShapeError(
            f"the {channels} channels of {call.described(0)} do not fall into groups for the filters "
            f"{call.described(1)}"
        )


@rule("DEPTHWISE_CONV_2D", inputs=(2, 3), optional=(2,))
def depthwise_convolution(call: Call) -> Results:
    """`[b, h, w, i]` with filters `[1, fh, fw, i*m]` gives `[b, h', w', i*m]`.

    Source: TFLite, depthwise_conv.cc, Prepare.
    """
    shape, filters = call.require_rank(0, 4), call.require_rank(1, 4)
    if shape is None or filters is None:
        return [(shape[0] if shape else DYNAMIC, DYNAMIC, DYNAMIC, filters[3] if filters else DYNAMIC)]
    _check_filled(call, 0, 1)
    if filters[0] not in (1, DYNAMIC) or (shape[3] > 0 and filters[3] > 0 and filters[3] % shape[3]):
        raise ShapeError(
            f"the filters {call.described(1)} must be one, with a multiple of the channels of {call.label(0)}"
        )
    _check_bias(call, 2, filters[3])
    return [(shape[0], *_slide(call, shape, filters[1:3]), filters[3])]


@rule("CONV_3D", inputs=(2, 3), optional=(2,))
def convolution_3d(call: Call) -> Results:
    """`[b, d, h, w, i]` with filters `[fd, fh, fw, i, o]` gives `[b, d', h', w', o]`.

    Source: TFLite, conv3d.cc, Prepare.
    """
    shape, filters = call.require_rank(0, 5), call.require_rank(1, 5)
    if shape is None or filters is None:
        return [(shape[0] if shape else DYNAMIC, *(DYNAMIC,) * 3, filters[4] if filters else DYNAMIC)]
    _check_filled(call, 0, 1)
    if not may_be_equal(shape[4], filters[3]):
        raise ShapeError(
            f"the channels of {call.described(0)} differ from those of the filters {call.described(1)}"
        )
    _check_bias(call, 2, filters[4])
    return [(shape[0], *_slide(call, shape, filters[:3]), filters[4])]


@rule("TRANSPOSE_CONV", inputs=(3, 4), optional=(3,))
def transposed_convolution(call: Call) -> Results:
    """The result has the shape that input 0 spells out; input 1 are filters `[o, fh, fw, i]`.

    Source: TFLite, transpose_conv.cc, Prepare.
    """
    result, filters, shape = call.sizes(0), call.require_rank(1, 4), call.require_rank(2, 4)
    if result is not None and len(result) != 4:
        raise ShapeError(f"{call.label(0)} spells out {shape_text(result)}: expected rank 4")
    if filters is None or shape is None:
        return [result or (DYNAMIC,) * 4]
    _check_filled(call, 1, 2)
    if not may_be_equal(shape[3], filters[3]):
        raise ShapeError(
            f"the channels of {call.described(2)} differ from those of the filters {call.described(1)}"
        )
    _check_bias(call, 3, filters[0])
    return [result or (DYNAMIC,) * 4]
