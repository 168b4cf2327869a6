"""Finds where two models begin to differ: the first tensor that both have and that is not the same.

Meant for a model and what a rewrite made of it: tensors outside rewritten regions keep their names. Both are cut at
tensors that they share, a logarithmic number of times; only one of them is loaded at a time. Changes no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_opt.comparison.facts import keeps_state, tensor_info
from edge_opt.comparison.findings import FirstDifference, OutputComparison
from edge_opt.ir import Model, Operator, Signature, Signatures, Subgraph, Tensor, load
from edge_opt.ir.opening import Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import backward_slice, cut_out
from edge_opt.runtime.inputs import InputPlan
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import MAIN, Kernels, SignatureInfo, TensorInfo

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
    outputs: tuple[TensorInfo, TensorInfo]
    kernels: Kernels
    plans: tuple[Plans, Plans]


def first_difference(worker: Worker, a: Path, b: Path, probe: Probe, measure: Measure) -> FirstDifference:
    """The first shared tensor that differs, with the operators of both models that lead to it from equal ones.

    Raises:
        RuntimeFailed: a model that was cut does not run.
        ModelFormatError: a file cannot be read any more.
    """
    place = [info.name for info in probe.signature.outputs].index(probe.outputs[0].name)
    files = zip((a, b), probe.outputs, strict=True)
    sides = tuple(_Side.of(file, probe.signature, output, place) for file, output in files)
    return _Search(worker, sides, _shared(*sides), probe, measure).run()


@dataclass(slots=True)
class _Side:
    """One model, and the entry point at hand."""

    model: Model
    graph: Subgraph
    inputs: dict[str, Tensor]
    output: Tensor

    @classmethod
    def of(cls, file: Path, signature: SignatureInfo, output: TensorInfo, place: int) -> _Side:
        model = load(file)
        entry = next((s for s in model.signatures if s.key == signature.name), None)
        if entry is not None:
            return cls(model, entry.subgraph, dict(entry.inputs), entry.outputs[output.name])
        graph = model.subgraphs[0]
        inputs = dict(zip((info.name for info in signature.inputs), graph.inputs, strict=True))
        return cls(model, graph, inputs, graph.outputs[place])

    def cone(
        self, roots: Iterable[Tensor], stops: Container[Tensor] = ()
    ) -> tuple[list[Operator], list[Tensor]]:
        """The operators that compute the roots from known tensors and inputs, in order; and what they start from."""
        operators, starts = backward_slice(roots, stops)
        return [operator for operator in self.graph.operators if operator in operators], starts

    def cut(self, signature: SignatureInfo, planned: Sequence[InputPlan], probes: Sequence[Tensor]) -> Model:
        """A model with the same inputs, named as they are planned, whose outputs are the probes, by number."""
        # In a model with state, what is computed last may be what the next run reads.
        operators = self.graph.operators if keeps_state(self.model) else self.cone(probes)[0]
        model = cut_out(self.model, operators, [self.inputs[info.name] for info in signature.inputs], probes)
        graph = model.subgraphs[0]
        inputs = dict(zip((one.info.name for one in planned), graph.inputs, strict=True))
        outputs = {str(place): tensor for place, tensor in enumerate(graph.outputs)}
        model.signatures = Signatures([Signature(MAIN, graph, inputs, outputs)])
        return model


@dataclass(slots=True)
class _Search:
    """`shared` are the tensors that both sides have, the output last; `equal` and `different` sort those looked at."""

    worker: Worker
    sides: tuple[_Side, ...]
    shared: Sequence[tuple[Tensor, Tensor]]
    probe: Probe
    measure: Measure
    equal: set[int] = field(default_factory=set)
    different: dict[int, OutputComparison] = field(default_factory=dict)

    def run(self) -> FirstDifference:
        """Bisect in execution order, then go back until all that the tensor is computed from is equal."""
        low, high = -1, len(self.shared) - 1
        while high - low > 1 or high not in self.different:
            self._look(self._evenly(low, high))
            if not self.different:
                return FirstDifference(self.probe.signature.name, reason=_VANISHED)
            high = min(self.different)
            low = max((place for place in self.equal if place < high), default=-1)
        while earlier := self._sources(high) - self.equal:
            self._look(sorted(earlier))
            if not earlier & self.different.keys():
                break
            high = min(earlier & self.different.keys())
        return self._describe(high)

    def _evenly(self, low: int, high: int) -> list[int]:
        """Up to `_PROBES` places spread evenly over (low, high], `high` among them, as many as fit into memory."""
        count = min(_PROBES, high - low)
        chosen: list[int] = []
        room = _PROBED_BYTES // len(self.probe.plans[0])
        for step in range(count, 0, -1):
            place = low + round((high - low) * step / count)
            tensor = self.shared[place][0]
            size = tensor.dtype.byte_size(tensor.elements) or 0
            if not chosen or size <= room:
                chosen.insert(0, place)
                room -= size
        return chosen

    def _look(self, places: Sequence[int]) -> None:
        """Run both models up to some shared tensors, and sort these by whether they are equal."""
        outputs = []
        for which, plans in enumerate(self.probe.plans):
            probes = [self.shared[place][which] for place in places]
            cut = self.sides[which].cut(self.probe.signature, plans[0], probes)
            with Part(cut).file() as file:
                outputs.append(self.worker.run_plans(file, MAIN, plans, self.probe.kernels))
        for number, place in enumerate(places):
            one, other = (tensor_info(tensor, tensor.name) for tensor in self.shared[place])
            for ours, theirs in zip(*outputs, strict=True):
                compared = self.measure(one, other, ours[str(number)], theirs[str(number)])
                if not compared.equal:
                    self.different.setdefault(place, compared)
            if place not in self.different:
                self.equal.add(place)

    def _cones(self, place: int) -> list[tuple[list[Operator], list[Tensor]]]:
        """In each model, what a shared tensor is computed by and from, back to other shared tensors."""
        return [
            side.cone([self.shared[place][which]], {pair[which] for pair in self.shared})
            for which, side in enumerate(self.sides)
        ]

    def _sources(self, place: int) -> set[int]:
        """Shared tensors that this one is computed from, in either model, without another in between."""
        numbers = {tensor: number for number, pair in enumerate(self.shared) for tensor in pair}
        return {numbers[t] for _, border in self._cones(place) for t in border if t in numbers}

    def _describe(self, place: int) -> FirstDifference:
        (ours, border), (theirs, other_border) = self._cones(place)
        tensor = self.shared[place][0]
        twins = {one: pair for pair in self.shared for one in pair}
        legend: dict[str, str] = {}
        known = {tensor: f"%{name}" for side in self.sides for name, tensor in side.inputs.items()}

        def short(tensor: Tensor) -> str:
            """A short name, the same for shared tensors of both models; `legend` has the long ones."""
            if tensor not in known:
                name = f"%{len(legend)}"
                legend[name] = tensor.name
                known.update(dict.fromkeys(twins.get(tensor, (tensor,)), name))
            return known[tensor]

        return FirstDifference(
            signature=self.probe.signature.name,
            equal_before=tuple(dict.fromkeys(map(short, (*border, *other_border)))),
            operators_a=tuple(operator_text(operator, short) for operator in ours),
            operators_b=tuple(operator_text(operator, short) for operator in theirs),
            tensor=tensor.name,
            short_name=short(tensor),
            figures=replace(self.different[place], name=tensor.name),
            names=legend,
            constants=_changed_constants(ours, theirs),
            reason=_NOTHING_SHARED if len(self.shared) == 1 else "",
        )


def _shared(a: _Side, b: _Side) -> list[tuple[Tensor, Tensor]]:
    """Tensors of one name, type and shape that the output is computed from in both models; it comes last."""
    ours, theirs = _named(a), _named(b)
    pairs = [(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs]
    alike = [pair for pair in pairs if len({(t.shape, t.shape_signature, t.dtype) for t in pair}) == 1]
    return [*alike, (a.output, b.output)]


def _named(side: _Side) -> dict[str, Tensor]:
    """Tensors of numbers that the output is computed from, by name, in execution order; only names that are unique."""
    tensors = [tensor for operator in side.cone([side.output])[0] for tensor in operator.outputs]
    counts = Counter(tensor.name for tensor in tensors)
    usable = (tensor for tensor in tensors if tensor.name and tensor.dtype.numpy is not None)
    return {t.name: t for t in usable if counts[t.name] == 1 and t is not side.output}


def _changed_constants(a: Sequence[Operator], b: Sequence[Operator]) -> tuple[str, ...]:
    """Names of constants of the first region that have other bytes in the second one.

    They are paired by place where both regions are the same operators, else by name.
    """
    ours, theirs = ([tensor for operator in region for tensor in operator.inputs] for region in (a, b))
    if [(one.name, len(one.inputs)) for one in a] != [(one.name, len(one.inputs)) for one in b]:
        named = {tensor.name: tensor for tensor in theirs if tensor is not None}
        theirs = [tensor and named.get(tensor.name) for tensor in ours]
    changed: dict[str, None] = {}
    for one, other in zip(ours, theirs, strict=True):
        data = [t.buffer.data for t in (one, other) if t and t.is_constant and t.buffer and t.buffer.data]
        if one and len(data) == 2 and not np.array_equal(data[0].view(), data[1].view()):
            changed[one.name] = None
    return tuple(changed)
