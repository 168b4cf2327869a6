"""Rules of the StableHLO operators that work element by element, or move and cut axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.arranging import join
from edge_opt.shapes.dimension import DYNAMIC, element_count, may_be_equal, shape_text
from edge_opt.shapes.elementwise import merge_equal
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results
    from edge_opt.shapes.dimension import Shape


def numbers(call: Call, name: str, count: int | None = None) -> list[int]:
    """Return a vector option.

    Raises:
        ShapeError: it does not have `count` numbers.
    """
    values = [int(value) for value in call.option(name, ())]
    if count is not None and len(values) != count:
        raise ShapeError(
            f"its {name} has {len(values)} numbers: expected {count}, one per axis of {call.described(0)}"
        )
    return values


@rule(
    "STABLEHLO_ABS", "STABLEHLO_CBRT", "STABLEHLO_CONVERT", "STABLEHLO_COSINE", "STABLEHLO_EXPONENTIAL",
    "STABLEHLO_FLOOR", "STABLEHLO_LOG", "STABLEHLO_LOGISTIC", "STABLEHLO_NEGATE", "STABLEHLO_RSQRT",
    "STABLEHLO_TANH",
    inputs=1,
)  # fmt: skip
def unary(call: Call) -> Results:
    """The result has the shape of the input.

    Source: StableHLO specification, elementwise operations.
    """
    return [call.shapes[0]]


@rule(
    "STABLEHLO_ADD", "STABLEHLO_AND", "STABLEHLO_COMPARE", "STABLEHLO_DIVIDE", "STABLEHLO_MAXIMUM",
    "STABLEHLO_MINIMUM", "STABLEHLO_MULTIPLY", "STABLEHLO_OR", "STABLEHLO_POWER", "STABLEHLO_REMAINDER",
    "STABLEHLO_SHIFT_LEFT", "STABLEHLO_SUBTRACT",
    inputs=2,
)  # fmt: skip
def binary(call: Call) -> Results:
    """Both operands have one shape, the result's; nothing broadcasts.

    Source: StableHLO specification, elementwise operations; TFLite, stablehlo_elementwise.cc,
    ElementwisePrepare.
    """
    return [merge_equal(call, 0, 1)]


@rule("STABLEHLO_CLAMP", inputs=3)
def clamp(call: Call) -> Results:
    """The result has the shape of the operand (input 1); each bound is a scalar or has that shape too.

    Source: StableHLO specification, clamp.
    """
    for index in (0, 2):
        if call.shapes[index] != ():
            merge_equal(call, index, 1)
    return [call.shapes[1]]


@rule("STABLEHLO_SELECT", inputs=3)
def select(call: Call) -> Results:
    """Both choices have one shape, the result's; the condition is a scalar or has that shape too.

    Source: StableHLO specification, select.
    """
    if call.shapes[0] != ():
        merge_equal(call, 0, 1)
    return [merge_equal(call, 1, 2)]


@rule("STABLEHLO_SORT", inputs=(1, None), outputs=None)
def sort(call: Call) -> Results:
    """All operands have one shape, which the results have too.

    Source: StableHLO specification, sort.
    """
    if len(call.op.outputs) != len(call.shapes):
        raise ShapeError(
            f"it has {len(call.op.outputs)} outputs: expected {len(call.shapes)}, one for each input"
        )
    for index in range(1, len(call.shapes)):
        merge_equal(call, 0, index)
    return list(call.shapes)


@rule("STABLEHLO_RESHAPE", inputs=1)
def reshape(call: Call) -> Results:
    """The result has its recorded shape, which has as many elements as the input: nothing else states it.

    Source: StableHLO specification, reshape.
    """
    shape, result = call.shapes[0], call.recorded(0)
    if shape is None or result is None:
        return [result]
    given, wanted = element_count(shape), element_count(result)
    if given >= 0 and wanted >= 0 and given != wanted:
        raise ShapeError(
            f"{call.described(0)} cannot become {shape_text(result)}: the numbers of elements differ"
        )
    return [result]


@rule("STABLEHLO_BROADCAST_IN_DIM", inputs=1)
def broadcast_in_dim(call: Call) -> Results:
    """The result has its recorded shape; input axis i is its axis `broadcast_dimensions[i]`, or has size 1.

    Source: StableHLO specification, broadcast_in_dim.
    """
    shape, result = call.shapes[0], call.recorded(0)
    if shape is None or result is None:
        return [result]
    for axis, target in enumerate(numbers(call, "broadcast_dimensions", len(shape))):
        target = call.axis(target, len(result), f"the result {shape_text(result)}")  # noqa: PLW2901
        if shape[axis] != 1 and not may_be_equal(shape[axis], result[target]):
            raise ShapeError(
                f"axis {axis} of {call.described(0)} does not fit axis {target} of {shape_text(result)}"
            )
    return [result]


@rule("STABLEHLO_IOTA", inputs=0)
def iota(call: Call) -> Results:
    """The result has its recorded shape: nothing else states it.

    Source: StableHLO specification, iota.
    """
    result = call.recorded(0)
    if result is not None:
        call.axis(int(call.option("iota_dimension", 0)), len(result), f"the result {shape_text(result)}")
    return [result]


@rule("STABLEHLO_RNG_BIT_GENERATOR", inputs=1, outputs=2)
def rng_bit_generator(call: Call) -> Results:
    """The new state has the old one's shape; the bits have their recorded shape: nothing else states it.

    Source: StableHLO specification, rng_bit_generator; TFLite, rng_bit_generator.cc, Prepare.
    """
    return [call.require_rank(0, 1), call.recorded(1)]


@rule("STABLEHLO_CONCATENATE", inputs=(1, None))
def concatenate(call: Call) -> Results:
    """The sizes along `dimension` add up; all other axes are equal.

    Source: StableHLO specification, concatenate.
    """
    return [join(call, int(call.option("dimension", 0)))]


@rule("STABLEHLO_TRANSPOSE", inputs=1)
def transpose(call: Call) -> Results:
    """Axis i of the result is axis `permutation[i]` of the input.

    Source: StableHLO specification, transpose.
    """
    shape = call.shapes[0]
    if shape is None:
        return [None]
    permutation = numbers(call, "permutation", len(shape))
    if sorted(permutation) != list(range(len(shape))):
        raise ShapeError(f"its permutation {permutation} does not name each axis of {call.described(0)} once")
    return [tuple(shape[axis] for axis in permutation)]


@rule("STABLEHLO_SLICE", inputs=1)
def slice_(call: Call) -> Results:
    """Axis by axis from `start_indices` to `limit_indices` by `strides`.

    Source: StableHLO specification, slice.
    """
    shape = call.shapes[0]
    if shape is None:
        return [None]
    names = ("start_indices", "limit_indices", "strides")
    triples = zip(*(numbers(call, name, len(shape)) for name in names), strict=True)
    dims = []
    for axis, (start, limit, stride) in enumerate(triples):
        if not 0 <= start <= limit or (0 <= shape[axis] < limit) or stride < 1:
            raise ShapeError(f"the slice {start}:{limit}:{stride} leaves axis {axis} of {call.described(0)}")
        dims.append(-(-(limit - start) // stride))
    return [tuple(dims)]


@rule("STABLEHLO_DYNAMIC_SLICE", inputs=(1, None))
def dynamic_slice(call: Call) -> Results:
    """The result has the shape `slice_sizes`; a scalar for each axis says where it starts.

    Source: StableHLO specification, dynamic_slice.
    """
    shape = call.shapes[0]
    sizes = numbers(call, "slice_sizes", None if shape is None else len(shape))
    if shape is not None and any(0 <= whole < size for whole, size in zip(shape, sizes, strict=True)):
        raise ShapeError(f"the slice {shape_text(sizes)} does not fit into {call.described(0)}")
    return [tuple(sizes)]


@rule("STABLEHLO_DYNAMIC_UPDATE_SLICE", inputs=(2, None))
def dynamic_update_slice(call: Call) -> Results:
    """The result has the shape of the operand; the update (input 1) fits into it.

    Source: StableHLO specification, dynamic_update_slice.
    """
    shape, update = call.shapes[0], call.shapes[1]
    if shape is None or update is None:
        return [shape]
    fits = len(shape) == len(update) and not any(0 <= a < b for a, b in zip(shape, update, strict=True))
    if not fits:
        raise ShapeError(f"the update {call.described(1)} does not fit into {call.described(0)}")
    return [shape]


@rule("STABLEHLO_PAD", inputs=2)
def pad(call: Call) -> Results:
    """Each axis n becomes `low + n + (n - 1) * interior + high`, low and high may be negative.

    Source: StableHLO specification, pad; TFLite, stablehlo_pad.cc, Prepare.
    """
    shape = call.shapes[0]
    call.require_single(1)
    if shape is None:
        return [None]
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    triples = zip(*(numbers(call, name, len(shape)) for name in names), strict=True)
    return [
        tuple(
            _padded(call, axis, size, triple)
            for axis, (size, triple) in enumerate(zip(shape, triples, strict=True))
        )
    ]


def _padded(call: Call, axis: int, size: int, triple: tuple[int, int, int]) -> int:
    low, high, interior = triple
    if size < 0:
        return size if triple == (0, 0, 0) else DYNAMIC
    result = low + size + max(size - 1, 0) * interior + high
    if interior < 0 or result < 0:
        raise ShapeError(f"axis {axis} of {call.described(0)} cannot be padded by {triple}")
    return result


@rule("STABLEHLO_REDUCE", inputs=(2, None), outputs=None)
def reduce(call: Call) -> Results:
    """The axes in `dimensions` are folded; the first half of the inputs are operands, the second their start.

    Source: StableHLO specification, reduce.
    """
    count = len(call.op.outputs)
    if len(call.shapes) != 2 * count:
        raise ShapeError(f"it has {len(call.shapes)} inputs: expected {2 * count}, two for each output")
    results: list[Shape | None] = []
    for index in range(count):
        shape = call.shapes[index]
        if shape is None:
            results.append(None)
            continue
        folded = {call.axis(axis, len(shape), call.described(index)) for axis in numbers(call, "dimensions")}
        results.append(tuple(dim for axis, dim in enumerate(shape) if axis not in folded))
    return results
