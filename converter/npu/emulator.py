"""Runs compiled graphs in the x86 emulator of QNN's HTP library, with the NPU's arithmetic.

An entry point is compiled once and runs any number of times. The emulator is third-party and may crash.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

import numpy as np

from edge_opt.base.atomic import scratch_folder
from edge_opt.ir import Model, Signature, Tensor, save
from edge_opt.npu.compiler import (
    CompilerFailedError,
    compiling_threads,
    cut_entry_point,
)
from edge_opt.npu.hexagon import Outcome
from edge_opt.runtime.protocol import Array, Arrays

RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"
"""Compiler flag without which the plugin requires memory shared with the NPU, which only devices have."""
_LOOK_SECONDS = 0.02


@contextmanager
def emulating(
    model: Model, signature: str, compile_and_run: Callable[[Path, Path], Outcome]
) -> "Iterator[Emulator]":
    """Compile an entry point to run in the emulator.

    `compile_and_run` gets the model's file and a pipe with the folders to run on.

    Raises:
        CompilerFailedError: compiler or emulator gave no result, or the NPU does not support the whole graph; the
            message is only the reason.
    """
    with scratch_folder() as scratch, compiling_threads(1) as threads:
        path = scratch / "model.tflite"
        folders = scratch / "folders"
        alone = cut_entry_point(model, signature)
        save(alone, path)
        os.mkfifo(folders)
        # Opening for reading too does not wait for the compiler.
        with open(os.open(folders, os.O_RDWR), "w", encoding="utf-8") as queue:  # noqa: PTH123 - of a descriptor
            compiling = threads.submit(compile_and_run, path, folders)
            emulator = Emulator(scratch, alone.signatures[0], queue, compiling)
            try:
                yield emulator
            finally:
                emulator.end()
        _check_ran(compiling.result())


class Emulator(NamedTuple):
    """A compiled (or compiling) model with one `signature`; it runs on the folders written to `queue`."""

    folder: Path
    signature: Signature
    queue: TextIO
    compiling: Future[Outcome]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once and return the outputs; both are named as in the signature, and unused inputs are ignored."""
        # The compiler's model has numbers as names of tensors, which are good names of files.
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            for key, tensor in self.signature.inputs.items():
                np.ascontiguousarray(inputs[key]).tofile(folder / f"{tensor.name}.in")
            self.queue.write(f"{folder}\n")
            self.queue.flush()
            while not (folder / "done").exists():
                if self.compiling.done():
                    self._fail("the compiler ends before the graph runs")
                time.sleep(_LOOK_SECONDS)
            return {
                key: self._output(folder, key, one) for key, one in self.signature.outputs.items()
            }

    def _output(self, folder: Path, key: str, tensor: Tensor) -> Array:
        file = folder / f"{tensor.name}.out"
        array = np.fromfile(file, tensor.dtype.numpy) if file.exists() else np.empty(0)
        if array.size != tensor.elements:
            self._fail(f"the compiled graph gives no output '{key}' of its type and size")
        return array.reshape(tensor.shape)

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
    why = _failure(outcome)
    if why:
        raise CompilerFailedError(why)


def _failure(outcome: Outcome) -> str:
    if outcome.interface and not outcome.known:
        return f"edge-opt's probe does not support QNN interface {outcome.interface}"
    if not outcome.finalized:
        return f"the compiler ended with code {outcome.code}: {outcome.reason}"
    if outcome.finalized[0]:
        return f"the compiler refuses the graph: {outcome.reason}"
    if outcome.missing:
        return f"the compiled graph expects input '{outcome.missing[0]}' in another type or size"
    if outcome.ran is None:
        if outcome.running:
            return f"the emulator crashes on the compiled graph ({outcome.ended})"
        return f"the compiler ends ({outcome.ended})"
    if outcome.ran:
        return f"the emulator refuses the compiled graph: error {outcome.ran}"
    figures = outcome.figures()
    if figures["taken"] == figures["operators"] and figures["partitions"] == 1:
        return ""
    counts = "{taken} of {operators} operators in {partitions} pieces".format_map(figures)
    return f"the compiler takes {counts}: only a whole graph in one piece can run"
