"""What an operator needs of its operands to give some elements of its results: index sets along each axis, backwards.

Nothing here knows of attention. `Step` says in what an operator on less differs from the one on everything.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.ir import Operator, Shape
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.refusal import RefusedError

Indices = NDArray[np.int64]
Box = tuple[Indices | None, ...]
"""Which indices along each axis, ascending; None where all."""


@dataclass(slots=True)
class Step:
    """One operator on less: what it needs of each operand, and in what it differs from the one on everything.

    `steering` and `options` are what it is told instead. `gives` is what it gives of each result (at least what was
    asked for), by default just that. `cuts` are the places where axes that carry rows are cut or joined.
    """

    needs: dict[int, Box]
    steering: dict[int, NDArray[Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gives: list[Box] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)


def sizes(shape: Shape, box: Box) -> Shape:
    """The shape of a box."""
    return tuple(size if indices is None else len(indices) for size, indices in zip(shape, box, strict=True))


def slim(box: Box, shape: Shape) -> Box:
    """The box with None for all indices of an axis."""
    both = zip(box, shape, strict=True)
    return tuple(None if indices is None or len(indices) == size else indices for indices, size in both)


def union(one: Box, other: Box) -> Box:
    """The least box that has both."""
    both = zip(one, other, strict=True)
    return tuple(None if a is None or b is None else np.union1d(a, b) for a, b in both)


def step_of(operator: Operator, wanted: Sequence[Box | None]) -> Step | None:
    """The operator on what is wanted of its results (None: nobody reads it); None where it has no rule.

    Raises:
        RefusedError: the rule has no answer.
    """
    box = reduce(union, [each for each in wanted if each is not None])
    if operator.name in ("SPLIT", "SPLIT_V"):
        step = _split(operator, box, wanted)
    elif operator.name in _RULES:
        step = _RULES[operator.name](operator, box)
    else:
        return None
    step.gives = step.gives or [box] * len(operator.outputs)
    return step


def _put(box: Box, axis: int, indices: Indices | None) -> Box:
    return (*box[:axis], indices, *box[axis + 1 :])


def _constant(operator: Operator, index: int) -> NDArray[Any]:
    tensor = operator.input(index)
    if not tensor.has_numbers:
        raise RefusedError("a variable steers it", operator)
    return tensor.array()


# What an operator needs of its operands


def _aligned(shape: Shape, result: Box) -> Box:
    """Axes are aligned from the right; an axis of size 1 serves all indices."""
    missing = len(result) - len(shape)
    return tuple(None if size == 1 else result[missing + axis] for axis, size in enumerate(shape))


def _elementwise(operator: Operator, box: Box) -> Step:
    inputs = {index: tensor for index, tensor in enumerate(operator.inputs) if tensor is not None}
    if operator.name == "SELECT" and len({len(tensor.shape) for tensor in inputs.values()}) > 1:
        raise RefusedError("the condition has another rank", operator)
    return Step({index: _aligned(tensor.shape, box) for index, tensor in inputs.items()})


def _along_last_axis(_: Operator, box: Box) -> Step:
    whole = (*box[:-1], None)
    return Step({0: whole}, gives=[whole])


def _batch_matmul(operator: Operator, box: Box) -> Step:
    sides = []
    for index, (kept, turned) in enumerate(((-2, "adj_x"), (-1, "adj_y"))):
        shape = operator.input(index).shape
        whole: Box = (*_aligned(shape[:-2], box[:-2]), None, None)
        axis = len(shape) + (-3 - kept if operator.option(turned) else kept)
        sides.append(_put(whole, axis, box[kept]))
    return Step(dict(enumerate(sides)))


def _fully_connected(operator: Operator, box: Box) -> Step:
    if operator.input(0).shape[:-1] != operator.output.shape[:-1]:
        raise RefusedError("it changes the rank", operator)
    step = _along_last_axis(operator, box)
    weights = {index: tensor for index, tensor in enumerate(operator.inputs) if index and tensor is not None}
    step.needs.update({index: (None,) * len(tensor.shape) for index, tensor in weights.items()})
    return step


def _concatenation(operator: Operator, box: Box) -> Step:
    axis = int(operator.option("axis")) % len(box)
    wanted, begin = box[axis], 0
    step = Step({})
    for index in range(len(operator.inputs)):
        end = begin + operator.input(index).shape[axis]
        part = None if wanted is None else wanted[(wanted >= begin) & (wanted < end)] - begin
        if part is None or part.size:
            step.needs[index] = _put(box, axis, part)
        if wanted is not None:
            step.cuts += [begin, end]
        begin = end
    return step


def _pack(operator: Operator, box: Box) -> Step:
    axis = int(operator.option("axis")) % len(box)
    each = (*box[:axis], *box[axis + 1 :])
    return Step(dict.fromkeys(range(len(operator.inputs)), each), gives=[_put(box, axis, None)])


def _unpack(operator: Operator, box: Box) -> Step:
    axis = int(operator.option("axis")) % (len(box) + 1)
    return Step({0: (*box[:axis], None, *box[axis:])})


def _split(operator: Operator, box: Box, wanted: Sequence[Box | None]) -> Step:
    """Parts of a SPLIT stay of one size: each gives what is wanted of any. Those of a SPLIT_V give their own.

    A part of a SPLIT_V that nobody reads gives its first element.
    """
    varied = operator.name == "SPLIT_V"
    data, steers = (0, (1, 2)) if varied else (1, (0,))
    steering = {index: _constant(operator, index) for index in steers}
    axis = int(steering[steers[-1]].ravel()[0]) % len(box)
    if varied:
        each = [np.zeros(1, np.int64) if part is None else part[axis] for part in wanted]
    else:
        each = [box[axis]] * len(wanted)
    if all(part is None for part, whole in zip(each, wanted, strict=True) if whole is not None):
        return Step({data: box}, steering)
    lengths = [tensor.shape[axis] for tensor in operator.outputs]
    bounds = np.cumsum([0, *lengths]).tolist()
    parts = [np.arange(n) if part is None else part for n, part in zip(lengths, each, strict=True)]
    need = np.concatenate([begin + part for begin, part in zip(bounds[:-1], parts, strict=True)])
    if varied:
        steering[1] = np.array([len(part) for part in parts], steering[1].dtype)
    gives = [_put(box, axis, part) for part in parts]
    return Step({data: _put(box, axis, need)}, steering, gives=gives, cuts=bounds)


def _slice(operator: Operator, box: Box) -> Step:
    """Where only some of the slice is wanted, its beginning becomes a part of which elements are read."""
    strided = operator.name == "STRIDED_SLICE"
    steering = {index: _constant(operator, index).copy() for index in range(1, len(operator.inputs))}
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask") if strided else ()
    if any(operator.option(mask) for mask in masks) or len(steering[1]) != len(box):
        raise RefusedError("it changes the rank", operator)
    step = Step({}, steering)
    need: list[Indices | None] = [None] * len(box)
    for axis, wanted in enumerate(box):
        if wanted is None:
            continue
        size, length = operator.input(0).shape[axis], operator.output.shape[axis]
        begin = int(steering[1][axis])
        places = np.arange(begin, begin + length)
        if strided:
            if steering[3][axis] < 0 or operator.option("offset"):
                raise RefusedError("it runs backwards", operator)
            first = None if int(operator.option("begin_mask")) >> axis & 1 else begin
            behind = None if int(operator.option("end_mask")) >> axis & 1 else int(steering[2][axis])
            places = np.arange(size)[first : behind : int(steering[3][axis])]
            steering[3][axis] = 1
        need[axis] = places[wanted]
        step.cuts += [] if length == size else [begin, begin + length]
        steering[1][axis], steering[2][axis] = 0, len(wanted)
    step.needs[0] = tuple(need)
    return step


def _transpose(operator: Operator, box: Box) -> Step:
    steer = _constant(operator, 1)
    need: list[Indices | None] = [None] * len(box)
    for place, axis in enumerate(steer):
        need[int(axis)] = box[place]
    return Step({0: tuple(need)}, {1: steer})


def _broadcast_to(operator: Operator, box: Box) -> Step:
    shape = np.array(sizes(operator.output.shape, box), _constant(operator, 1).dtype)
    return Step({0: _aligned(operator.input(0).shape, box)}, {1: shape})


def _reduce(operator: Operator, box: Box) -> Step:
    steer = _constant(operator, 1)
    rank = len(operator.input(0).shape)
    axes = {int(axis) % rank for axis in steer.ravel()} if rank else set()
    others = (axis for axis in range(rank) if operator.option("keep_dims") or axis not in axes)
    place = {axis: index for index, axis in enumerate(others)}
    return Step({0: tuple(None if axis in axes else box[place[axis]] for axis in range(rank))}, {1: steer})


def _reshape(operator: Operator, box: Box) -> Step:
    """Axes are matched in groups of equal size; in a group, the elements in row-major order stay what they are."""
    source, result = operator.input(0).shape, operator.output.shape
    need: list[Indices | None] = []
    for own, others in _groups(source, result):
        need += _regrouped(
            [source[a] for a in own], [result[a] for a in others], tuple(box[a] for a in others)
        )
    step = Step({0: tuple(need)})
    if len(operator.inputs) > 1 and operator.inputs[1] is not None:
        step.steering[1] = _constant(operator, 1)
    if operator.name == "RESHAPE":
        shape = np.array(sizes(result, box), np.int32)
        step.options["new_shape"] = shape
        step.steering.update({index: shape.astype(steer.dtype) for index, steer in step.steering.items()})
    return step


def _groups(source: Shape, result: Shape) -> Iterable[tuple[range, range]]:
    """Neighbouring axes of both sides with the same number of elements, as few as can be.

    Axes of size 1 belong to whatever they stand behind.
    """
    own, others = np.cumprod(source).tolist(), np.cumprod(result).tolist()
    begin = start = 0
    for product in sorted({1, *own} & {1, *others}):
        end, stop = bisect_right(own, product), bisect_right(others, product)
        yield range(begin, end), range(start, stop)
        begin, start = end, stop


def _regrouped(own: Sequence[int], others: Sequence[int], wanted: Box) -> Sequence[Indices | None]:
    """The indices along the `own` axes of an operand that give those `wanted` of a result, both of a group."""
    if all(indices is None for indices in wanted):
        return [None] * len(own)
    both = zip(others, wanted, strict=True)
    each = [np.arange(size) if indices is None else indices for size, indices in both]
    flat = np.ravel_multi_index(np.meshgrid(*each, indexing="ij"), others).ravel()
    needed = [np.unique(places) for places in np.unravel_index(flat, own)] if own else []
    if np.prod([len(places) for places in needed], dtype=np.int64) != flat.size:
        raise RefusedError("the rows are no block of a RESHAPE's operand")
    return needed


_RULES: dict[str, Callable[[Operator, Box], Step]] = {
    **dict.fromkeys(operators_that(Effect.ELEMENTWISE), _elementwise),
    **dict.fromkeys(operators_that(Effect.ALONG_ROWS), _along_last_axis),
    **dict.fromkeys(operators_that(Effect.REDUCTION), _reduce),
    **dict.fromkeys(operators_that(Effect.REARRANGING), _reshape),
    "BATCH_MATMUL": _batch_matmul,
    "FULLY_CONNECTED": _fully_connected,
    "CONCATENATION": _concatenation,
    "PACK": _pack,
    "UNPACK": _unpack,
    **dict.fromkeys(("SLICE", "STRIDED_SLICE"), _slice),
    "TRANSPOSE": _transpose,
    "BROADCAST_TO": _broadcast_to,
}
