"""Rules of operators that keep every element in its order and give the tensor other axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.ir.dtypes import DType
from edge_opt.shapes.call import Call, Element, Results, as_dimension
from edge_opt.shapes.dimension import (
    DYNAMIC,
    Dim,
    Shape,
    dimension_text,
    element_count,
    is_static,
    shape_text,
)
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

_INT32 = 2
_STRETCH = -1
_MAX_SQUEEZE_RANK = 8


@rule("RESHAPE", inputs=(1, 2), optional=(1,))
def reshape(call: Call) -> Results:
    """The result has the shape that input 1 gives, a vector of int32, else the one in the options.

    One size may be -1: it takes what is left of the elements. `[0]` in the options stands for a scalar.

    Source: TFLite, reshape.cc, GetOutputShape and ResolveOutputShape.
    """
    target = _reshape_target(call)
    if target is None:
        return [None]
    return [resolve_reshape(call.shapes[0], target, call.label(0))]


def _reshape_target(call: Call) -> list[Element] | None:
    if call.has(1):
        value, tensor = call.known(1), call.op.inputs[1]
        assert tensor is not None
        rank = value.ndim if value is not None else None if call.shapes[1] is None else len(call.shapes[1])
        if tensor.dtype == _INT32 and rank in (None, 1):
            return None if rank is None else call.elements(1)
    sizes = [int(size) for size in call.option("new_shape", ())]
    return [] if sizes == [0] else list(sizes)


def resolve_reshape(shape: Shape | None, target: Sequence[Element], label: str) -> Shape:
    """Return the shape that a reshape of `shape` to `target` has; None in `target` is an unknown size.

    A dynamic dimension that stands alone on both sides keeps its name: `[T,4,8]` to `[-1,32]` is `[T,32]`.

    Raises:
        ShapeError: the elements cannot be as many on both sides, or two sizes are -1.
    """
    stretches = [axis for axis, size in enumerate(target) if _is_stretch(size)]
    if len(stretches) > 1:
        raise ShapeError(
            f"the shape {_target_text(target)} has -1 at {len(stretches)} axes: expected at most one"
        )
    if any(size is not None and size < _STRETCH for size in target):
        raise ShapeError(f"the shape {_target_text(target)} has a negative size")
    dims = [as_dimension(size) for size in target]
    if shape is None:
        return tuple(dims)
    open_axes = [axis for axis, size in enumerate(target) if size is None or _is_stretch(size)]
    if len(open_axes) == 1:
        axis = open_axes[0]
        rest = dims[:axis] + dims[axis + 1 :]
        dims[axis] = _remaining(shape, rest, label, target, exact=bool(stretches))
    _check_counts(shape, dims, label)
    return tuple(dims)


def _is_stretch(size: Element) -> bool:
    return size == _STRETCH and not isinstance(size, Dim)


def _remaining(
    shape: Shape, rest: Sequence[int], label: str, target: Sequence[Element], *, exact: bool
) -> int:
    """The size that makes `rest` times it as many elements as `shape` has; -1 where that is not known."""
    have, need = _cancel_names(shape, rest)
    if 0 in have or 0 in need:
        return _remaining_of_none(have, need) if exact else DYNAMIC
    given, wanted = element_count(d for d in have if d >= 0), element_count(d for d in need if d >= 0)
    dynamic = [dim for dim in have if dim < 0]
    if any(dim < 0 for dim in need):
        return DYNAMIC
    if not dynamic:
        if given % wanted:
            raise ShapeError(
                f"{label} {shape_text(shape)} has {given} elements, which the shape {_target_text(target)} "
                f"cannot hold: expected a multiple of {wanted}"
            )
        return given // wanted
    return dynamic[0] if len(dynamic) == 1 and given == wanted else DYNAMIC


def _remaining_of_none(have: Sequence[int], need: Sequence[int]) -> int:
    """With 0 in play the runtime takes 0, or counts without the zeros where the target has one too."""
    if not is_static(tuple(have)) or not is_static(tuple(need)):
        return DYNAMIC
    if 0 not in need:
        return 0
    return element_count(d for d in have if d) // element_count(d for d in need if d)


def _cancel_names(shape: Sequence[int], rest: Sequence[int]) -> tuple[list[int], list[int]]:
    """Take named dimensions that stand on both sides off both."""
    need = list(rest)
    have: list[int] = []
    for dim in shape:
        index = next((i for i, other in enumerate(need) if _same_name(dim, other)), None)
        if index is None:
            have.append(dim)
        else:
            del need[index]
    return have, need


def _same_name(left: int, right: int) -> bool:
    return isinstance(left, Dim) and isinstance(right, Dim) and left.name == right.name


def _check_counts(shape: Shape, dims: Sequence[int], label: str) -> None:
    """Refuse counts that no choice of the dynamic sizes makes equal."""
    given, wanted = element_count(shape), element_count(dims)
    if given >= 0 and wanted >= 0:
        fits = given == wanted
    elif given < 0 <= wanted:
        fits = _divides(shape, wanted)
    elif wanted < 0 <= given:
        fits = _divides(dims, given)
    else:
        fits = True
    if not fits:
        raise ShapeError(
            f"{label} {shape_text(shape)} cannot become {shape_text(dims)}: it has {dimension_text(given)} elements, "
            f"the result {dimension_text(wanted)}"
        )


def _divides(dims: Sequence[int], count: int) -> bool:
    factor = element_count(dim for dim in dims if dim >= 0)
    return count == 0 if factor == 0 else count % factor == 0


def _target_text(target: Sequence[Element]) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in target) + "]"


@rule("EXPAND_DIMS", inputs=2)
def expand_dims(call: Call) -> Results:
    """An axis of size 1 is put in at the position that input 1 gives, counted from the end where negative.

    Source: TFLite, expand_dims.cc, ExpandTensorDim.
    """
    shape, axis = call.shapes[0], call.scalar(1)
    if shape is None:
        return [None]
    if axis is None:
        return [(DYNAMIC,) * (len(shape) + 1)]
    position = call.axis(axis, len(shape) + 1, f"the result of {call.described(0)}")
    return [(*shape[:position], 1, *shape[position:])]


@rule("SQUEEZE", inputs=1)
def squeeze(call: Call) -> Results:
    """The axes in `squeeze_dims`, of size 1 each, are dropped; without any, every axis of size 1 is.

    Source: TFLite, squeeze.cc, Prepare.
    """
    shape = call.require_rank(0, 0, _MAX_SQUEEZE_RANK)
    if shape is None:
        return [None]
    listed = [int(axis) for axis in call.option("squeeze_dims", ())]
    if not listed:
        return [None if min(shape, default=1) < 0 else tuple(dim for dim in shape if dim != 1)]
    dropped = {call.axis_of(0, axis) for axis in listed}
    for axis in dropped:
        if shape[axis] >= 0 and shape[axis] != 1:
            raise ShapeError(
                f"axis {axis} of {call.described(0)} has size {shape[axis]}: only size 1 can be dropped"
            )
    return [tuple(dim for axis, dim in enumerate(shape) if axis not in dropped)]


@rule("BITCAST", inputs=1)
def bitcast(call: Call) -> Results:
    """The bytes stay: a narrower type adds a last axis of the ratio, a wider one takes such an axis away.

    Source: TFLite, bitcast.cc, CalculateShape.
    """
    shape, source = call.shapes[0], call.op.inputs[0]
    assert source is not None
    before, after = DType(source.dtype).bits, DType(call.op.outputs[0].dtype).bits
    if before is None or after is None:
        raise ShapeError(f"a bitcast of {call.label(0)}: both types need a fixed size")
    if shape is None or before == after:
        return [shape]
    if before > after:
        return [(*shape, before // after)]
    if not shape or shape[-1] not in (DYNAMIC, after // before):
        raise ShapeError(
            f"the last axis of {call.described(0)} must have size {after // before} to make one wider element"
        )
    return [shape[:-1]]
