"""Runs a compiled graph in the x86 emulator of QNN's HTP library: the NPU's own arithmetic, with no NPU.

The compiler and the emulator are somebody else's and may crash: that is an answer, not an error.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_opt.ir import Subgraph
from edge_opt.npu.errors import CompilerFailedError
from edge_opt.npu.hexagon import Compiler, CompilerRun, run_compiler
from edge_opt.npu.hexagon_log import first_complaint, read_log
from edge_opt.npu.process import ended
from edge_opt.proof.protocol import Array

# Without it the plugin wants memory that only a device shares with its NPU.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"


def emulate(
    path: Path, graph: Subgraph, inputs: Mapping[str, Array], compiler: Compiler
) -> tuple[dict[str, Array], float]:
    """Compile a model and run its one entry point: the outputs by tensor name, and the emulator's seconds.

    Args:
        path: the model, of one entry point.
        graph: its graph: names, shapes and dtypes of inputs and outputs.
        inputs: numbers by tensor name, in the tensors' dtypes.
        compiler: with a probe.

    Raises:
        CompilerFailedError: compiler or emulator gave no result, or took too long; the message is the reason alone.
    """
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name:
        folder = Path(name)
        for number, array in enumerate(inputs.values()):
            np.ascontiguousarray(array).tofile(folder / f"{number}.in")
        lines = [f"{number}\t{given}\n" for number, given in enumerate(inputs)]
        (folder / "inputs").write_text("".join(lines), encoding="utf-8")
        try:
            outcome = run_compiler(path, replace(compiler, flags=[*compiler.flags, _RAW_MEMORY]), folder)
        except CompilerFailedError as error:
            raise CompilerFailedError(f"compiler and emulator were not done in time: {error}") from error
        reason = _failure(outcome)
        if reason:
            raise CompilerFailedError(reason)
        compiled, found = outcome.heard.graphs[0], {}
        assert compiled.ran is not None
        for tensor in graph.outputs:
            file = folder / f"{compiled.outputs.get(tensor.name)}.out"
            array = np.fromfile(file, tensor.dtype.numpy) if file.exists() else np.empty(0)
            if array.size != tensor.elements:
                raise CompilerFailedError(
                    f"the compiled graph gives no output '{tensor.name}' of its type and size"
                )
            found[tensor.name] = array.reshape(tensor.shape)
        return found, compiled.ran[1]


def _failure(outcome: CompilerRun) -> str:
    """Why there is nothing to compare; empty where the whole graph ran."""
    reason = first_complaint(outcome.output, outcome.errors) or ended(outcome.code)
    heard = outcome.heard
    if heard.interface and not heard.known:
        return f"QNN interface {heard.interface} is not one that edge-opt's probe was tried with"
    if not heard.graphs:
        return f"the compiler ended with code {outcome.code}: {reason}"
    graph = heard.graphs[0]
    if graph.finalized:
        return f"the compiler refuses the graph: {reason}"
    if graph.missing:
        return f"the compiled graph wants input '{graph.missing[0]}' in another type or size"
    if graph.ran is None:
        where = "the emulator crashes on the compiled graph" if graph.running else "the compiler ends"
        return f"{where} ({ended(outcome.code)})"
    if graph.ran[0]:
        return f"the emulator refuses the compiled graph: error {graph.ran[0]}"
    try:
        entries = read_log(outcome.output, outcome.errors)
    except ValueError as error:
        return f"the compiler's log cannot be read: {error}"
    for entry in entries:
        if (entry.taken, entry.partitions) != (entry.operators, 1):
            return (
                f"the compiler takes {entry.taken} of {entry.operators} operators in {entry.partitions} pieces: there "
                f"is no one graph to run"
            )
    return ""
