"""Golden files: record a model's outputs in a small file, and check a model against it.

The file describes each signature, which determines the inputs, and holds of each output a checksum, minimum, maximum
and sum of all elements, and a sample. Reading limits the size and never unpickles.
"""

import hashlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from edge_opt.base.atomic import AnyPath, path_of, resolve_target, write_whole
from edge_opt.base.errors import EdgeOptError, UsageError, match_names
from edge_opt.base.record import from_dict
from edge_opt.comparison.findings import (
    ComparisonReport,
    OutputComparison,
    SignatureComparison,
    measured,
    name_of,
)
from edge_opt.comparison.pairing import Pair, Session, checked_numbers, orders, sessions
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.runtime import noise
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import Planned, array_of, converted, integer_remarks
from edge_opt.runtime.metrics import Tolerance
from edge_opt.runtime.protocol import KINDS, Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

_KIND: list[str | int] = ["edge-opt golden", 7, noise.GENERATOR_VERSION]
_BUDGET = 640 << 10
_MAX_FILE = 16 << 20
_MAX_UNPACKED = 64 << 20
_MAX_SIGNATURES = 1000
_ROUNDING = 1e-12  # of a sum in float64, relative to the sum of absolute values


class GoldenError(EdgeOptError):
    """A golden file is missing, broken or of another version."""


class _Output(NamedTuple):
    """All elements of one output in few numbers: a checksum, and figures of the real numbers that they stand for.

    `others` counts NaN, infinity and -infinity; the other figures are those of the `finite` elements. `magnitude` is
    the sum of their absolute values.
    """

    kind: str
    checksum: str
    minimum: float
    maximum: float
    sum: float
    magnitude: float
    finite: int
    others: tuple[int, int, int]

    @classmethod
    def of(cls, array: Array, info: TensorInfo) -> "_Output":
        """Describe an output."""
        numbers = np.ascontiguousarray(array).reshape(-1)
        if numbers.dtype.kind == "f":
            # Payloads are not specified.
            numbers = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)
        checksum = hashlib.sha256(numbers.view(np.uint8).data).hexdigest()
        reals = info.reals(numbers)
        finite = reals[np.isfinite(reals)]
        count = finite.size
        if not count:
            finite = np.zeros(1)
        return cls(
            kind=f"{array.dtype.name} {list(array.shape)}",
            checksum=checksum,
            minimum=float(finite.min()),
            maximum=float(finite.max()),
            sum=float(finite.sum()),
            magnitude=float(np.abs(finite).sum()),
            finite=count,
            others=(
                int(np.isnan(reals).sum()),
                int(np.isposinf(reals).sum()),
                int(np.isneginf(reals).sum()),
            ),
        )

    def misses(self, now: "_Output", atol: float, rtol: float) -> str:
        """The first figure that shows that some element is outside the tolerances; empty if none does.

        If |a-b| <= atol + rtol*|a| for each of n elements, the same holds for minimum and maximum (`rtol` up to 1), and
        |sum a - sum b| <= atol*n + rtol * sum |a|.
        """
        if self.others != now.others:
            said = "{} NaN, {} infinite and {} -infinite elements"
            return f"{said.format(*now.others)}, recorded were {said.format(*self.others)}"
        largest = max(abs(self.minimum), abs(self.maximum))
        lowest = largest if rtol > 1 else abs(self.minimum)
        highest = largest if rtol > 1 else abs(self.maximum)
        bounds = (
            ("minimum", self.minimum, now.minimum, atol + rtol * lowest),
            ("maximum", self.maximum, now.maximum, atol + rtol * highest),
            ("sum", self.sum, now.sum, atol * self.finite + (rtol + _ROUNDING) * self.magnitude),
        )
        for name, before, after, allowed in bounds:
            if before != after and not abs(after - before) <= allowed:
                return f"the {name} of all elements is {after:.9g}, recorded was {before:.9g}"
        return ""


@dataclass(frozen=True, slots=True)
class _Golden:
    """Content of a golden file: what determines the inputs, and a description of the outputs.

    `kind` is the version of the file, `share` the largest size of a sample in bytes. `outputs` describes every output,
    by signature, call and name; the samples are arrays in the same order.
    """

    kind: list[str | int]
    seed: int
    atol: float
    rtol: float
    share: int
    signatures: list[SignatureInfo]
    outputs: list[_Output]


def record(
    model: ModelLike,
    path: AnyPath | None = None,
    *,
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 1e-4,
    rtol: float = 1e-4,
    overwrite: bool = False,
) -> Path:
    """Run a model (in a bundle: the prefill/decode model), write its outputs to a golden file and return its path.

    The default path is `<stem>.golden.npz` beside a model's file. The default tolerances allow for rounding on other
    processors; if both are 0, every bit must be the same. For quantized outputs they apply to the real numbers. To
    integers that stand for themselves, such as token IDs, only `atol` applies.

    Examples:
        >>> from edge_opt.testing import assert_golden, record_golden
        >>> record_golden("gemma.tflite")
        >>> assert_golden("gemma.opt.tflite", "gemma.golden.npz")

    Raises:
        UsageError: a signature is unknown, a number is invalid, the file is the model or exists and `overwrite` is not
            set, or a model in memory has no `path`.
        OutputError: the file cannot be written.
        RuntimeFailed: the model does not run.
    """
    seed, atol, rtol = checked_numbers(seed, atol, rtol)
    opened = Opened(model)
    main = opened.main()
    samples = list[Array]()
    if path is None and opened.path is not None:
        path = Path(opened.path).with_suffix(".golden.npz")
    if path is None:
        raise UsageError("a model in memory has no folder to write to: give path=...")
    resolve_target(path, overwrite=overwrite, inputs=[opened.path])
    with Worker() as worker, main.file() as file:
        described = describe(load(file))
        names = match_names("signature", signatures, [*described])
        chosen = [described[name] for name in names]
        places = list(_recorded(chosen))
        share = _BUDGET // max(len(places), 1)
        golden = _Golden(_KIND, seed, atol, rtol, share, chosen, [])
        pairs = {one.name: Pair.of(one, one, ("", ""), {}) for one in chosen}
        for session in sessions(pairs):
            results = worker.run_calls(file, session.calls(seed)[0])
            for name in session.pairs:
                for call, arrays in enumerate(session.outputs_of(name, results)):
                    for info in described[name].outputs:
                        array = arrays[info.name]
                        golden.outputs.append(_Output.of(array, info))
                        samples.append(_sample(array, name, info.name, call, golden.share))
    packed = io.BytesIO()
    meta = np.frombuffer(json.dumps(asdict(golden)).encode(), np.uint8)
    np.savez_compressed(packed, *samples, meta=meta)
    excess = _excess(packed)
    if excess:
        raise UsageError(f"{path} was not written, {excess}: choose fewer signatures=...")
    write_whole(path, packed.getbuffer(), overwrite=overwrite)
    return Path(path)


class _Recorded(NamedTuple):
    """An output as recorded: its figures, and a sample of it."""

    figures: _Output
    sample: Array


_Place = tuple[str, int, str]
"""An output of one call: the signature, the number of the call, and the output's name."""
_Kept = Mapping[_Place, _Recorded]


def _recorded(signatures: Sequence[SignatureInfo]) -> Iterator[_Place]:
    """The places of all outputs, in the order of a file."""
    outputs = {signature.name: signature.outputs for signature in signatures}
    for order in orders(signatures):
        for name, count in Counter(turn.name for turn in order).items():
            for call in range(count):
                for info in outputs[name]:
                    yield name, call, info.name


def check(model: ModelLike, path: AnyPath) -> ComparisonReport:
    """Run a model on a golden file's inputs and compare the outputs; in the report, `a` is the file.

    Raises:
        GoldenError: the file is missing, broken or of another version.
        RuntimeFailed: the model does not run.
    """
    golden, kept = _read(path_of(path, "a golden file"))
    known = {signature.name: signature for signature in golden.signatures}
    names = (os.fspath(path), name_of(model, "model"))
    compared = dict[str, SignatureComparison]()
    remarks = list[str]()
    with Worker() as worker, Opened(model).main().file() as file:
        described = describe(load(file))
        pairs = {name: _pair(one, described.get(name), names) for name, one in known.items()}
        for order in orders(golden.signatures):
            recorded = dict.fromkeys(turn.name for turn in order)
            runnable = {name: pairs[name] for name in recorded if not pairs[name].reason}
            session = Session(runnable, [turn for turn in order if turn.name in runnable])
            remarks += session.remarks()
            for name in recorded:
                remarks += integer_remarks(known[name])
            calls = session.calls(golden.seed)
            remarks += dict.fromkeys(_misfits(calls))
            results = worker.run_calls(file, calls[1])
            for name in recorded:
                compared[name] = _compare(golden, kept, pairs[name], session, results)
    report = ComparisonReport(*names, "cpu", golden.seed, golden.atol, golden.rtol)
    return replace(
        report, signatures=tuple(compared[name] for name in known), remarks=tuple(remarks)
    )


def _compare(
    golden: _Golden, kept: _Kept, pair: Pair, session: Session, results: Sequence[Arrays]
) -> SignatureComparison:
    """Compare the outputs of one signature, from the results of all calls of its session."""
    name = pair.signature.name
    outputs: list[OutputComparison] = []
    for before, now in pair.outputs:
        runs: list[tuple[_Recorded, Array]] = []
        for call, arrays in enumerate(session.outputs_of(name, results)):
            runs.append((kept[name, call, before.name], arrays[now.name]))
        outputs.append(_output(golden, name, (before, now), runs, session.ordinary(name)))
    return SignatureComparison(name, (*outputs, *pair.alone), pair.reason or pair.differs)


def _pair(recorded: SignatureInfo, now: SignatureInfo | None, names: Sequence[str]) -> Pair:
    """A recorded signature and the model's, which gets the recorded inputs."""
    if now is not None and now.keeps_state and not recorded.keeps_state:
        return Pair(
            recorded,
            reason="keeps state between calls, which the recorded model did not: record it again",
        )
    return Pair.of(recorded, now, names, {}, recorded=True)


def _misfits(calls: tuple[Sequence[Planned], Sequence[Planned]]) -> Iterator[str]:
    """Name the inputs that do not hold the recorded numbers."""
    for (name, ours), (_, theirs) in zip(*calls, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if one.info.has_type_of(other.info):
                continue
            given = converted(array_of(other), other.info, one.info)
            if not np.array_equal(array_of(one), given):
                rounded = f"recorded {one.info.dtype} numbers are rounded or clipped to {other.info.dtype}"
                yield f"{name}/{one.info.name}: {rounded}"


def _output(
    golden: _Golden,
    signature: str,
    infos: tuple[TensorInfo, TensorInfo],
    runs: Sequence[tuple[_Recorded, Array]],
    ordinary: int,
) -> OutputComparison:
    """Compare one output with its recording and its sample, over all calls, the first of which are `ordinary`."""
    before, now = infos
    rtol = 0.0 if before.is_plain_integer else golden.rtol  # as `measure` does
    sampled = list[tuple[Array, Array]]()
    elements = 0
    reason = ""
    differs = False
    for call, (recorded, array) in enumerate(runs):
        if differs and call == ordinary:
            break  # further inputs tell nothing new
        expected = recorded.figures
        actual = _Output.of(array, now)
        if actual.kind != expected.kind:
            return OutputComparison(
                name=before.name, reason=f"{expected.kind} recorded, {actual.kind} now"
            )
        sample = _sample(array, signature, before.name, call, golden.share)
        kept = recorded.sample
        if (kept.shape, kept.dtype) != (sample.shape, sample.dtype):
            raise _damaged(before)
        sampled.append((kept, sample))
        if actual.checksum != expected.checksum:
            differs = True
            reason = reason or expected.misses(actual, golden.atol, rtol)
        elements += actual.finite + sum(actual.others)
    output = measured(before, now, sampled, Tolerance(atol=golden.atol, rtol=rtol))
    if not differs:
        return replace(output, elements=elements)
    if output.elements == elements:  # the sample has all of them
        if output.bitwise:
            raise _damaged(before)  # every element is the recorded one, and the checksum is not
        return output
    if golden.atol == rtol == 0:
        reason = "elements beyond the sample differ"
    reason = reason if output.equal else output.reason
    return replace(output, reason=reason, sample_of=elements)


def _damaged(info: TensorInfo) -> GoldenError:
    return GoldenError(f"what the file holds of output '{info.name}' is damaged; record it again")


def _sample(array: Array, signature: str, name: str, run: int, share: int) -> Array:
    """Return all elements if they fit in `share` bytes, else a sample at positions seeded by names and run."""
    flat = array.reshape(-1)
    room = max(share // array.dtype.itemsize, 1)
    if flat.size <= room:
        return flat
    seed = noise.seed_of("sample", signature, name, run)
    return flat[np.sort(noise.integers(seed, room, 0, flat.size))]


def _read(path: Path) -> tuple[_Golden, _Kept]:
    """Return the content of a golden file, and its outputs by place."""
    try:
        with path.open("rb") as file:
            excess = _excess(file)
        if excess:
            raise GoldenError(excess)
        with np.load(path, allow_pickle=False) as stored:
            content = json.loads(stored["meta"].tobytes())
            kind = content.get("kind")
            if kind == _KIND:
                samples = [stored[f"arr_{place}"] for place in range(len(stored.files) - 1)]
                return _checked(from_dict(_Golden, content), samples)
    except FileNotFoundError as error:
        text = f"golden file '{path}' does not exist; record it with: edge-opt golden record"
        raise GoldenError(text) from error
    except Exception as error:
        why = error if isinstance(error, GoldenError) else f"{type(error).__name__}: {error}"
        raise GoldenError(
            f"golden file '{path}' cannot be read ({why}): give the model first, then the file, or record it again"
        ) from error
    raise GoldenError(
        f"golden file '{path}' is of another version of edge-opt (its version is {kind}, expected {_KIND}): record it "
        f"again with: edge-opt golden record MODEL -o {path} --force"
    )


def _excess(file: IO[bytes]) -> str:
    """Why a file is too large to be read, packed or unpacked; empty if it is not."""
    if file.seek(0, io.SEEK_END) > _MAX_FILE:
        return "it is too large"
    unpacked = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
    return "it unpacks to too many bytes" if unpacked > _MAX_UNPACKED else ""


def _checked(golden: _Golden, samples: Sequence[Array]) -> tuple[_Golden, _Kept]:
    """A file's content, which must be complete, and its outputs by place."""
    checked_numbers(golden.seed, golden.atol, golden.rtol)
    if len(golden.signatures) > _MAX_SIGNATURES:
        raise GoldenError(f"it has more than {_MAX_SIGNATURES} signatures")
    for signature in golden.signatures:
        for info in signature.inputs:
            if np.dtype(info.dtype).kind not in KINDS:
                raise GoldenError(
                    f"no numbers can be drawn for its input '{info.name}', {info.dtype}"
                )
        for info in signature.outputs:
            np.dtype(info.dtype)  # raises TypeError if numpy has none of that name
    # One more than there are, if so many: a file may name signatures for more calls than fit in memory.
    places = list(islice(_recorded(golden.signatures), len(golden.outputs) + 1))
    if not len(places) == len(golden.outputs) == len(samples):
        raise GoldenError("its outputs are not complete")
    outputs = map(_Recorded, golden.outputs, samples)
    return golden, dict(zip(places, outputs, strict=True))
