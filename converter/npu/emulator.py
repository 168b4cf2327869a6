"""Runs a compiled graph in the x86 emulator of QNN's HTP library: the NPU's own arithmetic, with no NPU.

The compiler and the emulator are somebody else's and may crash: that is an answer, not an error.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_opt.ir import Subgraph, Tensor
from edge_opt.npu.errors import CompilerFailedError
from edge_opt.npu.hexagon import CompilerRun, run_compiler
from edge_opt.npu.hexagon_log import first_complaint, read_log
from edge_opt.npu.process import ended
from edge_opt.npu.sdk import Sdk
from edge_opt.proof.protocol import Array

# Without it the plugin wants memory that only a device shares with its NPU.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"


@dataclass(frozen=True, slots=True)
class Emulated:
    """Outputs by the names of the graph's tensors, and the emulator's seconds; or the `verdict` why there are none."""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    seconds: float = 0.0
    verdict: str = ""


def emulate(
    sdk: Sdk,
    path: Path,
    graph: Subgraph,
    inputs: Mapping[str, Array],
    *,
    chip: str,
    flags: Sequence[str],
    seconds: float | None = None,
) -> Emulated:
    """Compile a model and run its one entry point.

    Args:
        sdk: the compiler, with a probe.
        path: the model, of one entry point.
        graph: its graph: names, shapes and dtypes of inputs and outputs.
        inputs: numbers by tensor name, in the tensors' dtypes.
        chip: the compiler's word for the chip, as `SM8750`.
        flags: for the compiler.
        seconds: after so long both are stopped; None never.

    Raises:
        CompilerMissingError: there is no probe.
    """
    sdk.probed()
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name:
        folder = Path(name)
        lines = []
        for number, (given, array) in enumerate(inputs.items()):
            np.ascontiguousarray(array).tofile(folder / f"{number}.in")
            lines.append(f"{number}\t{given}\n")
        (folder / "inputs").write_text("".join(lines), encoding="utf-8")
        try:
            outcome = run_compiler(sdk, path, chip, [*flags, _RAW_MEMORY], seconds, run=folder)
        except CompilerFailedError as error:
            return Emulated(verdict=f"compiler and emulator were not done in time: {error}")
        verdict = _verdict(outcome)
        if verdict:
            return Emulated(verdict=verdict)
        compiled = outcome.heard.graphs[0]
        assert compiled.ran is not None
        found = {}
        for tensor in graph.outputs:
            result = _output(folder, compiled.outputs, tensor)
            if result is None:
                return Emulated(
                    verdict=f"the compiled graph gives no output '{tensor.name}' of its type and size"
                )
            found[tensor.name] = result
        return Emulated(found, compiled.ran[1])


def _verdict(outcome: CompilerRun) -> str:
    """Why there is nothing to compare; empty where the graph ran."""
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
    return _left(outcome)


def _left(outcome: CompilerRun) -> str:
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


def _output(folder: Path, numbers: Mapping[str, int], tensor: Tensor) -> Array | None:
    number, dtype = numbers.get(tensor.name), tensor.dtype.numpy
    if number is None or dtype is None:
        return None
    array = np.fromfile(folder / f"{number}.out", dtype)
    return array.reshape(tensor.shape) if array.size == tensor.elements else None
