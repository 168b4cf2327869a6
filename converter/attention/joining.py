"""Joins the pieces of all heads to the tensor in which they lie side by side.

N x [1,1,T,H] -> [1,T,(N)(H)]              one CONCATENATION along H
N x [1,T,H]   -> [1,T,(N),H]               one PACK, where heads have no axis
N x [1,1,T,H] -> [1,(K),H,(G)(T)]          one CONCATENATION along T for every k, then one along K
"""

import math
from collections.abc import Sequence

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.block import Form
from edge_opt.attention.factors import Factored
from edge_opt.base.words import name_below
from edge_opt.ir import DType, Shape, Tensor
from edge_opt.shapes.dimension import with_axis

# Types that the runtime's kernels support (LiteRT, kernels/split.cc and unpack.cc); others use SLICE, or SPLIT.
SPLIT_TYPES = frozenset({DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})


def join_heads(
    assembly: Assembly, form: Form, heads: Sequence[Tensor], output: Tensor, factored: Factored
) -> None:
    """Define `output`, in which heads lie as in `factored`, from the pieces of all heads, innermost label first."""
    tensors = dict(enumerate(heads))
    factors = fx.merge_neighbours(fx.all_factors(factored))
    places = [place for place, factor in enumerate(factors) if factor.stride]
    for place in reversed(places):
        factor = factors[place]
        front = fx.axis_size(before for before in factors[:place] if not before.stride)
        groups: dict[int, list[Tensor]] = {}  # the pieces that differ only in this digit of the head
        for head in sorted(tensors):
            first = head - factor.digit(head) * factor.stride
            groups.setdefault(first, []).append(tensors[head])
        if place == places[0]:
            _join_into(assembly, form, groups[0], front, output)
            return
        tensors = {head: _joined(assembly, parts, front, output) for head, parts in groups.items()}


def _join_into(assembly: Assembly, form: Form, parts: list[Tensor], front: int, output: Tensor) -> None:
    """Define `output` as the parts side by side along an axis after `front` elements."""
    parts = _joinable(assembly, parts, front)
    if not form.keep and output.dtype in SPLIT_TYPES:
        axis = _packed_axis(parts, front, output.shape)
        if axis is not None:
            assembly.emit("PACK", parts, output, values_count=len(parts), axis=axis)
            return
    axis = _joined_axis(parts, front, output.shape)
    if _joined_shape(parts, axis) == output.shape:
        assembly.emit("CONCATENATION", parts, output, axis=axis)
    else:
        assembly.reshape_to(_concatenated(assembly, parts, axis, output), output)


def _joined(assembly: Assembly, parts: list[Tensor], front: int, output: Tensor) -> Tensor:
    """A new tensor with the parts side by side along an axis after `front` elements."""
    parts = _joinable(assembly, parts, front)
    return _concatenated(assembly, parts, _joined_axis(parts, front, output.shape), output)


def _joinable(assembly: Assembly, parts: list[Tensor], front: int) -> list[Tensor]:
    """The parts in a shape with `front` elements before an axis, if possible as they were before a RESHAPE.

    The joined tensor is then reshaped instead of every part.
    """
    sources = list(map(assembly.source, parts))
    if _places(sources[0].shape, front):
        return sources
    if _places(parts[0].shape, front):
        return parts
    flat = (front, parts[0].elements // front)
    return [assembly.reshaped(part, flat, name_below(part.name, "flat")) for part in parts]


def _packed_axis(parts: list[Tensor], front: int, target: Shape) -> int | None:
    """The axis along which a PACK of the parts gives the target's shape."""
    shape = parts[0].shape
    for axis in _places(shape, front):
        if target == (*shape[:axis], len(parts), *shape[axis:]):
            return axis
    return None


def _joined_axis(parts: list[Tensor], front: int, target: Shape) -> int:
    """The axis along which a CONCATENATION gives the target's shape; else the last possible one."""
    places = _places(parts[0].shape, front)
    return next((axis for axis in places if _joined_shape(parts, axis) == target), places[-1])


def _joined_shape(parts: list[Tensor], axis: int) -> Shape:
    shape = parts[0].shape
    return with_axis(shape, axis, shape[axis] * len(parts))


def _concatenated(assembly: Assembly, parts: list[Tensor], axis: int, output: Tensor) -> Tensor:
    made = assembly.tensor(name_below(output.name, "heads"), _joined_shape(parts, axis), output)
    return assembly.emit("CONCATENATION", parts, made, axis=axis)


def _places(shape: Shape, front: int) -> list[int]:
    """Axes with `front` elements before them, along which parts can be joined."""
    return [axis for axis in range(len(shape)) if math.prod(shape[:axis]) == front]
