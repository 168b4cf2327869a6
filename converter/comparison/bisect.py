"""Find the first tensor that two models share and that differs between them.

Intended for a model and its rewrite: tensors outside rewritten regions keep their names. Both are cut at shared
tensors, a logarithmic number of times; only one is loaded at a time, and neither is changed.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_opt.comparison.facts import arguments
from edge_opt.comparison.findings import FirstDifference, OutputComparison
from edge_opt.comparison.pairing import Both, Pair
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.opening import Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import cut_signature, needed_for, reads
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.inputs import InputPlan
from edge_opt.runtime.tensors import MAIN, Kernels

_PROBES = 12
_PROBED_BYTES = 192 << 20
_VANISHED = (
    "no tensor differs if it is made an output: the difference comes from how the runtime fuses operators"
)
_NOTHING_SHARED = "the models have no tensor names in common between their inputs and this output"


def first_difference(both: Both, pair: Pair, output: str, kernels: Kernels, runs: int) -> FirstDifference:
    """Return the first shared tensor that differs, with both models' operators that compute it from equal ones.

    `output` must differ; `runs` is the number of runs of each model.

    Raises:
        RuntimeFailed: a cut model does not run.
    """
    place = [info.name for info in pair.signature.outputs].index(output)
    sides = [arguments(model, pair.signature) for model in both.models]
    ends = sides[0][2][place], sides[1][2][place]
    # Numeric tensors that the output depends on, by name in execution order; only unique names.
    named: list[dict[str, Tensor]] = []
    for (graph, *_), end in zip(sides, ends, strict=True):
        tensors = [tensor for one in needed_for([end], graph.operators) for tensor in one.outputs]
        counts = Counter(tensor.name for tensor in tensors if tensor is not end)
        usable = (tensor for tensor in tensors if tensor.name and tensor.dtype.numpy is not None)
        named.append({tensor.name: tensor for tensor in usable if counts[tensor.name] == 1})
    pairs = [(tensor, named[1][name]) for name, tensor in named[0].items() if name in named[1]]
    alike = [pair for pair in pairs if len({(t.shape, t.shape_signature, t.dtype) for t in pair}) == 1]
    graphs, inputs = [graph for graph, *_ in sides], [given for _, given, _ in sides]
    return _Search(both, kernels, pair, both.plans(pair, runs), graphs, inputs, [*alike, ends]).run()


@dataclass(slots=True)
class _Search:
    """`shared` pairs tensors of both sides, the output last; `equal` and `different` are indices into it."""

    both: Both
    kernels: Kernels
    pair: Pair
    plans: Sequence[Sequence[Sequence[InputPlan]]]  # by side and run
    graphs: Sequence[Subgraph]
    inputs: Sequence[Sequence[Tensor]]
    shared: Sequence[tuple[Tensor, Tensor]]
    equal: set[int] = field(default_factory=set)
    different: dict[int, OutputComparison] = field(default_factory=dict)

    def run(self) -> FirstDifference:
        """Narrow down in execution order, then go back until all sources of the tensor are equal."""
        first = len(self.shared) - 1
        unknown: Sequence[int] = range(len(self.shared))
        numbers = {tensor: number for number, both in enumerate(self.shared) for tensor in both}
        while unknown:
            looked_at = self._look(unknown)
            if not self.different:
                return FirstDifference(self.pair.signature.name, reason=_VANISHED)
            first = min(looked_at & self.different.keys(), default=first)
            low = max((place for place in self.equal if place < first), default=-1)
            sources = {
                numbers[tensor] for side in self._cones(first) for tensor in side[1] if tensor in numbers
            }
            unknown = range(low + 1, first) or sorted(sources - self.equal - self.different.keys())
        return self._describe(first)

    def _look(self, places: Sequence[int]) -> set[int]:
        """Run both models up to some of these tensors, and record which are equal.

        The chosen tensors are spread evenly, include the last one, and fit into memory together.
        """
        count, room = min(_PROBES, len(places)), _PROBED_BYTES // len(self.plans[0])
        chosen: list[int] = []
        for step in range(count, 0, -1):
            place = places[round(len(places) * step / count) - 1]
            tensor = self.shared[place][0]
            size = tensor.dtype.byte_size(tensor.elements) or 0
            if not chosen or size <= room:
                chosen.append(place)
                room -= size
        results = []
        for side, (graph, plans) in enumerate(zip(self.graphs, self.plans, strict=True)):
            probes = {str(place): self.shared[place][side] for place in chosen}
            # In a stateful model, the last operators may compute state that the next run reads.
            operators = graph.operators if len(plans) > 1 else needed_for(probes.values(), graph.operators)
            given = dict(zip((one.info.name for one in plans[0]), self.inputs[side], strict=True))
            cut = cut_signature(self.both.models[side], MAIN, operators, given, probes)
            with Part(cut).file() as file:
                results.append(self.both.worker.run_plans(file, MAIN, plans, self.kernels))
        for place in chosen:
            a, b = (tensor_info(tensor, tensor.name) for tensor in self.shared[place])
            for ours, theirs in zip(*results, strict=True):
                found = self.both.measure((a, b), ours[str(place)], theirs[str(place)])
                if not found.equal:
                    self.different.setdefault(place, found)
        self.equal |= {*chosen} - self.different.keys()
        return {*chosen}

    def _cones(self, place: int) -> list[tuple[list[Operator], list[Tensor]]]:
        """Return each model's operators that compute a shared tensor from other shared tensors, and those tensors."""
        known: Container[Tensor] = {tensor for both in self.shared for tensor in both}
        cones = [
            needed_for([root], graph.operators, known)
            for graph, root in zip(self.graphs, self.shared[place], strict=True)
        ]
        return [(cone, [tensor for tensor in reads(cone) if not tensor.is_constant]) for cone in cones]

    def _describe(self, place: int) -> FirstDifference:
        (ours, border), (theirs, other_border) = self._cones(place)
        twins = {tensor: both for both in self.shared for tensor in both}
        legend: dict[str, str] = {}
        names = [info.name for info in self.pair.signature.inputs]
        known = {tensor: f"%{name}" for side in self.inputs for name, tensor in zip(names, side, strict=True)}

        def short(tensor: Tensor) -> str:
            """Return a short name, the same in both models for a shared tensor; `legend` maps it to the full name."""
            if tensor not in known:
                name = f"%{len(legend)}"
                legend[name] = tensor.name
                known.update(dict.fromkeys(twins.get(tensor, (tensor,)), name))
            return known[tensor]

        constants, others = (
            {t.name: t.buffer.data for one in cone for t in one.inputs if t and t.is_constant and t.buffer}
            for cone in (ours, theirs)
        )
        common = ((name, data, others.get(name)) for name, data in constants.items())
        tensor = self.shared[place][0]
        return FirstDifference(
            signature=self.pair.signature.name,
            equal_before=tuple(dict.fromkeys(map(short, (*border, *other_border)))),
            operators_a=tuple(operator_text(operator, short) for operator in ours),
            operators_b=tuple(operator_text(operator, short) for operator in theirs),
            tensor=tensor.name,
            short_name=short(tensor),
            figures=replace(self.different[place], name=tensor.name),
            names=legend,
            constants=tuple(
                name for name, a, b in common if a and b and not np.array_equal(a.view(), b.view())
            ),
            reason=_NOTHING_SHARED if len(self.shared) == 1 else "",
        )
