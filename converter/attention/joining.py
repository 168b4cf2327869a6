"""Joins the pieces of all heads to the tensor in which they lie side by side.

    N x [1,1,T,H] -> [1,T,(N)(H)]              one CONCATENATION along H
    N x [1,T,H]   -> [1,T,(N),H]               one PACK, where heads have no axis
    N x [1,1,T,H] -> [1,(K),H,(G)(T)]          one CONCATENATION along T for every k, then one along K

`(N)` is the axis of the heads: docs/head-axis.md.
"""

import math
from collections.abc import Mapping, Sequence

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factor
from edge_opt.attention.labelled import Labelled
from edge_opt.base.words import name_below
from edge_opt.ir import DType, Shape, Tensor
from edge_opt.shapes.dimension import with_axis

# Types of the runtime's SPLIT (LiteRT, kernels/split.cc); others are cut by SLICE, and joined without PACK.
SPLIT_TYPES = frozenset(
    {DType.FLOAT32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64}
)


def join_heads(assembly: Assembly, heads: Sequence[Tensor], whole: Labelled) -> None:
    """Define the `whole` tensor from the pieces of all heads, innermost label first."""
    output = whole.tensor
    factors = fx.merge_neighbours(fx.all_factors(whole.factored))
    labelled = [place for place, factor in enumerate(factors) if factor.stride]
    tensors = dict(enumerate(heads))
    for place in reversed(labelled):
        is_outermost = place == labelled[0]
        packs = is_outermost and not whole.keep_axes and output.dtype in SPLIT_TYPES
        front = fx.axis_size(before for before in factors[:place] if not before.stride)
        joined: dict[int, Tensor] = {}
        for first, group in _groups(tensors, factors[place]).items():
            parts = _joinable(assembly, group, front)
            if packs and _pack(assembly, parts, front, output):
                return
            joined[first] = _joined(assembly, parts, front, output)
        tensors = joined
    (last,) = tensors.values()
    if last is not output:
        assembly.reshape_to(last, output)


def _groups(tensors: Mapping[int, Tensor], digit: Factor) -> dict[int, list[Tensor]]:
    """The tensors whose heads differ only in one digit, by the head in which that digit is 0."""
    groups: dict[int, list[Tensor]] = {}
    for head, tensor in tensors.items():
        first = head - digit.digit(head) * digit.stride
        groups.setdefault(first, []).append(tensor)
    return groups


def _joinable(assembly: Assembly, parts: list[Tensor], front: int) -> list[Tensor]:
    """The parts in a shape with `front` elements before an axis, if possible as they were before a RESHAPE.

    The joined tensor is then reshaped instead of every part.
    """
    sources = list(map(assembly.before_reshape, parts))
    if _axes_after(front, sources[0].shape):
        return sources
    if _axes_after(front, parts[0].shape):
        return parts
    flat = (front, parts[0].elements // front)
    return [assembly.reshaped(part, flat, name_below(part.name, "flat")) for part in parts]


def _pack(assembly: Assembly, parts: list[Tensor], front: int, output: Tensor) -> bool:
    """Define `output` as a PACK of the parts along a new axis after `front` elements; False if there is none."""
    shape = parts[0].shape
    for axis in _axes_after(front, shape):
        if output.shape == (*shape[:axis], len(parts), *shape[axis:]):
            assembly.emit("PACK", parts, output, values_count=len(parts), axis=axis)
            return True
    return False


def _joined(assembly: Assembly, parts: list[Tensor], front: int, output: Tensor) -> Tensor:
    """A CONCATENATION of the parts along an axis after `front` elements: the output, if any axis gives its shape."""
    shape = parts[0].shape
    axes = _axes_after(front, shape)
    shapes = {axis: with_axis(shape, axis, shape[axis] * len(parts)) for axis in axes}
    for axis in axes:
        if shapes[axis] == output.shape:
            return assembly.emit("CONCATENATION", parts, output, axis=axis)
    made = assembly.tensor(name_below(output.name, "heads"), shapes[axes[-1]], output)
    return assembly.emit("CONCATENATION", parts, made, axis=axes[-1])


def _axes_after(front: int, shape: Shape) -> list[int]:
    """Axes with `front` elements before them, along which parts can be joined."""
    return [axis for axis in range(len(shape)) if math.prod(shape[:axis]) == front]
