"""Runs two small models on the same inputs: the worker's side of verifying a region, and the plain data of its result.

Matches inputs and outputs by position, because a rewrite may rename tensors. A difference is a result, not an error.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not

import numpy as np

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import VARIANTS, InputHint, InputPlan, array_of, plan
from edge_opt.runtime.metrics import NONE, Difference, Tolerance, measure, merge
from edge_opt.runtime.protocol import Array, DeclinedError, RunModel
from edge_opt.runtime.tensors import Kernels, SignatureInfo
from edge_opt.verification.extremes import extreme

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

    `hints` describe the inputs by position (none: plain data). With `every_below`, the only input takes the integers
    from 0 to below that in turn, and some beyond both ends, for which the first version gets the nearest of those. The
    first version is `clipped` at these codes, the second may exceed them. `parts` must differ, or nothing is shown.
    `extremes` are the kinds of extreme inputs to run as well, and `scales` the fractions of their range that quantized
    operands fill, in one run each. Differences are measured with `tolerance`.
    """

    hints: tuple[InputHint, ...] = ()
    every_below: int = 0
    clipped: tuple[int, int] | None = None
    parts: Parts | None = None
    extremes: tuple[str, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    scales: tuple[float, ...] = SCALES
    tolerance: Tolerance = NONE


ORDINARY = ""
"""The kind of inputs that are not extreme."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The difference of each output of both versions of a region, by kind of inputs and kernel set.

    `inconclusive` says why many wrong versions would give equal results, and is empty without such a reason. `scale` is
    the one at which results are most sensitive.
    """

    found: Mapping[str, Mapping[str, tuple[Difference, ...]]]
    inconclusive: str = ""
    scale: float = 1.0


def run(asked: tuple[SignatureInfo, Trial], run_model: RunModel) -> Outcome:
    """Run both versions on the same inputs at every scale, then (with extreme inputs) at the most sensitive one.

        inputs at each scale        -> both versions  -> differences; can they show a mistake?
        the same, one code up/down  -> first version  -> how many results change: the scale with most is used below
        ordinary and extreme inputs -> both versions  -> differences, by kind

    `asked` has the first version's signature. A kernel set that does not support that version is left out, unless it
    is the only one.

    Raises:
        DeclinedError: no kernel set supports the first version, or one supports the first but not the second.
    """
    signature, request = asked
    pair = _Pair(signature, request, run_model, list(request.kernels))
    reasons: list[str] = []
    changed: dict[float, int] = {}
    for of_scale, plans, arrays in pair.ordinary_runs():
        results = pair.compare(arrays)
        reasons.append(shows_nothing(results, request.parts, request.clipped))
        if of_scale is not None and len(request.scales) > 1:
            nudged = run_model("before", pair.kernels[0], _nudged(plans, arrays))
            changed[of_scale] = _count_changed(results, nudged)
    scale = max(changed, key=changed.__getitem__, default=request.scales[0])
    for draw in range(DRAWS if request.extremes else 0):
        plans = pair.drawn(scale, draw)
        arrays = [array_of(each) for each in plans]
        pair.compare(arrays)
        for kind in request.extremes:
            made = list(map(partial(extreme, kind=kind), plans, arrays))
            is_affected = any(map(is_not, made, arrays))
            if is_affected:
                pair.compare(made, kind)
    one_run_tells = "" in reasons
    return Outcome(pair.found, "" if one_run_tells else reasons[0], scale)


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

    def compare(self, arrays: Sequence[Array], kind: str = ORDINARY) -> Sequence[Array]:
        """Note differences on inputs of this kind; the first version's results on one kernel set."""
        results: list[Sequence[Array]] = []
        end = self.request.every_below
        valid = [array.clip(0, end - 1) for array in arrays] if end else arrays
        for kernels in tuple(self.kernels):
            try:
                old = self.run_model("before", kernels, valid)
            except DeclinedError:
                ran_before = kernels in self.found.get(ORDINARY, {})
                if ran_before or self.kernels == [kernels]:
                    raise
                self.kernels.remove(kernels)
                continue
            new = self.run_model("after", kernels, arrays)
            self._note(kind, kernels, self._differences(old, new))
            results.append(old)
        return results[0]

    def _note(self, kind: str, kernels: str, differences: Iterable[Difference]) -> None:
        """Add the differences of a run's outputs to those of earlier runs of this kind, on the same kernels."""
        found = self.found.setdefault(kind, {})
        if kernels in found:
            differences = map(merge, found[kernels], differences)
        found[kernels] = tuple(differences)

    def _differences(self, olds: Sequence[Array], news: Sequence[Array]) -> Iterator[Difference]:
        """The difference of each output, with the second version's clipped as the first one's are."""
        tolerance = self.request.tolerance
        clipped = self.request.clipped
        for info, old, new in zip(self.signature.outputs, olds, news, strict=True):
            if old.shape != new.shape:
                raise DeclinedError(
                    f"after: output '{info.tensor}' has shape {new.shape}, not {old.shape}"
                )
            own = new if clipped is None else new.clip(*clipped)
            yield measure(old, own, (info, info), tolerance=tolerance)

    def ordinary_runs(self) -> Iterator[tuple[float | None, list[InputPlan], list[Array]]]:
        """Each run's scale, if it has one, and inputs: one run per scale of quantized operands, or every value."""
        plans = self.drawn(1.0)
        if self.request.every_below:
            for array in self._every_value():
                yield None, plans, [array]
            return
        draws: list[tuple[float | None, list[InputPlan]]] = [(None, plans)]
        if _operands(plans):
            # Random numbers of its own for each scale.
            draws = [(scale, self.drawn(scale, scale)) for scale in self.request.scales]
        if any(each.role == "integer" for each in plans):
            draws += ((None, self.drawn(1.0, run=run)) for run in range(1, VARIANTS))
        for of_scale, each in draws:
            yield of_scale, each, list(map(array_of, each))

    def _every_value(self) -> Iterator[Array]:
        """The only input with 0 to `every_below` - 1, and some integers beyond, as many at a time as it holds."""
        (info,) = self.signature.inputs
        low, high = info.limits
        values = np.array([low, -1, *range(self.request.every_below + 1), high], info.dtype)
        for start in range(0, values.size, info.elements):
            yield np.resize(values[start : start + info.elements], info.shape)

    def drawn(self, scale: float, *draw: object, run: int = 0) -> list[InputPlan]:
        """One draw of the inputs, with operands at this scale and addends of logits in the usual range of logits."""
        hints = self.request.hints or [InputHint()] * len(self.signature.inputs)
        seed = noise.seed_of(self.request.seed, *draw)
        plans = plan(self.signature, seed=seed, run=run, hints=hints)
        operands = _operands(plans)
        drawn: list[InputPlan] = []
        for each in plans:
            spread = scale if each in operands else 1.0
            if each.side == "added" and _is_coded(each):
                low, high = each.info.limits
                whole_range = (high - low) * each.info.scales[0]
                spread = min(1.0, _LOGIT_RANGE / whole_range)
            drawn.append(replace(each, spread=spread))
        return drawn


def _is_coded(planned: InputPlan) -> bool:
    """True for quantized data."""
    return planned.info.quantized and planned.role == "data"


def _operands(plans: Sequence[InputPlan]) -> list[InputPlan]:
    """The quantized operands of logits; all quantized data if there are no logits."""
    sides = {each.side for each in plans} & {"left", "right"}
    coded = list(filter(_is_coded, plans))
    return [each for each in coded if each.side in sides] if sides else coded


def _nudged(plans: Sequence[InputPlan], arrays: Sequence[Array]) -> list[Array]:
    """The inputs, with every code of the operands raised or lowered by one."""
    nudged = list(arrays)
    for planned in _operands(plans):
        place = plans.index(planned)
        array = arrays[place]
        coins = noise.octets(planned.stream, array.size).reshape(array.shape) % 2
        steps = np.where(coins, np.int64(1), np.int64(-1))
        nudged[place] = np.clip(array + steps, *planned.info.limits).astype(array.dtype)
    return nudged


def shows_nothing(
    results: Sequence[Array], parts: Parts | None, clipped: tuple[int, int] | None
) -> str:
    """The reason why results cannot distinguish right from wrong; empty if they can.

    They are NaN, or one value, or clipped everywhere, or two heads (tiles) have the same numbers.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} has no finite number"
        if array.size > 1 and np.nanmin(array) == np.nanmax(array):
            return f"output {place} is the same value everywhere"
        if clipped is not None and not ((array > clipped[0]) & (array < clipped[1])).any():
            return f"output {place} is clipped everywhere in the old region"
    if parts is not None:
        array = results[parts.output].reshape(parts.sizes)
        count = math.prod(parts.sizes[axis] for axis in parts.axes)
        # [.., heads, .., tiles, ..] -> [heads, tiles, ..] -> [count, elements of one part]
        rows = np.moveaxis(array, parts.axes, range(len(parts.axes))).reshape(count, -1)
        different = {row.tobytes() for row in rows}
        if len(different) < count:
            return f"some of the {count} heads or tiles in output {parts.output} are equal"
    return ""
