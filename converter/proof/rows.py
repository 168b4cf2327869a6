"""A region on some of its rows: what the chosen rows of the result need of every tensor, and the operators on that.

Works backwards, operator by operator, on index sets along each axis. Operators keep their kind, their options and their
numbers; what only moves data is told of the smaller shapes, and where it begins becomes which elements are read. So two
versions of a region that read different rows ask for different elements of the same input, and give different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.composite_rules import BODY, COMPOSITE
from edge_opt.ir import Buffer, DType, Model, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.operators import required_version
from edge_opt.ir.refusal import RefusedError
from edge_opt.proof import noise
from edge_opt.proof.pair import Cut, take
from edge_opt.proof.row_rules import Box, Indices, Step, sizes, slim, step_of, union
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table

_RANDOM_ROWS = 4
_FEWEST = 32


@dataclass(frozen=True, slots=True)
class Rows:
    """Both versions on the same `rows` of `length`; `cut` says what each version reads of every input."""

    before: Model
    after: Model
    cut: Cut
    rows: tuple[int, ...]
    length: int


def sample(before: Model, after: Model, seed: int) -> Rows | None:
    """Both versions on rows that every operator takes part in: the ends, both sides of every cut, random ones.

    Of the result's axes the one is taken along which this saves most; None where no axis saves half.
    """
    shapes = [tensor.shape for tensor in before.subgraphs[0].outputs]
    found = []
    for length in sorted({size for shape in shapes for size in shape if size >= _FEWEST}, reverse=True):
        with suppress(RefusedError):
            part = _along(before, after, length, seed)
            found.append((multiply_adds(part.before) + multiply_adds(part.after), part))
    cost, best = min(found, key=lambda each: each[0], default=(0, None))
    return None if 2 * cost > multiply_adds(before) + multiply_adds(after) else best


def _along(before: Model, after: Model, length: int, seed: int) -> Rows:
    most = np.arange(1, length)
    places = {0} | {cut % length for model in (before, after) for cut in _on_rows(model, most, length).cuts()}
    random = noise.integers(noise.seed_of(seed, "rows", length), _RANDOM_ROWS, 0, length)
    rows = np.unique([*((place + side) % length for place in places for side in (-1, 0)), *random])
    if 2 * rows.size > length:
        raise RefusedError(f"{rows.size} of {length} rows are next to a cut")
    reduced = [_on_rows(model, rows, length) for model in (before, after)]
    for reduction in reduced:
        reduction.check_reach()
    boxes = (tuple(map(_plain, reduction.boxes())) for reduction in reduced)
    cut = Cut(tuple(tensor.shape for tensor in before.subgraphs[0].inputs), tuple(boxes))
    old, new = (reduction.model() for reduction in reduced)
    return Rows(old, new, cut, tuple(rows.tolist()), length)


def _plain(box: Box) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if indices is None else tuple(indices.tolist()) for indices in box)


def multiply_adds(model: Model) -> int:
    """Of matrix products the multiply-adds, of all else the elements that it defines."""
    return sum(_operations(operator) for operator in model.subgraphs[0].operators)


def _operations(operator: Operator) -> int:
    elements = sum(tensor.elements for tensor in operator.outputs)
    if operator.name == "BATCH_MATMUL":
        return elements * operator.input(0).shape[-2 if operator.option("adj_x") else -1]
    return elements * operator.input(1).shape[-1] if operator.name == "FULLY_CONNECTED" else elements


def peak_bytes(model: Model) -> int:
    """How much of what the operators define is needed at the same time, if each tensor is freed once it is read."""
    operators = list(model.subgraphs[0].operators)
    last = {tensor: place for place, operator in enumerate(operators) for tensor in operator.inputs}
    freed: dict[int, int] = {}
    now = most = 0
    for place, operator in enumerate(operators):
        for tensor in operator.outputs:
            size = tensor.dtype.byte_size(tensor.elements) or 0
            now += size
            end = last.get(tensor, len(operators))
            freed[end] = freed.get(end, 0) + size
        most = max(most, now)
        now -= freed.pop(place, 0)
    return most


def _on_rows(model: Model, rows: Indices, length: int) -> _Reduction:
    """One version of a region, on the given rows of every output's first axis of that length."""
    asked: list[Box] = []
    for tensor in model.subgraphs[0].outputs:
        if length not in tensor.shape:
            raise RefusedError(f"output '{tensor.name}' has no axis of {length}")
        axis = tensor.shape.index(length)
        asked.append(tuple(rows if place == axis else None for place in range(len(tensor.shape))))
    return _Reduction(model, model.subgraphs[0], asked)


class _Reduction:
    """A region, or the body of a composite in it, on what is asked of its results."""

    def __init__(self, model: Model, source: Subgraph, asked: Sequence[Box]) -> None:
        self._model = model
        self.source = source
        self.asked: dict[Tensor, Box] = {}
        self.given: dict[Tensor, Box] = {}
        self.steps: dict[Operator, Step] = {}
        self.bodies: dict[Operator, _Reduction] = {}
        for tensor, box in zip(source.outputs, asked, strict=True):
            self._ask(tensor, box)
        for operator in reversed(list(source.operators)):
            if any(tensor in self.asked for tensor in operator.outputs):
                self._go_through(operator)
        for tensor in source.inputs:
            self.given[tensor] = self.asked.get(tensor, (None,) * len(tensor.shape))

    def _go_through(self, operator: Operator) -> None:
        asked = [self.asked.get(tensor) for tensor in operator.outputs]
        affected = any(indices is not None for box in asked for indices in box or ())
        step = self._enter(operator, asked) if operator.name == COMPOSITE else step_of(operator, asked)
        if step is None or (affected and any(map(_per_axis, (*operator.inputs, *operator.outputs)))):
            raise RefusedError("it cannot run on some rows only", operator)
        self.steps[operator] = step
        self.given.update(zip(operator.outputs, step.gives, strict=True))
        for index, box in step.needs.items():
            tensor = operator.input(index)
            if tensor.is_constant and not tensor.has_numbers:
                raise RefusedError("a constant has no numbers", operator, tensor)
            self._ask(tensor, box)

    def _enter(self, composite: Operator, asked: Sequence[Box | None]) -> Step:
        """A composite on less is what its body is on less."""
        body = self._model.subgraphs[int(composite.option(BODY))]
        wanted = [box for box in asked if box is not None]
        if [len(body.inputs), len(body.outputs)] != [len(composite.inputs), len(wanted)]:
            raise RefusedError("the composite and its body differ", composite)
        inner = self.bodies[composite] = _Reduction(self._model, body, wanted)
        return Step(dict(enumerate(inner.boxes())), gives=wanted)

    def _ask(self, tensor: Tensor, box: Box) -> None:
        known, own = self.asked.get(tensor), slim(box, tensor.shape)
        self.asked[tensor] = own if known is None else union(known, own)

    def cuts(self) -> Iterable[int]:
        """Where axes that carry rows are cut or joined."""
        for step in self.steps.values():
            yield from step.cuts
        for body in self.bodies.values():
            yield from body.cuts()

    def check_reach(self) -> None:
        """Raises where an operator, or a part that one cuts off, has nothing to do with the rows."""
        for operator in self.source.operators:
            unread = [t for t in operator.outputs if t not in self.asked and t.consumers]
            if operator not in self.steps or unread:
                raise RefusedError("the rows do not reach it", operator)
        for body in self.bodies.values():
            body.check_reach()

    def boxes(self) -> tuple[Box, ...]:
        """What is read of every input."""
        return tuple(self.given[tensor] for tensor in self.source.inputs)

    def model(self) -> Model:
        """The operators on what is needed."""
        model = Model()
        _Writer(model, self)
        return model


class _Writer:
    """Adds a smaller subgraph to a model, those of bodies behind it, and says at which `place`.

    What one reader needs less of than others is cut down for it.
    """

    def __init__(self, model: Model, reduction: _Reduction) -> None:
        self.place = len(model.subgraphs)
        self._model = model
        self._reduction = reduction
        self._graph = Subgraph("rows")
        model.subgraphs.append(self._graph)
        self._made: dict[Tensor, Tensor] = {}
        self._narrowed: dict[tuple[Tensor, tuple[bytes | None, ...]], Tensor] = {}
        self._graph.inputs = [self._define(tensor) for tensor in reduction.source.inputs]
        for operator in reduction.source.operators:
            if operator in reduction.steps:
                self._write(operator, reduction.steps[operator])
        outputs = reduction.source.outputs
        self._graph.outputs = [self._narrow(tensor, reduction.asked[tensor]) for tensor in outputs]

    def _define(self, tensor: Tensor) -> Tensor:
        shape = sizes(tensor.shape, self._reduction.given[tensor])
        self._made[tensor] = made = self._tensor(tensor, shape)
        return made

    def _tensor(self, like: Tensor, shape: Shape, array: NDArray[Any] | None = None) -> Tensor:
        buffer = None if array is None else Buffer(Data(np.ascontiguousarray(array).tobytes()))
        name = str(len(self._graph.tensors))
        return self._graph.add_tensor(
            Tensor(name, shape, like.dtype, quantization=like.quantization, buffer=buffer)
        )

    def _write(self, operator: Operator, step: Step) -> None:
        inputs: list[Tensor | None] = []
        for index, tensor in enumerate(operator.inputs):
            if tensor is None:
                inputs.append(None)
            elif index in step.steering:
                array = step.steering[index]
                inputs.append(self._tensor(tensor, array.shape, array))
            elif index in step.needs:
                inputs.append(self._narrow(tensor, step.needs[index]))
        outputs = [self._define(tensor) for tensor in operator.outputs]
        options = operator.options
        body = self._reduction.bodies.get(operator)
        told = step.options if body is None else {BODY: _Writer(self._model, body).place}
        if options is not None and told:
            options = options.copy()
            for name, value in told.items():
                options.set(name, value)
        self._graph.append(Operator(operator.code, inputs, outputs, options))

    def _narrow(self, tensor: Tensor, box: Box) -> Tensor:
        box = slim(box, tensor.shape)
        if tensor.has_numbers:
            array = take(tensor.array(), box)
            return self._tensor(tensor, array.shape, array)
        key = (tensor, tuple(None if indices is None else indices.tobytes() for indices in box))
        if key not in self._narrowed:
            self._narrowed[key] = self._gathered(tensor, box)
        return self._narrowed[key]

    def _gathered(self, tensor: Tensor, box: Box) -> Tensor:
        made = self._made[tensor]
        for axis, (have, want) in enumerate(zip(self._reduction.given[tensor], box, strict=True)):
            if want is None or (have is not None and np.array_equal(have, want)):
                continue
            places = want if have is None else np.searchsorted(have, want)
            indices = Tensor("", places.shape, DType.INT32)
            listed = self._tensor(indices, places.shape, places.astype(np.int32))
            shape = (*made.shape[:axis], len(places), *made.shape[axis + 1 :])
            result = self._tensor(tensor, shape)
            options = new_table("GatherOptions", axis=axis)
            gather = Operator(self._model.operator_code("GATHER"), [made, listed], [result], options)
            gather.code = self._model.operator_code("GATHER", required_version(gather))
            self._graph.append(gather)
            made = result
        return made


def _per_axis(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.quantization is not None and tensor.quantization.is_per_axis
