"""Runs two models on the same inputs, signature by signature, and says how far their outputs are apart.

At most one of the two is loaded at a time; of the other only the outputs of the signature at hand are kept.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from edge_opt.base.errors import EdgeOptError, UsageError, match_names, unknown
from edge_opt.base.words import Progress
from edge_opt.comparison.bisect import Probe, first_difference
from edge_opt.comparison.facts import agreed, keeps_state, with_facts
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    OutputComparison,
    SignatureComparison,
    measured,
)
from edge_opt.comparison.generate import FilledCaches, compare_generation, keep
from edge_opt.comparison.models import MAIN, find_parts, name_of
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike
from edge_opt.runtime.inputs import InputPlan, pair
from edge_opt.runtime.metrics import are_logits
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import Kernels, SignatureInfo, TensorInfo, role_of

Place = Literal["cpu", "reference"]

KERNELS: dict[str, Kernels] = {"cpu": "xnnpack", "reference": "reference"}
_SECONDS_PER_REQUEST = 1800.0
_REPLY_BYTES = 256 << 20


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
    """Runs every signature of both models on the same random inputs and measures the outputs.

    Inputs are matched by the signature's names, or by position where a model has no signatures (then the name is
    `main`). A quantized input gets the same real numbers as its float counterpart. Caches are filled by the prefill of
    `a`. What one model has and the other lacks is a difference. Models that keep state are run twice, and it is carried
    from one run to the next.

    Args:
        a: the reference: a path, the bytes of a model, a `Model`, or what `litert_torch.convert` returns.
        b: what is judged.
        on: "cpu" as the runtime runs models by default, or "reference" for its reference kernels.
        signatures: only these; all of both by default.
        seed: decides the inputs.
        atol: `equal` means |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        shapes: sizes for inputs whose lengths are open in both models, by `NAME` or `signature/NAME`; 1 by default.
        generate: also generate so many tokens greedily, through prefill and decode, from a random prompt.
        locate: on a difference, look for the first tensor that differs (`first_difference` of the report).
        progress: called with a stage, the steps done and the steps in all.

    Raises:
        UsageError: an argument has no meaning, or no model has a chosen signature.
        ModelFormatError: a model cannot be read.
        RuntimeFailed: the runtime refused, crashed on or did not finish a model; names model and signature.
    """
    if on not in get_args(Place):
        raise unknown("place to run on", on, get_args(Place))
    seed, atol, rtol = checked_numbers(seed, atol, rtol)
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(time_limit=_SECONDS_PER_REQUEST))
        worker.start()
        models = [find_parts(model) for model in (a, b)]
        first, second = (stack.enter_context(parts[MAIN].file()) for parts in models)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        report = ComparisonReport(name_of(a, "a"), name_of(b, "b"), on, seed, atol, rtol)
        if generate is not None:
            # First: what is missing for it is found before the long work.
            helped = {**models[1], **models[0]}, {**models[0], **models[1]}
            names = report.a, report.b
            found = compare_generation(worker, *helped, names, count=generate, seed=seed, kernels=KERNELS[on])
            report = replace(report, generation=found)
        comparison = _Comparison(
            worker, first, second, report, progress or (lambda *_: None), folder, shapes or {}
        )
        compared = comparison.signatures(signatures)
        return replace(
            report,
            signatures=compared,
            first_difference=comparison.first_difference(compared) if locate else None,
            caches=tuple(comparison.caches.notes),
            opened=tuple(comparison.opened),
        )


def checked_numbers(seed: int, atol: float, rtol: float) -> tuple[int, float, float]:
    """What decides the inputs and what is equal, as Python's own numbers: JSON has none of numpy's.

    Raises:
        UsageError: one is not a number, or too small.
    """
    for name, value, kind in (("seed", seed, Integral), ("atol", atol, Real), ("rtol", rtol, Real)):
        if not isinstance(value, kind) or not value >= 0:
            number = "a number" if kind is Real else "an integer"
            raise UsageError(f"{name} is {value!r}, expected {number}, at least 0")
    return int(seed), float(atol), float(rtol)


def choose(available: Sequence[str], wanted: str | Sequence[str] | None) -> list[str]:
    """The signatures to run, in order.

    Raises:
        UsageError: a chosen one does not exist, or none is chosen: comparing nothing would find no difference.
    """
    if wanted is None:
        return list(available)
    if not wanted:
        raise UsageError(f"no signature is chosen, there is {', '.join(available)}")
    return match_names("signature", wanted, available)


class _Pairs(NamedTuple):
    """Inputs and outputs that both models have of a signature, and the outputs that only one has."""

    inputs: list[tuple[TensorInfo, TensorInfo]]
    outputs: list[tuple[TensorInfo, TensorInfo]]
    unmatched: list[OutputComparison]


@dataclass
class _Comparison:
    """Runs both models; `report` has the settings, and no signatures yet."""

    worker: Worker
    a: Path
    b: Path
    report: ComparisonReport
    progress: Progress
    folder: Path
    shapes: Mapping[str, Sequence[int]]
    caches: FilledCaches = field(init=False)
    described: dict[str, SignatureInfo] = field(init=False)
    """The signatures of `a`, with the inputs as both models take them."""
    pairs: dict[str, _Pairs | str] = field(default_factory=dict, init=False)
    """By signature; a text says why it cannot be run on both sides."""
    opened: list[str] = field(default_factory=list, init=False)
    runs: int = field(default=1, init=False)

    def signatures(self, chosen: Sequence[str] | None) -> tuple[SignatureComparison, ...]:
        """One comparison for each signature that either model has."""
        self.described, theirs = self._describe(self.a), self._describe(self.b)
        names = choose(list(dict.fromkeys([*self.described, *theirs])), chosen)
        self._check_shapes()
        for name in names:
            if name not in self.described or name not in theirs:
                self.pairs[name] = self._only(name in self.described)
                continue
            pairs = self.pairs[name] = self._pair(self.described[name], theirs[name])
            if isinstance(pairs, _Pairs):
                given = tuple(one for one, _ in pairs.inputs)
                self.described[name] = replace(self.described[name], inputs=given)
        self.progress("filling caches", 0, 2 * len(names))
        self.caches = FilledCaches(self.worker, self.a, self.described, self.report.seed, self.folder)
        self.caches.fill([name for name in names if isinstance(self.pairs[name], _Pairs)], self.runs)
        compared = []
        for place, name in enumerate(names):
            self.progress(f"{name}: running", 2 * place, 2 * len(names))
            compared.append(self._signature(name))
        self.progress("compared", 2 * len(names), 2 * len(names))
        return tuple(compared)

    def _check_shapes(self) -> None:
        """Sizes are given for inputs that there are."""
        inputs = [(name, info.name) for name, one in self.described.items() for info in one.inputs]
        known = dict.fromkeys([*(name for _, name in inputs), *map("/".join, inputs)])
        for name in self.shapes:
            if name not in known:
                raise unknown("input", name, list(known))

    def _describe(self, file: Path) -> dict[str, SignatureInfo]:
        model = load(file)
        self.runs = max(self.runs, 1 + keeps_state(model))
        return with_facts(self.worker.describe(file), model)

    def _signature(self, name: str) -> SignatureComparison:
        pairs = self.pairs[name]
        if isinstance(pairs, str):
            return SignatureComparison(name, reason=pairs)
        runs: list[int | None] = list(range(self.runs))
        if any(role_of(info) == "mask" for info in self.described[name].inputs):
            # A realistic mask closes no row, for no token is one; still, both models should agree there.
            runs.append(None)
        judged: dict[str, OutputComparison] = {}
        masked: dict[str, OutputComparison] = {}
        for run, outputs in self._run(name, pairs, runs):
            merged = masked if run is None else judged
            merged.update({output.name: output.merged(merged.get(output.name)) for output in outputs})
        return SignatureComparison(
            name, (*judged.values(), *pairs.unmatched), masked_rows=tuple(masked.values())
        )

    def _run(
        self, name: str, pairs: _Pairs, runs: Sequence[int | None]
    ) -> Iterator[tuple[int | None, list[OutputComparison]]]:
        """Run both models on several sets of inputs, and measure the outputs that both have.

        Runs are numbered; None is one with masked rows.
        """
        room = _REPLY_BYTES // max(sum(info.nbytes for info in self.described[name].outputs), 1)
        batch = max(room, 1)
        kernels, path = KERNELS[self.report.on], self.folder / "outputs"
        for begin in range(0, len(runs), batch):
            part = runs[begin : begin + batch]
            plans_a, plans_b = self._plans(name, pairs, part)
            path.unlink(missing_ok=True)
            ours = [keep(run, path) for run in self.worker.run_plans(self.a, name, plans_a, kernels)]
            theirs = self.worker.run_plans(self.b, name, plans_b, kernels)
            for run, one, other in zip(part, ours, theirs, strict=True):
                yield run, [self._measure(a, b, one[a.name], other.pop(b.name)) for a, b in pairs.outputs]

    def _plans(
        self, name: str, pairs: _Pairs, runs: Sequence[int | None]
    ) -> tuple[list[list[InputPlan]], list[list[InputPlan]]]:
        plans_a, plans_b = [], []
        for run in runs:
            planned = self.caches.plan(name, run or 0)
            if run is None:
                planned = tuple(replace(p, kind="masked_rows") if p.role == "mask" else p for p in planned)
            twins = [pair(ours, other) for ours, (_, other) in zip(planned, pairs.inputs, strict=True)]
            plans_a.append([ours for ours, _ in twins])
            plans_b.append([other for _, other in twins])
        return plans_a, plans_b

    def _measure(self, info_a: TensorInfo, info_b: TensorInfo, a: Array, b: Array) -> OutputComparison:
        how: dict[str, Any] = {
            "atol": self.report.atol,
            "rtol": self.report.rtol,
            "logits": are_logits(info_a),
        }
        output = measured(info_a, info_b, a, b, **how)
        requantized = info_a.quantized and info_b.quantized and info_a.quantization != info_b.quantization
        if output.reason or not requantized:
            return output
        return replace(output, reason=f"quantization {info_a.quantization} in a, {info_b.quantization} in b")

    def first_difference(self, compared: Sequence[SignatureComparison]) -> FirstDifference | None:
        """Where the first output that differs begins to; None where none does in its numbers."""
        for name, output in ((one.name, output) for one in compared for output in one.outputs):
            pairs = self.pairs[name]
            if isinstance(pairs, str) or output.difference is None or output.difference.equal:
                continue
            outputs = next(both for both in pairs.outputs if both[0].name == output.name)
            plans = self._plans(name, pairs, range(self.runs))
            probe = Probe(self.described[name], outputs, KERNELS[self.report.on], plans)
            try:
                return first_difference(self.worker, self.a, self.b, probe, self._measure)
            except EdgeOptError as error:
                # The comparison itself is done: what was found must not be lost.
                return FirstDifference(name, reason=f"looking for it failed: {error}")
        return None

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


def _match(
    ours: Sequence[TensorInfo], theirs: Sequence[TensorInfo], *, by_place: bool
) -> tuple[list[tuple[TensorInfo, TensorInfo]], list[tuple[TensorInfo, bool]]]:
    """Pairs by name, or by place, and what has no partner, with whether it is in `a`."""
    a, b = ({at if by_place else info.name: info for at, info in enumerate(side)} for side in (ours, theirs))
    alone = [(info, True) for key, info in a.items() if key not in b]
    alone += [(info, False) for key, info in b.items() if key not in a]
    return [(info, b[key]) for key, info in a.items() if key in b], alone
