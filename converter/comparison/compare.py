"""Run two models on the same inputs, signature by signature, and measure how far apart their outputs are.

On a difference, find the first tensor that differs. At most one model is loaded at a time, and neither is changed.
"""

import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Literal

import numpy as np

from edge_opt.base.errors import EdgeOptError, unknown
from edge_opt.base.words import Progress
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    OutputComparison,
    SignatureComparison,
    name_of,
)
from edge_opt.comparison.generate import compare_generation
from edge_opt.comparison.pairing import Both, Pair, Session, both_open, checked_numbers, sessions
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.opening import ModelLike, Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import cut_signature, needed_for, reads, with_outputs
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.data import Data

Place = Literal["cpu", "reference"]

KERNELS: dict[str, Kernels] = {"cpu": "xnnpack", "reference": "reference"}
_MOST_BYTES = 192 << 20  # of the tensors that are looked at together
_VANISHED = "no tensor differs if it is made an output: the difference comes from how the runtime fuses operators"
_NOTHING_SHARED = "the models have no tensor names in common between their inputs and this output"
_MAY_BE_STATE = (
    "state is kept between calls, so an earlier call, also of another signature, may be the cause"
)


def compare(
    a: ModelLike,
    b: ModelLike,
    *,
    on: Place = "cpu",
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    shapes: Mapping[str, Sequence[int]] | None = None,
    generate: int | None = None,
    locate: bool = True,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Run every signature of both models on the same random inputs and measure the outputs.

    Inputs are matched by name, or by position if neither model has signatures (then the signature is `main`). A
    quantized input gets the same real numbers as its float counterpart. Caches are random, too; `generate` fills them
    with a prefill. An input, output or signature that only one model has is a difference. Signatures that keep state
    run in one session, each of them at least eight times, and directly after every other one.

    Args:
        a: the reference: a path, the bytes of a model, a `Model`, or what `litert_torch.convert` returns.
        b: the model to compare with it.
        on: "cpu" for the runtime's default kernels, or "reference" for its reference kernels.
        signatures: signatures to compare; default: all of both models.
        seed: seed of the random inputs.
        atol: `equal` means |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        shapes: sizes for inputs with dynamic lengths in both models, by `NAME` or `signature/NAME`; default: 1.
        generate: number of tokens to also generate greedily, through prefill and decode, from a random prompt.
        locate: on a difference, look for the first tensor that differs (`first_difference` of the report).
        progress: called with (stage, done, total).

    Raises:
        UsageError: an argument is invalid, or neither model has a chosen signature.
        ModelFormatError: a model cannot be read.
        RuntimeFailed: a model was rejected, crashed or timed out; names model and signature.
    """
    if on not in KERNELS:
        raise unknown("place to run on", on, KERNELS)
    seed, atol, rtol = checked_numbers(seed, atol, rtol)
    kernels = KERNELS[on]
    report = ComparisonReport(name_of(a, "a"), name_of(b, "b"), on, seed, atol, rtol)
    if generate is not None:
        # First, so that missing parts are reported before the long work.
        report = replace(report, generation=compare_generation(a, b, generate, seed, kernels))
    with both_open(a, b, report, signatures=signatures, shapes=shapes, progress=progress) as both:

        def compared(session: Session) -> list[SignatureComparison]:
            """Run one model after the other, and measure the outputs that both have."""
            ours, theirs = session.calls(seed)
            with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
                results = both.worker.run_calls(both.files[0], ours, kernels)
                for call, arrays in enumerate(results):
                    _move(arrays, f"{folder}/{call}")
                others = both.worker.run_calls(both.files[1], theirs, kernels)
                return [
                    both.measure_all(
                        pair,
                        [*zip(session.of(name, results), session.of(name, others), strict=True)],
                    )
                    for name, pair in session.pairs.items()
                ]

        report = both.compared(compared)
        states = [text for session in sessions(both.pairs) for text in session.remarks()]
        report = replace(report, remarks=(*report.remarks, *states))
        outside = [
            (one.name, each.name)
            for one in report.signatures
            for each in one.outputs
            if each.outside
        ]
        if not outside or not locate:
            return report
        name, output = outside[0]
        try:
            session = next(one for one in sessions(both.pairs) if name in one.pairs)
            found = first_difference(both, session, name, output, kernels)
        except EdgeOptError as error:
            # Keep the result of the finished comparison.
            found = FirstDifference(name, reason=f"the search failed: {error}")
        return replace(report, first_difference=found)


def _move(arrays: Arrays, stem: str) -> None:
    """Replace arrays by memory-mapped files, whose names begin with `stem`."""
    for place, name in enumerate(arrays):
        np.save(path := f"{stem}.{place}.npy", arrays[name])
        arrays[name] = np.load(path, mmap_mode="r")


def first_difference(
    both: Both, session: Session, name: str, output: str, kernels: Kernels
) -> FirstDifference:
    """Return the first shared tensor that differs, with both models' operators that compute it from equal ones.

    Intended for a model and its rewrite: tensors outside rewritten regions keep their names. Both are run up to shared
    tensors, in execution order, as many at a time as fit into memory. `output` of signature `name` must differ.

    Raises:
        RuntimeFailed: a cut model does not run.
    """
    pair = session.pairs[name]
    sides = [model.arguments(name) for model in both.models]
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
    alike = [(one, other) for one, other in pairs if _form(one) == _form(other)]
    graphs = [graph for graph, *_ in sides]
    inputs = [given for _, given, _ in sides]
    search = _Search(both, kernels, session, pair, graphs, inputs, [*alike, ends])
    for places in search.batches():
        both.tell("looking for the first difference", places[0], len(search.shared))
        if (found := search.look(places)) is not None:
            return search.describe(*found)
    return FirstDifference(pair.signature.name, reason=_VANISHED)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.shape_signature, tensor.dtype


@dataclass(frozen=True, slots=True)
class _Search:
    """The tensors of both sides in `shared`, in execution order, the output last; a place is an index into it."""

    both: Both
    kernels: Kernels
    session: Session
    pair: Pair
    graphs: Sequence[Subgraph]
    inputs: Sequence[Mapping[str, Tensor]]
    shared: Sequence[tuple[Tensor, Tensor]]

    def batches(self) -> Iterator[list[int]]:
        """Yield all places, in groups whose tensors fit into memory together."""
        sizes = (tensor.dtype.byte_size(tensor.elements) or 0 for tensor, _ in self.shared)
        calls = self.session.order.count(self.pair.signature.name)
        ends = enumerate(accumulate(size * calls for size in sizes))
        for _, batch in groupby(ends, lambda each: (each[1] - 1) // _MOST_BYTES):
            yield [place for place, _ in batch]

    def look(self, places: Sequence[int]) -> tuple[int, OutputComparison] | None:
        """Run both models up to these tensors; return the first that differs, with its figures."""
        name = self.pair.signature.name
        results = []
        for side, calls in enumerate(self.session.calls(self.both.begun.seed)):
            probes = {str(place): self.shared[place][side] for place in places}
            with Part(self._probed(side, probes)).file() as file:
                outputs = self.both.worker.run_calls(file, calls, self.kernels)
            results.append(self.session.of(name, outputs))
        for place in places:
            a, b = (tensor_info(tensor, tensor.name) for tensor in self.shared[place])
            runs = (
                (ours[str(place)], theirs[str(place)])
                for ours, theirs in zip(*results, strict=True)
            )
            found = self.both.measure(a, b, runs)
            if not found.equal:
                return place, found
        return None

    def _probed(self, side: int, probes: Mapping[str, Tensor]) -> Model:
        """The model whose signature has these outputs; without state, only the operators that compute them."""
        model = self.both.models[side]
        name = self.pair.signature.name
        if (
            self.pair.signature.keeps_state
        ):  # any operator, in any signature, may compute what this one reads
            return with_outputs(model, name, probes)
        operators = needed_for(probes.values(), self.graphs[side].operators)
        return cut_signature(model, name, operators, self.inputs[side], probes)

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

        tensor = self.shared[place][0]
        return FirstDifference(
            signature=self.pair.signature.name,
            equal_before=tuple(
                dict.fromkeys(short(tensor) for tensor in read if not tensor.is_constant)
            ),
            operators_a=tuple(operator_text(operator, short) for operator in cones[0]),
            operators_b=tuple(operator_text(operator, short) for operator in cones[1]),
            tensor=tensor.name,
            short_name=short(tensor),
            figures=replace(figures, name=tensor.name),
            names=legend,
            constants=tuple(_differing(_constants(cones[0]), _constants(cones[1]))),
            reason="; ".join(self._remarks()),
        )

    def _remarks(self) -> Iterator[str]:
        """What limits the search."""
        if len(self.shared) == 1:
            yield _NOTHING_SHARED
        if self.pair.signature.keeps_state:
            yield _MAY_BE_STATE


def _constants(operators: Iterable[Operator]) -> dict[str, Data]:
    """The content of the constants that operators read, by name."""
    found: dict[str, Data] = {}
    for operator in operators:
        for tensor in operator.inputs:
            if tensor is not None and tensor.buffer is not None and tensor.buffer.data is not None:
                found[tensor.name] = tensor.buffer.data
    return found


def _differing(ours: Mapping[str, Data], theirs: Mapping[str, Data]) -> Iterator[str]:
    """The names of constants that both have, with different content."""
    for name, data in ours.items():
        other = theirs.get(name)
        if other is not None and not np.array_equal(data.view(), other.view()):
            yield name
