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

from edge_opt.ir import Buffer, DType, Model, Operator, Shape, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import renumbered
from edge_opt.proof.row_rules import Box, Indices, Step, sizes, slim, step_of, union
from edge_opt.runtime import noise
from edge_opt.runtime.pair import Cut, take
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table

_COMPOSITE = "STABLEHLO_COMPOSITE"
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
    parts = []
    for length in sorted({size for shape in shapes for size in shape if size >= _FEWEST}, reverse=True):
        with suppress(RefusedError):
            part = _along(before, after, length, seed)
            parts.append((multiply_adds(part.before) + multiply_adds(part.after), part))
    cost, best = min(parts, key=lambda each: each[0], default=(0, None))
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
    boxes = tuple(
        tuple(tuple(None if axis is None else tuple(axis.tolist()) for axis in box) for box in each.boxes())
        for each in reduced
    )
    cut = Cut(tuple(tensor.shape for tensor in before.subgraphs[0].inputs), boxes)
    old, new = (reduction.model() for reduction in reduced)
    return Rows(old, new, cut, tuple(rows.tolist()), length)


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
    operators = model.subgraphs[0].operators
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
    wanted: list[Box] = []
    for tensor in model.subgraphs[0].outputs:
        if length not in tensor.shape:
            raise RefusedError(f"output '{tensor.name}' has no axis of {length}")
        axis = tensor.shape.index(length)
        wanted.append(tuple(rows if place == axis else None for place in range(len(tensor.shape))))
    return _Reduction(model, model.subgraphs[0], wanted)


class _Reduction:
    """A region, or the body of a composite in it, on what is wanted of its results.

    `wanted` has the box of each tensor that its readers need, `defined` the one that its operator gives, or that is an
    input: at least the wanted one.
    """

    def __init__(self, model: Model, source: Subgraph, wanted: Sequence[Box]) -> None:
        self._model = model
        self.source = source
        self.wanted: dict[Tensor, Box] = {}
        self.defined: dict[Tensor, Box] = {}
        self.steps: dict[Operator, Step] = {}
        self.bodies: dict[Operator, _Reduction] = {}
        for tensor, box in zip(source.outputs, wanted, strict=True):
            self._want(tensor, box)
        for operator in reversed(source.operators):
            if any(tensor in self.wanted for tensor in operator.outputs):
                self._go_through(operator)
        for tensor in source.inputs:
            self.defined[tensor] = self.wanted.get(tensor, (None,) * len(tensor.shape))

    def _want(self, tensor: Tensor, box: Box) -> None:
        box = slim(box, tensor.shape)
        self.wanted[tensor] = union(self.wanted[tensor], box) if tensor in self.wanted else box

    def _go_through(self, operator: Operator) -> None:
        wanted = [self.wanted.get(tensor) for tensor in operator.outputs]
        step = self._enter(operator, wanted) if operator.name == _COMPOSITE else step_of(operator, wanted)
        affected = any(indices is not None for box in wanted for indices in box or ())
        if step is None or (affected and any(map(_per_axis, (*operator.inputs, *operator.outputs)))):
            raise RefusedError("it cannot run on some rows only", operator)
        self.steps[operator] = step
        self.defined.update(zip(operator.outputs, step.gives, strict=True))
        for index, box in step.needs.items():
            tensor = operator.input(index)
            if tensor.is_constant and not tensor.has_numbers:
                raise RefusedError("a constant has no numbers", operator, tensor)
            self._want(tensor, box)

    def _enter(self, composite: Operator, wanted: Sequence[Box | None]) -> Step:
        """A composite on less is what its body is on less."""
        (index,) = subgraph_indices(composite.options)
        body = self._model.subgraphs[index]
        read = [box for box in wanted if box is not None]
        if [len(body.inputs), len(body.outputs)] != [len(composite.inputs), len(read)]:
            raise RefusedError("the composite and its body differ", composite)
        inner = self.bodies[composite] = _Reduction(self._model, body, read)
        return Step(dict(enumerate(inner.boxes())), gives=read)

    def cuts(self) -> Iterable[int]:
        """Where axes that carry rows are cut or joined."""
        for step in self.steps.values():
            yield from step.cuts
        for body in self.bodies.values():
            yield from body.cuts()

    def check_reach(self) -> None:
        """Raises where an operator, or a part that one cuts off, has nothing to do with the rows."""
        for operator in self.source.operators:
            unread = [t for t in operator.outputs if t not in self.wanted and t.consumers]
            if operator not in self.steps or unread:
                raise RefusedError("the rows do not reach it", operator)
        for body in self.bodies.values():
            body.check_reach()

    def boxes(self) -> tuple[Box, ...]:
        """What is read of every input."""
        return tuple(self.defined[tensor] for tensor in self.source.inputs)

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
        self._copies: dict[Tensor, Tensor] = {}
        self._narrowed: dict[tuple[Tensor, tuple[bytes | None, ...]], Tensor] = {}
        self._graph.inputs = [self._define(tensor) for tensor in reduction.source.inputs]
        for operator, step in reversed(reduction.steps.items()):
            self._write(operator, step)
        outputs = reduction.source.outputs
        self._graph.outputs = [self._narrow(tensor, reduction.wanted[tensor]) for tensor in outputs]

    def _define(self, tensor: Tensor) -> Tensor:
        copy = self._copies[tensor] = self._add(tensor, sizes(tensor.shape, self._reduction.defined[tensor]))
        return copy

    def _add(self, like: Tensor, shape: Shape, dtype: DType | None = None) -> Tensor:
        name, quantization = str(len(self._graph.tensors)), like.quantization if dtype is None else None
        return self._graph.add_tensor(Tensor(name, shape, dtype or like.dtype, quantization=quantization))

    def _constant(self, like: Tensor, array: NDArray[Any], dtype: DType | None = None) -> Tensor:
        tensor = self._add(like, array.shape, dtype)
        tensor.buffer = Buffer(Data(np.ascontiguousarray(array).tobytes()))
        return tensor

    def _write(self, operator: Operator, step: Step) -> None:
        inputs: list[Tensor | None] = []
        for index, tensor in enumerate(operator.inputs):
            if tensor is None:
                inputs.append(None)
            elif index in step.steering:
                inputs.append(self._constant(tensor, step.steering[index]))
            elif index in step.needs:
                inputs.append(self._narrow(tensor, step.needs[index]))
        outputs = [self._define(tensor) for tensor in operator.outputs]
        options = operator.options
        if options is not None and operator in self._reduction.bodies:
            place = _Writer(self._model, self._reduction.bodies[operator]).place
            options = renumbered(options, dict.fromkeys(subgraph_indices(options), place))
        elif options is not None and step.options:
            options = options.copy()
            for name, value in step.options.items():
                options.set(name, value)
        self._graph.append(Operator(operator.code, inputs, outputs, options))

    def _narrow(self, tensor: Tensor, box: Box) -> Tensor:
        box = slim(box, tensor.shape)
        if tensor.has_numbers:
            return self._constant(tensor, take(tensor.array(), box))
        key = (tensor, tuple(None if indices is None else indices.tobytes() for indices in box))
        if key not in self._narrowed:
            self._narrowed[key] = self._gather(tensor, box)
        return self._narrowed[key]

    def _gather(self, tensor: Tensor, box: Box) -> Tensor:
        source = self._copies[tensor]
        for axis, (have, want) in enumerate(zip(self._reduction.defined[tensor], box, strict=True)):
            if want is None or (have is not None and np.array_equal(have, want)):
                continue
            places = (want if have is None else np.searchsorted(have, want)).astype(np.int32)
            indices = self._constant(tensor, places, DType.INT32)
            result = self._add(tensor, (*source.shape[:axis], len(places), *source.shape[axis + 1 :]))
            options = new_table("GatherOptions", axis=axis)
            gather = Operator(self._model.operator_code("GATHER"), [source, indices], [result], options)
            gather.code = self._model.operator_code("GATHER", gather.least_version)
            self._graph.append(gather)
            source = result
        return source


def _per_axis(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.quantization is not None and tensor.quantization.is_per_axis
