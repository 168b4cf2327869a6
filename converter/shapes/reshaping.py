"""Rules of operators that keep every element in its order and give the tensor other axes."""

import math
from collections.abc import Sequence

from edge_opt.ir.dtypes import DType
from edge_opt.ir.refusal import RefusedError
from edge_opt.shapes.call import Call, Results
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Element,
    ShapeError,
    as_dimension,
    dimension_text,
    element_count,
    is_negative,
    is_number,
    shape_text,
)
from edge_opt.shapes.rules import rule

_STRETCH = -1
_MAX_SQUEEZE_RANK = 8


@rule("RESHAPE", "TFLite, reshape.cc, GetOutputShape and ResolveOutputShape")
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.
    """
    target = _reshape_target(call)
    stretches = [axis for axis, size in enumerate(target) if is_number(size) and size == _STRETCH]
    if len(stretches) > 1:
        raise ShapeError(
            f"the shape {_target_text(target)} has -1 at {len(stretches)} axes: expected at most one"
        )
    if any(is_negative(size) and size != _STRETCH for size in target):
        raise ShapeError(f"the shape {_target_text(target)} has a negative size")
    dims = [as_dimension(size) for size in target]
    open_axes = [*stretches, *(axis for axis, size in enumerate(target) if size is None)]
    if len(open_axes) == 1:
        axis = open_axes[0]
        rest = dims[:axis] + dims[axis + 1 :]
        dims[axis] = _remaining(call, rest, target, exact=bool(stretches))
    shape = call.shape(0)
    given, wanted = element_count(shape), element_count(dims)
    if not (_may_hold(shape, wanted) and _may_hold(dims, given)):
        raise ShapeError(
            f"{call.described(0)} cannot become {shape_text(dims)}: it has {dimension_text(given)} elements, "
            f"the result {dimension_text(wanted)}"
        )
    return [tuple(dims)]


def _reshape_target(call: Call) -> list[Element]:
    tensor = call.op.inputs[1] if call.has(1) else None
    if tensor is not None and tensor.dtype == DType.INT32 and len(call.shape(1)) == 1:
        return call.elements(1)
    sizes = call.listed("new_shape")
    return [] if sizes == [0] else list(sizes)


def _remaining(call: Call, rest: Sequence[int], target: Sequence[Element], *, exact: bool) -> int:
    """The size that makes `rest` times it as many elements as the input has; -1 where that is not known."""
    have, need = call.shape(0), rest
    if 0 in have or 0 in need:
        return _remaining_of_none(have, need) if exact else DYNAMIC
    if any(dim < 0 for dim in (*have, *need)):
        return DYNAMIC
    given, wanted = math.prod(have), math.prod(need)
    if given % wanted:
        raise ShapeError(
            f"{call.described(0)} has {given} elements, which the shape {_target_text(target)} "
            f"cannot hold: expected a multiple of {wanted}"
        )
    return given // wanted


def _remaining_of_none(have: Sequence[int], need: Sequence[int]) -> int:
    """With 0 in play the runtime takes 0, or counts without the zeros where the target has one too."""
    if min(*have, *need, 0) < 0:
        return DYNAMIC
    if 0 not in need:
        return 0
    return math.prod(dim for dim in have if dim) // math.prod(dim for dim in need if dim)


def _known_product(dims: Sequence[int]) -> int:
    return math.prod(dim for dim in dims if dim >= 0)


def _may_hold(dims: Sequence[int], count: int) -> bool:
    """Whether the known sizes leave room for `count` elements, of which -1 says that nobody knows."""
    known = _known_product(dims)
    return count < 0 or (count == 0 if known == 0 else count % known == 0)


def _target_text(target: Sequence[Element]) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in target) + "]"


@rule("EXPAND_DIMS", "TFLite, expand_dims.cc, ExpandTensorDim")
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is put in at the position that input 1 gives, counted from the end where negative."""
    shape, axis = call.shape(0), call.scalar(1)
    if not is_number(axis):
        return [(DYNAMIC,) * (len(shape) + 1)]
    position = call.axis(axis, len(shape) + 1, f"the result of {call.described(0)}")
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", "TFLite, squeeze.cc, Prepare")
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is."""
    shape = call.shape(0, most=_MAX_SQUEEZE_RANK)
    listed = call.listed("squeeze_dims")
    if not listed and min(shape, default=1) < 0:
        raise RefusedError("which axes have size 1 is not known", call.op)
    if not listed:
        return [tuple(dim for dim in shape if dim != 1)]
    dropped = {call.axis_of(0, axis) for axis in listed}
    for axis in dropped:
        if shape[axis] >= 0 and shape[axis] != 1:
            raise ShapeError(
                f"axis {axis} of {call.described(0)} has size {shape[axis]}: only size 1 can be dropped"
            )
    return [tuple(dim for axis, dim in enumerate(shape) if axis not in dropped)]


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
    if not shape or shape[-1] not in (DYNAMIC, after // before):
        raise ShapeError(
            f"the last axis of {call.described(0)} must have size {after // before} to make one wider element"
        )
    return [shape[:-1]]
