"""Do two small models compute the same? The worker's side of a region proof, and the plain data of its result.

Works on inputs and outputs by position, because a rewrite may rename tensors. Never raises for a difference: a proof
that fails is a value.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime import metrics
from edge_opt.runtime.inputs import InputHint, InputPlan, Kind, array_of, extreme_of, plan
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import Kernels, SignatureInfo, TensorInfo

VERSIONS = ("before", "after")
Runner = Callable[[str, Kernels, Iterable[Arrays]], list[list[Array]]]
"""Loads one version and runs it on each of these named inputs; gives the outputs of each run in order."""


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
    empty where there is no such reason. `extremes` has by kind what extreme inputs gave. `seconds` is how long all of
    it took.
    """

    outputs: Mapping[str, tuple[OutputProof, ...]]
    mismatch: str | None = None
    untold: str = ""
    extremes: Mapping[str, Mapping[str, tuple[OutputProof, ...]]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def bitwise(self) -> bool:
        """Whether every output was bit for bit the same on every kernel set, fully masked rows included."""
        return self.mismatch is None and all(proof.bitwise for proof in self.all())

    def bitwise_on(self, kernels: Kernels) -> bool:
        """The same for one kernel set."""
        return kernels in self.outputs and replace(self, outputs={kernels: self.outputs[kernels]}).bitwise

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
class Cut:
    """Both versions read only some elements of inputs of these `shapes`.

    `boxes` has, for each version and input, the indices along each axis, ascending; None where all.
    """

    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[tuple[tuple[int, ...] | None, ...], ...], ...]


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
        kind: realistic inputs or one of the hostile kinds.
        extremes: kinds of extreme inputs on which both are run as well.
        seed: decides all inputs, together with their positions.
        kernels: the kernel sets to run on.
        cut: what the models read of larger inputs, where they are versions of a region on some of its rows.
    """

    hints: tuple[InputHint | None, ...] = ()
    row_axes: tuple[int | None, ...] = ()
    limits: tuple[int, int] | None = None
    at_once: bool = False
    parts: int = 1
    kind: Kind = "realistic"
    extremes: tuple[Kind, ...] = ()
    seed: int = 0
    kernels: tuple[Kernels, ...] = ("xnnpack", "reference")
    cut: Cut | None = None


def prove(signatures: tuple[SignatureInfo, SignatureInfo], request: ProofRequest, run: Runner) -> Outcome:
    """Runs both versions on the same inputs, at once if the request says so, else one loaded at a time.

    Raises:
        Whatever `run` raises.
    """
    first, second = (_uncut(signature, request.cut) for signature in signatures)
    mismatch = _mismatch(first, second)
    if mismatch is not None:
        return Outcome({}, mismatch=mismatch)
    hints = (*request.hints, *[None] * len(first.inputs))[: len(first.inputs)]
    plans = plan(first, seed=request.seed, hints=hints)
    kinds = (request.kind, *request.extremes)
    inputs = _inputs((first, second), plans, kinds, request.cut)

    def results(version: int, kernels: Kernels, wanted: Sequence[Kind]) -> list[list[Array]]:
        given = chain.from_iterable(_runs(inputs[version][kind], plans) for kind in wanted)
        ran = run(VERSIONS[version], kernels, given)
        if len(ran) == len(wanted):
            return ran
        return [[np.stack(each) for each in zip(*ran, strict=True)]]  # of an input that takes every value

    reason = ""
    proofs: dict[str, dict[str, tuple[OutputProof, ...]]] = {kind: {} for kind in kinds}
    with ThreadPoolExecutor(1) as beside:
        for kernels in request.kernels:
            wanted = [kind for kind in kinds if not _is_shown(request, kind, proofs[kind])]
            # The runtime lets other threads work while it computes.
            started = beside.submit(results, 1, kernels, wanted) if request.at_once else None
            before = results(0, kernels, wanted)
            reason = reason if proofs[request.kind] else untold(before[0], request.parts)
            after = started.result() if started else results(1, kernels, wanted)
            for kind, olds, news in zip(wanted, before, after, strict=True):
                for place, (a, b) in enumerate(zip(olds, news, strict=True)):
                    if a.shape != b.shape:
                        where = f"output {place} ('{first.outputs[place].tensor}')"
                        return Outcome({}, mismatch=f"{where}: shape {a.shape} before, {b.shape} after")
                proofs[kind][kernels] = tuple(
                    _compare(place, a, b, first.outputs[place], plans, request)
                    for place, (a, b) in enumerate(zip(olds, news, strict=True))
                )
    return Outcome(proofs.pop(request.kind), untold=reason, extremes=proofs)


def _is_shown(request: ProofRequest, kind: Kind, proofs: Mapping[str, Sequence[OutputProof]]) -> bool:
    """Whether rows of a region gave the same bits on such extreme inputs on one kernel set, which is enough."""
    same = all(proof.bitwise for outputs in proofs.values() for proof in outputs)
    return request.cut is not None and kind != request.kind and bool(proofs) and same


def _uncut(signature: SignatureInfo, cut: Cut | None) -> SignatureInfo:
    """The signature of the whole region: inputs are made for that, and then cut."""
    if cut is None:
        return signature
    whole = zip(signature.inputs, cut.shapes, strict=True)
    inputs = tuple(replace(info, shape=shape, declared=shape) for info, shape in whole)
    return replace(signature, inputs=inputs)


def _mismatch(first: SignatureInfo, second: SignatureInfo) -> str | None:
    for what, ones, others in (
        ("input", first.inputs, second.inputs),
        ("output", first.outputs, second.outputs),
    ):
        if len(ones) != len(others):
            return f"{len(ones)} {what}s before, {len(others)} after"
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            for property_name in ("shape", "dtype", "quantization"):
                old, new = getattr(one, property_name), getattr(other, property_name)
                if old != new:
                    return f"{what} {place} ('{one.tensor}'): {property_name} {old} before, {new} after"
    return None


def _inputs(
    signatures: tuple[SignatureInfo, SignatureInfo],
    plans: Sequence[InputPlan],
    kinds: Sequence[Kind],
    cut: Cut | None,
) -> tuple[dict[Kind, Arrays], dict[Kind, Arrays]]:
    """What each version gets, by its names; all kinds but the first are extreme. Equal arrays are made once."""
    versions: tuple[dict[Kind, Arrays], ...] = tuple({kind: {} for kind in kinds} for _ in signatures)
    for place, planned in enumerate(plans):
        plain = array_of(replace(planned, kind=kinds[0]))
        for kind in kinds:
            whole = plain if kind == kinds[0] else extreme_of(replace(planned, kind=kind), plain)
            for version, arrays in enumerate(versions):
                name = signatures[version].inputs[place].name
                if whole is plain and kind != kinds[0]:
                    arrays[kind][name] = arrays[kinds[0]][name]
                    continue
                array = whole if version or planned.ends is None else whole.clip(*planned.ends)
                arrays[kind][name] = take(array, cut.boxes[version][place]) if cut else array
    return versions[0], versions[1]


def _runs(inputs: Arrays, plans: Sequence[InputPlan]) -> list[Arrays]:
    """The inputs of each run: an array of every value has one slice for each."""
    every = [name for name, planned in zip(inputs, plans, strict=True) if planned.every]
    if not every:
        return [inputs]
    return [inputs | {name: inputs[name][run] for name in every} for run in range(len(inputs[every[0]]))]


def take(array: Array, box: Sequence[Sequence[int] | NDArray[np.int64] | None]) -> Array:
    """The elements at these indices along each axis; None where all."""
    for axis, indices in enumerate(box):
        if indices is not None:
            array = np.take(array, indices, axis)
    return array


def untold(results: Sequence[Array], parts: int) -> str:
    """Why results do not tell right from wrong (all is NaN or one value, or heads are alike); empty where they do.

    `parts`: along every axis that they divide, so many equal stretches (heads or tiles) must differ from each other.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} is nowhere a finite number"
        if array.size == 1:
            continue
        numbers = array[~np.isnan(array)] if array.dtype.kind == "f" else array
        if numbers.min() == numbers.max():
            return f"output {place} is the same value everywhere"
        for axis, size in enumerate(array.shape):
            if (
                parts > 1
                and size % parts == 0
                and len({part.tobytes() for part in np.split(array, parts, axis)}) < parts
            ):
                return f"of the {parts} parts of output {place} along axis {axis} some are equal"
    return ""


def _compare(
    place: int, a: Array, b: Array, info: TensorInfo, plans: Sequence[InputPlan], request: ProofRequest
) -> OutputProof:
    def measure(one: Array, other: Array) -> Difference:
        return metrics.measure(one, other, quantized_a=info, quantized_b=info)

    if request.limits is not None:
        # Where the first version was clipped, the second may lie beyond that limit, but must not fall short of it.
        low, high = request.limits
        inside = (a > low) & (a < high)
        gap = np.where(a >= high, a.astype(np.int64) - b, b.astype(np.int64) - a)[~inside]
        return OutputProof(place, measure(a[inside], b[inside]), None, gap.size, int(gap.max(initial=0)))
    axis = request.row_axes[place] if place < len(request.row_axes) else None
    masks = (one for one in plans if one.role == "mask" and one.masked_rows and len(one.info.shape) > 1)
    mask = next(masks, None)
    if axis is None or mask is None:
        return OutputProof(place, measure(a, b))
    closed = np.isin(np.arange(a.shape[axis]) % mask.info.shape[-2], mask.masked_rows)
    opened, masked = (measure(a.compress(rows, axis), b.compress(rows, axis)) for rows in (~closed, closed))
    return OutputProof(place, opened, masked)
