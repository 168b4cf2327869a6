"""Do two small models compute the same? The worker's side of verifying a region, and the plain data of its result.

Works on inputs and outputs by position, because a rewrite may rename tensors. Never raises for a difference: a rewrite
that fails is a value.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_opt.runtime import metrics, noise
from edge_opt.runtime.errors import DeclinedError
from edge_opt.runtime.inputs import BEYOND, InputHint, InputPlan, array_of, plan
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import Kernels, SignatureInfo

VERSIONS = ("before", "after")
Results = list[list[Array]]
"""The outputs of each run, in order."""

Plans = Sequence[InputPlan]

Runner = Callable[[str, Kernels, Iterable[Arrays]], Results]
"""Loads one version and runs it on each of these named inputs; DeclinedError where the kernels do not take it."""

SCALES = (1.0, 0.5, 0.25, 0.125, 0.03125, 0.0078125)
"""How much of their range the operands of a quantized region fill, one run after the other.

Where codes fill it, logits are far apart, every softmax picks one key, and most of what happens before could be wrong
unseen; where they fill too little, products vanish in rounding.
"""

_REALISTIC = "realistic"
DRAWS = 3  # at the scale that tells most: rounding may hide in one what another shows
_LOGIT_RANGE = 12.0  # of what is added to logits: softmax weights then differ, and few are lost in rounding


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the heads or tiles are in an output: its axes as sizes, outermost first, each with its stride.

    A size with stride 0 belongs to every part; else its index is that digit of the part's number.
    """

    output: int
    factors: tuple[tuple[int, int], ...]

    def of(self, array: Array) -> Iterator[Array]:
        """What each part has of the output."""
        split = array.reshape([size for size, _ in self.factors])
        for part in range(math.prod(size for size, stride in self.factors if stride)):
            yield split[tuple(part // d % size if d else slice(None) for size, d in self.factors)]


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """On what two versions of a region are run.

    Args:
        hints: what the inputs are, by position (None, or a missing one: plain data).
        limits: the codes at which the first version was clipped inside; beyond them the second may go on.
        parts: the heads or tiles that results must tell apart.
        extremes: kinds of extreme inputs on which both are run as well.
        seed: decides all inputs, together with their positions.
        kernels: the kernel sets to run on.
        scales: how much of their range quantized operands fill, in one run each.
    """

    hints: tuple[InputHint | None, ...] = ()
    limits: tuple[int, int] | None = None
    parts: Parts | None = None
    extremes: tuple[str, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    scales: tuple[float, ...] = SCALES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running both versions of a region: the difference of each output, by kernel set.

    `extremes` has by kind what extreme inputs gave. `untold` says why many a wrong version would give the same results,
    and is empty where there is no such reason. `scale` is the one at which results tell most.
    """

    outputs: Mapping[str, tuple[Difference, ...]]
    extremes: Mapping[str, Mapping[str, tuple[Difference, ...]]] = field(default_factory=dict)
    untold: str = ""
    scale: float = 1.0


def prove(signatures: tuple[SignatureInfo, SignatureInfo], request: ProofRequest, run: Runner) -> Outcome:
    """Runs both versions on the same inputs, one loaded at a time.

    A kernel set that does not take the first version alone is left out, if there is another one.

    Raises:
        DeclinedError: no kernel set takes the first version, or one that does, not the second.
    """
    first = signatures[0]
    runs = _realistic(first, request)
    outputs: dict[str, tuple[Difference, ...]] = {}
    extremes: dict[str, dict[str, tuple[Difference, ...]]] = {}
    reason, scale, more = "", request.scales[0], dict[str, list[Plans]]()
    for kernels in request.kernels:
        try:
            before = run(VERSIONS[0], kernels, _inputs(0, first, runs))
        except DeclinedError:
            if outputs or kernels != request.kernels[-1]:
                continue
            raise
        if not outputs:
            reasons = [untold(results, request.parts, request.limits) for results in before]
            reason = "" if "" in reasons else reasons[0]
            if len(runs) > 1 and _operands(runs[0]):
                nudged = run(VERSIONS[0], kernels, _nudged(first, runs))
                changed = [_changed(*each) for each in zip(before, nudged, strict=True)]
                scale = request.scales[int(np.argmax(changed))]
            more = _more(first, request, scale) if request.extremes else {}
        after = run(VERSIONS[1], kernels, _inputs(1, signatures[1], runs))
        outputs[kernels] = _compared(before, after, first, request)
        rest = [plans for draws in more.values() for plans in draws]
        before, after = (run(VERSIONS[n], kernels, _inputs(n, signatures[n], rest)) for n in (0, 1))
        for kind, draws in more.items():
            place = rest.index(draws[0])
            part = slice(place, place + len(draws))
            found = _compared(before[part], after[part], first, request)
            if kind == _REALISTIC:
                outputs[kernels] = tuple(map(metrics.merge, outputs[kernels], found))
            else:
                extremes.setdefault(kind, {})[kernels] = found
    return Outcome(outputs, extremes, reason, scale)


def _planned(signature: SignatureInfo, request: ProofRequest, *draw: object) -> Plans:
    """One draw of the inputs; the scale is not chosen yet."""
    hints = (*request.hints, *[None] * len(signature.inputs))[: len(signature.inputs)]
    return plan(signature, seed=noise.seed_of(request.seed, *draw), hints=hints)


def _realistic(signature: SignatureInfo, request: ProofRequest) -> list[Plans]:
    """The inputs of each run: one for each scale of quantized operands, or as many as all values of an input take."""
    plans = _planned(signature, request)
    for counted in (each for each in plans if each.every):
        starts = range(0, counted.every + BEYOND, counted.info.elements)
        return [[replace(each, start=start) for each in plans] for start in starts]
    if not _operands(plans):
        return [plans]
    return [_scaled(_planned(signature, request, scale), scale) for scale in request.scales]


def _more(signature: SignatureInfo, request: ProofRequest, scale: float) -> dict[str, list[Plans]]:
    """The inputs of further runs at a scale: realistic ones, and each kind of extremes that changes any."""
    draws: list[Plans] = [_scaled(_planned(signature, request, draw), scale) for draw in range(DRAWS)]
    plain = [array_of(each).tobytes() for each in draws[0]]
    made = {_REALISTIC: draws}
    for kind in request.extremes:
        runs: list[Plans] = [[replace(each, kind=kind) for each in plans] for plans in draws]
        if [array_of(each).tobytes() for each in runs[0]] != plain:
            made[kind] = runs
    return made


def _changed(one: Sequence[Array], other: Sequence[Array]) -> int:
    return sum(int(np.count_nonzero(a != b)) for a, b in zip(one, other, strict=True))


def _operands(plans: Sequence[InputPlan]) -> list[InputPlan]:
    """The quantized operands of logits; without any logits, all quantized data."""
    sides = {each.side for each in plans} & {"left", "right"}
    quantized = (each for each in plans if each.info.quantized and each.role == "data")
    return [each for each in quantized if not sides or each.side in sides]


def _scaled(plans: Sequence[InputPlan], scale: float) -> list[InputPlan]:
    """The plans with operands at that scale; what is added to logits is as far apart as logits are."""
    operands = _operands(plans)

    def spread(each: InputPlan) -> float:
        if each.side == "added" and each.role == "data" and each.info.quantized:
            limits = np.iinfo(each.info.dtype)
            return min(1.0, _LOGIT_RANGE / ((limits.max - limits.min) * each.info.scales[0]))
        return scale if each in operands else each.spread

    return [replace(each, spread=spread(each)) for each in plans]


def _inputs(version: int, signature: SignatureInfo, runs: Sequence[Plans]) -> Iterator[Arrays]:
    """What one version gets in each run, by its names; instead of values beyond the last the first gets that."""
    for plans in runs:
        arrays = {}
        for info, planned in zip(signature.inputs, plans, strict=True):
            array = array_of(planned)
            arrays[info.name] = array if version or not planned.every else array.clip(0, planned.every - 1)
        yield arrays


def _nudged(signature: SignatureInfo, runs: Sequence[Plans]) -> Iterator[Arrays]:
    """The inputs of each run with every code of the operands one higher or lower."""
    for plans, arrays in zip(runs, _inputs(0, signature, runs), strict=True):
        for planned in _operands(plans):
            array, limits = arrays[planned.info.name], np.iinfo(planned.info.dtype)
            steps = noise.octets(planned.stream, array.size).reshape(array.shape) % 2 * np.int64(2) - 1
            arrays[planned.info.name] = np.clip(array + steps, limits.min, limits.max).astype(array.dtype)
        yield arrays


def untold(results: Sequence[Array], parts: Parts | None, limits: tuple[int, int] | None) -> str:
    """Why results do not tell right from wrong; empty where they do.

    They are NaN, or one value, or beyond the limits, or two heads (tiles) have the same numbers.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} is nowhere a finite number"
        if array.size > 1 and np.nanmin(array) == np.nanmax(array):
            return f"output {place} is the same value everywhere"
        if limits is not None and not ((array > limits[0]) & (array < limits[1])).any():
            return f"output {place} is clipped everywhere in the old region"
    if parts is not None:
        each = [part.tobytes() for part in parts.of(results[parts.output])]
        if len({*each}) < len(each):
            return f"of the {len(each)} heads or tiles in output {parts.output} some are equal"
    return ""


def _compared(
    before: Results, after: Results, signature: SignatureInfo, request: ProofRequest
) -> tuple[Difference, ...]:
    """The difference of each output over some runs.

    Raises:
        DeclinedError: the second version gives another shape.
    """
    found: list[Difference] = []
    for olds, news in zip(before, after, strict=True):
        differences = []
        for info, old, new in zip(signature.outputs, olds, news, strict=True):
            if old.shape != new.shape:
                raise DeclinedError(f"after: output '{info.tensor}' has shape {new.shape}, not {old.shape}")
            if request.limits is not None:
                low, high = request.limits
                beyond = ((old >= high) & (new > high)) | ((old <= low) & (new < low))
                new = np.where(beyond, old, new)  # noqa: PLW2901
            differences.append(metrics.measure(old, new, quantized_a=info, quantized_b=info))
        found = list(map(metrics.merge, found, differences)) if found else differences
    return tuple(found)
