"""Do two small models compute the same? The worker's side of verifying a region, and the plain data of its result.

Works on inputs and outputs by position, because a rewrite may rename tensors. Never raises for a difference: a rewrite
that fails is a value.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edge_opt.runtime import metrics, noise
from edge_opt.runtime.inputs import InputHint, InputPlan, array_of, extreme_of, plan
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import Kernels, SignatureInfo, TensorInfo

VERSIONS = ("before", "after")
Runner = Callable[[str, Kernels, Iterable[Arrays]], list[list[Array]]]
"""Loads one version and runs it on each of these named inputs; gives the outputs of each run in order."""

SCALES = (1.0, 0.5, 0.25, 0.125, 0.03125, 0.0078125)
"""How much of their range the operands of a quantized region may fill."""

_LOGIT_RANGE = 12.0  # of what is added to logits: softmax weights then differ, and few are lost in rounding


@dataclass(frozen=True, slots=True)
class OutputProof:
    """One output on one kernel set: all rows with an open mask entry, and apart from them the fully masked rows.

    `saturated` counts elements that the first version had clipped (they are in neither), `short` is the most steps by
    which the second version stays short of where they were clipped.
    """

    output: int
    open_rows: Difference
    masked_rows: Difference | None = None
    saturated: int = 0
    short: int = 0

    @property
    def measured(self) -> tuple[Difference, ...]:
        """What was measured: of the open rows, and of the fully masked ones where they were kept apart."""
        return (self.open_rows,) if self.masked_rows is None else (self.open_rows, self.masked_rows)

    @property
    def bitwise(self) -> bool:
        """Whether no element's bits differ, and none was left out."""
        return not self.saturated and all(difference.bitwise for difference in self.measured)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running both versions of a region.

    `mismatch` says why the two could not be compared at all (numbers, shapes, dtypes or quantization of inputs or
    outputs differ); then `outputs` is empty. `untold` says why many a wrong version would give the same results, and is
    empty where there is no such reason. `extremes` has by kind what extreme inputs gave. `scale` is the one that was
    taken for the operands.
    """

    outputs: Mapping[str, tuple[OutputProof, ...]]
    mismatch: str | None = None
    untold: str = ""
    extremes: Mapping[str, Mapping[str, tuple[OutputProof, ...]]] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def bitwise(self) -> bool:
        """Whether every output was bit for bit the same on every kernel set, fully masked rows included."""
        return self.mismatch is None and all(proof.bitwise for proof in self.all())

    def on(self, *kernels: str) -> "Outcome":
        """The same for some kernel sets."""
        return replace(self, outputs={name: self.outputs[name] for name in kernels if name in self.outputs})

    def worst(self, figure: Callable[[Difference], float], *, masked: bool = False) -> float:
        """The largest figure (`lambda d: d.max_rel`) over kernel sets and outputs; infinite after a mismatch."""
        if self.mismatch is not None:
            return float("inf")
        rows = [proof.masked_rows if masked else proof.open_rows for proof in self.all()]
        return max((figure(difference) for difference in rows if difference is not None), default=0.0)

    def all(self) -> list[OutputProof]:
        """Every output on every kernel set."""
        return [proof for proofs in self.outputs.values() for proof in proofs]


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """On what two versions of a region are run, and what is measured apart.

    Args:
        hints: what the inputs are, by position (None, or a missing one: plain data). A mask's hint can name query rows
            to be masked everywhere.
        row_axes: for each output, the axis on which the mask's query rows lie (index modulo the mask's rows), so that
            fully masked rows are measured apart; None, or a missing one: not separated.
        limits: the codes at which the first version was clipped inside, so that those elements are counted apart.
        at_once: run both models at the same time, which takes the memory of both.
        parts: how many heads or tiles the results must tell apart.
        extremes: kinds of extreme inputs on which both are run as well.
        seed: decides all inputs, together with their positions.
        kernels: the kernel sets to run on.
        scale: how much of their range operands fill; None takes the one of `SCALES` that tells most.
    """

    hints: tuple[InputHint | None, ...] = ()
    row_axes: tuple[int | None, ...] = ()
    limits: tuple[int, int] | None = None
    at_once: bool = False
    parts: int = 1
    extremes: tuple[str, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    scale: float | None = None


def prove(signatures: tuple[SignatureInfo, SignatureInfo], request: ProofRequest, run: Runner) -> Outcome:
    """Runs both versions on the same inputs, at once if the request says so, else one loaded at a time.

    Raises:
        Whatever `run` raises.
    """
    first, second = signatures
    mismatch = _mismatch(first, second)
    if mismatch is not None:
        return Outcome({}, mismatch=mismatch)
    hints = (*request.hints, *[None] * len(first.inputs))[: len(first.inputs)]
    plans = plan(first, seed=request.seed, hints=hints)
    scale = _most_telling(plans, partial(run, VERSIONS[0], request.kernels[0]), request.scale)
    plans = _scaled(plans, scale)
    kinds = ("realistic", *request.extremes)
    reason = ""
    proofs: dict[str, dict[str, tuple[OutputProof, ...]]] = {kind: {} for kind in kinds}

    def results(version: int, kernels: Kernels) -> list[list[Array]]:
        """The outputs for each kind of inputs; for an input of every value, stacked over its runs."""
        ran = run(VERSIONS[version], kernels, _inputs(version, signatures[version], plans, kinds))
        return ran if len(ran) == len(kinds) else [[np.stack(each) for each in zip(*ran, strict=True)]]

    with ThreadPoolExecutor(1) as beside:
        for kernels in request.kernels:
            # The runtime lets other threads work while it computes.
            started = beside.submit(results, 1, kernels) if request.at_once else None
            before = results(0, kernels)
            reason = reason or untold(before[0], request.parts)
            after = started.result() if started else results(1, kernels)
            for kind, olds, news in zip(kinds, before, after, strict=True):
                both = list(zip(first.outputs, olds, news, strict=True))
                for place, (info, a, b) in enumerate(both):
                    if a.shape != b.shape:
                        where = f"output {place} ('{info.tensor}')"
                        return Outcome({}, mismatch=f"{where}: shape {a.shape} before, {b.shape} after")
                proofs[kind][kernels] = tuple(
                    _compare(place, a, b, info, plans, request) for place, (info, a, b) in enumerate(both)
                )
    return Outcome(proofs.pop("realistic"), untold=reason, extremes=proofs, scale=scale)


def _mismatch(first: SignatureInfo, second: SignatureInfo) -> str | None:
    for what in ("input", "output"):
        ones, others = (getattr(signature, f"{what}s") for signature in (first, second))
        if len(ones) != len(others):
            return f"{len(ones)} {what}s before, {len(others)} after"
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            for property_name in ("shape", "dtype", "quantization"):
                old, new = getattr(one, property_name), getattr(other, property_name)
                if old != new:
                    return f"{what} {place} ('{one.tensor}'): {property_name} {old} before, {new} after"
    return None


def _most_telling(
    plans: Sequence[InputPlan], run: Callable[[Iterable[Arrays]], list[list[Array]]], given: float | None
) -> float:
    """The scale at which a step more or less in the operands changes the most results; 1 without quantized operands.

    Where codes fill their range, logits are far apart, every softmax picks one key, and most of what happens before
    could be wrong unseen; where they fill too little of it, products vanish in rounding.
    """
    operands = _operands(plans)
    if given is not None or not operands:
        return given or 1.0

    def inputs() -> Iterator[Arrays]:
        for scale in SCALES:
            arrays = {each.info.name: array_of(each) for each in _scaled(plans, scale)}
            yield arrays
            yield arrays | {each.info.name: _nudged(each, arrays[each.info.name]) for each in operands}

    ran = run(inputs())
    changed = [
        sum(int(np.count_nonzero(one != other)) for one, other in zip(plain, nudged, strict=True))
        for plain, nudged in zip(ran[::2], ran[1::2], strict=True)
    ]
    return SCALES[int(np.argmax(changed))]


def _operands(plans: Sequence[InputPlan]) -> list[InputPlan]:
    """The quantized operands of logits; without any logits, all quantized data."""
    sides = {each.side for each in plans} & {"left", "right"}
    quantized = (each for each in plans if each.info.quantized and each.role == "data")
    return [each for each in quantized if not sides or each.side in sides]


def _scaled(plans: Sequence[InputPlan], scale: float) -> tuple[InputPlan, ...]:
    """The plans with operands at that scale; what is added to logits is as far apart as logits are."""
    operands = _operands(plans)

    def spread(each: InputPlan) -> float:
        if each.side == "added" and each.role == "data" and each.info.quantized:
            limits = np.iinfo(each.info.dtype)
            return min(1.0, _LOGIT_RANGE / ((limits.max - limits.min) * each.info.scales[0]))
        return scale if each in operands else each.spread

    return tuple(replace(each, spread=spread(each)) for each in plans)


def _nudged(planned: InputPlan, array: Array) -> Array:
    """The same array, with each code one higher or lower."""
    limits = np.iinfo(array.dtype)
    steps = noise.octets(planned.stream, array.size).reshape(array.shape) % 2 * np.int64(2) - 1
    return np.asarray(np.clip(array + steps, limits.min, limits.max), array.dtype)


def _inputs(
    version: int, signature: SignatureInfo, plans: Sequence[InputPlan], kinds: Sequence[str]
) -> Iterator[Arrays]:
    """What one version gets in each run, by its names; all kinds but the first are extreme."""
    both = [(info.name, planned) for info, planned in zip(signature.inputs, plans, strict=True)]
    plain = {name: array_of(planned) for name, planned in both}
    every = [(name, planned.ends) for name, planned in both if planned.every]
    for name, ends in every:
        values = plain[name] if version or ends is None else plain[name].clip(*ends)
        yield from (plain | {name: value} for value in values)
    if not every:
        yield plain
        for kind in kinds[1:]:
            yield {name: extreme_of(replace(planned, kind=kind), plain[name]) for name, planned in both}


def untold(results: Sequence[Array], parts: int) -> str:
    """Why results do not tell right from wrong (all is NaN or one value, or heads are alike); empty where they do.

    `parts`: along some axis that they divide, so many equal stretches (heads or tiles) must differ from each other.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} is nowhere a finite number"
        if array.size > 1 and np.nanmin(array) == np.nanmax(array):
            return f"output {place} is the same value everywhere"
        for axis, size in enumerate(array.shape):
            stretches = np.split(array, parts, axis) if parts > 1 and size % parts == 0 else []
            if len({stretch.tobytes() for stretch in stretches}) < len(stretches):
                return f"of the {parts} parts of output {place} along axis {axis} some are equal"
    return ""


def _compare(
    place: int, a: Array, b: Array, info: TensorInfo, plans: Sequence[InputPlan], request: ProofRequest
) -> OutputProof:
    measure = partial(metrics.measure, quantized_a=info, quantized_b=info)
    if request.limits is not None:
        # Where the first version was clipped, the second may lie beyond that limit, but must not fall short of it.
        low, high = request.limits
        inside = (a > low) & (a < high)
        gap = np.where(a >= high, a.astype(np.int64) - b, b.astype(np.int64) - a)[~inside]
        return OutputProof(place, measure(a[inside], b[inside]), None, gap.size, int(gap.max(initial=0)))
    axis = request.row_axes[place] if place < len(request.row_axes) else None
    masks = [one for one in plans if one.role == "mask" and one.masked_rows and len(one.info.shape) > 1]
    if axis is None or not masks:
        return OutputProof(place, measure(a, b))
    mask = masks[0]
    closed = np.isin(np.arange(a.shape[axis]) % mask.info.shape[-2], mask.masked_rows)
    opened, masked = (measure(a.compress(rows, axis), b.compress(rows, axis)) for rows in (~closed, closed))
    return OutputProof(place, opened, masked)
