"""Rules of the StableHLO operators that the runtime has a kernel for; the others keep their recorded shapes."""

from edge_opt.shapes.call import Call, Results, recorded_shape
from edge_opt.shapes.dimension import DYNAMIC, Shape, ShapeError, shape_text
from edge_opt.shapes.rules import rule

_MAX_WINDOW_RANK = 6


@rule(
    "STABLEHLO_RNG_BIT_GENERATOR",
    "StableHLO specification, rng_bit_generator; TFLite, rng_bit_generator.cc, Prepare",
)
def rng_bit_generator(call: Call) -> Results:
    """The new state has the old one's shape; the bits have their recorded shape: nothing else states it."""
    return [call.shape(0, rank=1), recorded_shape(call.op.outputs[1])]


@rule("STABLEHLO_PAD", "StableHLO specification, pad; TFLite, stablehlo_pad.cc, Prepare")
def pad(call: Call) -> Results:
    """Each axis n becomes `low + n + (n - 1) * interior + high`, low and high may be negative."""
    call.require_single(1)
    shape = call.shape(0)
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    numbers = (call.listed(name, len(shape)) for name in names)
    result = []
    for axis, (size, low, high, interior) in enumerate(zip(shape, *numbers, strict=True)):
        padded = low + size + max(size - 1, 0) * interior + high
        if size >= 0 and (interior < 0 or padded < 0):
            raise ShapeError(f"axis {axis} of {call.text(0)} cannot be padded by {(low, high, interior)}")
        result.append(DYNAMIC if size < 0 else padded)
    return [tuple(result)]


def _slide(size: int, window: int, stride: int, base: int, dilation: int, low: int, high: int) -> int:
    """The number of places of a window: `floor((padded - reach) / stride) + 1`, 0 where it does not fit."""
    if min(stride, base, dilation) < 1:
        raise ShapeError(f"stride {stride} and dilations {base} and {dilation} must be 1 or more")
    if size < 0:
        return DYNAMIC
    padded = low + (0 if size == 0 else (size - 1) * base + 1) + high
    reach = (window - 1) * dilation + 1
    return 0 if reach > padded else (padded - reach) // stride + 1


@rule(
    "STABLEHLO_REDUCE_WINDOW",
    "StableHLO specification, reduce_window; TFLite, stablehlo_reduce_window.cc, StablehloData::Setup",
)
def reduce_window(call: Call) -> Results:
    """A window slides over every axis, dilated and padded by the options."""
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count}, two for each output")
    return [_reduced(call, call.shape(index, least=1, most=_MAX_WINDOW_RANK)) for index in range(count)]


def _reduced(call: Call, shape: Shape) -> Shape:
    rank = len(shape)
    windows = call.listed("window_dimensions", rank)
    padding = call.listed("padding") or [0] * (2 * rank)
    strides, base, dilations = (
        call.listed(name) or [1] * rank for name in ("window_strides", "base_dilations", "window_dilations")
    )
    if len(padding) != 2 * rank or any(len(values) != rank for values in (strides, base, dilations)):
        raise ShapeError(f"its strides, dilations and padding must fit the axes of {call.text(0)}")
    if min(windows) < 1:
        raise ShapeError(f"its window_dimensions {windows} must be 1 or more each")
    return tuple(map(_slide, shape, windows, strides, base, dilations, padding[::2], padding[1::2]))


@rule("STABLEHLO_GATHER", "StableHLO specification, gather; TFLite, stablehlo_gather.cc, GetResultShape")
def gather(call: Call) -> Results:
    """The indices' axes, less the vector axis, with the slice's axes at `offset_dims`."""
    shape, indices = call.all_shapes()
    sizes = call.listed("slice_sizes", len(shape))
    collapsed, offsets = call.listed("collapsed_slice_dims"), call.listed("offset_dims")
    window = [size for axis, size in enumerate(sizes) if axis not in collapsed]
    if len(window) != len(offsets):
        text = f"its slice {sizes} less {collapsed} has {len(window)} axes"
        raise ShapeError(f"{text}: expected those of {offsets}")
    if any(0 <= whole < size for whole, size in zip(shape, sizes, strict=True)):
        raise ShapeError(f"the slice {shape_text(sizes)} does not fit into {call.text(0)}")
    vector = call.number("index_vector_dim")
    if not 0 <= vector <= len(indices):
        raise ShapeError(f"its index_vector_dim {vector} lies outside {call.text(1)}")
    batch = [dim for axis, dim in enumerate(indices) if axis != vector]
    rank = len(batch) + len(window)
    if any(not 0 <= axis < rank for axis in offsets) or len(set(offsets)) != len(offsets):
        raise ShapeError(f"its offset_dims {offsets} must name axes of the result, of rank {rank}")
    slices, places = iter(window), iter(batch)
    return [tuple(next(slices) if axis in offsets else next(places) for axis in range(rank))]


@rule("STABLEHLO_SCATTER", "StableHLO specification, scatter; TFLite, stablehlo_scatter.cc, Prepare")
def scatter(call: Call) -> Results:
    """The results have the shapes of the operands: the first inputs, before the indices and the updates."""
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count + 1:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count + 1} for {count} outputs")
    return list(call.shapes[:count])
