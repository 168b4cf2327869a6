"""Find the first tensor that two models share and that differs between them.

Intended for a model and its rewrite: tensors outside rewritten regions keep their names. Both are run up to shared
tensors, in execution order, as many at a time as fit into memory; only one is loaded at a time, and neither is changed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np

from edge_opt.comparison.findings import FirstDifference, OutputComparison
from edge_opt.comparison.pairing import Both, Pair
from edge_opt.ir import Subgraph, Tensor
from edge_opt.ir.opening import Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import cut_signature, needed_for, reads
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.inputs import InputPlan
from edge_opt.runtime.tensors import MAIN, Kernels

_MOST_BYTES = 192 << 20  # of the tensors that are looked at together
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
    sides = [model.arguments(pair.signature.name) for model in both.models]
    infos = next(infos for infos in pair.outputs if infos[0].name == output)
    ends = sides[0][2][infos[0].name], sides[1][2][infos[1].name]
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
    plans = pair.plans(both.begun.seed, runs)
    search = _Search(both, kernels, pair, plans, graphs, inputs, [*alike, ends])
    for places in search.batches():
        both.tell("looking for the first difference", places[0], len(search.shared))
        if (found := search.look(places)) is not None:
            return search.describe(*found)
    return FirstDifference(pair.signature.name, reason=_VANISHED)


@dataclass(frozen=True, slots=True)
class _Search:
    """The tensors of both sides in `shared`, in execution order, the output last; a place is an index into it."""

    both: Both
    kernels: Kernels
    pair: Pair
    plans: Sequence[Sequence[Sequence[InputPlan]]]  # by side and run
    graphs: Sequence[Subgraph]
    inputs: Sequence[Mapping[str, Tensor]]
    shared: Sequence[tuple[Tensor, Tensor]]

    def batches(self) -> Iterator[list[int]]:
        """Yield all places, in groups whose tensors fit into memory together."""
        sizes = (tensor.dtype.byte_size(tensor.elements) or 0 for tensor, _ in self.shared)
        ends = enumerate(accumulate(size * len(self.plans[0]) for size in sizes))
        for _, batch in groupby(ends, lambda each: (each[1] - 1) // _MOST_BYTES):
            yield [place for place, _ in batch]

    def look(self, places: Sequence[int]) -> tuple[int, OutputComparison] | None:
        """Run both models up to these tensors; return the first that differs, with its figures."""
        results = []
        for side, (graph, plans) in enumerate(zip(self.graphs, self.plans, strict=True)):
            probes = {str(place): self.shared[place][side] for place in places}
            # In a stateful model, the last operators may compute state that the next run reads.
            operators = graph.operators if len(plans) > 1 else needed_for(probes.values(), graph.operators)
            cut = cut_signature(self.both.models[side], MAIN, operators, self.inputs[side], probes)
            with Part(cut).file() as file:
                results.append(self.both.worker.run_plans(file, MAIN, plans, self.kernels))
        for place in places:
            a, b = (tensor_info(tensor, tensor.name) for tensor in self.shared[place])
            runs = ((ours[str(place)], theirs[str(place)]) for ours, theirs in zip(*results, strict=True))
            found = self.both.measure(a, b, runs)
            if not found.equal:
                return place, found
        return None

    def describe(self, place: int, figures: OutputComparison) -> FirstDifference:
        """Describe a difference; all shared tensors before it are equal."""
        equal = {tensor for both in self.shared[:place] for tensor in both}
        cones = [
            needed_for([root], graph.operators, equal)
            for graph, root in zip(self.graphs, self.shared[place], strict=True)
        ]
        read = [tensor for cone in cones for tensor in reads(cone)]
        twins = {tensor: both for both in self.shared for tensor in both}
        legend: dict[str, str] = {}
        known = {self.inputs[0][info.name]: f"%{info.name}" for info in self.pair.signature.inputs}
        for one, other in zip(self.pair.signature.inputs, self.pair.inputs, strict=True):
            known[self.inputs[1][other.name]] = f"%{one.name}"

        def short(tensor: Tensor) -> str:
            """Return a short name, the same in both models for a shared tensor; `legend` maps it to the full name."""
            if tensor not in known:
                name = f"%{len(legend)}"
                legend[name] = tensor.name
                known.update(dict.fromkeys(twins.get(tensor, (tensor,)), name))
            return known[tensor]

        constants, others = (
            {t.name: t.buffer.data for one in cone for t in one.inputs if t and t.is_constant and t.buffer}
            for cone in cones
        )
        common = ((name, data, others.get(name)) for name, data in constants.items())
        tensor = self.shared[place][0]
        return FirstDifference(
            signature=self.pair.signature.name,
            equal_before=tuple(dict.fromkeys(short(tensor) for tensor in read if not tensor.is_constant)),
            operators_a=tuple(operator_text(operator, short) for operator in cones[0]),
            operators_b=tuple(operator_text(operator, short) for operator in cones[1]),
            tensor=tensor.name,
            short_name=short(tensor),
            figures=replace(figures, name=tensor.name),
            names=legend,
            constants=tuple(
                name for name, a, b in common if a and b and not np.array_equal(a.view(), b.view())
            ),
            reason=_NOTHING_SHARED if len(self.shared) == 1 else "",
        )
