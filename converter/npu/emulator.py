"""Run compiled graphs in the x86 emulator of QNN's HTP library, with the NPU's arithmetic; compare two models there.

An entry point is compiled once and runs any number of times. The emulator is third-party and may crash. The NPU's error
is measured against the first model on the CPU; a large one is a warning, not part of the verdict.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from edge_opt.base.words import Progress
from edge_opt.comparison.findings import ComparisonReport, SignatureComparison, name_of
from edge_opt.comparison.pairing import Both, Pair, both_open, checked_numbers
from edge_opt.ir import Model, Signature, save
from edge_opt.ir.opening import ModelLike
from edge_opt.npu.hexagon import Compiler, Outcome, compiling_threads, cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError, find_sdk
from edge_opt.runtime.inputs import array_of
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.runtime.tensors import TensorInfo

# Without it, the plugin requires memory shared with the NPU, which only devices have.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"
_LOOK_SECONDS = 0.02
_NEAR_DB = 20.0  # warn below this signal-to-noise ratio against the CPU


def check_emulator(compiler: Compiler) -> None:
    """Raise CompilerMissingError unless compiled graphs can run here; the message says what is needed."""
    no_probe = find_sdk(compiler.sdk).no_probe
    if no_probe:
        raise CompilerMissingError(no_probe)


@contextmanager
def emulating(model: Model, signature: str, compiler: Compiler) -> "Iterator[Emulator]":
    """Compile an entry point to run in the emulator.

    Raises:
        CompilerFailedError: compiler or emulator gave no result, or the NPU does not support the whole graph; the
            message is only the reason.
    """
    compiler = replace(compiler, flags=(*compiler.flags, _RAW_MEMORY))
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name, compiling_threads(1) as threads:
        path, folders = Path(name, "model.tflite"), Path(name, "folders")
        alone = cut_entry_point(model, signature)
        save(alone, path)
        os.mkfifo(folders)
        # Opening for reading too does not wait for the compiler.
        with open(os.open(folders, os.O_RDWR), "w", encoding="utf-8") as queue:  # noqa: PTH123 - of a descriptor
            compiling = threads.submit(compiler.run, path, folders)
            emulator = Emulator(Path(name), alone.signatures[0], queue, compiling)
            try:
                yield emulator
            finally:
                emulator.end()
        _check_ran(compiling.result())


@dataclass(frozen=True, slots=True)
class Emulator:
    """A compiled (or compiling) model with one `signature`; it runs on the folders written to `queue`."""

    folder: Path
    signature: Signature
    queue: TextIO
    compiling: Future[Outcome]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once and return the outputs; both are named as in the signature, and unused inputs are ignored."""
        # The compiler's model has numbers as names of tensors, which are good names of files.
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder, outputs = Path(name), {}
            for key, tensor in self.signature.inputs.items():
                np.ascontiguousarray(inputs[key]).tofile(folder / f"{tensor.name}.in")
            self.queue.write(f"{folder}\n")
            self.queue.flush()
            while not (folder / "done").exists():
                if self.compiling.done():
                    self._fail("the compiler ends before the graph runs")
                time.sleep(_LOOK_SECONDS)
            for key, tensor in self.signature.outputs.items():
                file = folder / f"{tensor.name}.out"
                array = np.fromfile(file, tensor.dtype.numpy) if file.exists() else np.empty(0)
                if array.size != tensor.elements:
                    self._fail(f"the compiled graph gives no output '{key}' of its type and size")
                outputs[key] = array.reshape(tensor.shape)
            return outputs

    def _fail(self, otherwise: str) -> NoReturn:
        """Raise the compiler's reason, or `otherwise` if it has none."""
        self.end()
        _check_ran(self.compiling.result())
        raise CompilerFailedError(otherwise)

    def end(self) -> None:
        """Signal that no more folders will follow."""
        # Delete before closing: a compiler that opened it later would wait forever for a writer.
        (self.folder / "folders").unlink(missing_ok=True)
        self.queue.close()


def _check_ran(outcome: Outcome) -> None:
    """Raise CompilerFailedError unless the whole graph compiled in one piece and ran in the emulator."""
    if outcome.interface and not outcome.known:
        why = f"edge-opt's probe does not support QNN interface {outcome.interface}"
    elif not outcome.finalized:
        why = f"the compiler ended with code {outcome.code}: {outcome.reason}"
    elif outcome.finalized[0]:
        why = f"the compiler refuses the graph: {outcome.reason}"
    elif outcome.missing:
        why = f"the compiled graph expects input '{outcome.missing[0]}' in another type or size"
    elif outcome.ran is None:
        where = "the emulator crashes on the compiled graph" if outcome.running else "the compiler ends"
        why = f"{where} ({outcome.ended})"
    elif outcome.ran:
        why = f"the emulator refuses the compiled graph: error {outcome.ran}"
    else:
        figures = outcome.figures()
        if (figures["taken"], figures["partitions"]) == (figures["operators"], 1):
            return
        counts = "{taken} of {operators} operators in {partitions} pieces".format_map(figures)
        why = f"the compiler takes {counts}: only a whole graph in one piece can run"
    raise CompilerFailedError(why)


def compare_on_npu(
    a: ModelLike,
    b: ModelLike,
    compiler: Compiler = Compiler(),
    *,
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compile both models for a Hexagon NPU, run them in the compiler's emulator, and compare their outputs.

    If outputs are far from the CPU's, the report's `remarks` say so; this does not affect whether the models are equal.
    Other arguments mean the same as in `edge_opt.compare`.

    Raises:
        CompilerMissingError: the compiler, its libraries or a C compiler is missing.
        UsageError: a signature does not exist.
        ModelFormatError: a model cannot be read.
    """
    check_emulator(compiler)
    begun = ComparisonReport(name_of(a, "a"), name_of(b, "b"), "npu", *checked_numbers(seed, atol, rtol))
    with both_open(a, b, begun, signatures=signatures, progress=progress) as both:
        report = both.compared(
            lambda session: [_emulated(both, pair, compiler) for pair in session.pairs.values()]
        )
        stateful = [name for name, pair in both.pairs.items() if pair.signature.keeps_state]
    compiled = ", ".join([f"compiled for {compiler.chip}", *compiler.flags])
    warnings = filter(None, map(_warning, report.signatures))
    remarks = (*warnings, compiled, *report.remarks)
    if stateful:
        remarks += (f"state is not carried over here, each signature ran once: {', '.join(stateful)}",)
    return replace(report, remarks=remarks)


def _emulated(both: Both, pair: Pair, compiler: Compiler) -> SignatureComparison:
    """Run both entry points on the CPU and in the emulator; a model compared with itself runs once."""
    name, plans, cpu, runs = pair.signature.name, pair.plans(both.begun.seed), list[Arrays](), list[Arrays]()
    sides = "a" if both.begun.a == both.begun.b else "ab"
    for side, model, file, planned in zip(sides, both.models, both.files, plans, strict=False):
        cpu += both.worker.run_calls(file, [(name, planned)])
        try:
            with emulating(model, name, compiler) as emulator:
                outputs = emulator.run({one.info.name: array_of(one) for one in planned})
        except CompilerFailedError as error:
            return SignatureComparison(name, reason=f"{side}: {error}")
        # Outputs that are an input or a constant are not compiled; they are the CPU's.
        ends = model.arguments(name)[2].items()
        runs.append({key: cpu[-1][key] for key, tensor in ends if tensor.producer is None} | outputs)
    found = both.measure_all(pair, [(runs[0], {**runs[-1]})])

    def far(run: Arrays, info: TensorInfo, of_a: TensorInfo) -> float:
        return measure(cpu[0][of_a.name], run[info.name], quantized_a=of_a, quantized_b=info).snr_db

    distances = {
        one.name: (far(runs[0], one, one), far(runs[-1], other, one))
        for one, other in pair.outputs
        if one.shape == other.shape
    }
    return replace(found, outputs=tuple(replace(one, db=distances.get(one.name)) for one in found.outputs))


def _warning(compared: SignatureComparison) -> str:
    """Return a warning if an output is far from the CPU's, else an empty string."""
    distances = [(output.db, output.name) for output in compared.outputs if output.db is not None]
    db, name = min(distances, key=lambda one: min(one[0]), default=((_NEAR_DB, _NEAR_DB), ""))
    if min(db) >= _NEAR_DB:
        return ""
    return (
        f"warning: signature '{compared.name}', output '{name}': a is {db[0]:.1f} dB and b {db[1]:.1f} dB from the "
        "CPU's kernels: the NPU's arithmetic is different; this is not a difference between a and b"
    )
