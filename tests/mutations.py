"""Small mistakes in a new region, each at every place where it can be made: what a rewrite might get wrong."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Tensor
from edge_opt.ir.graph import same_type
from edge_opt.passes.rewrite import Rewrite
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table

Operators = list[Operator]


@dataclass(frozen=True)
class Mutant:
    """A new region with one mistake, and which and where it is."""

    kind: str
    place: str
    rewrite: Rewrite


def mutants(rewrite: Rewrite) -> Iterator[Mutant]:
    """Every mistake of every kind, in a fixed order."""
    added = set(rewrite.added())
    for kind, mistakes in KINDS.items():
        for place, operator in enumerate(rewrite.new):
            if operator in added:
                for new in mistakes(_Region(rewrite, place)):
                    yield Mutant(kind, operator.outputs[0].name, replace(rewrite, new=tuple(new)))


def sampled(rewrite: Rewrite, count: int) -> Iterator[Mutant]:
    """At most so many mutants of each kind, from all over the region."""
    everything = list(mutants(rewrite))
    for kind in KINDS:
        own = [mutant for mutant in everything if mutant.kind == kind]
        yield from own[:: max(len(own) // count, 1)][:count]


def constant(values: Any, dtype: DType = DType.INT32, q: Quantization | None = None) -> Tensor:
    """A new constant."""
    array = np.asarray(values, dtype.numpy)
    return Tensor("wrong", array.shape, dtype, quantization=q, buffer=Buffer(Data(array.tobytes())))


class _Region:
    """The new operators, and the one among them where a mistake is made."""

    def __init__(self, rewrite: Rewrite, place: int) -> None:
        self.model: Model = rewrite.model
        self.rewrite = rewrite
        self.new: Operators = list(rewrite.new)
        self.place = place
        self.operator = self.new[place]

    @property
    def result(self) -> Tensor:
        return self.operator.outputs[0]

    def made(self, name: str, inputs: Sequence[Tensor], result: Tensor, **settings: Any) -> Operator:
        operator = self.model.new_operator(name, inputs, [result], **settings)
        operator.code = self.model.operator_code(name, operator.least_version)
        return operator

    def instead(self, *made: Operator) -> Operators:
        """Other operators in the place of this one."""
        return [*self.new[: self.place], *made, *self.new[self.place + 1 :]]

    def changed(
        self,
        inputs: Sequence[Tensor | None] | None = None,
        outputs: Sequence[Tensor] | None = None,
        options: Table | None = None,
    ) -> Operator:
        own = self.operator
        return Operator(
            own.code, inputs or own.inputs, outputs or own.outputs, options or own.options, own.table
        )

    def behind(self, name: str, *others: Tensor, **settings: Any) -> Operators:
        """One more operator between this one and its readers."""
        between = like(self.result, f"{self.result.name}/between")
        outputs = [between, *self.operator.outputs[1:]]
        return self.instead(
            self.changed(outputs=outputs), self.made(name, [between, *others], self.result, **settings)
        )

    def rereading(self, old: Tensor, new: Tensor, made: Operators) -> Operators:
        """All that reads a tensor reads another one."""
        return [
            op.on(lambda t: new if t is old else t) if old in op.inputs and old not in op.outputs else op
            for op in made
        ]


def like(tensor: Tensor, name: str | None = None, **changes: Any) -> Tensor:
    """A new tensor of the same type, but for the changes."""
    fields = {"shape": tensor.shape, "dtype": tensor.dtype, "quantization": tensor.quantization, **changes}
    return Tensor(name or tensor.name, **fields)


def _swapped_inputs(region: _Region) -> Iterator[Operators]:
    inputs = region.operator.inputs
    for i, j in combinations(range(len(inputs)), 2):
        one, other = inputs[i], inputs[j]
        if one is not None and other is not None and one is not other and same_type(one, other):
            swapped = list(inputs)
            swapped[i], swapped[j] = other, one
            yield region.instead(region.changed(inputs=swapped))


def _swapped_outputs(region: _Region) -> Iterator[Operators]:
    outputs = region.operator.outputs
    for i, j in combinations(range(len(outputs)), 2):
        if same_type(outputs[i], outputs[j]):
            swapped = list(outputs)
            swapped[i], swapped[j] = outputs[j], outputs[i]
            yield region.instead(region.changed(outputs=swapped))


def _left_out(region: _Region) -> Iterator[Operators]:
    for source in region.operator.inputs:
        if source is not None and source.shape == region.result.shape and source.dtype == region.result.dtype:
            yield region.rereading(region.result, source, region.instead())


def _another_operand(region: _Region) -> Iterator[Operators]:
    """An input of the region or a result of it that has the same type."""
    before = [*region.rewrite.inputs(), *(t for op in region.new[: region.place] for t in op.outputs)]
    for index, own in enumerate(region.operator.inputs):
        if own is None or own.is_constant:
            continue
        others = [t for t in before if t is not own and t.shape == own.shape and t.dtype == own.dtype]
        for other in {others[0], others[-1]} if others else ():
            inputs = list(region.operator.inputs)
            inputs[index] = other
            yield region.instead(region.changed(inputs=inputs))


def _another_option(region: _Region) -> Iterator[Operators]:
    options = region.operator.options
    for name, value in [] if options is None else list(options.fields.items()):
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, float):
            others = [2 * value]
        elif isinstance(value, int):
            others = [value - 1, value + 1]
        for other in others:
            assert options is not None
            table = options.copy()
            table.set(name, other)
            yield region.instead(region.changed(options=table))
    if region.operator.name in {"ADD", "MUL", "BATCH_MATMUL"} and options is not None:
        for name in {"fused_activation_function", "adj_x", "adj_y"} & set(options.spec.by_name):
            table = options.copy()
            table.set(name, type(options.get(name))(not options.get(name)))
            yield region.instead(region.changed(options=table))


def _another_constant(region: _Region) -> Iterator[Operators]:
    """A place or size that is off by one, or two that are exchanged; a number that is off by a hundredth or a code."""
    for index, tensor in enumerate(region.operator.inputs):
        if tensor is None or not tensor.has_numbers or tensor.dtype.numpy is None or not tensor.elements:
            continue
        flat = np.asarray(tensor.array()).reshape(-1)
        wrong = []
        for at in {0, flat.size - 1}:
            for step in (-1, 1) if flat.dtype.kind in "iu" else ():
                wrong.append(flat.copy())
                wrong[-1][at] += step
        if flat.dtype.kind == "f":
            wrong.append((flat.astype(np.float64) * 1.01).astype(flat.dtype))
        elif flat.size > 1:
            wrong.append(np.roll(flat, 1))
        for values in wrong:
            inputs = list(region.operator.inputs)
            inputs[index] = constant(values.reshape(tensor.shape), tensor.dtype, tensor.quantization)
            yield region.instead(region.changed(inputs=inputs))


def _another_kind(region: _Region) -> Iterator[Operators]:
    name, inputs = region.operator.name, [t for t in region.operator.inputs if t is not None]
    if name in {"ADD", "MUL"}:
        for other in {"ADD", "MUL", "SUB"} - {name}:
            yield region.instead(region.made(other, inputs, region.result))
    if name in {"EQUAL", "NOT_EQUAL"}:
        yield region.instead(
            region.made("EQUAL" if name == "NOT_EQUAL" else "NOT_EQUAL", inputs, region.result)
        )


def _another_quantization(region: _Region) -> Iterator[Operators]:
    own, last = region.result.quantization, region.new[-1].outputs[0]
    if own is None or region.result is last:
        return
    scale, zero = float(own.scale[0]), int(own.zero_point[0])
    others = [Quantization.affine(scale * 1.01, zero)]
    if region.result.dtype is DType.INT8:
        others.append(Quantization.affine(scale, zero + 1))
    read = [t.quantization for t in region.operator.inputs if t is not None and t.quantization is not None]
    others += [quantization for quantization in read if quantization.key() != own.key()]
    for quantization in others:
        wrong = like(region.result, quantization=quantization)
        outputs = [wrong, *region.operator.outputs[1:]]
        yield region.rereading(region.result, wrong, region.instead(region.changed(outputs=outputs)))


def _clamped(region: _Region) -> Iterator[Operators]:
    """Results that keep within limits: a code less than their type has, or numbers that are not too large."""
    tensor = region.result
    if tensor.dtype is DType.FLOAT32:
        yield region.behind("MINIMUM", constant(60.0, tensor.dtype))
        yield region.behind("MAXIMUM", constant(-60.0, tensor.dtype))
    elif tensor.dtype in {DType.INT8, DType.INT16} and tensor.quantization is not None:
        limits = np.iinfo(np.int8 if tensor.dtype is DType.INT8 else np.int16)
        yield region.behind("MINIMUM", constant(limits.max - 1, tensor.dtype, tensor.quantization))
        yield region.behind("MAXIMUM", constant(limits.min + 1, tensor.dtype, tensor.quantization))


def _moved(region: _Region) -> Iterator[Operators]:
    """One element that is off: by a step, of int16 by some, for what is rounded afterwards."""
    tensor = region.result
    if tensor.dtype in {DType.FLOAT32, DType.INT8, DType.INT16} and tensor.elements > 1:
        zero = 0 if tensor.quantization is None else int(tensor.quantization.zero_point[0])
        step = np.full(tensor.shape, zero)
        step.reshape(-1)[tensor.elements // 2 + 1] += 64 if tensor.dtype is DType.INT16 else 1
        yield region.behind("ADD", constant(step, tensor.dtype, tensor.quantization))


def _exchanged(region: _Region) -> Iterator[Operators]:
    """Two neighbouring rows, columns, keys or heads that are exchanged."""
    tensor = region.result
    for axis, size in enumerate(tensor.shape):
        if size > 1 and tensor.dtype in {DType.FLOAT32, DType.INT8, DType.INT16}:
            places = np.arange(size)
            at = size // 2
            places[[at - 1, at]] = places[[at, at - 1]]
            yield region.behind("GATHER", constant(places), axis=axis)


KINDS: dict[str, Callable[[_Region], Iterator[Operators]]] = {
    "operands swapped": _swapped_inputs,
    "results swapped": _swapped_outputs,
    "an operator left out": _left_out,
    "another operand": _another_operand,
    "another option": _another_option,
    "another constant": _another_constant,
    "another operator": _another_kind,
    "another quantization": _another_quantization,
    "a clamp": _clamped,
    "one element off": _moved,
    "two places exchanged": _exchanged,
}
