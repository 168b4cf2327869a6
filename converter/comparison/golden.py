"""Golden files: record a model's outputs in a small file, and check a model against it.

The file describes each signature, which determines the inputs, and holds a sample and a full checksum of each output.
Reading limits the size and never unpickles.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from edge_opt.base.atomic import AnyPath, resolve_target, write_whole
from edge_opt.base.errors import EdgeOptError, UsageError, match_names
from edge_opt.base.record import from_dict
from edge_opt.comparison.findings import (
    ComparisonReport,
    OutputComparison,
    SignatureComparison,
    measured,
    name_of,
)
from edge_opt.comparison.pairing import Pair, checked_numbers, runs_of
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.runtime import noise
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import plan
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

_KIND: list[str | int] = ["edge-opt golden", 4, noise.GENERATOR_VERSION]
_BUDGET = 640 << 10
_MAX_FILE = 16 << 20
_MAX_UNPACKED = 64 << 20


class GoldenError(EdgeOptError):
    """A golden file is missing, broken or of another version."""


@dataclass(frozen=True, slots=True)
class _Golden:
    """Content of a golden file: what determines the inputs, and a description of the outputs.

    `kind` is the version of the file, `share` the largest size of a sample in bytes. `outputs` has type and checksum of
    every output, by signature, run and output; the samples are arrays in the same order.
    """

    kind: list[str | int]
    seed: int
    runs: int
    atol: float
    rtol: float
    share: int
    signatures: list[SignatureInfo]
    outputs: list[tuple[str, str]]


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
    processors; if both are 0, every bit must be the same. For quantized outputs they apply to the real numbers.

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
    opened, samples = Opened(model), list[Array]()
    if path is None and opened.path is not None:
        path = Path(opened.path).with_suffix(".golden.npz")
    if path is None:
        raise UsageError("a model in memory has no folder to write to: give path=...")
    resolve_target(path, overwrite=overwrite, inputs=[opened.path])
    with Worker() as worker, opened.main().file() as file:
        graph = load(file)
        described = describe(graph)
        runs = runs_of(graph)
        names = match_names("signature", "*" if signatures is None else signatures, [*described])
        chosen = [described[name] for name in names]
        share = _BUDGET // max(sum(len(signature.outputs) for signature in chosen) * runs, 1)
        golden = _Golden(_KIND, seed, runs, atol, rtol, share, chosen, [])
        for signature in chosen:
            plans = [plan(signature, seed=seed, run=run) for run in range(runs)]
            for run, values in enumerate(worker.run_plans(file, signature.name, plans)):
                for name in (info.name for info in signature.outputs):
                    golden.outputs.append(_described(values[name]))
                    samples.append(_sample(values[name], signature.name, name, run, share))
    packed, meta = io.BytesIO(), np.frombuffer(json.dumps(asdict(golden)).encode(), np.uint8)
    np.savez_compressed(packed, *samples, meta=meta)
    write_whole(path, packed.getbuffer(), overwrite=overwrite)
    return Path(path)


def check(model: ModelLike, path: AnyPath) -> ComparisonReport:
    """Run a model on a golden file's inputs and compare the outputs; in the report, `a` is the file.

    Raises:
        GoldenError: the file is missing, broken or of another version.
        RuntimeFailed: the model does not run.
    """
    golden, samples = _read(Path(path))
    kept = iter(zip(golden.outputs, samples, strict=True))
    names = os.fspath(path), name_of(model, "model")
    compared = []
    with Worker() as worker, Opened(model).main().file() as file:
        described = describe(load(file))
        for recorded in golden.signatures:
            results = [{info.name: next(kept) for info in recorded.outputs} for _ in range(golden.runs)]
            pair, outputs = Pair.of(recorded, described.get(recorded.name), names, {}), []
            if not pair.reason:
                _, plans = pair.plans(golden.seed, golden.runs)
                runs = [*zip(results, worker.run_plans(file, recorded.name, plans), strict=True)]
                outputs = [_output(golden, recorded.name, infos, runs) for infos in pair.outputs]
            compared.append(SignatureComparison(recorded.name, (*outputs, *pair.alone), pair.reason))
    return ComparisonReport(*names, "cpu", golden.seed, golden.atol, golden.rtol, tuple(compared))


def _described(array: Array) -> tuple[str, str]:
    """Type and shape, and the checksum of all elements."""
    checksum = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"{array.dtype.name} {list(array.shape)}", checksum.hexdigest()


def _output(
    golden: _Golden,
    signature: str,
    infos: tuple[TensorInfo, TensorInfo],
    runs: Sequence[tuple[Mapping[str, tuple[tuple[str, str], Array]], Arrays]],
) -> OutputComparison:
    """Compare one output with its recording and its sample, over all runs."""
    (before, now), sampled, is_beyond = infos, [], False
    for run, (recorded, values) in enumerate(runs):
        array, ((expected, checksum), kept) = values[now.name], recorded[before.name]
        actual, sha256 = _described(array)
        if actual != expected:
            return OutputComparison(name=before.name, reason=f"{expected} recorded, {actual} now")
        sample = _sample(array, signature, before.name, run, golden.share)
        if sample.shape != kept.shape or sample.dtype != kept.dtype:
            raise GoldenError(f"the sample of output '{before.name}' is damaged; record it again")
        sampled.append((kept, sample))
        is_beyond |= sample.size < array.size and sha256 != checksum
    output = measured(before, now, sampled, atol=golden.atol, rtol=golden.rtol)
    if golden.atol == golden.rtol == 0 and output.equal and is_beyond:
        return replace(output, reason="elements beyond the sample differ")
    return output


def _sample(array: Array, signature: str, name: str, run: int, share: int) -> Array:
    """Return all elements if they fit in `share` bytes, else a sample at positions seeded by names and run."""
    flat = array.reshape(-1)
    room = max(share // array.dtype.itemsize, 1)
    if flat.size <= room:
        return flat
    seed = noise.seed_of("sample", signature, name, run)
    return flat[np.sort(noise.integers(seed, room, 0, flat.size))]


def _read(path: Path) -> tuple[_Golden, list[Array]]:
    """Return the content of a golden file, and its samples."""
    try:
        if path.stat().st_size > _MAX_FILE:
            raise GoldenError("it is too large")
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_UNPACKED:
                raise GoldenError("it unpacks to too many bytes")
        with np.load(path, allow_pickle=False) as stored:
            content = json.loads(stored["meta"].tobytes())
            if content.get("kind") != _KIND:
                raise GoldenError(f"its version is {content.get('kind')}, expected {_KIND}")
            samples = [stored[f"arr_{place}"] for place in range(len(stored.files) - 1)]
        golden = from_dict(_Golden, content)
        checked_numbers(golden.seed, golden.atol, golden.rtol)
        count = golden.runs * sum(len(signature.outputs) for signature in golden.signatures)
        if golden.runs not in (1, 2) or not count == len(golden.outputs) == len(samples):
            raise GoldenError("its outputs are not complete")
    except FileNotFoundError as error:
        text = f"golden file '{path}' does not exist; record it with: edge-opt golden record"
        raise GoldenError(text) from error
    except Exception as error:
        why = error if isinstance(error, GoldenError) else f"{type(error).__name__}: {error}"
        raise GoldenError(
            f"golden file '{path}' cannot be read ({why}): give the model first, then the file, or record it again"
        ) from error
    return golden, samples
