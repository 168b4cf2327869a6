"""Runs two models on the same inputs, signature by signature, and says how far their outputs are apart.

At most one of the two is loaded at a time; of the other only the outputs of the signature at hand are kept.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from edge_opt.base.errors import EdgeOptError, UsageError, match_names, unknown
from edge_opt.base.words import Progress, many
from edge_opt.comparison.bisect import Probe, first_difference
from edge_opt.comparison.facts import agreed, keeps_state, with_facts
from edge_opt.comparison.findings import (
    ComparisonReport,
    FirstDifference,
    OutputComparison,
    SignatureComparison,
    measured,
    name_of,
    quantization_of,
)
from edge_opt.comparison.generate import FilledCaches, compare_generation, find_parts, keep
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike
from edge_opt.ir.refusal import RefusedError
from edge_opt.runtime.inputs import InputPlan
from edge_opt.runtime.inputs import pair as twins
from edge_opt.runtime.metrics import are_logits
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import MAIN, Kernels, SignatureInfo, TensorInfo

Place = Literal["cpu", "reference"]

KERNELS: dict[str, Kernels] = {"cpu": "xnnpack", "reference": "reference"}
_SECONDS_PER_REQUEST = 1800.0


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
    tell, kernels = progress or (lambda *_: None), KERNELS[on]
    report = ComparisonReport(name_of(a, "a"), name_of(b, "b"), on, seed, atol, rtol)
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(time_limit=_SECONDS_PER_REQUEST))
        worker.start()
        parts = [find_parts(model) for model in (a, b)]
        files = [stack.enter_context(each[MAIN].file()) for each in parts]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        if generate is not None:
            # First: what is missing for it is found before the long work.
            helped = {**parts[1], **parts[0]}, {**parts[0], **parts[1]}
            found = compare_generation(
                worker, *helped, (report.a, report.b), count=generate, seed=seed, kernels=kernels
            )
            report = replace(report, generation=found)
        models = [load(file) for file in files]
        runs = 1 + any(map(keeps_state, models))
        ours, theirs = (
            with_facts(worker.describe(file), model) for file, model in zip(files, models, strict=True)
        )
        names = choose(list(dict.fromkeys([*ours, *theirs])), signatures)
        _check_shapes(shapes or {}, ours)
        pairs: dict[str, _Pair] = {}
        reasons: dict[str, str] = {}
        for name in names:
            try:
                pairs[name] = _Pair.of(ours.get(name), theirs.get(name), shapes or {}, (report.a, report.b))
            except RefusedError as refused:
                reasons[name] = str(refused)
        described = ours | {name: pair.signature for name, pair in pairs.items()}
        tell("filling caches", 0, 2 * len(names))
        caches = FilledCaches(worker, files[0], described, seed, folder)
        caches.fill(pairs)
        comparison = _Comparison(worker, (files[0], files[1]), caches, kernels, runs, atol, rtol)
        compared = []
        for place, name in enumerate(names):
            tell(f"{name}: running", 2 * place, 2 * len(names))
            if name in pairs:
                compared.append(comparison.run(pairs[name]))
            else:
                compared.append(SignatureComparison(name, reason=reasons[name]))
        tell("compared", 2 * len(names), 2 * len(names))
        sizes = ", ".join(text for pair in pairs.values() for text in pair.opened)
        opened = [f"open lengths were run at one size only (--shape gives others): {sizes}"] if sizes else []
        return replace(
            report,
            signatures=tuple(compared),
            first_difference=comparison.locate(pairs, compared) if locate else None,
            remarks=(*caches.notes, *opened, *_retyped(pairs.values())),
        )


def checked_numbers(seed: int, atol: float, rtol: float) -> tuple[int, float, float]:
    """What decides the inputs and what is equal, as Python's own numbers: JSON has none of numpy's.

    Raises:
        UsageError: one is below 0, or not a number.
    """
    for name, value in (("seed", seed), ("atol", atol), ("rtol", rtol)):
        if not value >= 0:
            raise UsageError(f"{name} is {value}, expected at least 0")
    return int(seed), float(atol), float(rtol)


def choose(available: Sequence[str], wanted: str | Sequence[str] | None) -> list[str]:
    """The signatures to run, in order.

    Raises:
        UsageError: a chosen one does not exist.
    """
    return list(available) if wanted is None else match_names("signature", wanted, available)


def _check_shapes(shapes: Mapping[str, Sequence[int]], described: Mapping[str, SignatureInfo]) -> None:
    """Sizes are given for inputs that there are."""
    inputs = [(name, info.name) for name, one in described.items() for info in one.inputs]
    known = dict.fromkeys([*(name for _, name in inputs), *map("/".join, inputs)])
    for name in shapes:
        if name not in known:
            raise unknown("input", name, list(known))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A signature of both models: that of `a` with its inputs as both take them, and the inputs of `b`.

    `outputs` are those of both, `alone` those that only one has; `opened` are the inputs of open lengths, with the
    size that was taken.
    """

    signature: SignatureInfo
    inputs: list[TensorInfo]
    outputs: list[tuple[TensorInfo, TensorInfo]]
    alone: list[OutputComparison]
    opened: list[str]

    @classmethod
    def of(
        cls,
        a: SignatureInfo | None,
        b: SignatureInfo | None,
        shapes: Mapping[str, Sequence[int]],
        names: Sequence[str],
    ) -> Self:
        """What both models have; `names` are theirs.

        Raises:
            RefusedError: the signature cannot be run on both.
        """
        if a is None or b is None:
            raise RefusedError(f"only in {names[a is None]}")
        inputs, alone = _matched(a, b, "inputs", names)
        if alone:
            raise RefusedError(f"input '{alone[0].name}' is {alone[0].reason}")
        both, opened = [], []
        for one, other in inputs:
            given = shapes.get(f"{a.name}/{one.name}", shapes.get(one.name))
            taken = agreed(one, other, given)
            if taken is None:
                wanted = "" if given is None else f", {tuple(given)} is asked for"
                shown = f"input '{one.name}' has shape {one.declared} in a, {other.declared} in b"
                raise RefusedError(f"{shown}{wanted}")
            both.append(taken)
            if -1 in map(max, one.declared, other.declared):
                opened.append(f"{a.name}/{one.name} {list(taken[0].shape)}")
        signature = replace(a, inputs=tuple(one for one, _ in both))
        return cls(signature, [other for _, other in both], *_matched(a, b, "outputs", names), opened)


def _retyped(pairs: Iterable[_Pair]) -> list[str]:
    """That inputs have other types in `b`, where some have."""
    found = [
        f"{pair.signature.name}/{one.name}, {one.dtype} in a, {other.dtype} in b"
        for pair in pairs
        for one, other in zip(pair.signature.inputs, pair.inputs, strict=True)
        if one.dtype != other.dtype
    ]
    how = "of another type in b, given the same real numbers"
    return [f"{many(len(found), 'input')} {how} (the first: {found[0]})"] if found else []


def _matched(
    a: SignatureInfo, b: SignatureInfo, what: str, names: Sequence[str]
) -> tuple[list[tuple[TensorInfo, TensorInfo]], list[OutputComparison]]:
    """Inputs or outputs in pairs, by place where neither model has signatures, else by name; and those of one only."""
    by_place = a.positional and b.positional
    ours, theirs = (
        {at if by_place else info.name: info for at, info in enumerate(getattr(side, what))}
        for side in (a, b)
    )
    alone = [(info, names[0]) for key, info in ours.items() if key not in theirs]
    alone += [(info, names[1]) for key, info in theirs.items() if key not in ours]
    pairs = [(info, theirs[key]) for key, info in ours.items() if key in theirs]
    return pairs, [OutputComparison(info.name, reason=f"only in {name}") for info, name in alone]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """How both models are run and measured; in `runs` after the first, they have the state that the one before left."""

    worker: Worker
    files: tuple[Path, Path]
    caches: FilledCaches
    kernels: Kernels
    runs: int
    atol: float
    rtol: float

    def run(self, pair: _Pair) -> SignatureComparison:
        """Run both models on the same inputs, one after the other, and measure the outputs that both have."""
        name, path = pair.signature.name, self.caches.folder / "outputs"
        plans = self._plans(pair)
        path.unlink(missing_ok=True)
        ours = [keep(run, path) for run in self.worker.run_plans(self.files[0], name, plans[0], self.kernels)]
        theirs = self.worker.run_plans(self.files[1], name, plans[1], self.kernels)
        found: dict[str, OutputComparison] = {}
        for one, other in zip(ours, theirs, strict=True):
            for a, b in pair.outputs:
                output = self._measure(a, b, one[a.name], other.pop(b.name))
                found[a.name] = output.merged(found.get(a.name))
        return SignatureComparison(name, (*found.values(), *pair.alone))

    def _plans(self, pair: _Pair) -> tuple[list[list[InputPlan]], list[list[InputPlan]]]:
        """The inputs of each run, for both models."""
        runs = [
            [twins(ours, other) for ours, other in zip(planned, pair.inputs, strict=True)]
            for planned in (self.caches.plan(pair.signature.name, run) for run in range(self.runs))
        ]
        return [[ours for ours, _ in run] for run in runs], [[other for _, other in run] for run in runs]

    def _measure(self, info_a: TensorInfo, info_b: TensorInfo, a: Array, b: Array) -> OutputComparison:
        logits = are_logits(info_a)
        output = measured(info_a, info_b, a, b, atol=self.atol, rtol=self.rtol, logits=logits)
        requantized = info_a.quantized and info_b.quantized and info_a.quantization != info_b.quantization
        if output.reason or not requantized:
            return output
        return replace(output, reason=f"{quantization_of(info_a)} in a, {quantization_of(info_b)} in b")

    def locate(
        self, pairs: Mapping[str, _Pair], compared: Sequence[SignatureComparison]
    ) -> FirstDifference | None:
        """Where the first output that differs begins to; None where none does in its numbers."""
        for name, output in ((one.name, output) for one in compared for output in one.outputs):
            if output.difference is None or output.difference.equal:
                continue
            signature, plans = pairs[name].signature, self._plans(pairs[name])
            probe = Probe(self.worker, self.files, signature, output.name, plans, self.kernels, self._measure)
            try:
                return first_difference(probe)
            except EdgeOptError as error:
                # The comparison itself is done: what was found must not be lost.
                return FirstDifference(name, reason=f"looking for it failed: {error}")
        return None
