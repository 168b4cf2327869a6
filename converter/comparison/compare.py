"""Run two models on the same inputs, signature by signature, and measure how far apart their outputs are.

On a difference, find the first tensor that differs. At most one model is loaded at a time, and neither is changed.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from edge_opt.base.atomic import scratch_folder
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
from edge_opt.comparison.pairing import Both, Session, both_open, checked_numbers, sessions
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.opening import ModelLike, Part
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import cut_signature, makers_of, needed_for, reads
from edge_opt.runtime.description import tensor_info
from edge_opt.runtime.protocol import KINDS, Arrays
from edge_opt.runtime.tensors import Kernels
from edge_opt.schema.data import Data

Place = Literal["cpu", "reference"]
Twins = tuple[Tensor, Tensor]
"""A tensor of `a` and its counterpart in `b`."""

KERNELS: dict[str, Kernels] = {"cpu": "xnnpack", "reference": "reference"}
_MOST_BYTES = 192 << 20  # of the tensors that are looked at together
_VANISHED = "no tensor differs if it is made an output: the difference comes from how the runtime fuses operators"
_NOTHING_SHARED = "the models have no tensor names in common between their inputs and this output"
_KEEPS_STATE = (
    "results may depend on random numbers, or on an earlier call, also of another signature"
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
        report = both.compared(partial(_run_both, both, kernels))
        remarks = list(report.remarks)
        for session in sessions(both.pairs):
            remarks += session.remarks()
        report = replace(report, remarks=tuple(remarks))
        outside = _first_outside(report)
        if outside is None or not locate:
            return report
        name, output = outside
        try:
            found = first_difference(both, name, output, kernels)
        except EdgeOptError as error:
            # Keep the result of the finished comparison.
            found = FirstDifference(name, reason=f"the search failed: {error}")
        return replace(report, first_difference=found)


def _run_both(both: Both, kernels: Kernels, session: Session) -> Iterator[SignatureComparison]:
    """Run one model after the other, and measure the outputs that both have."""
    ours, theirs = session.calls(both.begun.seed)
    with scratch_folder() as folder:
        results = both.worker.run_calls(both.files[0], ours, kernels)
        for call, arrays in enumerate(results):
            _move(arrays, f"{folder}/{call}")
        others = both.worker.run_calls(both.files[1], theirs, kernels)
        for name, pair in session.pairs.items():
            of_a = session.outputs_of(name, results)
            of_b = session.outputs_of(name, others)
            runs = list(zip(of_a, of_b, strict=True))
            yield both.measure_all(pair, runs, session.ordinary(name))


def _first_outside(report: ComparisonReport) -> tuple[str, str] | None:
    """The signature and the name of the first output with elements outside the tolerances."""
    for signature in report.signatures:
        for output in signature.outputs:
            if output.outside:
                return signature.name, output.name
    return None


def _move(arrays: Arrays, stem: str) -> None:
    """Replace arrays by memory-mapped files, whose names begin with `stem`."""
    for place, name in enumerate(arrays):
        path = f"{stem}.{place}.npy"
        np.save(path, arrays[name])
        arrays[name] = np.load(path, mmap_mode="r")


def first_difference(both: Both, name: str, output: str, kernels: Kernels) -> FirstDifference:
    """Return the first shared tensor that differs, with both models' operators that compute it from equal ones.

    Intended for a model and its rewrite: tensors outside rewritten regions keep their names. Both are run up to shared
    tensors, in execution order, as many at a time as fit into memory. `output` of signature `name` must differ. If the
    signature keeps state, any operator in any signature may compute what it reads, so nothing is looked for.

    Raises:
        RuntimeFailed: a cut model does not run.
    """
    pair = both.pairs[name]
    if pair.signature.keeps_state:
        return FirstDifference(name, reason=_KEEPS_STATE)
    (session,) = sessions({name: pair})
    of_a, of_b = next(infos for infos in pair.outputs if infos[0].name == output)
    graph_a, _, outputs_a = both.models[0].arguments(name)
    graph_b, _, outputs_b = both.models[1].arguments(name)
    end_a = outputs_a[of_a.name]
    end_b = outputs_b[of_b.name]
    shared = list(_shared(_named(graph_a, end_a), _named(graph_b, end_b)))
    shared.append((end_a, end_b))
    search = _Search(both, kernels, session, name, shared)
    for places in search.batches():
        both.tell("looking for the first difference", places[0], len(shared))
        found = search.look(places)
        if found is not None:
            return search.describe(*found)
    return FirstDifference(name, reason=_VANISHED)


def _named(graph: Subgraph, end: Tensor) -> dict[str, Tensor]:
    """Numeric tensors with unique names that `end` depends on, by name in execution order."""
    tensors = makers_of(needed_for([end], graph.operators))
    counts = Counter(tensor.name for tensor in tensors if tensor is not end)
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        kind = np.dtype(tensor.dtype.numpy or np.bytes_).kind
        if tensor.name and counts[tensor.name] == 1 and kind in KINDS:
            found[tensor.name] = tensor
    return found


def _shared(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[Twins]:
    """Tensors of both models that have the same name, shape and type."""
    for name, one in ours.items():
        other = theirs.get(name)
        if other is not None and _form(one) == _form(other):
            yield one, other


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.shape_signature, tensor.dtype


class _Search(NamedTuple):
    """Looks for the first difference in the signature `name`, which runs alone in the `session`.

    `shared` has the tensors of both sides in execution order, the output last; a place is an index into it. Side 0 is
    `a`, side 1 is `b`.
    """

    both: Both
    kernels: Kernels
    session: Session
    name: str
    shared: Sequence[Twins]

    def batches(self) -> list[list[int]]:
        """All places, in groups whose tensors fit into memory together."""
        calls = len(self.session.order)
        batches = defaultdict[int, list[int]](list)
        end = 0
        for place, (one, _) in enumerate(self.shared):
            end += calls * (one.dtype.byte_size(one.elements) or 0)
            batches[(end - 1) // _MOST_BYTES].append(place)
        return list(batches.values())

    def look(self, places: Sequence[int]) -> tuple[int, OutputComparison] | None:
        """Run both models up to these tensors; return the first that differs, with its figures."""
        results: list[list[Arrays]] = []
        for side, calls in enumerate(self.session.calls(self.both.begun.seed)):
            probes = {str(place): self.shared[place][side] for place in places}
            with Part(self._probed(side, probes)).file() as file:
                results.append(self.both.worker.run_calls(file, calls, self.kernels))
        ordinary = self.session.ordinary(self.name)
        for place in places:
            one, other = self.shared[place]
            a = tensor_info(one, one.name)
            b = tensor_info(other, other.name)
            key = str(place)
            runs = [(ours[key], theirs[key]) for ours, theirs in zip(*results, strict=True)]
            found = self.both.measure(a, b, runs, ordinary)
            if not found.equal:
                return place, found
        return None

    def _probed(self, side: int, probes: Mapping[str, Tensor]) -> Model:
        """The operators that compute these tensors, with the tensors as outputs of the signature."""
        model = self.both.models[side]
        graph, inputs, _ = model.arguments(self.name)
        operators = needed_for(probes.values(), graph.operators)
        return cut_signature(model, self.name, operators, inputs, probes)

    def describe(self, place: int, figures: OutputComparison) -> FirstDifference:
        """Describe a difference; all shared tensors before it are equal."""
        equal = set(chain.from_iterable(self.shared[:place]))
        tensor, other_tensor = self.shared[place]
        graph_a, inputs_a, _ = self.both.models[0].arguments(self.name)
        graph_b, inputs_b, _ = self.both.models[1].arguments(self.name)
        cone_a = needed_for([tensor], graph_a.operators, equal)
        cone_b = needed_for([other_tensor], graph_b.operators, equal)
        names = _ShortNames(self.shared)
        pair = self.both.pairs[self.name]
        for one, other in zip(pair.signature.inputs, pair.inputs, strict=True):
            names.known[inputs_a[one.name]] = f"%{one.name}"
            names.known[inputs_b[other.name]] = f"%{one.name}"
        # Tensors are numbered in the order in which they are shown.
        read = [names.of(one) for one in reads([*cone_a, *cone_b]) if not one.is_constant]
        operators_a = [operator_text(operator, names.of) for operator in cone_a]
        operators_b = [operator_text(operator, names.of) for operator in cone_b]
        return FirstDifference(
            signature=self.name,
            equal_before=tuple(dict.fromkeys(read)),
            operators_a=tuple(operators_a),
            operators_b=tuple(operators_b),
            tensor=tensor.name,
            short_name=names.of(tensor),
            figures=replace(figures, name=tensor.name),
            names=names.legend,
            constants=tuple(_differing(cone_a, cone_b)),
            reason=_NOTHING_SHARED if len(self.shared) == 1 else "",
        )


class _ShortNames:
    """Short names of tensors, the same in both models for a shared one; `legend` maps them to the full names."""

    def __init__(self, shared: Iterable[Twins]) -> None:
        self.known: dict[Tensor, str] = {}
        self.legend: dict[str, str] = {}
        self._twins = {tensor: both for both in shared for tensor in both}

    def of(self, tensor: Tensor) -> str:
        """The name of a tensor, which is numbered if it has none yet."""
        if tensor not in self.known:
            name = f"%{len(self.legend)}"
            self.legend[name] = tensor.name
            for twin in self._twins.get(tensor, (tensor,)):
                self.known[twin] = name
        return self.known[tensor]


def _constants(operators: Iterable[Operator]) -> dict[str, Data]:
    """The content of the constants that operators read, by name."""
    found: dict[str, Data] = {}
    for operator in operators:
        for tensor in operator.given:
            if tensor.data is not None:
                found[tensor.name] = tensor.data
    return found


def _differing(ours: Iterable[Operator], theirs: Iterable[Operator]) -> Iterator[str]:
    """The names of constants that operators of both models read, with different content."""
    others = _constants(theirs)
    for name, data in _constants(ours).items():
        other = others.get(name)
        if other is not None and not np.array_equal(data.view(), other.view()):
            yield name
