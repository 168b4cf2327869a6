"""Do two small models compute the same? The worker's side of a region proof, and the plain data of its result.

Works on inputs and outputs by position, because a rewrite may rename tensors. Never raises for a difference: a proof
that fails is a value.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from edge_opt.proof import metrics
from edge_opt.proof.inputs import InputHint, InputPlan, Kind, array_of, extreme_of, plan
from edge_opt.proof.metrics import Difference
from edge_opt.proof.protocol import Array, Arrays
from edge_opt.proof.tensors import Kernels, SignatureInfo, TensorInfo

VERSIONS = ("before", "after")
Runner = Callable[[str, Kernels, Iterable[Arrays]], list[list[Array]]]
"""Loads one version and runs it on each of these named inputs; gives the outputs of each run in order."""

_KEPT = 8 << 20  # bytes of inputs that are held in memory, not made again for each version and kernel set


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
        found = [proof.masked_rows if masked else proof.open_rows for proof in self.all()]
        return max((figure(difference) for difference in found if difference is not None), default=0.0)

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
    kinds = (request.kind, *request.extremes)
    plain = plan(first, seed=request.seed, hints=hints)
    plans = [[replace(made, kind=kind) for made in plain] for kind in kinds]
    maker = _maker((first, second), plans, request.cut)

    def ran(version: int, kernels: Kernels, wanted: Sequence[Kind]) -> list[list[Array]]:
        infos, made = (first, second)[version].inputs, (maker(version, kinds.index(kind)) for kind in wanted)
        results = run(VERSIONS[version], kernels, (each for inputs in made for each in runs(inputs, infos)))
        if len(results) == len(wanted):
            return results
        return [[np.stack(each) for each in zip(*results, strict=True)]]  # of an input that takes every value

    masked = _masked_rows(plans[0])
    reason = ""
    found: dict[str, dict[str, tuple[OutputProof, ...]]] = {kind: {} for kind in kinds}
    with ThreadPoolExecutor(1) as beside:
        for kernels in request.kernels:
            # The runtime lets other threads work while it computes.
            wanted = [kind for kind in kinds if not _is_shown(request, kind, found[kind])]
            started = beside.submit(ran, 1, kernels, wanted) if request.at_once else None
            reference = ran(0, kernels, wanted)
            reason = reason if found[request.kind] else untold(reference[0], request.parts)
            rewritten = started.result() if started else ran(1, kernels, wanted)
            for kind, before, after in zip(wanted, reference, rewritten, strict=True):
                for place, (a, b) in enumerate(zip(before, after, strict=True)):
                    if a.shape != b.shape:
                        where = f"output {place} ('{first.outputs[place].tensor}')"
                        return Outcome({}, mismatch=f"{where}: shape {a.shape} before, {b.shape} after")
                found[kind][kernels] = tuple(
                    _compare(place, a, b, first.outputs[place], masked, request)
                    for place, (a, b) in enumerate(zip(before, after, strict=True))
                )
    return Outcome(found.pop(request.kind), untold=reason, extremes=found)


def _is_shown(request: ProofRequest, kind: Kind, found: Mapping[str, Sequence[OutputProof]]) -> bool:
    """Whether rows of a region gave the same bits on such extreme inputs on one kernel set, which is enough."""
    rows = request.cut is not None and kind != request.kind
    return rows and bool(found) and all(proof.bitwise for proofs in found.values() for proof in proofs)


def runs(inputs: Arrays, infos: Sequence[TensorInfo]) -> list[Arrays]:
    """The inputs of each run: an array with one axis more than its input has one slice for each."""
    swept = {info.name for info in infos if inputs[info.name].ndim > len(info.shape)}
    if not swept:
        return [inputs]
    count = max(len(inputs[name]) for name in swept)
    return [{n: array[run] if n in swept else array for n, array in inputs.items()} for run in range(count)]


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
            if parts > 1 and size % parts == 0 and len({*map(_digest, np.split(array, parts, axis))}) < parts:
                return f"of the {parts} parts of output {place} along axis {axis} some are equal"
    return ""


def _digest(piece: Array) -> bytes:
    return blake2b(piece.tobytes(), digest_size=16).digest()


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


def _uncut(signature: SignatureInfo, cut: Cut | None) -> SignatureInfo:
    """The signature of the whole region: inputs are made for that, and then cut."""
    if cut is None:
        return signature
    whole = zip(signature.inputs, cut.shapes, strict=True)
    return replace(
        signature, inputs=tuple(replace(info, shape=shape, declared=shape) for info, shape in whole)
    )


def _maker(
    signatures: tuple[SignatureInfo, SignatureInfo], plans: Sequence[Sequence[InputPlan]], cut: Cut | None
) -> Callable[[int, int], Arrays]:
    """What makes the inputs of a version (0 or 1), by its names, for the run of that number; the first is no extreme.

    Few, and parts of arrays, are made once and kept.
    """
    names = [[info.name for info in signature.inputs] for signature in signatures]
    if cut is None and sum(info.nbytes for info in signatures[0].inputs) > _KEPT:
        return lambda version, run: dict(zip(names[version], map(array_of, plans[run]), strict=True))
    kept: list[tuple[Arrays, Arrays]] = [({}, {}) for _ in plans]
    for place, first in enumerate(plans[0]):
        realistic = array_of(first)
        for made, versions in zip(plans, kept, strict=True):
            whole = realistic if made is plans[0] else extreme_of(made[place], realistic)
            for version, arrays in enumerate(versions):
                if whole is realistic and made is not plans[0]:
                    arrays[names[version][place]] = kept[0][version][names[version][place]]
                    continue
                array = whole if version or first.ends is None else whole.clip(*first.ends)
                arrays[names[version][place]] = take(array, cut.boxes[version][place]) if cut else array
    return lambda version, run: kept[run][version]


def take(array: Array, box: Sequence[Sequence[int] | NDArray[np.int64] | None]) -> Array:
    """The elements at these indices along each axis; None where all."""
    for axis, indices in enumerate(box):
        if indices is not None:
            array = np.take(array, indices, axis)
    return array


def _masked_rows(plans: Sequence[InputPlan]) -> tuple[int, tuple[int, ...]] | None:
    """How many query rows a mask has, and which of them are masked everywhere; None where none is."""
    for made in plans:
        if made.role == "mask" and made.masked_rows and len(made.info.shape) > 1:
            return made.info.shape[-2], made.masked_rows
    return None


def _compare(
    place: int,
    a: Array,
    b: Array,
    info: TensorInfo,
    masked: tuple[int, tuple[int, ...]] | None,
    request: ProofRequest,
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
    if axis is None or masked is None:
        return OutputProof(place, measure(a, b))
    rows, closed = masked
    chosen = np.isin(np.arange(a.shape[axis]) % rows, closed)
    opened, masked_rows = (measure(a.compress(w, axis), b.compress(w, axis)) for w in (~chosen, chosen))
    return OutputProof(place, opened, masked_rows)
