"""Do two small models compute the same? The worker's side of a region proof, and the plain data of its result.

Works on inputs and outputs by position, because a rewrite may rename tensors. Never raises for a difference: a proof
that fails is a value.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_opt.proof import metrics, plain
from edge_opt.proof.inputs import InputHint, InputPlan, Kind, generate, plan
from edge_opt.proof.metrics import Difference
from edge_opt.proof.telling import Telling
from edge_opt.proof.tensors import Kernels, SignatureInfo, TensorInfo

Array = NDArray[Any]
Box = tuple[NDArray[np.int64] | None, ...]
"""Which indices along each axis, ascending; None where all."""

_Maker = Callable[[], dict[str, Array]]
_KEPT = (
    8 << 20
)  # bytes of inputs that are held in memory instead of made again for each version and kernel set
Runner = Callable[[bytes, Kernels, list[_Maker]], Iterable[dict[str, Array]]]


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running both versions of a region.

    `mismatch` says why the two could not be compared at all (numbers, shapes, dtypes or quantization of inputs or
    outputs differ); then `outputs` is empty. `untold` says why what came out would be
    the same for many a wrong version; it is empty where there is no such reason. `seconds` is how long all of it took.
    """

    outputs: Mapping[str, tuple[OutputProof, ...]]
    mismatch: str | None = None
    untold: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def bitwise(self) -> bool:
        """Whether every output was bit for bit the same on every kernel set, fully masked rows included."""
        return self.mismatch is None and all(_bitwise(proofs) for proofs in self.outputs.values())

    def bitwise_on(self, kernels: Kernels) -> bool:
        """The same for one kernel set."""
        return self.mismatch is None and kernels in self.outputs and _bitwise(self.outputs[kernels])

    def worst(self, figure: Callable[[Difference], float], *, masked: bool = False) -> float:
        """The largest figure (`lambda d: d.max_rel`) over kernel sets and outputs; infinite after a mismatch."""
        if self.mismatch is not None:
            return float("inf")
        found = [proof.masked_rows if masked else proof.open_rows for proof in self.all()]
        return max((figure(difference) for difference in found if difference is not None), default=0.0)

    def all(self) -> list[OutputProof]:
        """Those of every kernel set."""
        return [proof for proofs in self.outputs.values() for proof in proofs]


def _bitwise(proofs: Sequence[OutputProof]) -> bool:
    return all(
        p.open_rows.bitwise and (p.masked_rows is None or p.masked_rows.bitwise) and not p.saturated
        for p in proofs
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Both versions read only some elements of inputs of these `shapes`: for each version and input, its box."""

    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[Box, ...], tuple[Box, ...]]

    @classmethod
    def received(cls, shapes: Sequence[Sequence[int]], arrays: Mapping[str, Array]) -> Self:
        """As a request carries it: `arrays` has the indices by `index_name`."""
        first, second = (
            tuple(
                tuple(arrays.get(index_name(version, place, axis)) for axis in range(len(shape)))
                for place, shape in enumerate(shapes)
            )
            for version in range(2)
        )
        return cls(tuple(map(tuple, shapes)), (first, second))


def index_name(version: int, place: int, axis: int) -> str:
    """Under which name the indices of a version's input along an axis are sent."""
    return f"indices/{version}/{place}/{axis}"


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """What to run: see `Worker.prove` for the meaning of each field."""

    kernels: tuple[Kernels, ...]
    hints: tuple[InputHint | None, ...]
    seed: int
    runs: int
    kind: Kind
    row_axes: tuple[int | None, ...]
    limits: tuple[tuple[int, int] | None, ...] = ()
    at_once: bool = False
    parts: int = 1
    cut: Cut | None = None


def prove(
    before: bytes,
    after: bytes,
    signatures: tuple[SignatureInfo, SignatureInfo],
    request: ProofRequest,
    run: Runner,
) -> Outcome:
    """Runs both models on the same inputs, at once if the request says so, else one loaded at a time.

    Raises:
        Whatever `run` raises.
    """
    first, second = _uncut(signatures, request.cut)
    mismatch = _mismatch(first, second)
    if mismatch is not None:
        return Outcome({}, mismatch=mismatch)
    hints = request.hints + (None,) * (len(first.inputs) - len(request.hints))
    plans = [
        plan(first, seed=request.seed, run=number, kind=request.kind, hints=hints)
        for number in range(request.runs)
    ]
    inputs, renamed = _makers((first, second), plans, request.cut)
    telling = Telling(request.parts, len(first.outputs))
    outputs: dict[str, tuple[OutputProof, ...]] = {}
    with ThreadPoolExecutor(1) as beside:
        for kernels in request.kernels:
            # The runtime lets other threads work while it computes.
            started = beside.submit(run, after, kernels, renamed) if request.at_once else None
            reference = [list(values.values()) for values in run(before, kernels, inputs)]
            if not outputs:
                for values in reference:
                    telling.add(values)
            results = started.result() if started else run(after, kernels, renamed)
            try:
                rewritten = [list(values.values()) for values in results]
                outputs[kernels] = _compare(reference, rewritten, first, plans, request)
            except _ShapesDifferError as error:
                return Outcome({}, mismatch=str(error))
    return Outcome(outputs, untold=telling.reason())


def to_plain(proof: Outcome) -> dict[str, Any]:
    """The fields as plain data, for the way from the worker."""
    return {**asdict(proof), "outputs": {k: [asdict(p) for p in v] for k, v in proof.outputs.items()}}


def from_plain(fields: Mapping[str, Any]) -> Outcome:
    """The inverse of `to_plain`."""
    outputs = {
        kernels: tuple(
            OutputProof(
                proof["output"],
                plain.from_plain(Difference, proof["open_rows"]),
                plain.from_plain(Difference | None, proof["masked_rows"]),
                proof["saturated"],
                proof["short"],
            )
            for proof in proofs
        )
        for kernels, proofs in fields["outputs"].items()
    }
    return Outcome(outputs, fields["mismatch"], fields["untold"])


class _ShapesDifferError(Exception):
    """An output came out in another shape than the other version's."""


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


def _uncut(
    signatures: tuple[SignatureInfo, SignatureInfo], cut: Cut | None
) -> tuple[SignatureInfo, SignatureInfo]:
    """The signatures of the whole region: inputs are made for those, and then cut."""
    if cut is None:
        return signatures
    first, second = (
        replace(
            signature,
            inputs=tuple(
                replace(info, shape=shape, declared=shape)
                for info, shape in zip(signature.inputs, cut.shapes, strict=True)
            ),
        )
        for signature in signatures
    )
    return first, second


def _makers(
    signatures: tuple[SignatureInfo, SignatureInfo],
    plans: Sequence[Sequence[InputPlan]],
    cut: Cut | None,
) -> tuple[list[_Maker], list[_Maker]]:
    """For each version, what makes its inputs run by run. Few, and parts of arrays, are made once and kept."""
    names = [[info.name for info in signature.inputs] for signature in signatures]
    if cut is None and sum(map(_size, signatures[0].inputs)) > _KEPT:
        first, second = ([_maker(own, run) for run in plans] for own in names)
        return first, second
    kept: tuple[list[_Maker], list[_Maker]] = ([], [])
    for run in plans:
        parts: list[dict[str, Array]] = [{}, {}]
        for place, made in enumerate(run):
            whole = generate(made)
            for version, own in enumerate(parts):
                own[names[version][place]] = whole if cut is None else take(whole, cut.boxes[version][place])
        for listed, own in zip(kept, parts, strict=True):
            listed.append(own.copy)
    return kept


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def _maker(names: Sequence[str], plans: Sequence[InputPlan]) -> _Maker:
    return lambda: {name: generate(made) for name, made in zip(names, plans, strict=True)}


def take(array: Array, box: Box) -> Array:
    """The elements of a box."""
    for axis, indices in enumerate(box):
        if indices is not None:
            array = np.take(array, indices, axis)
    return array


def _compare(
    reference: Sequence[list[Array]],
    rewritten: Iterable[list[Array]],
    first: SignatureInfo,
    plans: Sequence[tuple[InputPlan, ...]],
    request: ProofRequest,
) -> tuple[OutputProof, ...]:
    merged: list[OutputProof] = []
    for made, ones, others in zip(plans, reference, rewritten, strict=True):
        masked = _masked_rows(made)
        proofs = []
        for place, (a, b) in enumerate(zip(ones, others, strict=True)):
            axis = request.row_axes[place] if place < len(request.row_axes) else None
            limits = request.limits[place] if place < len(request.limits) else None
            if limits is not None and a.shape == b.shape:
                proofs.append(_clipped_output(place, a, b, first, limits))
            else:
                proofs.append(_output(place, a, b, first, masked, axis))
        merged = [_merge(*pair) for pair in zip(merged, proofs, strict=True)] if merged else proofs
    return tuple(merged)


def _masked_rows(plans: Sequence[InputPlan]) -> tuple[int, frozenset[int]]:
    """How many query rows a mask has, and which of them are masked everywhere."""
    for made in plans:
        shape = made.info.shape
        if made.role == "mask" and made.masked_rows and len(shape) > 1:
            return shape[-2], frozenset(made.masked_rows)
    return 1, frozenset()


def _output(
    place: int,
    a: Array,
    b: Array,
    first: SignatureInfo,
    masked: tuple[int, frozenset[int]],
    axis: int | None,
) -> OutputProof:
    info = first.outputs[place]
    if a.shape != b.shape:
        raise _ShapesDifferError(f"output {place} ('{info.tensor}'): shape {a.shape} before, {b.shape} after")
    rows, closed = masked
    if axis is None or not closed or len(info.scales) > 1:
        return OutputProof(place, metrics.measure(a, b, quantized_a=info, quantized_b=info))
    chosen = np.isin(np.arange(a.shape[axis]) % rows, list(closed))
    parts = [
        metrics.measure(a.compress(which, axis), b.compress(which, axis), quantized_a=info, quantized_b=info)
        for which in (~chosen, chosen)
    ]
    return OutputProof(place, parts[0], parts[1])


def _clipped_output(
    place: int, a: Array, b: Array, first: SignatureInfo, limits: tuple[int, int]
) -> OutputProof:
    """Where the first version was clipped, the second may go on, but not turn back."""
    low, high = limits
    info = first.outputs[place]
    inside = (a > low) & (a < high)
    compared = metrics.measure(a[inside], b[inside], quantized_a=info, quantized_b=info)
    gap = np.where(a >= high, a.astype(np.int64) - b, b.astype(np.int64) - a)[~inside]
    return OutputProof(place, compared, None, gap.size, int(gap.max(initial=0)))


def _merge(one: OutputProof, other: OutputProof) -> OutputProof:
    masked = one.masked_rows
    if masked is not None and other.masked_rows is not None:
        masked = metrics.merge(masked, other.masked_rows)
    return OutputProof(
        one.output,
        metrics.merge(one.open_rows, other.open_rows),
        masked,
        one.saturated + other.saturated,
        max(one.short, other.short),
    )
