"""What an operator needs of its operands to give some elements of its results: index sets along each axis, backwards.

Nothing here knows of attention. `Step` says in what an operator on less differs from the one on everything.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.rules import ELEMENTWISE
from edge_opt.ir import Operator, Shape

Indices = NDArray[np.int64]
Box = tuple[Indices | None, ...]
"""Which indices along each axis, ascending; None where all."""

_CUTTING = {"CONCATENATION", "SPLIT", "SPLIT_V", "SLICE", "STRIDED_SLICE"}


class NotReducibleError(Exception):
    """The region cannot be run on some rows only; the text says which operator is in the way."""


@dataclass(slots=True)
class Step:
    """One operator on less: what it gives (at least what was asked for), needs of each operand, and is told instead."""

    gives: list[Box]
    needs: dict[int, Box]
    steering: dict[int, NDArray[Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def cuts(operator: Operator, step: Step) -> Iterable[int]:
    """Where axes that carry rows are cut or joined."""
    if operator.name not in _CUTTING:
        return
    if operator.name == "CONCATENATION":
        axis = int(operator.option("axis")) % len(operator.output.shape)
        if step.gives[0][axis] is not None:
            yield from np.cumsum([0, *(operator.input(i).shape[axis] for i in range(len(operator.inputs)))])
        return
    source = operator.input(1 if operator.name == "SPLIT" else 0)
    need = next(iter(step.needs.values()))
    for axis, size in enumerate(source.shape):
        if need[axis] is None or operator.outputs[0].shape[axis] == size:
            continue
        if operator.name.startswith("SPLIT"):
            yield from np.cumsum([0, *(tensor.shape[axis] for tensor in operator.outputs)])
        else:
            begin = int(_constant(operator, 1)[axis])
            yield from (begin, begin + operator.output.shape[axis])


def sizes(shape: Shape, box: Box) -> Shape:
    """The shape of a box."""
    return tuple(size if indices is None else len(indices) for size, indices in zip(shape, box, strict=True))


def slim(box: Box, shape: Shape) -> Box:
    """The box with None for all indices of an axis."""
    return tuple(
        None if indices is None or len(indices) == size else indices
        for indices, size in zip(box, shape, strict=True)
    )


def union(one: Box, other: Box) -> Box:
    """The least box that has both."""
    return tuple(
        None if a is None or b is None else np.union1d(a, b) for a, b in zip(one, other, strict=True)
    )


def _union_of(asked: Iterable[Box | None]) -> Box:
    boxes = [box for box in asked if box is not None]
    found = boxes[0]
    for box in boxes[1:]:
        found = union(found, box)
    return found


def _put(box: Box, axis: int, indices: Indices | None) -> Box:
    return (*box[:axis], indices, *box[axis + 1 :])


def _constant(operator: Operator, index: int) -> NDArray[Any]:
    tensor = operator.input(index)
    if not tensor.has_numbers:
        raise NotReducibleError(f"{operator.name} '{operator.outputs[0].name}': steered by a variable")
    return tensor.array()


# What an operator needs of its operands


def _aligned(shape: Shape, result: Box) -> Box:
    """Axes are aligned from the right; an axis of size 1 serves all indices."""
    missing = len(result) - len(shape)
    return tuple(None if size == 1 else result[missing + axis] for axis, size in enumerate(shape))


def _elementwise(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    inputs = {index: tensor for index, tensor in enumerate(operator.inputs) if tensor is not None}
    if operator.name == "SELECT" and len({len(tensor.shape) for tensor in inputs.values()}) > 1:
        raise NotReducibleError(f"SELECT '{operator.output.name}': a condition of another rank")
    return Step([box], {index: _aligned(tensor.shape, box) for index, tensor in inputs.items()})


def _along_last_axis(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = (*_union_of(asked)[:-1], None)
    return Step([box], {0: box})


def _batch_matmul(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    sides = []
    for index, (kept, turned) in enumerate(((-2, "adj_x"), (-1, "adj_y"))):
        shape = operator.input(index).shape
        own: Box = (*_aligned(shape[:-2], box[:-2]), None, None)
        axis = len(shape) + (-3 - kept if operator.option(turned) else kept)
        sides.append(_put(own, axis, box[kept]))
    return Step([box], dict(enumerate(sides)))


def _fully_connected(operator: Operator, asked: Sequence[Box | None]) -> Step:
    source, result = operator.input(0), operator.output
    if source.shape[:-1] != result.shape[:-1]:
        raise NotReducibleError(f"FULLY_CONNECTED '{result.name}' changes the rank")
    box = (*_union_of(asked)[:-1], None)
    others = {
        index: (None,) * len(tensor.shape)
        for index, tensor in enumerate(operator.inputs)
        if index and tensor is not None
    }
    return Step([box], {0: box, **others})


def _concatenation(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    axis = int(operator.option("axis")) % len(box)
    wanted, begin = box[axis], 0
    needs: dict[int, Box] = {}
    for index in range(len(operator.inputs)):
        end = begin + operator.input(index).shape[axis]
        part = None if wanted is None else wanted[(wanted >= begin) & (wanted < end)] - begin
        if part is None or part.size:
            needs[index] = _put(box, axis, part)
        begin = end
    return Step([box], needs)


def _pack(operator: Operator, asked: Sequence[Box | None]) -> Step:
    axis = int(operator.option("axis")) % len(operator.output.shape)
    box = _put(_union_of(asked), axis, None)
    own = (*box[:axis], *box[axis + 1 :])
    return Step([box], dict.fromkeys(range(len(operator.inputs)), own))


def _unpack(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    axis = int(operator.option("axis")) % (len(box) + 1)
    return Step([box] * len(operator.outputs), {0: (*box[:axis], None, *box[axis:])})


def _split(operator: Operator, asked: Sequence[Box | None]) -> Step:
    """Parts stay of one size: each is asked for what any of them is."""
    box = _union_of(asked)
    steer = _constant(operator, 0)
    axis = int(steer.ravel()[0]) % len(box)
    size, own = operator.outputs[0].shape[axis], box[axis]
    count = len(operator.outputs)
    all_own = None if own is None else np.concatenate([part * size + own for part in range(count)])
    return Step([box] * count, {1: _put(box, axis, all_own)}, {0: steer})


def _split_v(operator: Operator, asked: Sequence[Box | None]) -> Step:
    lengths, steer = _constant(operator, 1), _constant(operator, 2)
    box = _union_of(asked_whole := [given for given in asked if given is not None])
    axis = int(steer.ravel()[0]) % len(box)
    if all(given[axis] is None for given in asked_whole):
        box = _put(box, axis, None)
        return Step([box] * len(operator.outputs), {0: box}, {1: lengths, 2: steer})
    parts, gives, begin = [], [], 0
    for tensor, given in zip(operator.outputs, asked, strict=True):
        size = tensor.shape[axis]
        own = np.zeros(1, np.int64) if given is None else given[axis]
        part = np.arange(size) if own is None else own
        parts.append(begin + part)
        gives.append(_put(box, axis, part))
        begin += size
    counts = np.array([len(part) for part in parts], lengths.dtype)
    return Step(gives, {0: _put(box, axis, np.concatenate(parts))}, {1: counts, 2: steer})


def _slice(operator: Operator, asked: Sequence[Box | None]) -> Step:
    """Where only some of the slice is wanted, its beginning becomes a part of which elements are read."""
    box = _union_of(asked)
    begin, size = _constant(operator, 1).copy(), _constant(operator, 2).copy()
    need: list[Indices | None] = [None] * len(box)
    for axis, wanted in enumerate(box):
        if wanted is not None:
            need[axis] = wanted + int(begin[axis])
            begin[axis], size[axis] = 0, len(wanted)
    return Step([box], {0: tuple(need)}, {1: begin, 2: size})


def _strided_slice(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    begin, end, strides = (_constant(operator, index).copy() for index in (1, 2, 3))
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    if any(operator.option(mask) for mask in masks) or len(begin) != len(box):
        raise NotReducibleError(f"STRIDED_SLICE '{operator.output.name}' changes the rank")
    need: list[Indices | None] = [None] * len(box)
    for axis, wanted in enumerate(box):
        if wanted is None:
            continue
        first = None if int(operator.option("begin_mask")) >> axis & 1 else int(begin[axis])
        behind = None if int(operator.option("end_mask")) >> axis & 1 else int(end[axis])
        places = np.arange(operator.input(0).shape[axis])[first : behind : int(strides[axis])]
        if strides[axis] < 0 or operator.option("offset"):
            raise NotReducibleError(f"STRIDED_SLICE '{operator.output.name}' runs backwards")
        need[axis] = places[wanted]
        begin[axis], end[axis], strides[axis] = 0, len(wanted), 1
    return Step([box], {0: tuple(need)}, {1: begin, 2: end, 3: strides})


def _transpose(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box, steer = _union_of(asked), _constant(operator, 1)
    need: list[Indices | None] = [None] * len(box)
    for place, axis in enumerate(steer):
        need[int(axis)] = box[place]
    return Step([box], {0: tuple(need)}, {1: steer})


def _broadcast_to(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box = _union_of(asked)
    shape = np.array(sizes(operator.output.shape, box), _constant(operator, 1).dtype)
    return Step([box], {0: _aligned(operator.input(0).shape, box)}, {1: shape})


def _reduce(operator: Operator, asked: Sequence[Box | None]) -> Step:
    box, steer = _union_of(asked), _constant(operator, 1)
    rank = len(operator.input(0).shape)
    axes = {int(axis) % rank for axis in steer.ravel()}
    kept = iter(box)
    if operator.option("keep_dims"):
        need: Box = tuple(None if axis in axes else box[axis] for axis in range(rank))
    else:
        need = tuple(None if axis in axes else next(kept) for axis in range(rank))
    return Step([box], {0: need}, {1: steer})


def _reshape(operator: Operator, asked: Sequence[Box | None]) -> Step:
    """Axes are matched in groups of equal size; in a group, the elements in row-major order stay what they are."""
    box = _union_of(asked)
    source, result = operator.input(0).shape, operator.output.shape
    need: list[Indices | None] = []
    for own, others in _groups(source, result):
        need += _regrouped([source[a] for a in own], [result[a] for a in others], [box[a] for a in others])
    shape = sizes(result, box)
    steering: dict[int, NDArray[Any]] = {}
    options: dict[str, Any] = {}
    if operator.name == "RESHAPE":
        options["new_shape"] = np.array(shape, np.int32)
    if len(operator.inputs) > 1 and operator.inputs[1] is not None:
        steer = _constant(operator, 1)
        steering[1] = np.array(shape, steer.dtype) if operator.name == "RESHAPE" else steer
    return Step([box], {0: tuple(need)}, steering, options)


def _groups(source: Shape, result: Shape) -> Iterable[tuple[list[int], list[int]]]:
    """Neighbouring axes of both sides with the same number of elements, as few as can be."""
    one, other = 0, 0
    while one < len(source) or other < len(result):
        own: list[int] = []
        others: list[int] = []
        left = right = 1
        while not (own or others) or left != right:
            if one < len(source) and (left <= right or other == len(result)):
                own.append(one)
                left *= source[one]
                one += 1
            else:
                others.append(other)
                right *= result[other]
                other += 1
        # Axes of size 1 belong to whatever they stand behind.
        while one < len(source) and source[one] == 1:
            own.append(one)
            one += 1
        while other < len(result) and result[other] == 1:
            others.append(other)
            other += 1
        yield own, others


def _regrouped(own: Sequence[int], others: Sequence[int], asked: Sequence[Indices | None]) -> list[Any]:
    if all(indices is None for indices in asked):
        return [None] * len(own)
    each = [
        np.arange(size) if indices is None else indices for size, indices in zip(others, asked, strict=True)
    ]
    flat = np.ravel_multi_index(np.meshgrid(*each, indexing="ij"), others).ravel()
    found = [np.unique(places) for places in np.unravel_index(flat, own)] if own else []
    if np.prod([len(places) for places in found], dtype=np.int64) != flat.size:
        raise NotReducibleError("the rows are no block of a RESHAPE's operand")
    return found


RULES: dict[str, Callable[[Operator, Sequence[Box | None]], Step]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("SOFTMAX", "LOG_SOFTMAX"), _along_last_axis),
    **dict.fromkeys(("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"), _reduce),
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS"), _reshape),
    "BATCH_MATMUL": _batch_matmul,
    "FULLY_CONNECTED": _fully_connected,
    "CONCATENATION": _concatenation,
    "PACK": _pack,
    "UNPACK": _unpack,
    "SPLIT": _split,
    "SPLIT_V": _split_v,
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
    "TRANSPOSE": _transpose,
    "BROADCAST_TO": _broadcast_to,
}
