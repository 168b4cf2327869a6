"""Finds where two models begin to differ: the first tensor that both have and that is not the same.

Meant for a model and what a rewrite made of it: tensors outside rewritten regions keep their names. Both are cut at
tensors that they share, a logarithmic number of times; only one of them is loaded at a time. Changes no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_opt.comparison.findings import FirstDifference, OutputComparison
from edge_opt.ir import DType, Model, Signature, load
from edge_opt.ir.extract import cut_out
from edge_opt.ir.text import operator_text
from edge_opt.proof.source import Source
from edge_opt.proof.tensors import MAIN, SignatureInfo, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from edge_opt.ir import Operator, Subgraph, Tensor
    from edge_opt.proof.inputs import InputPlan
    from edge_opt.proof.protocol import Array
    from edge_opt.proof.runner import Worker
    from edge_opt.proof.tensors import Kernels

    Measure = Callable[[TensorInfo, TensorInfo, Array, Array], OutputComparison]
    Plans = Sequence[Sequence[InputPlan]]

_PROBES = 12
_PROBED_BYTES = 192 << 20
_VANISHED = (
    "no tensor differs once it is an output itself: the difference comes from how the runtime joins operators"
)
_NOTHING_SHARED = "the models share no names of tensors between their inputs and this output"


class Probe(NamedTuple):
    """One output of a signature that differs, and what it was run on."""

    signature: SignatureInfo
    output_a: TensorInfo
    output_b: TensorInfo
    kernels: Kernels
    plans_a: Plans
    plans_b: Plans


def first_difference(worker: Worker, a: Source, b: Source, probe: Probe, measure: Measure) -> FirstDifference:
    """The first shared tensor that differs, with the operators of both models that lead to it from equal ones.

    Raises:
        RuntimeFailed: a model that was cut does not run.
        ModelFormatError: a file cannot be read any more.
    """
    sides = _Side.of(a, probe.signature, probe.output_a), _Side.of(b, probe.signature, probe.output_b)
    search = _Search(worker, sides[0], sides[1], probe, measure)
    return search.run()


@dataclass(slots=True)
class _Side:
    """One model, the entry point at hand, and its operators by identity with their place."""

    model: Model
    graph: Subgraph
    inputs: dict[str, Tensor]
    output: Tensor
    places: dict[int, int]

    @classmethod
    def of(cls, source: Source, signature: SignatureInfo, output: TensorInfo) -> _Side:
        model = load(source.model)
        entry = next((s for s in model.signatures if s.key == signature.name), None)
        if entry is None:
            graph = model.subgraphs[0]
            inputs = {info.name: t for info, t in zip(signature.inputs, graph.inputs, strict=True)}
            found = graph.outputs[[info.name for info in signature.outputs].index(output.name)]
        else:
            graph, inputs, found = entry.subgraph, dict(entry.inputs), entry.outputs[output.name]
        places = {id(operator): place for place, operator in enumerate(graph.operators)}
        return cls(model, graph, inputs, found, places)

    def cone(
        self, roots: Iterable[Tensor], known: Container[int] = ()
    ) -> tuple[list[Operator], list[Tensor]]:
        """Operators that the roots are computed by, in order, back to known ones (by identity); and those."""
        operators: dict[int, Operator] = {}
        border: dict[int, Tensor] = {}
        pending = [root.producer for root in roots if root.producer is not None]
        while pending:
            operator = pending.pop()
            if id(operator) in operators:
                continue
            operators[id(operator)] = operator
            for tensor in operator.inputs:
                if tensor is None or tensor.is_constant:
                    continue
                if tensor.producer is None or id(tensor) in known:
                    border[id(tensor)] = tensor
                else:
                    pending.append(tensor.producer)
        ordered = sorted(operators.values(), key=lambda operator: self.places[id(operator)])
        return ordered, list(border.values())

    def cut(self, signature: SignatureInfo, probes: Sequence[Tensor]) -> Model:
        """A model with the same inputs whose outputs are the probes, by number."""
        operators, _ = self.cone(probes)
        if any(_has_state(operator) for operator in self.graph.operators):
            last = max((self.places[id(operator)] for operator in operators), default=-1)
            operators = [operator for operator in self.graph.operators if self.places[id(operator)] <= last]
        arguments = [self.inputs[info.name] for info in signature.inputs]
        model = cut_out(self.model, operators, arguments, probes)
        graph = model.subgraphs[0]
        names = [info.name for info in signature.inputs]
        inputs = dict(zip(names, graph.inputs, strict=True))
        outputs = {str(place): tensor for place, tensor in enumerate(graph.outputs)}
        model.signatures = [Signature(MAIN, graph, inputs, outputs)]
        return model


def _has_state(operator: Operator) -> bool:
    return not operator.outputs or any(
        tensor is not None and (tensor.is_variable or tensor.dtype is DType.RESOURCE)
        for tensor in (*operator.inputs, *operator.outputs)
    )


@dataclass(slots=True)
class _Search:
    worker: Worker
    a: _Side
    b: _Side
    probe: Probe
    measure: Measure

    def run(self) -> FirstDifference:
        """Bisect in execution order, then go back until all that the tensor is computed from is equal."""
        shared = _shared(self.a, self.b)
        equal: set[int] = set()
        found: dict[int, OutputComparison] = {}
        low, high = -1, len(shared) - 1
        while high - low > 1 or high not in found:
            self._look(shared, _evenly(shared, low, high, len(self.probe.plans_a)), equal, found)
            if high not in found and high == len(shared) - 1 and not found:
                return self._nowhere(_VANISHED)
            high = min(found)
            low = max((place for place in equal if place < high), default=-1)
        while earlier := self._sources(shared, high) - equal:
            self._look(shared, sorted(earlier), equal, found)
            if not any(place in found for place in earlier):
                break
            high = min(place for place in earlier if place in found)
        return self._describe(shared, high, found[high])

    def _look(
        self,
        shared: Sequence[tuple[Tensor, Tensor]],
        places: Sequence[int],
        equal: set[int],
        found: dict[int, OutputComparison],
    ) -> None:
        """Run both models up to some shared tensors, and sort these by whether they are equal."""
        signature = self.probe.signature
        outputs = []
        for side, plans, which in ((self.a, self.probe.plans_a, 0), (self.b, self.probe.plans_b, 1)):
            cut = side.cut(signature, [shared[place][which] for place in places])
            with Source(cut, "cut model") as source:
                outputs.append(self.worker.run_plans(source.model, MAIN, plans, self.probe.kernels))
        for number, place in enumerate(places):
            one, other = (_info(tensor) for tensor in shared[place])
            for ours, theirs in zip(*outputs, strict=True):
                compared = self.measure(one, other, ours[str(number)], theirs[str(number)])
                if not compared.equal:
                    found.setdefault(place, compared)
            if place not in found:
                equal.add(place)

    def _sources(self, shared: Sequence[tuple[Tensor, Tensor]], place: int) -> set[int]:
        """Shared tensors that this one is computed from, in either model, without another in between."""
        found: set[int] = set()
        for side, which in ((self.a, 0), (self.b, 1)):
            numbers = {id(pair[which]): number for number, pair in enumerate(shared)}
            _, border = side.cone([shared[place][which]], numbers)
            found.update(numbers[id(tensor)] for tensor in border if id(tensor) in numbers)
        return found

    def _describe(
        self, shared: Sequence[tuple[Tensor, Tensor]], place: int, compared: OutputComparison
    ) -> FirstDifference:
        names = _Names(self.a, self.b, shared)
        regions: list[list[Operator]] = []
        borders: dict[str, None] = {}
        for side, which in ((self.a, 0), (self.b, 1)):
            known = {id(pair[which]) for pair in shared}
            operators, border = side.cone([shared[place][which]], known)
            regions.append(operators)
            borders.update(dict.fromkeys(names(tensor) for tensor in border))
        texts = [tuple(operator_text(operator, names) for operator in operators) for operators in regions]
        return FirstDifference(
            signature=self.probe.signature.name,
            backend=self.probe.kernels,
            tensor=shared[place][0].name,
            short_name=names(shared[place][0]),
            figures=replace(compared, name=shared[place][0].name),
            equal_before=tuple(borders),
            operators_a=texts[0],
            operators_b=texts[1],
            names=names.legend,
            constants=_changed_constants(*regions),
            reason=_NOTHING_SHARED if len(shared) == 1 else "",
        )

    def _nowhere(self, reason: str) -> FirstDifference:
        return FirstDifference(self.probe.signature.name, self.probe.kernels, reason=reason)


def _shared(a: _Side, b: _Side) -> list[tuple[Tensor, Tensor]]:
    """Tensors of one name, type and shape that the output is computed from in both models; it comes last."""
    ours, theirs = _named(a), _named(b)
    pairs = [
        (tensor, theirs[name])
        for name, tensor in ours.items()
        if name in theirs and _kind(tensor) == _kind(theirs[name])
    ]
    pairs = [(one, other) for one, other in pairs if one is not a.output and other is not b.output]
    return [*pairs, (a.output, b.output)]


def _named(side: _Side) -> dict[str, Tensor]:
    """Tensors that the output is computed from, in execution order, those whose name is not unique left out."""
    operators, _ = side.cone([side.output])
    tensors = [tensor for operator in operators for tensor in operator.outputs]
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.name] = counts.get(tensor.name, 0) + 1
    return {tensor.name: tensor for tensor in tensors if tensor.name and counts[tensor.name] == 1}


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.shape_signature, tensor.dtype


def _evenly(shared: Sequence[tuple[Tensor, Tensor]], low: int, high: int, runs: int) -> list[int]:
    """Up to `_PROBES` places in (low, high], evenly, `high` among them, that fit into memory."""
    count = min(_PROBES, high - low)
    places = sorted({low + round((high - low) * (step + 1) / count) for step in range(count)}, reverse=True)
    chosen: list[int] = []
    room = _PROBED_BYTES
    for place in places:
        tensor = shared[place][0]
        size = (tensor.dtype.byte_size(tensor.elements) or 0) * runs
        if not chosen or size <= room:
            chosen.append(place)
            room -= size
    return sorted(chosen)


def _info(tensor: Tensor) -> TensorInfo:
    """What the runtime would say of the tensor."""
    numpy = tensor.dtype.numpy
    quantization = tensor.quantization if tensor.is_quantized else None
    return TensorInfo(
        name=tensor.name,
        tensor=tensor.name,
        shape=tensor.shape,
        declared=tensor.shape_signature or tensor.shape,
        dtype="" if numpy is None else np.dtype(numpy).name,
        scales=() if quantization is None else tuple(float(scale) for scale in quantization.scale),
        zero_points=() if quantization is None else tuple(int(zero) for zero in quantization.zero_point),
        axis=0 if quantization is None else quantization.dimension,
    )


class _Names:
    """Short names that say the same of shared tensors in both models; `legend` has the long ones."""

    def __init__(self, a: _Side, b: _Side, shared: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.legend: dict[str, str] = {}
        self._names: dict[int, str] = {}
        for side in (a, b):
            self._names.update({id(tensor): f"%{name}" for name, tensor in side.inputs.items()})
        self._pairs = {id(one): other for one, other in shared} | {id(other): one for one, other in shared}

    def __call__(self, tensor: Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            name = f"%{len(self.legend)}"
            self.legend[name] = tensor.name
            self._names[id(tensor)] = name
            if id(tensor) in self._pairs:
                self._names[id(self._pairs[id(tensor)])] = name
        return name


def _changed_constants(a: Sequence[Operator], b: Sequence[Operator]) -> tuple[str, ...]:
    """Names of constants that both regions read, with other bytes."""
    ours, theirs = _constants(a), _constants(b)
    return tuple(name for name, tensor in ours.items() if name in theirs and not _same(tensor, theirs[name]))


def _constants(operators: Iterable[Operator]) -> dict[str, Tensor]:
    read = (tensor for operator in operators for tensor in operator.inputs)
    return {tensor.name: tensor for tensor in read if tensor is not None and tensor.is_constant}


def _same(one: Tensor, other: Tensor) -> bool:
    assert one.buffer is not None
    assert one.buffer.data is not None
    assert other.buffer is not None
    assert other.buffer.data is not None
    return bool(np.array_equal(one.buffer.data.view(), other.buffer.data.view()))
