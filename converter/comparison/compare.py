"""Runs two models on the same inputs, signature by signature, and says how far their outputs are apart.

At most one of the two is loaded at a time; of the other only the outputs of the signature at hand are kept.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from edge_opt.base.errors import EdgeOptError, UsageError, unknown
from edge_opt.base.words import Progress
from edge_opt.comparison.bisect import Probe, first_difference
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    GenerationComparison,
    OutputComparison,
    SignatureComparison,
    measured,
)
from edge_opt.comparison.generate import FilledCaches, compare_generation, keep
from edge_opt.comparison.models import MAIN, agreed, find_parts, keeps_state, name_of, with_facts
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike, Part, Readable
from edge_opt.runtime.inputs import HOSTILE, InputPlan, Kind, pair, plan
from edge_opt.runtime.metrics import are_logits
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels, SignatureInfo, TensorInfo, role_of

Backend = Literal["xnnpack", "reference", "both", "tensorflow"]

_SECONDS_PER_REQUEST = 1800.0
_REPLY_BYTES = 256 << 20


def compare(
    a: ModelLike,
    b: ModelLike,
    *,
    signatures: Sequence[str] | None = None,
    backend: Backend = "xnnpack",
    runs: int = 1,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    hostile: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
    locate: bool = True,
    generate: int | None = None,
    embedder: Readable | None = None,
    auxiliary: Readable | None = None,
    progress: Progress | None = None,
    worker: Worker | None = None,
) -> ComparisonReport:
    """Runs every signature of both models on the same random inputs and measures the outputs.

    Inputs are matched by the signature's names, or by position where a model has no signatures (then the name is
    `main`). A quantized input gets the same real numbers as its float counterpart. Caches are filled by the prefill of
    `a`. What one model has and the other lacks is a reported difference.

    Args:
        a: the reference: a path, the bytes of a model, a `Model`, or what `litert_torch.convert` returns.
        b: what is judged.
        signatures: only these; all of both by default.
        backend: kernels to run on; `both` is XNNPACK and the reference kernels.
        runs: sets of realistic inputs per signature; figures are the worst over all. Models that keep state are run
            twice at least, and it is carried from one run to the next.
        seed: decides the inputs.
        atol: `equal` means |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        hostile: also run one set each of inputs with fully masked rows, large values, denormals, NaN and infinity.
        shapes: sizes for inputs whose lengths are open in both models, by `NAME` or `signature/NAME`; 1 by default.
        locate: on a difference, look for the first tensor that differs (`first_difference` of the report).
        generate: also generate so many tokens greedily, through prefill and decode, from a random prompt.
        embedder: the model that makes embeddings of tokens; by default the section of a bundle, or
            `embedder.tflite` beside the model. Only for `generate`.
        auxiliary: the same for rotary tables, masks and caches: `auxiliary.tflite`.
        progress: called with a stage, the steps done and the steps in all.
        worker: a running worker to use; by default one of its own.

    Raises:
        UsageError: an argument has no meaning, or no model has a chosen signature; `BackendMissing` is one.
        ModelFormatError: a model cannot be read.
        RuntimeFailed: the runtime refused, crashed on or did not finish a model; names model and signature.
    """
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    runs, seed, atol, rtol = checked_numbers(runs, seed, atol, rtol)
    kernel_sets: tuple[Kernels, ...] = ("xnnpack", "reference") if backend == "both" else (backend,)
    with ExitStack() as stack:
        running = worker or stack.enter_context(Worker(time_limit=_SECONDS_PER_REQUEST))
        running.start()
        models = [find_parts(model, embedder, auxiliary) for model in (a, b)]
        first, second = (stack.enter_context(parts[MAIN].file()) for parts in models)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        names = name_of(a, "a"), name_of(b, "b")
        report = ComparisonReport(*names, backend, seed, runs, hostile, atol, rtol)
        comparison = _Comparison(running, first, second, report, progress, folder, shapes or {})
        # First: what is missing for it is found before the long work.
        generation = None if generate is None else comparison.generate(models, generate, kernel_sets[0])
        compared = comparison.signatures(signatures, kernel_sets)
        return replace(
            comparison.report,
            signatures=compared,
            first_difference=comparison.first_difference(compared) if locate else None,
            generation=generation,
            caches=tuple(comparison.caches.notes),
            opened=tuple(comparison.opened),
        )


def checked_numbers(runs: int, seed: int, atol: float, rtol: float) -> tuple[int, int, float, float]:
    """What decides the inputs and what is equal, as Python's own numbers: numpy's are none of JSON.

    Raises:
        UsageError: one is no number, or too small.
    """
    for name, value, kind, least in (
        ("runs", runs, Integral, 1), ("seed", seed, Integral, 0), ("atol", atol, Real, 0), ("rtol", rtol, Real, 0)
    ):  # fmt: skip
        if not isinstance(value, kind) or not value >= least:
            number = "a number" if kind is Real else "an integer"
            raise UsageError(f"{name} is {value!r}, expected {number}, at least {least}")
    return int(runs), int(seed), float(atol), float(rtol)


def choose(available: Sequence[str], chosen: Sequence[str] | None) -> list[str]:
    """The signatures to run, in order.

    Raises:
        UsageError: a chosen one does not exist, or none is chosen: comparing nothing would find no difference.
    """
    if isinstance(chosen, str):
        chosen = [chosen]
    if chosen is not None and not chosen:
        raise UsageError(f"no signature is chosen, there is {', '.join(available)}")
    for name in chosen or ():
        if name not in available:
            raise unknown("signature", name, available)
    return list(available if chosen is None else dict.fromkeys(chosen))


class _Set(NamedTuple):
    """A set of inputs: its kind, and a number that tells it from others. `apart`: not part of the verdict."""

    kind: Kind
    run: int
    apart: bool = False


class _Pairs(NamedTuple):
    """Inputs and outputs that both models have, and the outputs that only one has."""

    inputs: list[tuple[TensorInfo, TensorInfo]]
    outputs: list[tuple[TensorInfo, TensorInfo]]
    unmatched: list[OutputComparison]


@dataclass
class _Comparison:
    """Runs both models; `report` has the settings and, as yet, no findings."""

    worker: Worker
    a: Path
    b: Path
    report: ComparisonReport
    progress: Progress | None
    folder: Path
    shapes: Mapping[str, Sequence[int]]
    caches: FilledCaches = field(init=False)
    described: dict[str, SignatureInfo] = field(init=False)
    """The signatures of `a`, with the inputs as both models take them."""
    pairs: dict[str, _Pairs | str] = field(default_factory=dict, init=False)
    """By signature; a text says why it cannot be run on both sides."""
    opened: list[str] = field(default_factory=list, init=False)
    done: int = field(default=0, init=False)
    steps: int = field(default=1, init=False)

    def generate(
        self, models: Sequence[Mapping[str, Part]], count: int, kernels: Kernels
    ) -> GenerationComparison:
        """Both models drive the loop of prefill and decode."""
        self._tell("generating")
        a, b = models
        helped = {**b, **a}, {**a, **b}  # an embedder or auxiliary model that is missing is the other's
        return compare_generation(
            self.worker, *helped, self.report.a, count=count, seed=self.report.seed, kernels=kernels
        )

    def signatures(
        self, chosen: Sequence[str] | None, kernel_sets: Sequence[Kernels]
    ) -> tuple[SignatureComparison, ...]:
        """One comparison per signature and kernel set."""
        self.described, theirs = self._describe(self.a), self._describe(self.b)
        available = list(dict.fromkeys([*self.described, *theirs]))
        names = choose(available, chosen)
        inputs = {
            info.name: f"{name}/{info.name}" for name, one in self.described.items() for info in one.inputs
        }
        for name in self.shapes:
            if name not in {*inputs, *inputs.values()}:
                raise unknown("input", name, [*inputs, *inputs.values()])
        for name in available:
            if name not in self.described or name not in theirs:
                self.pairs[name] = self._only(name in self.described)
                continue
            pairs = self.pairs[name] = self._pair(self.described[name], theirs[name])
            if isinstance(pairs, _Pairs):
                given = tuple(one for one, _ in pairs.inputs)
                self.described[name] = replace(self.described[name], inputs=given)
        self.steps = 2 * len(names) * len(kernel_sets)
        self._fill_caches([name for name in names if name in self.described])
        compared = []
        for kernels in kernel_sets:
            for name in names:
                compared.append(self._signature(name, kernels))
                self.done += 2
        self._tell("compared")
        return tuple(compared)

    def _describe(self, file: Path) -> dict[str, SignatureInfo]:
        model = load(file)
        self.report = replace(self.report, runs=max(self.report.runs, 1 + keeps_state(model)))
        return with_facts(self.worker.describe(file), model)

    def _fill_caches(self, names: Sequence[str]) -> None:
        """Fill those that realistic runs read; caches of hostile runs hold what is hostile."""
        self.caches = FilledCaches(self.worker, self.a, self.described, self.report.seed, self.folder)
        by_filler, without = self.caches.served(names)
        self.steps += len(by_filler)
        for prefill, served in by_filler.items():
            self._tell(f"{prefill}: filling caches")
            self.caches.fill(prefill, served, range(self.report.runs))
            self.done += 1
        if without:
            why = "random, because no prefill signature of a fills them"
            self.caches.notes.append(f"caches of {', '.join(without)}: {why}")

    def _signature(self, name: str, kernels: Kernels) -> SignatureComparison:
        pairs, sets = self.pairs[name], self._sets()
        if isinstance(pairs, str):
            return SignatureComparison(name, kernels, reason=pairs)
        signature = self.described[name]
        if not self.report.hostile and any(role_of(info) == "mask" for info in signature.inputs):
            # A realistic mask closes no row, for no token is one; still, both models should agree there.
            sets.append(_Set("masked_rows", 0, apart=True))
        batch = max(_REPLY_BYTES // max(sum(info.nbytes for info in signature.outputs), 1), 1)
        judged: dict[str, OutputComparison] = {}
        masked: dict[str, OutputComparison] = {}
        for begin in range(0, len(sets), batch):
            batched = sets[begin : begin + batch]
            for one, outputs in zip(batched, self._run(name, pairs, kernels, batched), strict=True):
                merged = masked if one.apart else judged
                merged.update({output.name: output.merged(merged.get(output.name)) for output in outputs})
        both = (*judged.values(), *pairs.unmatched)
        return SignatureComparison(name, kernels, both, masked_rows=tuple(masked.values()))

    def _sets(self) -> list[_Set]:
        """The inputs that every signature is run on."""
        runs, hostile = self.report.runs, HOSTILE if self.report.hostile else ()
        realistic = [_Set("realistic", run) for run in range(runs)]
        return realistic + [_Set(kind, runs + place) for place, kind in enumerate(hostile)]

    def _run(
        self, name: str, pairs: _Pairs, kernels: Kernels, sets: Sequence[_Set]
    ) -> Iterator[list[OutputComparison]]:
        """Run both models on each set of inputs, and measure the outputs that both have."""
        plans_a, plans_b = self._plans(name, pairs, sets)
        self._tell(f"{name}: running a on {kernels} kernels")
        path = self.folder / "outputs"
        path.unlink(missing_ok=True)
        kept = [keep(run, path) for run in self.worker.run_plans(self.a, name, plans_a, kernels)]
        self._tell(f"{name}: running b on {kernels} kernels", ahead=1)
        results = self.worker.run_plans(self.b, name, plans_b, kernels)
        for ours, theirs in zip(kept, results, strict=True):
            yield [self._measure(a, b, ours[a.name], theirs.pop(b.name)) for a, b in pairs.outputs]

    def _plans(
        self, name: str, pairs: _Pairs, sets: Sequence[_Set]
    ) -> tuple[list[list[InputPlan]], list[list[InputPlan]]]:
        plans_a, plans_b = [], []
        for one in sets:
            if one.kind == "realistic" or one.apart:
                planned = self.caches.plan(name, one.run)
            else:
                planned = plan(self.described[name], seed=self.report.seed, run=one.run, kind=one.kind)
            if one.apart:
                planned = tuple(replace(p, kind=one.kind) if p.role == "mask" else p for p in planned)
            twins = [pair(ours, other) for ours, (_, other) in zip(planned, pairs.inputs, strict=True)]
            plans_a.append([ours for ours, _ in twins])
            plans_b.append([other for _, other in twins])
        return plans_a, plans_b

    def _measure(self, info_a: TensorInfo, info_b: TensorInfo, a: Array, b: Array) -> OutputComparison:
        how = {"atol": self.report.atol, "rtol": self.report.rtol, "logits": are_logits(info_a)}
        output = measured(info_a, info_b, a, b, **how)
        requantized = info_a.quantized and info_b.quantized and info_a.quantization != info_b.quantization
        if output.reason or not requantized:
            return output
        return replace(output, reason=f"quantization {info_a.quantization} in a, {info_b.quantization} in b")

    def first_difference(self, compared: Sequence[SignatureComparison]) -> FirstDifference | None:
        """Where the first output that differs begins to; None where none does in its numbers."""
        for signature in compared:
            pairs = self.pairs[signature.name]
            for output in signature.outputs:
                if isinstance(pairs, _Pairs) and output.difference and not output.difference.equal:
                    return self._locate(signature, pairs, output.name)
        return None

    def _locate(self, signature: SignatureComparison, pairs: _Pairs, output: str) -> FirstDifference:
        name, kernels = signature.name, cast("Kernels", signature.backend)
        self._tell(f"{name}: looking for the first difference")
        outputs = next(both for both in pairs.outputs if both[0].name == output)
        plans = self._plans(name, pairs, self._sets())
        try:
            probe = Probe(self.described[name], outputs, kernels, plans)
            return first_difference(self.worker, self.a, self.b, probe, self._measure)
        except EdgeOptError as error:
            # The comparison itself is done: what was found must not be lost.
            return FirstDifference(name, kernels, reason=f"looking for it failed: {error}")

    def _pair(self, a: SignatureInfo, b: SignatureInfo) -> _Pairs | str:
        """What both models have of a signature, or why it cannot be run on both."""
        by_place = a.positional and b.positional
        matched, alone = _match(a.inputs, b.inputs, by_place=by_place)
        for info, in_a in alone:
            return f"input '{info.name}' is {self._only(in_a)}"
        inputs = []
        for one, other in matched:
            given = self.shapes.get(f"{a.name}/{one.name}", self.shapes.get(one.name))
            both = agreed(one, other, given)
            if both is None:
                wanted = "" if given is None else f", {tuple(given)} is asked for"
                return f"input '{one.name}' has shape {one.declared} in a, {other.declared} in b{wanted}"
            inputs.append(both)
            if -1 in map(max, one.declared, other.declared):
                self.opened.append(f"{a.name}/{one.name} {list(both[0].shape)}")
        outputs, alone = _match(a.outputs, b.outputs, by_place=by_place)
        missing = [OutputComparison(info.name, reason=self._only(in_a)) for info, in_a in alone]
        return _Pairs(inputs, outputs, missing)

    def _only(self, in_a: bool) -> str:
        return f"only in {self.report.a if in_a else self.report.b}"

    def _tell(self, stage: str, ahead: int = 0) -> None:
        if self.progress is not None:
            self.progress(stage, self.done + ahead, self.steps)


def _match(
    ours: Sequence[TensorInfo], theirs: Sequence[TensorInfo], *, by_place: bool
) -> tuple[list[tuple[TensorInfo, TensorInfo]], list[tuple[TensorInfo, bool]]]:
    """Pairs by name, or by place, and what has no partner, with whether it is in `a`."""
    a, b = ({at if by_place else info.name: info for at, info in enumerate(side)} for side in (ours, theirs))
    alone = [(info, True) for key, info in a.items() if key not in b]
    alone += [(info, False) for key, info in b.items() if key not in a]
    return [(info, b[key]) for key, info in a.items() if key in b], alone
