"""Finds where two models begin to differ: the first tensor that both have and that is not the same.

Meant for a model and what a rewrite made of it: tensors outside rewritten regions keep their names. Both are cut at
tensors that they share, a logarithmic number of times; only one of them is loaded at a time. Changes no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_opt.comparison.facts import arguments, keeps_state, tensor_info
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


@dataclass(frozen=True, slots=True)
class Probe:
    """An output of a signature that differs, as `a` names both, and how the two models were run and measured."""

    worker: Worker
    files: tuple[Path, Path]
    signature: SignatureInfo
    output: str
    plans: tuple[Plans, Plans]
    kernels: Kernels
    measure: Measure


def first_difference(probe: Probe) -> FirstDifference:
    """The first shared tensor that differs, with the operators of both models that lead to it from equal ones.

    Raises:
        RuntimeFailed: a model that was cut does not run.
        ModelFormatError: a file cannot be read any more.
    """
    sides = tuple(_Side.of(load(file), probe.signature, probe.output) for file in probe.files)
    ours, theirs = (side.named() for side in sides)
    pairs = [(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs]
    alike = [pair for pair in pairs if len({(t.shape, t.shape_signature, t.dtype) for t in pair}) == 1]
    return _Search(probe, sides, [*alike, tuple(side.output for side in sides)]).run()


@dataclass(slots=True)
class _Side:
    """One model, and the entry point at hand."""

    model: Model
    graph: Subgraph
    inputs: list[Tensor]
    output: Tensor

    @classmethod
    def of(cls, model: Model, signature: SignatureInfo, output: str) -> _Side:
        graph, inputs, outputs = arguments(model, signature)
        return cls(model, graph, inputs, outputs[[info.name for info in signature.outputs].index(output)])

    def cone(
        self, roots: Sequence[Tensor], stops: Collection[Tensor] = ()
    ) -> tuple[list[Operator], list[Tensor]]:
        """The operators that compute the roots from known tensors and inputs, in order; and what they start from."""
        operators, starts = backward_slice(roots, stops)
        return [operator for operator in self.graph.operators if operator in operators], starts

    def named(self) -> dict[str, Tensor]:
        """Tensors of numbers that lead to the output, by name, in execution order; only names that are unique."""
        tensors = [tensor for operator in self.cone([self.output])[0] for tensor in operator.outputs]
        counts = Counter(tensor.name for tensor in tensors if tensor is not self.output)
        usable = (tensor for tensor in tensors if tensor.name and tensor.dtype.numpy is not None)
        return {tensor.name: tensor for tensor in usable if counts[tensor.name] == 1}

    def cut(self, plans: Sequence[InputPlan], probes: Sequence[Tensor]) -> Model:
        """A model with the inputs of the plans, whose outputs are the probes, by number."""
        # In a model with state, what is computed last may be what the next run reads.
        operators = self.graph.operators if keeps_state(self.model) else self.cone(probes)[0]
        model = cut_out(self.model, operators, self.inputs, probes)
        graph = model.subgraphs[0]
        inputs = dict(zip((plan.info.name for plan in plans), graph.inputs, strict=True))
        outputs = {str(place): tensor for place, tensor in enumerate(graph.outputs)}
        model.signatures = Signatures([Signature(MAIN, graph, inputs, outputs)])
        return model


@dataclass(slots=True)
class _Search:
    """`shared` are the tensors that both sides have, the output last; `equal` and `different` sort those looked at."""

    probe: Probe
    sides: Sequence[_Side]
    shared: Sequence[Sequence[Tensor]]
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
                chosen.append(place)
                room -= size
        return chosen

    def _look(self, places: Sequence[int]) -> None:
        """Run both models up to some shared tensors, and sort these by whether they are equal."""
        results = []
        for which, (side, plans) in enumerate(zip(self.sides, self.probe.plans, strict=True)):
            cut = side.cut(plans[0], [self.shared[place][which] for place in places])
            with Part(cut).file() as file:
                results.append(self.probe.worker.run_plans(file, MAIN, plans, self.probe.kernels))
        for number, place in enumerate(places):
            infos = [tensor_info(tensor, tensor.name) for tensor in self.shared[place]]
            runs = zip(*([run[str(number)] for run in one] for one in results), strict=True)
            found = [self.probe.measure(infos[0], infos[1], *arrays) for arrays in runs]
            worst = next((one for one in found if not one.equal), None)
            if worst is None:
                self.equal.add(place)
            else:
                self.different[place] = worst

    def _cones(self, place: int) -> list[tuple[list[Operator], list[Tensor]]]:
        """In each model, what a shared tensor is computed by and from, back to other shared tensors."""
        known = {tensor for pair in self.shared for tensor in pair}
        return [
            side.cone([tensor], known) for side, tensor in zip(self.sides, self.shared[place], strict=True)
        ]

    def _sources(self, place: int) -> set[int]:
        """Shared tensors that this one is computed from, in either model, without another in between."""
        numbers = {tensor: number for number, pair in enumerate(self.shared) for tensor in pair}
        return {numbers[t] for _, border in self._cones(place) for t in border if t in numbers}

    def _describe(self, place: int) -> FirstDifference:
        (ours, border), (theirs, other_border) = self._cones(place)
        twins = {tensor: pair for pair in self.shared for tensor in pair}
        legend: dict[str, str] = {}
        names = [info.name for info in self.probe.signature.inputs]
        known = {
            tensor: f"%{name}" for side in self.sides for name, tensor in zip(names, side.inputs, strict=True)
        }

        def short(tensor: Tensor) -> str:
            """A short name, the same for shared tensors of both models; `legend` has the long ones."""
            if tensor not in known:
                name = f"%{len(legend)}"
                legend[name] = tensor.name
                known.update(dict.fromkeys(twins.get(tensor, (tensor,)), name))
            return known[tensor]

        tensor = self.shared[place][0]
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


def _changed_constants(a: Sequence[Operator], b: Sequence[Operator]) -> tuple[str, ...]:
    """Names of constants that both regions read, with other bytes."""
    ours, theirs = (
        {t.name: t.buffer.data for one in region for t in one.inputs if t and t.is_constant and t.buffer}
        for region in (a, b)
    )
    both = ((name, data, theirs.get(name)) for name, data in ours.items())
    return tuple(
        name for name, one, other in both if one and other and not np.array_equal(one.view(), other.view())
    )
