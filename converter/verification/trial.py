"""Runs two small models on the same inputs: the worker's side of verifying a region, and the plain data of its result.

Matches inputs and outputs by position, because a rewrite may rename tensors. A difference is a result, not an error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import VARIANTS, InputHint, InputPlan, array_of, plan
from edge_opt.runtime.metrics import NONE, Difference, Tolerance, measure, merge
from edge_opt.runtime.protocol import Array, DeclinedError, RunModel
from edge_opt.runtime.tensors import Kernels, SignatureInfo
from edge_opt.verification.extremes import extreme

VERSIONS = ("before", "after")

SCALES = (1.0, 0.5, 0.25, 0.125, 0.03125, 0.0078125)
"""Fractions of their range that the operands of a quantized region fill, one per run.

With the full range, logits are far apart and every softmax picks one key, which hides most errors before it; with too
little of it, products vanish in rounding.
"""

# At the most sensitive scale; a difference that rounding hides in one draw may show in another.
DRAWS = 3
# Of quantized addends of logits: softmax weights then differ, and few round to 0.
_LOGIT_RANGE = 12.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Location of the heads or tiles in an output, reshaped to `sizes`: one for each index along the `axes`."""

    output: int
    sizes: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs and conditions for running two versions of a region.

    `hints` describe the inputs by position (none: plain data). With `every`, the only input takes the integers 0 to
    `every` - 1 in turn, and some beyond both ends, for which the first version gets the nearest of those. The first
    version clips at the codes `limits`, the second may exceed them. `parts` must differ, or nothing is shown.
    `extremes` are the kinds of extreme inputs to run as well, and `scales` the fractions of their range that quantized
    operands fill, in one run each. Differences are measured with `tolerance`.
    """

    hints: tuple[InputHint, ...] = ()
    every: int = 0
    limits: tuple[int, int] | None = None
    parts: Parts | None = None
    extremes: tuple[str, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    scales: tuple[float, ...] = SCALES
    tolerance: Tolerance = NONE


@dataclass(frozen=True, slots=True)
class Outcome:
    """The difference of each output of both versions of a region, by kind of inputs ("": ordinary) and kernel set.

    `inconclusive` says why many wrong versions would give equal results, and is empty without such a reason. `scale` is
    the one at which results are most sensitive.
    """

    found: Mapping[str, Mapping[str, tuple[Difference, ...]]]
    inconclusive: str = ""
    scale: float = 1.0


def run(asked: tuple[SignatureInfo, Trial], run_model: RunModel) -> Outcome:
    """Run both versions on the same inputs at every scale, then (with extreme inputs) at the most sensitive one.

    `asked` has the first version's signature. A kernel set that does not support that version is left out, unless it
    is the only one.

    Raises:
        DeclinedError: no kernel set supports the first version, or one supports the first but not the second.
    """
    signature, request = asked
    pair = _Pair(signature, request, run_model, list(request.kernels))
    reasons: list[str] = []
    changed: list[int] = []
    for plans, arrays in pair.realistic():
        results = pair.compare(arrays)
        reasons.append(shows_nothing(results, request.parts, request.limits))
        if len(request.scales) > 1 and _operands(plans):
            nudged = run_model(VERSIONS[0], pair.kernels[0], _nudged(plans, arrays))
            changed.append(_count_changed(results, nudged))
    # The first runs are one for each scale; later ones have other integers.
    changed = changed[: len(request.scales)]
    scale = request.scales[int(np.argmax(changed)) if changed else 0]
    for draw in range(DRAWS if request.extremes else 0):
        plans = pair.drawn(scale, draw)
        arrays = [array_of(each) for each in plans]
        pair.compare(arrays)
        for kind in request.extremes:
            made = [extreme(each, array, kind) for each, array in zip(plans, arrays, strict=True)]
            if any(new is not old for new, old in zip(made, arrays, strict=True)):
                pair.compare(made, kind)
    return Outcome(pair.found, "" if "" in reasons else reasons[0], scale)


def _count_changed(results: Sequence[Array], others: Sequence[Array]) -> int:
    """The number of elements that differ."""
    return sum(int(np.count_nonzero(a != b)) for a, b in zip(results, others, strict=True))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both versions, on every kernel set that supports the first one."""

    signature: SignatureInfo
    request: Trial
    run_model: RunModel
    kernels: list[Kernels]
    found: dict[str, dict[str, tuple[Difference, ...]]] = field(default_factory=dict)

    def compare(self, arrays: Sequence[Array], kind: str = "") -> Sequence[Array]:
        """Note differences on inputs of this kind; the first version's results on one kernel set."""
        results: list[Sequence[Array]] = []
        found = self.found.setdefault(kind, {})
        every = self.request.every
        valid = [array.clip(0, every - 1) for array in arrays] if every else arrays
        for kernels in tuple(self.kernels):
            try:
                old = self.run_model(VERSIONS[0], kernels, valid)
            except DeclinedError:
                if kernels in self.found[""] or self.kernels == [kernels]:
                    raise
                self.kernels.remove(kernels)
                continue
            results.append(old)
            differences = self._differences(old, self.run_model(VERSIONS[1], kernels, arrays))
            merged = map(merge, found[kernels], differences) if kernels in found else differences
            found[kernels] = tuple(merged)
        return results[0]

    def _differences(self, olds: Sequence[Array], news: Sequence[Array]) -> Iterator[Difference]:
        for info, old, new in zip(self.signature.outputs, olds, news, strict=True):
            if old.shape != new.shape:
                raise DeclinedError(
                    f"after: output '{info.tensor}' has shape {new.shape}, not {old.shape}"
                )
            if self.request.limits is not None:
                low, high = self.request.limits
                beyond = ((old >= high) & (new > high)) | ((old <= low) & (new < low))
                new = np.where(beyond, old, new)  # noqa: PLW2901
            tolerance = self.request.tolerance
            yield measure(old, new, quantized_a=info, quantized_b=info, tolerance=tolerance)

    def realistic(self) -> Iterator[tuple[list[InputPlan], list[Array]]]:
        """The inputs of each run: one run per scale of quantized operands, or enough to cover `every` value."""
        plans = self.drawn(1.0)
        every = self.request.every
        if every:
            (info,) = self.signature.inputs
            limits = np.iinfo(info.dtype)
            values = np.array([limits.min, -1, *range(every + 1), limits.max], info.dtype)
            for start in range(0, values.size, info.elements):
                yield plans, [np.resize(values[start : start + info.elements], info.shape)]
            return
        scales = self.request.scales if _operands(plans) else ()
        draws = [self.drawn(scale, scale) for scale in scales] or [plans]
        if any(each.role == "integer" for each in plans):
            draws += (self.drawn(1.0, run=run) for run in range(1, VARIANTS))
        for each in draws:
            yield each, [array_of(planned) for planned in each]

    def drawn(self, scale: float, *draw: object, run: int = 0) -> list[InputPlan]:
        """One draw of the inputs, with operands at this scale and addends of logits in the usual range of logits."""
        hints = self.request.hints or [InputHint()] * len(self.signature.inputs)
        plans = plan(
            self.signature, seed=noise.seed_of(self.request.seed, *draw), run=run, hints=hints
        )
        operands = _operands(plans)

        def spread(each: InputPlan) -> float:
            if each.side == "added" and each.role == "data" and each.info.quantized:
                limits = np.iinfo(each.info.dtype)
                return min(1.0, _LOGIT_RANGE / ((limits.max - limits.min) * each.info.scales[0]))
            return scale if each in operands else 1.0

        return [replace(each, spread=spread(each)) for each in plans]


def _operands(plans: Sequence[InputPlan]) -> list[InputPlan]:
    """The quantized operands of logits; all quantized data if there are no logits."""
    sides = {each.side for each in plans} & {"left", "right"}
    quantized = (each for each in plans if each.info.quantized and each.role == "data")
    return [each for each in quantized if not sides or each.side in sides]


def _nudged(plans: Sequence[InputPlan], arrays: Sequence[Array]) -> list[Array]:
    """The inputs, with every code of the operands raised or lowered by one."""
    nudged = list(arrays)
    for planned in _operands(plans):
        place = plans.index(planned)
        limits = np.iinfo(planned.info.dtype)
        array = arrays[place]
        steps = noise.octets(planned.stream, array.size).reshape(array.shape) % 2 * np.int64(2) - 1
        nudged[place] = np.clip(array + steps, limits.min, limits.max).astype(array.dtype)
    return nudged


def shows_nothing(
    results: Sequence[Array], parts: Parts | None, limits: tuple[int, int] | None
) -> str:
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
        array = results[parts.output].reshape(parts.sizes)
        count = math.prod(parts.sizes[axis] for axis in parts.axes)
        rows = np.moveaxis(array, parts.axes, range(len(parts.axes))).reshape(count, -1)
        if len({row.tobytes() for row in rows}) < count:
            return f"some of the {count} heads or tiles in output {parts.output} are equal"
    return ""
