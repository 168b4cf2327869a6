"""Rules of the StableHLO operators that contract, slide a window, gather or scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edge_opt.shapes.dimension import DYNAMIC, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule
from edge_opt.shapes.stablehlo import numbers

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results
    from edge_opt.shapes.dimension import Shape

_MAX_WINDOW_RANK = 6


@rule("STABLEHLO_DOT_GENERAL", inputs=2)
def dot_general(call: Call) -> Results:
    """The batching axes, then what is left of the first operand, then of the second; contracting axes agree.

    Source: StableHLO specification, dot_general.
    """
    left, right = call.shapes
    if left is None or right is None:
        return [None]
    batch, contracted = (
        [
            [
                call.axis(axis, len(shape), call.described(index))
                for axis in numbers(call, f"{side}_{kind}_dimensions")
            ]
            for index, (side, shape) in enumerate((("lhs", left), ("rhs", right)))
        ]
        for kind in ("batching", "contracting")
    )
    for kind, (first, second) in (("batching", batch), ("contracting", contracted)):
        sizes = [(left[a], right[b]) for a, b in zip(first, second, strict=False)]
        if len(first) != len(second) or not all(may_be_equal(a, b) for a, b in sizes):
            raise ShapeError(
                f"{kind} axes {first} of {call.described(0)} do not match {second} of {call.described(1)}"
            )
    rest = [
        tuple(
            dim
            for axis, dim in enumerate(shape)
            if axis not in batch[index] and axis not in contracted[index]
        )
        for index, shape in enumerate((left, right))
    ]
    return [(*(left[axis] for axis in batch[0]), *rest[0], *rest[1])]


@rule("STABLEHLO_CONVOLUTION", inputs=2)
def convolution(call: Call) -> Results:
    """Operand and kernel with their axes named by the options; the window slides over the spatial ones.

    Source: StableHLO specification, convolution.
    """
    shape, kernel = call.shapes
    if shape is None or kernel is None:
        return [None if shape is None else (DYNAMIC,) * len(shape)]
    if len(shape) != len(kernel) or len(shape) < 2:
        raise ShapeError(f"{call.described(0)} and {call.described(1)} must have one rank, 2 or more")
    spatial = len(shape) - 2
    result = [DYNAMIC] * len(shape)
    batch, groups = (
        shape[int(call.option("input_batch_dimension", 0))],
        int(call.option("batch_group_count", 1)),
    )
    result[int(call.option("output_batch_dimension", 0))] = (
        batch if groups == 1 or batch < 0 else batch // groups
    )
    result[int(call.option("output_feature_dimension", 0))] = kernel[
        int(call.option("kernel_output_feature_dimension", 0))
    ]
    slides = _convolution_windows(call, spatial)
    inputs, kernels, outputs = (
        _spatial(call, name, spatial)
        for name in ("input_spatial_dimensions", "kernel_spatial_dimensions", "output_spatial_dimensions")
    )
    for index, (source, window, target) in enumerate(zip(inputs, kernels, outputs, strict=True)):
        result[target] = _slide(shape[source], kernel[window], slides[index])
    return [tuple(result)]


def _spatial(call: Call, name: str, count: int) -> list[int]:
    axes = numbers(call, name)
    if len(axes) != count or any(not 0 <= axis < count + 2 for axis in axes):
        raise ShapeError(f"its {name} {axes} does not name the {count} spatial axes of {call.described(0)}")
    return axes


class _Slide(NamedTuple):
    """How a window slides along one axis."""

    stride: int
    base: int
    dilation: int
    low: int
    high: int


def _convolution_windows(call: Call, spatial: int) -> list[_Slide]:
    """How the window slides along each spatial axis; an absent option means neither stride nor padding."""
    padding = numbers(call, "padding") or [0] * (2 * spatial)
    strides, base, window = (
        numbers(call, name) or [1] * spatial for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    if len(padding) != 2 * spatial or any(len(values) != spatial for values in (strides, base, window)):
        raise ShapeError(
            f"its strides, dilations and padding must fit the {spatial} spatial axes of {call.described(0)}"
        )
    return list(map(_Slide, strides, base, window, padding[::2], padding[1::2]))


def _slide(size: int, window: int, slide: _Slide) -> int:
    """The number of places of a window: `floor((padded - reach) / stride) + 1`, 0 where it does not fit."""
    stride, base, dilation, low, high = slide
    if min(stride, base, dilation) < 1:
        raise ShapeError(f"stride {stride} and dilations {base} and {dilation} must be 1 or more")
    if size < 0 or window < 0:
        return size if (window, stride, base, low, high) == (1, 1, 1, 0, 0) else DYNAMIC
    padded = low + (0 if size == 0 else (size - 1) * base + 1) + high
    reach = (window - 1) * dilation + 1 if window else 0
    return 0 if padded == 0 or reach > padded else (padded - reach) // stride + 1


@rule("STABLEHLO_REDUCE_WINDOW", inputs=(2, None), outputs=None)
def reduce_window(call: Call) -> Results:
    """A window slides over every axis, dilated and padded by the options.

    Source: StableHLO specification, reduce_window; TFLite, stablehlo_reduce_window.cc, StablehloData::Setup.
    """
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count}, two for each output")
    return [_reduced(call, call.shapes[index]) for index in range(count)]


def _reduced(call: Call, shape: Shape | None) -> Shape | None:
    if shape is None:
        return None
    rank = len(shape)
    if not 0 < rank <= _MAX_WINDOW_RANK:
        raise ShapeError(f"{call.described(0)} has rank {rank}: expected rank 1 to {_MAX_WINDOW_RANK}")
    windows = numbers(call, "window_dimensions", rank)
    padding = numbers(call, "padding") or [0] * (2 * rank)
    strides, base, dilations = (
        numbers(call, name) or [1] * rank for name in ("window_strides", "base_dilations", "window_dilations")
    )
    if len(padding) != 2 * rank or any(len(values) != rank for values in (strides, base, dilations)):
        raise ShapeError(f"its strides, dilations and padding must fit the axes of {call.described(0)}")
    if min(windows) < 1:
        raise ShapeError(f"its window_dimensions {windows} must be 1 or more each")
    slides = map(_Slide, strides, base, dilations, padding[::2], padding[1::2])
    return tuple(map(_slide, shape, windows, slides))


@rule("REDUCE_WINDOW", inputs=5)
def tflite_reduce_window(call: Call) -> Results:
    """A window (input 2) slides over every axis with strides (input 3) and dilations (input 4), unpadded.

    Source: TFLite, stablehlo_reduce_window.cc, TFLiteData::Setup.
    """
    shape = call.shapes[0]
    if shape is None:
        return [None]
    if not 0 < len(shape) <= _MAX_WINDOW_RANK:
        raise ShapeError(f"{call.described(0)} has rank {len(shape)}: expected rank 1 to {_MAX_WINDOW_RANK}")
    windows, strides, dilations = (_window_numbers(call, index, len(shape)) for index in (2, 3, 4))
    if windows is None or strides is None or dilations is None:
        return [(DYNAMIC,) * len(shape)]
    slides = (_Slide(stride, 1, dilation, 0, 0) for stride, dilation in zip(strides, dilations, strict=True))
    return [tuple(map(_slide, shape, windows, slides))]


def _window_numbers(call: Call, index: int, rank: int) -> list[int] | None:
    values = call.integers(index)
    if values is not None and (len(values) != rank or min(values) < 1):
        raise ShapeError(f"{call.label(index)} holds {values}: expected {rank} numbers, 1 or more each")
    return values


@rule("STABLEHLO_GATHER", inputs=2)
def gather(call: Call) -> Results:
    """The indices' axes, less the vector axis, with the slice's axes at `offset_dims`.

    Source: StableHLO specification, gather; TFLite, stablehlo_gather.cc, GetResultShape.
    """
    shape, indices = call.shapes
    sizes = numbers(call, "slice_sizes", None if shape is None else len(shape))
    collapsed, offsets = numbers(call, "collapsed_slice_dims"), numbers(call, "offset_dims")
    window = [size for axis, size in enumerate(sizes) if axis not in collapsed]
    if len(window) != len(offsets):
        raise ShapeError(
            f"its slice {sizes} less {collapsed} has {len(window)} axes: expected those of {offsets}"
        )
    if shape is not None and any(0 <= whole < size for whole, size in zip(shape, sizes, strict=True)):
        raise ShapeError(f"the slice {shape_text(sizes)} does not fit into {call.described(0)}")
    if indices is None:
        return [None]
    vector = int(call.option("index_vector_dim", 0))
    if not 0 <= vector <= len(indices):
        raise ShapeError(f"its index_vector_dim {vector} lies outside {call.described(1)}")
    batch = [dim for axis, dim in enumerate(indices) if axis != vector]
    rank = len(batch) + len(window)
    if any(not 0 <= axis < rank for axis in offsets) or len(set(offsets)) != len(offsets):
        raise ShapeError(f"its offset_dims {offsets} must name axes of the result, of rank {rank}")
    slices, places = iter(window), iter(batch)
    return [tuple(next(slices) if axis in offsets else next(places) for axis in range(rank))]


@rule("STABLEHLO_SCATTER", inputs=(3, None), outputs=None)
def scatter(call: Call) -> Results:
    """The results have the shapes of the operands: the first inputs, before the indices and the updates.

    Source: StableHLO specification, scatter; TFLite, stablehlo_scatter.cc, Prepare.
    """
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count + 1:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count + 1} for {count} outputs")
    return list(call.shapes[:count])
