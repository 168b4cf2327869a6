"""Runs two models on the same inputs, signature by signature, and says how far their outputs are apart.

At most one of the two is loaded at a time; of the other only the outputs of the signature at hand are kept.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from edge_opt.comparison.bisect import Probe, first_difference
from edge_opt.comparison.filling import FilledCaches, Filler
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    GenerationComparison,
    OutputComparison,
    SignatureComparison,
    measured,
)
from edge_opt.comparison.generate import compare_generation
from edge_opt.comparison.graph_facts import least_entries, least_runs, shaped_like, with_entries, with_lengths
from edge_opt.comparison.models import Models, find_models
from edge_opt.comparison.shelf import Shelf
from edge_opt.ir import load
from edge_opt.proof.inputs import HOSTILE, InputPlan, Kind, pair, plan
from edge_opt.proof.metrics import are_logits
from edge_opt.proof.protocol import Array
from edge_opt.proof.roles import role_of
from edge_opt.proof.runner import Worker
from edge_opt.proof.source import ModelLike, Source
from edge_opt.proof.tensors import Kernels, SignatureInfo, TensorInfo
from edge_opt.schema.errors import EdgeOptError, UsageError, unknown

Backend = Literal["xnnpack", "reference", "both", "tensorflow"]
Progress = Callable[[str, int, int], None]

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
    locate: bool = True,
    generate: int | None = None,
    embedder: ModelLike | None = None,
    auxiliary: ModelLike | None = None,
    progress: Progress | None = None,
    worker: Worker | None = None,
) -> ComparisonReport:
    """Runs every signature of both models on the same random inputs and measures the outputs.

    Inputs are matched by the signature's names, or by position where a model has no signatures (then the name is
    `main`). A quantized input gets the same real numbers as its float counterpart. Caches are filled by the prefill of
    `a`. What one model has and the other lacks is a reported difference.

    Args:
        a: the reference: a path, the bytes of a model, or a `Model`.
        b: what is judged.
        signatures: only these; all of both by default.
        backend: kernels to run on; `both` is XNNPACK and the reference kernels.
        runs: sets of realistic inputs per signature; figures are the worst over all. Models that keep state are run
            twice at least, and it is carried from one run to the next.
        seed: decides the inputs.
        atol: `equal` means |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        hostile: also run one set each of inputs with fully masked rows, large values, denormals, NaN and infinity.
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
    _check(backend, runs, atol, rtol)
    with ExitStack() as stack:
        running = worker or stack.enter_context(Worker(time_limit=_SECONDS_PER_REQUEST))
        running.start()
        models = [find_models(model, embedder, auxiliary) for model in (a, b)]
        first = stack.enter_context(models[0].source("a"))
        second = stack.enter_context(models[1].source("b"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        job = _Job(running, first, second, runs, hostile, seed, atol, rtol, progress, folder)
        # First: what is missing for it is found before the long work.
        generation = None if generate is None else job.generate(models, generate, _kernels(backend)[0])
        found = job.signatures(signatures, _kernels(backend))
        place = job.first_difference(found) if locate else None
        return job.report(backend, found, place, generation)


def _check(backend: str, runs: int, atol: float, rtol: float) -> None:
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    if runs < 1:
        raise UsageError(f"runs is {runs}, expected at least 1")
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not value >= 0:
            raise UsageError(f"{name} is {value}, expected a number that is not negative")


def _kernels(backend: Backend) -> tuple[Kernels, ...]:
    return ("xnnpack", "reference") if backend == "both" else (backend,)


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


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of inputs: its kind, and a number that tells it from others. `apart`: not part of the verdict."""

    kind: Kind
    run: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class _Pairing:
    """What of one signature can be run on both sides, and what differs before anything ran."""

    inputs: tuple[tuple[TensorInfo, TensorInfo], ...] = ()
    outputs: tuple[tuple[TensorInfo, TensorInfo], ...] = ()
    unmatched: tuple[OutputComparison, ...] = ()
    reason: str = ""


@dataclass
class _Job:
    worker: Worker
    a: Source
    b: Source
    runs: int
    hostile: bool
    seed: int
    atol: float
    rtol: float
    progress: Progress | None
    folder: Path
    caches: FilledCaches = field(default_factory=FilledCaches, init=False)
    described: tuple[dict[str, SignatureInfo], dict[str, SignatureInfo]] = field(default=({}, {}), init=False)
    done: int = field(default=0, init=False)
    steps: int = field(default=1, init=False)

    @property
    def sets(self) -> list[_Set]:
        """What every signature is run on."""
        sets = [_Set("realistic", run) for run in range(self.runs)]
        return sets + [_Set(kind, self.runs + place) for place, kind in enumerate(HOSTILE)] * self.hostile

    def report(
        self,
        backend: Backend,
        found: Sequence[SignatureComparison],
        place: FirstDifference | None,
        generation: GenerationComparison | None,
    ) -> ComparisonReport:
        """All that was found, with what it was found on."""
        return ComparisonReport(
            self.a.name,
            self.b.name,
            backend,
            self.seed,
            self.runs,
            self.hostile,
            self.atol,
            self.rtol,
            tuple(found),
            place,
            generation,
            tuple(self.caches.told),
        )

    def generate(self, models: Sequence[Models], count: int, kernels: Kernels) -> GenerationComparison:
        """Both models drive the loop of prefill and decode."""
        self.tell("generating")
        a, b = models
        pair = a.with_helpers_of(b), b.with_helpers_of(a)
        return compare_generation(self.worker, *pair, count=count, seed=self.seed, kernels=kernels)

    def signatures(
        self, chosen: Sequence[str] | None, kernel_sets: Sequence[Kernels]
    ) -> list[SignatureComparison]:
        """One comparison per signature and kernel set."""
        ours, theirs = self._describe(self.a), self._describe(self.b)
        for name in ours.keys() & theirs.keys():
            ours[name] = least_entries(ours[name], theirs[name])
            theirs[name] = shaped_like(theirs[name], ours[name])
        self.described = ours, theirs
        names = choose(list(dict.fromkeys([*ours, *theirs])), chosen)
        self.steps = 2 * len(names) * len(kernel_sets)
        self._fill_caches([name for name in names if name in ours])
        begun = self.done
        found = []
        for kernels in kernel_sets:
            for name in names:
                if name in ours and name in theirs:
                    found.append(self._signature(ours[name], theirs[name], kernels))
                else:
                    found.append(SignatureComparison(name, kernels, reason=self._only(name in ours)))
                self.done = begun + 2 * len(found)
        self.tell("compared")
        return found

    def _describe(self, source: Source) -> dict[str, SignatureInfo]:
        described = self.worker.describe(source.model)
        model = load(source.model)
        self.runs = max(self.runs, least_runs(model))
        known = with_entries(described, model)
        if source is self.a:
            known = with_lengths(known, model)
        return {signature.name: signature for signature in known}

    def _fill_caches(self, names: Sequence[str]) -> None:
        """Of realistic runs; caches of hostile ones hold what is hostile."""
        filler = Filler(self.worker, self.a.model, self.described[0], self.seed, self.folder)
        by_filler, without = filler.served(names)
        self.steps += len(by_filler)
        for prefill, served in by_filler.items():
            self.tell(f"{prefill}: filling caches")
            filler.fill(prefill, served, range(self.runs), self.caches)
            self.done += 1
        if without:
            listed = ", ".join(without)
            self.caches.told.append(
                f"caches of {listed}: random, because no prefill signature of a fills them"
            )

    def first_difference(self, found: Sequence[SignatureComparison]) -> FirstDifference | None:
        """Where the first output that differs begins to; None where none does in its numbers."""
        for signature in found:
            for output in signature.outputs:
                if output.difference is not None and not output.difference.equal:
                    return self._locate(signature, output.name)
        return None

    def _locate(self, found: SignatureComparison, output: str) -> FirstDifference:
        self.tell(f"{found.name}: looking for the first difference")
        ours, theirs = (described[found.name] for described in self.described)
        paired = self._pair(ours, theirs)
        outputs = next(pair for pair in paired.outputs if pair[0].name == output)
        plans = self._plans(ours, paired, self.sets)
        kernels = cast("Kernels", found.backend)
        try:
            probe = Probe(ours, *outputs, kernels, *plans)
            return first_difference(self.worker, self.a, self.b, probe, self._measure)
        except EdgeOptError as error:
            # The comparison itself is done: what was found must not be lost.
            return FirstDifference(found.name, found.backend, reason=f"looking for it failed: {error}")

    def _signature(self, a: SignatureInfo, b: SignatureInfo, kernels: Kernels) -> SignatureComparison:
        paired = self._pair(a, b)
        if paired.reason:
            return SignatureComparison(a.name, kernels, reason=paired.reason)
        size = sum(info.nbytes for info in a.outputs)
        batch = max(_REPLY_BYTES // max(size, 1), 1)
        sets = self.sets
        if not self.hostile and any(role_of(info) == "mask" for info in a.inputs):
            # A realistic mask closes no row, for no token is one; still, both models should agree there.
            sets.append(_Set("masked_rows", 0, apart=True))
        merged: dict[str, OutputComparison] = {}
        closed: dict[str, OutputComparison] = {}
        for begin in range(0, len(sets), batch):
            self._run_batch(a, paired, kernels, sets[begin : begin + batch], merged, closed)
        outputs = (*merged.values(), *paired.unmatched)
        return SignatureComparison(a.name, kernels, outputs, masked_rows=tuple(closed.values()))

    def _run_batch(
        self,
        signature: SignatureInfo,
        paired: _Pairing,
        kernels: Kernels,
        sets: Sequence[_Set],
        merged: dict[str, OutputComparison],
        closed: dict[str, OutputComparison],
    ) -> None:
        plans_a, plans_b = self._plans(signature, paired, sets)
        with Shelf() as shelf:
            self.tell(f"{signature.name}: running a on {kernels} kernels")
            for run, outputs in enumerate(
                self.worker.run_plans(self.a.model, signature.name, plans_a, kernels)
            ):
                shelf.keep(run, outputs)
            self.done += 1
            self.tell(f"{signature.name}: running b on {kernels} kernels")
            results = self.worker.run_plans(self.b.model, signature.name, plans_b, kernels)
            self.done += 1
            for run, outputs in enumerate(results):
                into = closed if sets[run].apart else merged
                for info_a, info_b in paired.outputs:
                    ours = shelf.get(run, info_a.name)
                    found = self._measure(info_a, info_b, ours, outputs.pop(info_b.name))
                    into[found.name] = found.merged(into.get(found.name))
            self.done -= 2

    def _plans(
        self, signature: SignatureInfo, paired: _Pairing, sets: Sequence[_Set]
    ) -> tuple[list[list[InputPlan]], list[list[InputPlan]]]:
        plans_a, plans_b = [], []
        for one in sets:
            if one.kind == "realistic" or one.apart:
                made = self.caches.plan(signature, self.seed, one.run)
            else:
                made = plan(signature, seed=self.seed, run=one.run, kind=one.kind)
            if one.apart:
                made = tuple(
                    replace(given, kind=one.kind) if given.role == "mask" else given for given in made
                )
            twins = [pair(ours, other) for ours, (_, other) in zip(made, paired.inputs, strict=True)]
            plans_a.append([ours for ours, _ in twins])
            plans_b.append([other for _, other in twins])
        return plans_a, plans_b

    def _measure(self, info_a: TensorInfo, info_b: TensorInfo, a: Array, b: Array) -> OutputComparison:
        how = {"atol": self.atol, "rtol": self.rtol, "logits": are_logits(info_a)}
        found = measured(info_a, info_b, a, b, **how)
        requantized = info_a.quantized and info_b.quantized and info_a.quantization != info_b.quantization
        if found.reason or not requantized:
            return found
        return replace(found, reason=f"quantization {info_a.quantization} in a, {info_b.quantization} in b")

    def _pair(self, a: SignatureInfo, b: SignatureInfo) -> _Pairing:
        by_place = a.positional and b.positional
        inputs, alone = _match(a.inputs, b.inputs, by_place=by_place)
        for info, in_a in alone:
            return _Pairing(reason=f"input '{info.name}' is {self._only(in_a)}")
        for one, other in inputs:
            if one.declared != other.declared:
                return _Pairing(
                    reason=f"input '{one.name}' has shape {one.declared} in a, {other.declared} in b"
                )
        outputs, alone = _match(a.outputs, b.outputs, by_place=by_place)
        unmatched = tuple(OutputComparison(info.name, reason=self._only(in_a)) for info, in_a in alone)
        return _Pairing(tuple(inputs), tuple(outputs), unmatched)

    def _only(self, in_a: bool) -> str:
        return f"only in {self.a.name if in_a else self.b.name}"

    def tell(self, stage: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(stage, self.done, self.steps)


def _match(
    ours: Sequence[TensorInfo], theirs: Sequence[TensorInfo], *, by_place: bool
) -> tuple[list[tuple[TensorInfo, TensorInfo]], list[tuple[TensorInfo, bool]]]:
    """Pairs by name, or by place, and what has no partner, with whether it is in `a`."""
    a, b = (
        {place if by_place else info.name: info for place, info in enumerate(own)} for own in (ours, theirs)
    )
    alone = [(info, True) for key, info in a.items() if key not in b]
    alone += [(info, False) for key, info in b.items() if key not in a]
    return [(info, b[key]) for key, info in a.items() if key in b], alone
