"""Small mistakes in a new region, each at every place where it can be made: what a rewrite might get wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from pass_runs import refusal

from edge_opt.ir import Buffer, DType, Operator, Quantization, Tensor
from edge_opt.ir.graph import same_type
from edge_opt.schema.data import Data
from edge_opt.verification.frame import check_frame, check_parameters, check_shapes
from edge_opt.verification.rewrite import Rewrite

Operators = list[Operator]
_INTEGERS = {DType.INT8, DType.INT16}


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


def survives_checks(rewrite: Rewrite) -> bool:
    """Whether only a proof can stop it."""
    checks = check_frame, check_shapes, check_parameters
    return all(refusal(check, rewrite) is None for check in checks)


def constant(values: Any, dtype: DType = DType.INT32, q: Quantization | None = None) -> Tensor:
    """A new constant."""
    array = np.asarray(values, dtype.numpy)
    return Tensor("wrong", array.shape, dtype, quantization=q, buffer=Buffer(Data(array.tobytes())))


class _Region:
    """The new operators, and the one among them where a mistake is made."""

    def __init__(self, rewrite: Rewrite, place: int) -> None:
        self.rewrite = rewrite
        self.new: Operators = list(rewrite.new)
        self.place = place
        self.operator = self.new[place]
        self.result = self.operator.outputs[0]
        self.reads_all = [tensor for tensor in self.operator.inputs if tensor is not None]

    def instead(self, *made: Operator) -> Operators:
        """Other operators in the place of this one."""
        return [*self.new[: self.place], *made, *self.new[self.place + 1 :]]

    def changed(self, **changes: Any) -> Operators:
        """The operator with other inputs, outputs or options."""
        own = self.operator
        parts = {"inputs": own.inputs, "outputs": own.outputs, "options": own.options, **changes}
        return self.instead(Operator(own.code, table=own.table, **parts))

    def reading(self, index: int, tensor: Tensor) -> Operators:
        """The operator with another input."""
        inputs = self.operator.inputs
        return self.changed(inputs=[*inputs[:index], tensor, *inputs[index + 1 :]])

    def with_option(self, name: str, value: Any) -> Operators:
        """The operator with another option."""
        table = self.operator.options.copy()
        table.set(name, value)
        return self.changed(options=table)

    def behind(self, name: str, *others: Tensor, **settings: Any) -> Operators:
        """One more operator between this one and its readers."""
        between = like(self.result, f"{self.result.name}/between")
        own = self.changed(outputs=[between, *self.operator.outputs[1:]])[self.place]
        new = self.rewrite.model.new_operator(name, [between, *others], [self.result], **settings)
        return self.instead(own, new)

    def rereading(self, new: Tensor, made: Operators) -> Operators:
        """All that reads the result reads another tensor."""
        old = self.result
        return [
            op.on(lambda t: new if t is old else t)
            if old in op.inputs and old not in op.outputs
            else op
            for op in made
        ]


def like(tensor: Tensor, name: str | None = None, **changes: Any) -> Tensor:
    """A new tensor of the same type, but for the changes."""
    fields = {
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "quantization": tensor.quantization,
        **changes,
    }
    return Tensor(name or tensor.name, **fields)


def _swapped(region: _Region) -> Iterator[Operators]:
    """Each two operands, or results, of one type exchanged."""
    for side in ("inputs", "outputs"):
        tensors = getattr(region.operator, side)
        for i, j in combinations(range(len(tensors)), 2):
            one, other = tensors[i], tensors[j]
            if one is not None and other is not None and one is not other and same_type(one, other):
                swapped = list(tensors)
                swapped[i], swapped[j] = other, one
                yield region.changed(**{side: swapped})


def _left_out(region: _Region) -> Iterator[Operators]:
    for source in region.reads_all:
        if source.shape == region.result.shape and source.dtype == region.result.dtype:
            yield region.rereading(source, region.instead())


def _another_operand(region: _Region) -> Iterator[Operators]:
    """An input of the region or a result of it that has the same type."""
    before = [
        *region.rewrite.inputs(),
        *(t for op in region.new[: region.place] for t in op.outputs),
    ]
    for index, own in enumerate(region.operator.inputs):
        if own is None or own.is_constant:
            continue
        others = [
            t for t in before if t is not own and t.shape == own.shape and t.dtype == own.dtype
        ]
        for other in dict.fromkeys((others[0], others[-1])) if others else ():
            yield region.reading(index, other)


def _another_option(region: _Region) -> Iterator[Operators]:
    options = region.operator.options
    if options is None:
        return
    for name, value in list(options.fields.items()):
        if isinstance(value, bool):
            yield region.with_option(name, not value)
        elif isinstance(value, float):
            yield region.with_option(name, 2 * value)
        elif isinstance(value, int):
            yield region.with_option(name, value - 1)
            yield region.with_option(name, value + 1)
    if region.operator.name in {"ADD", "MUL", "BATCH_MATMUL"}:
        for name in ("fused_activation_function", "adj_x", "adj_y"):
            if name in options.spec.by_name:
                yield region.with_option(name, type(options.get(name))(not options.get(name)))


def _another_constant(region: _Region) -> Iterator[Operators]:
    """A place or size that is off by one, or two that are exchanged; a number that is off by a hundredth or a code."""
    for index, tensor in enumerate(region.operator.inputs):
        if tensor is None or not tensor.has_numbers or not tensor.elements:
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
            wrong_one = constant(values.reshape(tensor.shape), tensor.dtype, tensor.quantization)
            yield region.reading(index, wrong_one)


_OTHERS = {
    "ADD": ("MUL", "SUB"), "MUL": ("ADD", "SUB"), "EQUAL": ("NOT_EQUAL",), "NOT_EQUAL": ("EQUAL",),
}  # fmt: skip


def _another_kind(region: _Region) -> Iterator[Operators]:
    for name in _OTHERS.get(region.operator.name, ()):
        yield region.instead(
            region.rewrite.model.new_operator(name, region.reads_all, [region.result])
        )


def _another_quantization(region: _Region) -> Iterator[Operators]:
    own, last = region.result.quantization, region.new[-1].outputs[0]
    if own is None or region.result is last:
        return
    scale, zero = float(own.scale[0]), int(own.zero_point[0])
    others = [Quantization.affine(scale * 1.01, zero)]
    if region.result.dtype is DType.INT8:
        others.append(Quantization.affine(scale, zero + 1))
    read = [tensor.quantization for tensor in region.reads_all if tensor.quantization is not None]
    others += [quantization for quantization in read if quantization.key() != own.key()]
    for quantization in others:
        wrong = like(region.result, quantization=quantization)
        yield region.rereading(wrong, region.changed(outputs=[wrong, *region.operator.outputs[1:]]))


def _clamped(region: _Region) -> Iterator[Operators]:
    """Results that keep within limits: a code less than their type has, or numbers that are not too large."""
    tensor, limits = region.result, (60.0, -60.0)
    if tensor.dtype in _INTEGERS:
        codes = np.iinfo(tensor.dtype.numpy)
        limits = codes.max - 1, codes.min + 1
    if tensor.dtype is DType.FLOAT32 or tensor.is_quantized:
        for name, limit in zip(("MINIMUM", "MAXIMUM"), limits, strict=True):
            yield region.behind(name, constant(limit, tensor.dtype, tensor.quantization))


def _moved(region: _Region) -> Iterator[Operators]:
    """One element that is off: by a step, of int16 by some, for what is rounded afterwards."""
    tensor = region.result
    if tensor.dtype in {DType.FLOAT32, *_INTEGERS} and tensor.elements > 1:
        zero = 0 if tensor.quantization is None else int(tensor.quantization.zero_point[0])
        step = np.full(tensor.shape, zero)
        step.reshape(-1)[tensor.elements // 2 + 1] += 64 if tensor.dtype is DType.INT16 else 1
        yield region.behind("ADD", constant(step, tensor.dtype, tensor.quantization))


def _exchanged(region: _Region) -> Iterator[Operators]:
    """Two neighbouring rows, columns, keys or heads that are exchanged."""
    tensor = region.result
    for axis, size in enumerate(tensor.shape):
        if size > 1 and tensor.dtype in {DType.FLOAT32, *_INTEGERS}:
            places, at = np.arange(size), size // 2
            places[[at - 1, at]] = places[[at, at - 1]]
            yield region.behind("GATHER", constant(places), axis=axis)


KINDS: dict[str, Callable[[_Region], Iterator[Operators]]] = {
    "operands or results swapped": _swapped,
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
