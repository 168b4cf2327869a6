"""Golden files: what a model computed, kept in a small file, and whether a model still computes it.

The file has a description of each signature, from which the inputs follow, and of each output a sample, its checksum
and statistics of all elements. It is read without unpickling, and only up to bounds.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.atomic import write_whole
from edge_opt.base.errors import EdgeOptError
from edge_opt.base.record import from_dict
from edge_opt.comparison.compare import checked_numbers, choose
from edge_opt.comparison.facts import keeps_state, with_facts
from edge_opt.comparison.findings import ComparisonReport, OutputComparison, SignatureComparison
from edge_opt.comparison.models import name_of
from edge_opt.ir import load
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.runtime import metrics, noise
from edge_opt.runtime.inputs import plan
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

_KIND = {"format": "edge-opt golden", "version": 2, "generator": noise.GENERATOR_VERSION}
_BUDGET = 640 << 10
_MAX_FILE = 16 << 20
_MAX_UNPACKED = 64 << 20
_META = "meta"


class GoldenError(EdgeOptError):
    """A golden file cannot be read, or was not recorded for what is asked of it."""


def record(
    model: ModelLike,
    path: str | os.PathLike[str],
    *,
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 1e-4,
    rtol: float = 1e-4,
    overwrite: bool = False,
) -> Path:
    """Runs the model (of a bundle, the prefill/decode one) and writes what came out as a golden file; returns its path.

    The default tolerances leave room for another processor's rounding; 0 and 0 demand the same bits' values. For
    quantized outputs they apply to the real numbers.

    Raises:
        UsageError: an unknown signature, a number that cannot be, or the file exists and `overwrite` is not set.
        OutputError: the file cannot be written.
        RuntimeFailed: the model does not run.
    """
    seed, atol, rtol = checked_numbers(seed, atol, rtol)
    arrays: Arrays = {}
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        file = stack.enter_context(Opened(model).main().file())
        graph = load(file)
        described = with_facts(worker.describe(file), graph)
        runs = 1 + keeps_state(graph)
        chosen = [described[name] for name in choose(list(described), signatures)]
        share = _BUDGET // max(sum(len(signature.outputs) for signature in chosen) * runs, 1)
        meta: dict[str, Any] = {
            **_KIND,
            "model": _fingerprint(model if isinstance(model, str | os.PathLike) else file),
            "seed": seed,
            "runs": runs,
            "atol": atol,
            "rtol": rtol,
            "share": share,
            "signatures": [],
        }
        for signature in chosen:
            results = _run(worker, file, meta, signature)
            entries = {
                info.name: [
                    _entry(info, signature.name, results[run], run, share, arrays) for run in range(runs)
                ]
                for info in signature.outputs
            }
            meta["signatures"].append({**asdict(signature), "results": entries})
    packed = io.BytesIO()
    contents: dict[str, Any] = {_META: np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays}
    np.savez_compressed(packed, **contents)
    write_whole(path, packed.getbuffer(), overwrite=overwrite)
    return Path(path)


def check(model: ModelLike, path: str | os.PathLike[str]) -> ComparisonReport:
    """Runs the model on the inputs of a golden file and compares; `a` of the report is the file.

    Raises:
        GoldenError: the file is missing, broken or of another version.
        RuntimeFailed: the model does not run.
    """
    meta, arrays = _read(Path(path))
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        file = stack.enter_context(Opened(model).main().file())
        described = {signature.name: signature for signature in worker.describe(file)}
        checking = _Check(meta, arrays, worker, file, name_of(model, "model"))
        try:
            compared = tuple(checking.signature(described, entry) for entry in meta["signatures"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise _broken(Path(path), f"{type(error).__name__} {error}") from error
    settings = {name: meta[name] for name in ("seed", "atol", "rtol")}
    return ComparisonReport(os.fspath(path), checking.name, "cpu", signatures=compared, **settings)


def _run(worker: Worker, file: Path, meta: Mapping[str, Any], signature: SignatureInfo) -> list[Arrays]:
    """The outputs of as many runs as the file says, on the inputs that follow from its seed."""
    plans = [plan(signature, seed=meta["seed"], run=run) for run in range(meta["runs"])]
    return worker.run_plans(file, signature.name, plans)


def _entry(
    info: TensorInfo, signature: str, values: Arrays, run: int, share: int, arrays: Arrays
) -> dict[str, Any]:
    """What the file says of one output of one run; its sample goes to `arrays`."""
    key, array = f"{len(arrays)}", values[info.name]
    arrays[key] = _sample(array, signature, info.name, run, share)
    return {"key": key, **_statistics(array, info)}


@dataclass(frozen=True, slots=True)
class _Check:
    """The content of a golden file, and what runs the model that is compared with it."""

    meta: Mapping[str, Any]
    arrays: Arrays
    worker: Worker
    file: Path
    name: str

    def signature(
        self, described: Mapping[str, SignatureInfo], entry: Mapping[str, Any]
    ) -> SignatureComparison:
        """One signature of the file against the model's."""
        golden = from_dict(SignatureInfo, {key: value for key, value in entry.items() if key != "results"})
        actual = described.get(golden.name)
        if actual is None:
            return SignatureComparison(golden.name, reason=f"missing in {self.name}")
        reason = _other_inputs(golden, actual)
        if reason:
            return SignatureComparison(golden.name, reason=reason)
        now = {info.name: info for info in actual.outputs}
        # Inputs come from the recorded description, so that they stay the same if only an output is renamed.
        results = _run(self.worker, self.file, self.meta, golden)
        outputs = []
        for info in golden.outputs:
            compared: OutputComparison | None = None
            for run, (expected, values) in enumerate(zip(entry["results"][info.name], results, strict=True)):
                compared = self._output(golden.name, info, expected, values, run).merged(compared)
            assert compared is not None, "there is at least one run"
            if info.name in now and now[info.name].quantization != info.quantization:
                reason = f"quantization {info.quantization} recorded, {now[info.name].quantization} now"
                compared = replace(compared, reason=reason)
            outputs.append(compared)
        return SignatureComparison(golden.name, tuple(outputs))

    def _output(
        self, signature: str, info: TensorInfo, expected: Mapping[str, Any], values: Arrays, run: int
    ) -> OutputComparison:
        actual, kept = values.get(info.name), self.arrays[expected["key"]]
        if actual is None:
            return OutputComparison(info.name, reason="missing in the model")
        now = _statistics(actual, info)
        if now["type"] != expected["type"]:
            return OutputComparison(info.name, reason=f"{expected['type']} recorded, {now['type']} now")
        sample = _sample(actual, signature, info.name, run, self.meta["share"])
        if sample.shape != kept.shape or sample.dtype != kept.dtype:
            raise ValueError(f"sample of {info.name}")
        tolerances = {name: self.meta[name] for name in ("atol", "rtol")}
        difference = metrics.measure(kept, sample, quantized_a=info, quantized_b=info, **tolerances)
        is_whole = not difference.equal or difference.elements == actual.size
        return OutputComparison(info.name, difference, "" if is_whole else self._beyond_sample(expected, now))

    def _beyond_sample(self, expected: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        """What checksum and statistics say of the elements that were not kept.

        If every element is within |a-b| <= atol + rtol*|a|, so is the mean with the mean of |a|, and each extreme with
        the largest |a|; a statistic outside of these bounds proves a difference.
        """
        if now["sha256"] == expected["sha256"]:
            return ""
        atol, rtol = self.meta["atol"], self.meta["rtol"]
        if atol == rtol == 0:
            return "elements beyond the sample differ"
        largest = max(abs(expected["low"]), abs(expected["high"]))
        for name in ("mean", "mean_abs", "low", "high"):
            size = expected["mean_abs"] if name.startswith("mean") else largest
            if not abs(now[name] - expected[name]) <= atol + rtol * size:
                return f"elements beyond the sample differ: {name} {now[name]:.6g}, recorded {expected[name]:.6g}"
        return ""


def _other_inputs(golden: SignatureInfo, actual: SignatureInfo) -> str:
    """The first input that is not as it was recorded, in a sentence; empty where all are."""
    old, new = ({i.name: f"{i.dtype} {list(i.declared)}" for i in each.inputs} for each in (golden, actual))
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            return f"input '{name}': expected {old.get(name, 'none')}, got {new.get(name, 'none')}"
    return ""


def _sample(array: Array, signature: str, name: str, run: int, share: int) -> Array:
    """All elements if they fit in `share` bytes, else as many as do, at places that only the names decide."""
    flat = array.reshape(-1)
    room = max(share // array.dtype.itemsize, 1)
    if flat.size <= room:
        return flat
    seed = noise.seed_of("sample", signature, name, run)
    return flat[np.sort(noise.integers(seed, room, 0, flat.size))]


def _statistics(array: Array, info: TensorInfo) -> dict[str, Any]:
    flat = array.reshape(-1)
    real = info.reals(flat)
    finite = real[np.isfinite(real)]
    if not finite.size:
        finite = np.zeros(1)
    return {
        "type": f"{array.dtype.name} {list(array.shape)}",
        "sha256": hashlib.sha256(np.ascontiguousarray(flat).view(np.uint8).data).hexdigest(),
        "mean": float(finite.mean()),
        "mean_abs": float(np.abs(finite).mean()),
        "low": float(finite.min()),
        "high": float(finite.max()),
    }


def _fingerprint(model: str | os.PathLike[str]) -> dict[str, Any]:
    with Path(model).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise _broken(path, "it is too large")
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_UNPACKED:
                raise _broken(path, "it unpacks to too much")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        meta = json.loads(arrays.pop(_META).tobytes())
        kind = {name: meta[name] for name in _KIND}
        numbers = all(isinstance(meta[name], int | float) for name in ("seed", "share", "atol", "rtol"))
        if not numbers or meta["runs"] not in (1, 2):
            raise _broken(path, "its numbers make no sense")
    except FileNotFoundError as error:
        text = f"golden file '{path}' does not exist; record it with: edge-opt golden record"
        raise GoldenError(text) from error
    except GoldenError:
        raise
    except zipfile.BadZipFile as error:
        text = f"'{path}' is not a golden file, or is damaged: give the model first, the golden file second"
        raise GoldenError(text) from error
    except Exception as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    if kind != _KIND:
        text = f"golden file '{path}' is of kind {list(kind.values())}, expected {list(_KIND.values())}"
        raise GoldenError(f"{text}; record it again")
    return meta, arrays


def _broken(path: Path, why: str) -> GoldenError:
    return GoldenError(f"golden file '{path}' cannot be read ({why}); record it again")
