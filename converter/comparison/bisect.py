"""Finds where two models begin to differ: the first tensor that both have and that is not the same.

Meant for a model and a rewrite of it: tensors outside rewritten regions keep their names. Both are cut at tensors that
they share, a logarithmic number of times; only one of them is loaded at a time. Changes no model.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_opt.comparison.facts import arguments, tensor_info
from edge_opt.comparison.findings import FirstDifference, OutputComparison
from edge_opt.comparison.pairing import Both, Pair
from edge_opt.ir import Model, Operator, Signature, Signatures, Subgraph, Tensor
from edge_opt.ir.opening import Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import backward_slice, cut_out
from edge_opt.runtime.inputs import InputPlan
from edge_opt.runtime.tensors import MAIN, Kernels, SignatureInfo

_PROBES = 12
_PROBED_BYTES = 192 << 20
_VANISHED = (
    "no tensor differs once it is an output itself: the difference comes from how the runtime joins operators"
)
_NOTHING_SHARED = "the models share no names of tensors between their inputs and this output"


def first_difference(both: Both, pair: Pair, output: str, kernels: Kernels, runs: int) -> FirstDifference:
    """The first shared tensor that differs, with the operators of both models that compute it from equal ones.

    `output` differs; `runs` is how often the models are run.

    Raises:
        RuntimeFailed: a model that was cut does not run.
    """
    sides = [_Side.of(model, pair.signature, output) for model in both.models]
    ours, theirs = (side.named() for side in sides)
    pairs = [(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs]
    alike = [pair for pair in pairs if len({(t.shape, t.shape_signature, t.dtype) for t in pair}) == 1]
    shared = [*alike, (sides[0].output, sides[1].output)]
    return _Search(both, kernels, pair.signature, both.plans(pair, runs), sides, shared).run()


@dataclass(slots=True)
class _Side:
    """One model, and the entry point at hand."""

    model: Model
    graph: Subgraph
    inputs: list[Tensor]
    output: Tensor

    @classmethod
    def of(cls, model: Model, signature: SignatureInfo, output: str) -> "_Side":
        graph, inputs, outputs = arguments(model, signature)
        return cls(model, graph, inputs, outputs[[info.name for info in signature.outputs].index(output)])

    def cone(self, root: Tensor, stops: Collection[Tensor] = ()) -> tuple[list[Operator], list[Tensor]]:
        """The operators that compute the root from the stops, in order; and what they start from."""
        operators, starts = backward_slice([root], stops)
        return [operator for operator in self.graph.operators if operator in operators], starts

    def named(self) -> dict[str, Tensor]:
        """Tensors of numbers that lead to the output, by name, in execution order; only names that are unique."""
        tensors = [tensor for operator in self.cone(self.output)[0] for tensor in operator.outputs]
        counts = Counter(tensor.name for tensor in tensors if tensor is not self.output)
        usable = (tensor for tensor in tensors if tensor.name and tensor.dtype.numpy is not None)
        return {tensor.name: tensor for tensor in usable if counts[tensor.name] == 1}


@dataclass(slots=True)
class _Search:
    """`shared` are the tensors of both sides, the output last; `equal` and `different` are places among them."""

    both: Both
    kernels: Kernels
    signature: SignatureInfo
    plans: Sequence[Sequence[Sequence[InputPlan]]]  # by side and run
    sides: Sequence[_Side]
    shared: Sequence[tuple[Tensor, Tensor]]
    equal: set[int] = field(default_factory=set)
    different: dict[int, OutputComparison] = field(default_factory=dict)

    def run(self) -> FirstDifference:
        """Narrow down in execution order, then go back until all sources of the tensor are equal."""
        first = len(self.shared) - 1
        unknown: Sequence[int] = range(len(self.shared))
        while unknown:
            looked_at = self._look(unknown)
            if not self.different:
                return FirstDifference(self.signature.name, reason=_VANISHED)
            first = min(looked_at & self.different.keys(), default=first)
            low = max((place for place in self.equal if place < first), default=-1)
            numbers = {tensor: number for number, pair in enumerate(self.shared) for tensor in pair}
            sources = {numbers[t] for _, border in self._cones(first) for t in border if t in numbers}
            unknown = range(low + 1, first) or sorted(sources - self.equal - self.different.keys())
        return self._describe(first)

    def _look(self, places: Sequence[int]) -> set[int]:
        """Run both models up to some of these tensors, and sort them by whether they are equal.

        They are spread evenly, the last one among them, as many as fit into memory.
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
        for which, side in enumerate(self.sides):
            probes = [self.shared[place][which] for place in chosen]
            # In a model with state, the last operators may compute what the next run reads.
            inside = side.graph.operators if len(self.plans[0]) > 1 else backward_slice(probes)[0]
            operators = [operator for operator in side.graph.operators if operator in inside]
            cut = cut_out(side.model, operators, side.inputs, probes)
            graph, plans = cut.subgraphs[0], self.plans[which]
            inputs = dict(zip((one.info.name for one in plans[0]), graph.inputs, strict=True))
            outputs = {str(place): tensor for place, tensor in zip(chosen, graph.outputs, strict=True)}
            cut.signatures = Signatures([Signature(MAIN, graph, inputs, outputs)])
            with Part(cut).file() as file:
                results.append(self.both.worker.run_plans(file, MAIN, plans, self.kernels))
        for place in chosen:
            infos = [tensor_info(tensor, tensor.name) for tensor in self.shared[place]]
            runs = zip(*([run[str(place)] for run in one] for one in results), strict=True)
            found = [self.both.measure(infos[0], infos[1], *arrays) for arrays in runs]
            worst = next((one for one in found if not one.equal), None)
            if worst is None:
                self.equal.add(place)
            else:
                self.different[place] = worst
        return {*chosen}

    def _cones(self, place: int) -> list[tuple[list[Operator], list[Tensor]]]:
        """In each model, what computes a shared tensor from other shared tensors, and these."""
        known = {tensor for pair in self.shared for tensor in pair}
        return [side.cone(root, known) for side, root in zip(self.sides, self.shared[place], strict=True)]

    def _describe(self, place: int) -> FirstDifference:
        (ours, border), (theirs, other_border) = self._cones(place)
        twins = {tensor: pair for pair in self.shared for tensor in pair}
        legend: dict[str, str] = {}
        names = [info.name for info in self.signature.inputs]
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
            signature=self.signature.name,
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
