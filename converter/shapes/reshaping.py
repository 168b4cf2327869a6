"""Rules of operators that keep every element in its order and give the tensor other axes."""

import math
from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import DYNAMIC, Element, Shape, ShapeError, product, size_of, size_text
from edge_opt.shapes.rules import rule

_STRETCH = -1
_MAX_SQUEEZE_RANK = 8


@rule("RESHAPE", "TFLite, reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.
    """
    target = _reshape_target(call)
    text = "[" + ",".join("?" if size is None else str(size) for size in target) + "]"
    if target.count(_STRETCH) > 1:
        raise ShapeError(f"the shape {text} has {target.count(_STRETCH)} sizes of -1: expected at most one")
    if any(size is not None and size < _STRETCH for size in target):
        raise ShapeError(f"the shape {text} has a negative size")
    shape, sizes = call.shape(0), list(map(size_of, target))
    # Of two sizes, unknown or stretched, each depends on the other.
    if sizes.count(DYNAMIC) == 1:
        axis = sizes.index(DYNAMIC)
        sizes[axis] = _remaining(shape, (*sizes[:axis], *sizes[axis + 1 :]), stretched=_STRETCH in target)
    given, wanted = product(*shape), product(*sizes)
    if not (_may_hold(shape, wanted) and _may_hold(sizes, given)):
        counts = f"it has {size_text(given)} elements, the result {size_text(wanted)}"
        raise ShapeError(f"{call.text(0)} cannot become {text}: {counts}")
    return [tuple(sizes)]


def _reshape_target(call: Call) -> list[Element]:
    tensor = call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        return call.elements(1)
    sizes = call.listed("new_shape")
    return [] if sizes == [0] else list(sizes)


def _remaining(shape: Shape, others: Shape, *, stretched: bool) -> int:
    """The size that, with the others, makes as many elements as the shape has; -1 where that is not known.

    Where there are no elements the runtime stretches to 0, or counts without the zeros if the others have one too.
    """
    if min((*shape, *others), default=0) < 0 or (0 in (*shape, *others) and not stretched):
        return DYNAMIC
    if 0 in shape and 0 not in others:
        return 0
    return math.prod(filter(None, shape)) // math.prod(filter(None, others))


def _may_hold(sizes: Sequence[int], count: int) -> bool:
    """Whether the known sizes leave room for `count` elements, of which -1 says that nobody knows."""
    known = math.prod(size for size in sizes if size >= 0)
    return count < 0 or (count == 0 if known == 0 else count % known == 0)


@rule("EXPAND_DIMS", "TFLite, expand_dims.cc, ExpandTensorDim")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is put in at the position that input 1 gives, counted from the end where negative."""
    shape, axis = call.shape(0), call.scalar(1)
    if axis is None:
        return [(DYNAMIC,) * (len(shape) + 1)]
    position = call.axis(axis, len(shape) + 1, f"the result of {call.text(0)}")
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "TFLite, squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is."""
    shape, listed = call.shape(0, most=_MAX_SQUEEZE_RANK), call.listed("squeeze_dims")
    if not listed and min(shape, default=1) < 0:
        raise RefusedError("which axes have size 1 is not known", call.op)
    dropped = {
        call.axis_of(0, axis) for axis in listed or [axis for axis, size in enumerate(shape) if size == 1]
    }
    for axis in dropped:
        if shape[axis] not in (1, DYNAMIC):
            text = f"axis {axis} of {call.text(0)} has size {shape[axis]}"
            raise ShapeError(f"{text}: only size 1 can be dropped")
    return [tuple(size for axis, size in enumerate(shape) if axis not in dropped)]


@rule("BITCAST", "TFLite, bitcast.cc, CalculateShape")
def bitcast(call: Call) -> Results:
    """The bytes stay: a narrower type adds a last axis of the ratio, a wider one takes such an axis away."""
    shape = call.shape(0)
    before, after = call.op.input(0).dtype.bits, call.op.outputs[0].dtype.bits
    if before is None or after is None:
        raise ShapeError(f"a bitcast of {call.label(0)}: both types need a fixed size")
    if before == after:
        return [shape]
    if before > after:
        return [(*shape, before // after)]
    ratio = after // before
    if not shape or shape[-1] not in (DYNAMIC, ratio):
        raise ShapeError(f"the last axis of {call.text(0)} must have size {ratio} to make one wider element")
    return [shape[:-1]]
