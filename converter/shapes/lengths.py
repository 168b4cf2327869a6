"""Sizes for a model whose lengths are known only at run time, such that all its operators accept them.

Each axis that the file leaves open in a graph input gets a prime, in every choice another. Two axes get the same one
where an operator does not take its inputs otherwise. Nothing here changes a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np

from edge_opt.ir import Model, Operator, Tensor
from edge_opt.shapes.call import Array, constants_of
from edge_opt.shapes.dimension import Shape, ShapeError
from edge_opt.shapes.inference import derive
from edge_opt.shapes.report import ShapeReport
from edge_opt.shapes.rules import infer_operator

_FIRST, _LAST = 11, 4000
_ATTEMPTS = 50
_NEAREST = 6
_Axis: TypeAlias = tuple[Tensor, int]
_Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """One choice: the shape that every tensor has with it, and the small numbers that follow from shapes.

    `tells`: results at it can differ from head to head; over a single key the probabilities are 1 in all of them.
    """

    shapes: dict[Tensor, Shape]
    values: dict[Tensor, Array]
    tells: bool = True


def choose_lengths(model: Model) -> tuple[Lengths, ...]:
    """Two choices that agree in no open size, and all lengths 1 where the operators take that.

    Nothing where no length is open, or no choice was found.
    """
    axes = list(_open_inputs(model))
    if not axes:
        return ()
    divisors = _divisors_in(model)
    primes = [p for p in range(_FIRST, _LAST) if len(_divisors(p)) == 1 and p not in divisors]
    choice = _Choice(model, _same_names(model, axes), primes)
    for attempt in range(_ATTEMPTS):
        choice = replace(choice, primes=primes[attempt:])
        found = _settled(choice) if 2 * choice.count <= len(choice.primes) else None
        if found is None:
            return ()
        both = found.lengths(0), found.lengths(1)
        if not open_sizes(both) & divisors:
            return (*both, *found.ones())
    return ()


def open_sizes(lengths: Sequence[Lengths]) -> set[int]:
    """The sizes in the first choice of axes that another choice gives another size."""
    first, second = lengths[0].shapes, lengths[1].shapes
    return {
        size
        for tensor, shape in first.items()
        for size, other in zip(shape, second.get(tensor, shape), strict=False)
        if size != other
    }


def _open_inputs(model: Model) -> Iterator[_Axis]:
    for _, graph in model.entry_points():
        for tensor in graph.inputs:
            for axis, size in enumerate(tensor.shape_signature or ()):
                if size < 0:
                    yield tensor, axis


def _same_names(model: Model, axes: Sequence[_Axis]) -> dict[_Axis, int]:
    """A group for each axis; an input that several signatures have under one name has one length in all of them."""
    names = {
        (tensor, axis): (name, axis)
        for signature in model.signatures
        for name, tensor in signature.inputs.items()
        for axis in range(len(tensor.shape))
    }
    groups: dict[object, int] = {}
    return {axis: groups.setdefault(names.get(axis, axis), len(groups)) for axis in axes}


def _divisors_in(model: Model) -> set[int]:
    """What divides a size that the file records: an open size must not pass for another."""
    sizes = {
        size
        for graph in model.subgraphs
        for tensor in graph.tensors
        for size, stated in zip(tensor.shape, tensor.shape_signature or tensor.shape, strict=False)
        if stated > 1
    }
    return {divisor for size in sizes for divisor in _divisors(size)}


def _divisors(size: int) -> set[int]:
    """All but 1."""
    small = {d for d in range(2, int(size**0.5) + 1) if size % d == 0}
    return small | {size // d for d in small} | {size}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which axes have one size; the groups' order is that of the sizes."""

    model: Model
    groups: dict[_Axis, int]
    primes: Sequence[int]

    @property
    def count(self) -> int:
        return max(self.groups.values()) + 1

    def sizes(self, which: int) -> Sequence[int]:
        return self.primes[which * self.count : (which + 1) * self.count]

    def report(self, sizes: Sequence[int]) -> ShapeReport:
        inputs = {tensor: list(tensor.shape_signature or ()) for tensor, _ in self.groups}
        for (tensor, axis), group in self.groups.items():
            inputs[tensor][axis] = sizes[group]
        return derive(self.model, resize=inputs)

    def lengths(self, which: int) -> Lengths:
        return _lengths(self.report(self.sizes(which)))

    def ones(self) -> list[Lengths]:
        report = self.report([1] * self.count)
        return [] if report.refused else [replace(_lengths(report), tells=False)]

    def read_as(self, group: int) -> set[tuple[str, int]]:
        """Which operand the group's inputs are, of which operators."""
        return {
            (consumer.name, consumer.inputs.index(tensor))
            for (tensor, _), own in self.groups.items()
            if own == group
            for consumer in tensor.consumers
        }

    def joined(self, pairs: Sequence[_Pair], *, alike: bool) -> _Choice:
        """One size for both groups of each pair; `alike`: also for axes that the file describes in the same words."""
        groups = dict(self.groups)
        for one, other in pairs:
            ends = {group for axis, group in groups.items() if self.groups[axis] in (one, other)}
            words = {_words(axis) for axis, group in groups.items() if group in ends}
            for axis, group in groups.items():
                if group in ends or (alike and _words(axis) in words):
                    groups[axis] = min(ends)
        return replace(self, groups=groups)

    def renumbered(self) -> _Choice:
        """The same groups with the smallest sizes that there are, in their order."""
        numbers = {group: number for number, group in enumerate(sorted(set(self.groups.values())))}
        return replace(self, groups={axis: numbers[group] for axis, group in self.groups.items()})

    def swapped(self, one: int, other: int) -> _Choice:
        places = {one: other, other: one}
        return replace(self, groups={axis: places.get(group, group) for axis, group in self.groups.items()})


def _words(axis: _Axis) -> tuple[object, ...]:
    tensor, place = axis
    return tensor.shape_signature, tensor.dtype, place


def _lengths(report: ShapeReport) -> Lengths:
    shapes = {t: shape for t, shape in report.shapes.items() if shape is not None and -1 not in shape}
    values = {t: v for t, v in report.values.items() if v.dtype != object}
    return Lengths(shapes, values)


def _settled(choice: _Choice) -> _Choice | None:
    """The choice, changed until no operator refuses it; None where no change helps."""
    sizes = choice.sizes(0)
    report = choice.report(sizes)
    for _ in range(_FIRST + 2 * len(choice.groups)):
        if not report.refused:
            return choice.renumbered()
        operator = report.refused[0]
        pairs = list(combinations(_met(choice, sizes, report), 2))
        swap = next((pair for pair in pairs if _accepts(operator, report, sizes, (), pair)), None)
        if swap is not None:
            choice = choice.swapped(*swap)
            report = choice.report(sizes)
            continue
        several = (some for count in (1, 2, 3) for some in combinations(pairs, count))
        joined = next((some for some in several if _accepts(operator, report, sizes, some)), None)
        joined = joined or _summed(choice, sizes, operator)
        if joined is None:
            return None
        # A model has such pairs for each layer's cache: all go at once, where that brings it further.
        narrow, wide = (choice.joined(joined, alike=alike) for alike in (False, True))
        reports = narrow.report(sizes), wide.report(sizes)
        further = _known(reports[1]) > _known(reports[0])
        choice, report = (wide, reports[1]) if further else (narrow, reports[0])
    return None


def _met(choice: _Choice, sizes: Sequence[int], report: ShapeReport) -> list[int]:
    """The groups whose sizes the first operator that refuses its inputs has before it."""
    tensors = [tensor for tensor in report.refused[0].inputs if tensor is not None]
    seen = {size for tensor in tensors for size in report.shapes.get(tensor) or tensor.shape}
    seen |= {int(n) for t in tensors if t in report.values for n in report.values[t].ravel() if n is not None}
    groups = sorted(set(choice.groups.values()))
    return [group for group in groups if any(size > 0 and size % sizes[group] == 0 for size in seen)]


def _summed(choice: _Choice, sizes: Sequence[int], operator: Operator) -> tuple[_Pair, ...] | None:
    """Pairs of groups above an operator with which it takes its inputs, where those have sums of lengths.

    Keys and values grown by CONCATENATION have `past + new` entries, of two pasts; no size tells which they are of.
    Groups that are the same operand of such operators go first: a past with a past.
    """
    roles = {group: choice.read_as(group) for group in _above(choice, operator)}
    pairs = sorted(combinations(roles, 2), key=lambda pair: roles[pair[0]] != roles[pair[1]])
    several = (some for count in (1, 2) for some in combinations(pairs, count))
    return next(
        (some for some in several if operator not in choice.joined(some, alike=False).report(sizes).refused),
        None,
    )


def _above(choice: _Choice, operator: Operator) -> list[int]:
    """The groups of the nearest graph inputs that lead to an operator."""
    found: dict[int, None] = {}
    pending, seen = deque([operator]), {operator}
    while pending and len(found) < _NEAREST:
        for tensor in (tensor for tensor in pending.popleft().inputs if tensor is not None):
            found.update(
                (choice.groups[tensor, axis], None)
                for axis in range(len(tensor.shape))
                if (tensor, axis) in choice.groups
            )
            if tensor.producer is not None and tensor.producer not in seen:
                seen.add(tensor.producer)
                pending.append(tensor.producer)
    return list(found)


def _accepts(
    operator: Operator,
    report: ShapeReport,
    sizes: Sequence[int],
    joined: Sequence[_Pair],
    swapped: _Pair | None = None,
) -> bool:
    """Whether an operator takes its inputs with one size for both groups of each pair, or with two swapped."""
    read = constants_of(operator)

    def changed(size: int) -> int:
        for one, other in joined:
            if size and size % sizes[other] == 0:
                size = size // sizes[other] * sizes[one]
        for mine, theirs in () if swapped is None else (swapped, swapped[::-1]):
            if size and size % sizes[mine] == 0:
                return size // sizes[mine] * sizes[theirs]
        return size

    def constant(index: int) -> Array | None:
        tensor = operator.inputs[index]
        if tensor is None or tensor not in report.values:
            return read(index)
        value = report.values[tensor]
        return None if value.dtype == object else np.vectorize(changed, otypes=[value.dtype])(value)

    known = [None if t is None else report.shapes.get(t, t.shape) for t in operator.inputs]
    shapes = [None if shape is None else tuple(map(changed, shape)) for shape in known]
    try:
        infer_operator(operator, shapes, constant)
    except ShapeError:
        return False
    return True


def _known(report: ShapeReport) -> int:
    return sum(shape is not None and -1 not in shape for shape in report.shapes.values())
