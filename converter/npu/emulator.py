"""Run a compiled graph in the x86 emulator of QNN's HTP library, with the NPU's arithmetic.

An entry point is compiled once and runs any number of times. The emulator is third-party and may crash.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from edge_opt.ir import Model, Signature, save
from edge_opt.npu.hexagon import Compiler, Outcome, compiling_threads, cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError, find_sdk
from edge_opt.runtime.protocol import Array, Arrays

# Without it, the plugin requires memory shared with the NPU, which only devices have.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"
_LOOK_SECONDS = 0.02


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
