"""Compares two small models: the worker's side of verifying a region, and the plain data of its result.

Matches inputs and outputs by position, because a rewrite may rename tensors. A difference is a result, not an error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from edge_opt.runtime import noise
from edge_opt.runtime.errors import DeclinedError
from edge_opt.runtime.extremes import extreme
from edge_opt.runtime.inputs import BEYOND, InputHint, InputPlan, array_of, plan
from edge_opt.runtime.metrics import Difference, measure, merge
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import Kernels, SignatureInfo

VERSIONS = ("before", "after")

Run = Callable[[Arrays], Sequence[Array]]
"""A loaded version: returns its outputs, in order, for named inputs."""

Load = Callable[[str, Kernels], Run]
"""Loads one version; raises DeclinedError, at the latest in the first run, if the kernels do not support it."""

Differences = dict[str, tuple[Difference, ...]]
"""The difference of each output, by kernel set."""

SCALES = (1.0, 0.5, 0.25, 0.125, 0.03125, 0.0078125)
"""Fractions of their range that the operands of a quantized region fill, one per run.

With the full range, logits are far apart and every softmax picks one key, which hides most errors before it; with too
little of it, products vanish in rounding.
"""

DRAWS = 3  # at the most sensitive scale; a difference that rounding hides in one draw may show in another
_LOGIT_RANGE = 12.0  # of quantized addends of logits: softmax weights then differ, and few round to 0


@dataclass(frozen=True, slots=True)
class Parts:
    """Location of the heads or tiles in an output: sizes of its axes, outermost first, each with its stride.

    A size with stride 0 belongs to every part; otherwise its index is a digit of the part's number.
    """

    output: int
    factors: tuple[tuple[int, int], ...]

    def of(self, array: Array) -> Iterator[Array]:
        """Each part's elements of the output."""
        split = array.reshape([size for size, _ in self.factors])
        for part in range(math.prod(size for size, stride in self.factors if stride)):
            yield split[tuple(part // d % size if d else slice(None) for size, d in self.factors)]


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """Inputs and conditions for running two versions of a region.

    `hints` describe the inputs by position (none: plain data). The first version clips at the codes `limits`, the
    second may exceed them. `parts` must differ, or nothing is shown. `extremes` are the kinds of extreme inputs to run
    as well, and `scales` the fractions of their range that quantized operands fill, in one run each.
    """

    hints: tuple[InputHint, ...] = ()
    limits: tuple[int, int] | None = None
    parts: Parts | None = None
    extremes: tuple[str, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    scales: tuple[float, ...] = SCALES


@dataclass(frozen=True, slots=True)
class Outcome:
    """The difference of each output of both versions of a region, by kernel set.

    `extremes` has the same by kind of extreme inputs. `untold` says why many wrong versions would give equal results,
    and is empty if there is no such reason. `scale` is the one at which results are most sensitive.
    """

    outputs: Mapping[str, tuple[Difference, ...]]
    extremes: Mapping[str, Mapping[str, tuple[Difference, ...]]] = field(default_factory=dict)
    untold: str = ""
    scale: float = 1.0


def prove(signatures: tuple[SignatureInfo, SignatureInfo], request: ProofRequest, load: Load) -> Outcome:
    """Run both versions on the same inputs at every scale, then (with extreme inputs) at the most sensitive one.

    A kernel set that does not support the first version is left out, unless it is the only one.

    Raises:
        DeclinedError: no kernel set supports the first version, or one supports the first but not the second.
    """
    first = signatures[0]
    pair, runs = _Pair(signatures, request, load), _realistic(first, request)
    reasons, changed = [], []
    for plans in runs:
        arrays = [array_of(each) for each in plans]
        results = pair.run(arrays, pair.outputs)
        reasons.append(untold(results, request.parts, request.limits))
        if len(runs) > 1 and _operands(plans):
            nudged = pair.results(0, pair.kernels[0], _nudged(plans, arrays))
            changed.append(sum(int(np.count_nonzero(a != b)) for a, b in zip(results, nudged, strict=True)))
    scale = request.scales[int(np.argmax(changed)) if changed else 0]
    extremes: dict[str, Differences] = {}
    for draw in range(DRAWS if request.extremes else 0):
        plans = _scaled(_planned(first, request, draw), scale)
        arrays = [array_of(each) for each in plans]
        pair.run(arrays, pair.outputs)
        for kind in request.extremes:
            made = [extreme(each, array, kind) for each, array in zip(plans, arrays, strict=True)]
            if any(new is not old for new, old in zip(made, arrays, strict=True)):
                pair.run(made, extremes.setdefault(kind, {}))
    return Outcome(pair.outputs, extremes, "" if "" in reasons else reasons[0], scale)


class _Pair:
    """Both versions, loaded on every kernel set that supports the first one."""

    def __init__(
        self, signatures: tuple[SignatureInfo, SignatureInfo], request: ProofRequest, load: Load
    ) -> None:
        self.kernels, self.outputs = list(request.kernels), Differences()
        self._signatures, self._request = signatures, request
        self._load = cache(load)

    def run(self, arrays: Sequence[Array], found: Differences) -> Sequence[Array]:
        """Merge differences on these inputs into `found`; return the first version's results on one kernel set."""
        results = []
        for kernels in tuple(self.kernels):
            try:
                old = self.results(0, kernels, arrays)
            except DeclinedError:
                if kernels in self.outputs or self.kernels == [kernels]:
                    raise
                self.kernels.remove(kernels)
                continue
            results.append(old)
            differences = self._compared(old, self.results(1, kernels, arrays))
            merged = map(merge, found[kernels], differences) if kernels in found else differences
            found[kernels] = tuple(merged)
        return results[0]

    def results(self, version: int, kernels: Kernels, arrays: Sequence[Array]) -> Sequence[Array]:
        """A version's results; for the first, inputs with `every` are clipped to their valid values."""
        hints = self._request.hints or [InputHint()] * len(arrays)
        named = {
            info.name: array if version or not hint.every else array.clip(0, hint.every - 1)
            for info, hint, array in zip(self._signatures[version].inputs, hints, arrays, strict=True)
        }
        return self._load(VERSIONS[version], kernels)(named)

    def _compared(self, olds: Sequence[Array], news: Sequence[Array]) -> Iterator[Difference]:
        for info, old, new in zip(self._signatures[0].outputs, olds, news, strict=True):
            if old.shape != new.shape:
                raise DeclinedError(f"after: output '{info.tensor}' has shape {new.shape}, not {old.shape}")
            if self._request.limits is not None:
                low, high = self._request.limits
                beyond = ((old >= high) & (new > high)) | ((old <= low) & (new < low))
                new = np.where(beyond, old, new)  # noqa: PLW2901
            yield measure(old, new, quantized_a=info, quantized_b=info)


def _planned(signature: SignatureInfo, request: ProofRequest, *draw: object) -> Sequence[InputPlan]:
    """One draw of the inputs, not yet scaled."""
    hints = request.hints or [InputHint()] * len(signature.inputs)
    return plan(signature, seed=noise.seed_of(request.seed, *draw), hints=hints)


def _realistic(signature: SignatureInfo, request: ProofRequest) -> list[Sequence[InputPlan]]:
    """The inputs of each run: one run per scale of quantized operands, or enough to cover `every` value."""
    plans = _planned(signature, request)
    for counted in (each for each in plans if each.every):
        starts = range(0, counted.every + BEYOND, counted.info.elements)
        return [[replace(each, start=start) for each in plans] for start in starts]
    if not _operands(plans):
        return [plans]
    return [_scaled(_planned(signature, request, scale), scale) for scale in request.scales]


def _operands(plans: Sequence[InputPlan]) -> list[InputPlan]:
    """The quantized operands of logits; all quantized data if there are no logits."""
    sides = {each.side for each in plans} & {"left", "right"}
    quantized = (each for each in plans if each.info.quantized and each.role == "data")
    return [each for each in quantized if not sides or each.side in sides]


def _scaled(plans: Sequence[InputPlan], scale: float) -> list[InputPlan]:
    """The plans with operands at this scale, and with addends of logits limited to the usual range of logits."""
    operands = _operands(plans)

    def spread(each: InputPlan) -> float:
        if each.side == "added" and each.role == "data" and each.info.quantized:
            limits = np.iinfo(each.info.dtype)
            return min(1.0, _LOGIT_RANGE / ((limits.max - limits.min) * each.info.scales[0]))
        return scale if each in operands else each.spread

    return [replace(each, spread=spread(each)) for each in plans]


def _nudged(plans: Sequence[InputPlan], arrays: Sequence[Array]) -> list[Array]:
    """The inputs, with every code of the operands raised or lowered by one."""
    operands, nudged = _operands(plans), []
    for planned, array in zip(plans, arrays, strict=True):
        if planned not in operands:
            nudged.append(array)
            continue
        limits = np.iinfo(planned.info.dtype)
        steps = noise.octets(planned.stream, array.size).reshape(array.shape) % 2 * np.int64(2) - 1
        nudged.append(np.clip(array + steps, limits.min, limits.max).astype(array.dtype))
    return nudged


def untold(results: Sequence[Array], parts: Parts | None, limits: tuple[int, int] | None) -> str:
    """The reason why results cannot distinguish right from wrong; empty if they can.

    They are NaN, or one value, or beyond the limits, or two heads (tiles) have the same numbers.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} has no finite number"
        if array.size > 1 and np.nanmin(array) == np.nanmax(array):
            return f"output {place} is the same value everywhere"
        if limits is not None and not ((array > limits[0]) & (array < limits[1])).any():
            return f"output {place} is clipped everywhere in the old region"
    if parts is not None:
        each = [part.tobytes() for part in parts.of(results[parts.output])]
        if len({*each}) < len(each):
            return f"some of the {len(each)} heads or tiles in output {parts.output} are equal"
    return ""
