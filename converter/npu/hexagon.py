"""Compiles a model for a Hexagon NPU on this machine, with LiteRT's ahead-of-time tool: no phone takes part.

Of a compilation nothing is kept but the figures. `emulate` also runs the graph, in the x86 emulator of QNN's HTP
library: the NPU's own arithmetic. Compiler and emulator are somebody else's and may crash.

LiteRT's tool prints to standard error, the QNN libraries to standard output. Both are buffered apart, so the two texts
must be taken apart too: in one pipe they cut each other's lines. Our probe writes a file.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib.metadata import version
from itertools import islice
from operator import add
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np

from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.ir import Model, Subgraph
from edge_opt.npu.figures import Compilation, SpillFigures, TimeEstimate, read_floor
from edge_opt.npu.sdk import (
    CHIPS,
    LIBRARY,
    Chip,
    CompilerFailedError,
    Sdk,
    estimate_for,
    estimate_note,
    run_program,
    search_path,
    why_ended,
)
from edge_opt.runtime.protocol import Array

_PARTITIONED = re.compile(
    r"Partitioned subgraph<(\d+)>, selected (\d+) ops, from a total of (\d+) ops\. resulted in (\d+) partitions"
)
_FIGURES = {
    "spill": re.compile(r"\bspill_bytes=(\d+)"),
    "fill": re.compile(r"\bfill_bytes=(\d+)"),
    "ddr_read": re.compile(r"\bread_total_bytes=(\d+)"),
    "ddr_written": re.compile(r"\bwrite_total_bytes=(\d+)"),
    "run_list": re.compile(r"\bin_runlist=(\d+)"),
}
# QnnHtpProfile.h: events of a graph's finalization.
_EVENTS = {
    2006: "cycles",
    2007: "cycles_low",
    2008: "cycles_high",
    2017: "without_cost",
    2019: "us",
    2020: "us_low",
    2021: "us_high",
}
_VERSION = re.compile(r"Qnn library version ([\d.]+) is used")
_COMPLAINTS = re.compile(r"^(?:.*::ERROR:|.*?\[ ERROR \]\s+(?:<E>\s+)?|ERROR: |└ )(.*)$", re.MULTILINE)
# The plugin sets an option that is newer than the library; the library ignores it.
_HARMLESS = "unexpected GraphHtpSettings option"
Done = CompletedProcess[str]
DEFAULT_CHIP = "SM8750"
# Without it the plugin wants memory that only a device shares with its NPU.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"
_KNOWN_INTERFACES = "2.36 to 2.40"
_VTCM_FLAG = "qualcomm_vtcm_size"
_UNKNOWN_CHIP = "Unexpected SoC model"


@dataclass(frozen=True, slots=True)
class SubgraphFigures:
    """One subgraph of the file: how much of it was taken, and the sums over its partitions."""

    subgraph: int
    taken: int
    operators: int
    partitions: int
    figures: dict[str, int]


def read_log(output: str, errors: str) -> list[SubgraphFigures]:
    """What was made of each subgraph, in the order of its compilation; ValueError where a figure is lost."""
    columns = {name: [int(text) for text in pattern.findall(output)] for name, pattern in _FIGURES.items()}
    rows = [tuple(int(text) for text in found) for found in _PARTITIONED.findall(errors)]
    total = sum(row[3] for row in rows)
    for name, values in columns.items():
        if len(values) != total:
            raise ValueError(f"{total} partitions were compiled and {len(values)} have a figure for {name}")
    subgraphs, done = [], 0
    for subgraph, taken, operators, partitions in rows:
        sums = {name: sum(values[done : done + partitions]) for name, values in columns.items()}
        subgraphs.append(SubgraphFigures(subgraph, taken, operators, partitions, sums))
        done += partitions
    return subgraphs


def library_version(errors: str) -> str | None:
    """The QNN interface's version, where the tool names it (it does if it was built for another)."""
    found = _VERSION.search(errors)
    return None if found is None else found[1]


def first_complaint(output: str, errors: str) -> str | None:
    """The first thing that the libraries, or else the tool, call an error."""
    for log in (output, errors):
        for found in _COMPLAINTS.finditer(log):
            text = found[1].strip()
            if text and _HARMLESS not in text:
                return text[:200]
    return None


@dataclass(slots=True)
class CompiledGraph:
    """One compiled graph: what its profile says by event type, and what became of it in the emulator.

    `ran` is the library's return code and the seconds; None after `running` means that the process ended there.
    """

    name: str
    finalized: int
    events: dict[int, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    running: bool = False
    ran: tuple[int, float] | None = None
    outputs: dict[str, int] = field(default_factory=dict)

    def time(self, chip: str) -> TimeEstimate | None:
        """The estimate of one run on this chip; None where the library gives none."""
        if not _EVENTS.keys() <= self.events.keys():
            return None
        return TimeEstimate(chip=chip, **{name: self.events[event] for event, name in _EVENTS.items()})


@dataclass(slots=True)
class ProbeLog:
    """Everything that the probe wrote; `interface` is the version of the library's own, `known` if it is trusted."""

    interface: str = ""
    known: bool = False
    graphs: list[CompiledGraph] = field(default_factory=list)


def read_probe_log(text: str) -> ProbeLog:
    """What the probe's log says; its lines are described in `probe.c`."""
    probe_log = ProbeLog()
    for line in text.splitlines():
        graph = probe_log.graphs[-1] if probe_log.graphs else CompiledGraph("", 0)
        match line.split("\t"):
            case ["interface", trusted, core, *_]:
                probe_log.known, probe_log.interface = trusted == "known", core
            case ["finalized", name, status, *_]:
                probe_log.graphs.append(CompiledGraph(name, int(status)))
            case ["event", event, value, *_]:
                graph.events.setdefault(int(event), int(value))
            case ["missing", name, *_]:
                graph.missing.append(name)
            case ["running", *_]:
                graph.running = True
            case ["output", number, _, name, *_]:
                graph.outputs[name] = int(number)
            case ["ran", _, status, seconds, *_]:
                graph.ran = int(status), float(seconds)
    return probe_log


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compiler with its settings; after so many `seconds` it is stopped, None never."""

    sdk: Sdk
    chip: str
    flags: Sequence[str]
    seconds: float | None = None

    def judging(self) -> "Compiler":
        """The same for the chip whose estimate of time is taken, see `judged_by`."""
        chip, flags = judged_by(self.chip, self.flags)
        return replace(self, chip=chip, flags=flags)


def compile_model(path: Path, model: Model, compiler: Compiler) -> Compilation:
    """Compile `model`, which `path` holds; where its chip has no estimate of time, for the nearest one too.

    Raises:
        CompilerFailedError: the compiler ended without a result, or took too long; an operator that it refuses is no
            such failure, nor is it one if only the estimate is not to be had.
    """
    chip, no_probe = compiler.chip, compiler.sdk.no_probe
    judge = estimate_for(chip)
    with ThreadPoolExecutor(1) as beside:
        judging = None
        if judge is not None and judge.name != chip and not no_probe:
            judging = beside.submit(run_compiler, path, compiler.judging())
        done, probe_log = run_compiler(path, compiler)
        qnn = library_version(done.stderr) or probe_log.interface
        if judging is not None:
            try:
                probe_log = judging.result()[1]
            except CompilerFailedError as error:
                probe_log, no_probe = ProbeLog(), str(error).partition(": ")[2]
    try:
        compiled = {entry.subgraph: entry for entry in read_log(done.stdout, done.stderr)}
    except ValueError as error:
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler's log cannot be read: {error}"
        ) from error
    partitions = sum(entry.partitions for entry in compiled.values())
    times = [] if judge is None else [graph.time(judge.name) for graph in probe_log.graphs]
    note = "" if judge is None else estimate_note(chip, judge)
    if len(times) != partitions or None in times:
        times = [None] * partitions
        note = f"no estimate of time: {no_probe or _why_no_time(chip, judge, probe_log)}"
    versions = {"ai-edge-litert": version("ai-edge-litert"), **({"qnn": qnn} if qnn else {})}
    return Compilation(_figures(path, model, compiled, times), versions, (note,) if note else ())


def judged_by(chip: str, flags: Sequence[str]) -> tuple[str, list[str]]:
    """The chip whose estimate is taken for this one, and the flags for it: with this one's memory, unless they say."""
    judge = estimate_for(chip)
    if judge is None:
        return chip, [*flags]
    named = any(flag.startswith(f"--{_VTCM_FLAG}") for flag in flags)
    return judge.name, [*flags, *([] if named else [f"--{_VTCM_FLAG}={CHIPS[chip].vtcm}"])]


def run_compiler(path: Path, compiler: Compiler, run: Path | None = None) -> tuple[Done, ProbeLog]:
    """Compile one file: how that ended, and what the probe wrote; UsageError where the compiler knows no such chip.

    Without `run` a compiler that fails is a CompilerFailedError. With that folder, graphs run in the emulator on the
    inputs in it, see `probe.c`, and the outcome tells.
    """
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        log, sdk = Path(folder) / "probe", compiler.sdk
        command = [
            str(sdk.tool),
            "--cmd=apply",
            f"--model={path}",
            f"--o={folder}/compiled.tflite",
            f"--libs={sdk.plugin}",
            "--soc_manufacturer=Qualcomm",
            f"--soc_model={compiler.chip}",
            *compiler.flags,
        ]
        folders = [sdk.libraries] if sdk.probe is None else [sdk.probe, sdk.libraries]
        environment = {
            **os.environ,
            "EDGE_OPT_QNN_REAL": str(sdk.libraries / LIBRARY),
            "EDGE_OPT_PROBE_LOG": str(log),
            **({} if run is None else {"EDGE_OPT_PROBE_RUN": str(run)}),
            "LD_LIBRARY_PATH": search_path(*folders, scratch=Path(folder)),
        }
        done = run_program(f"{path.name}: the Hexagon compiler", command, compiler.seconds, environment)
        probe_log = read_probe_log(log.read_text(errors="replace") if log.exists() else "")
    if done.returncode and run is None:
        if _UNKNOWN_CHIP in done.stderr:
            raise UsageError(
                f"the Hexagon compiler knows no chip '{compiler.chip}', {did_you_mean(compiler.chip, CHIPS)}"
            )
        reason = first_complaint(done.stdout, done.stderr) or why_ended(done.returncode)
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler ended with code {done.returncode}: {reason}; try other compiler flags "
            f"or another form"
        )
    return done, probe_log


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
            raw = replace(compiler, flags=[*compiler.flags, _RAW_MEMORY])
            done, probe_log = run_compiler(path, raw, folder)
        except CompilerFailedError as error:
            raise CompilerFailedError(f"compiler and emulator were not done in time: {error}") from error
        reason = _failure(done, probe_log)
        if reason:
            raise CompilerFailedError(reason)
        compiled, found = probe_log.graphs[0], {}
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


def _failure(done: Done, probe_log: ProbeLog) -> str:
    """Why there is nothing to compare; empty where the whole graph ran."""
    ended = why_ended(done.returncode)
    reason = first_complaint(done.stdout, done.stderr) or ended
    if probe_log.interface and not probe_log.known:
        return f"QNN interface {probe_log.interface} is not one that edge-opt's probe was tried with"
    if not probe_log.graphs:
        return f"the compiler ended with code {done.returncode}: {reason}"
    graph = probe_log.graphs[0]
    if graph.finalized:
        return f"the compiler refuses the graph: {reason}"
    if graph.missing:
        return f"the compiled graph wants input '{graph.missing[0]}' in another type or size"
    if graph.ran is None:
        where = "the emulator crashes on the compiled graph" if graph.running else "the compiler ends"
        return f"{where} ({ended})"
    if graph.ran[0]:
        return f"the emulator refuses the compiled graph: error {graph.ran[0]}"
    try:
        entries = read_log(done.stdout, done.stderr)
    except ValueError as error:
        return f"the compiler's log cannot be read: {error}"
    for entry in entries:
        if (entry.taken, entry.partitions) != (entry.operators, 1):
            return (
                f"the compiler takes {entry.taken} of {entry.operators} operators in {entry.partitions} pieces: there "
                f"is no one graph to run"
            )
    return ""


def _why_no_time(chip: str, judge: Chip | None, probe_log: ProbeLog) -> str:
    """Why the compiler estimated no time."""
    if judge is None:
        return f"the Hexagon version of {chip} is not known here; known chips are {', '.join(sorted(CHIPS))}"
    if not probe_log.known:
        return (
            f"the libraries have QNN interface {probe_log.interface or '(unknown)'}, and edge-opt's probe was tried "
            f"with {_KNOWN_INTERFACES} (onnxruntime-qnn 2.3 to 2.7)"
        )
    return f"the compiler gave none for {judge.name}"


def _figures(
    path: Path, model: Model, compiled: Mapping[int, SubgraphFigures], times: Sequence[TimeEstimate | None]
) -> tuple[SpillFigures, ...]:
    # The probe hears the partitions in the order in which the subgraphs stand in the file.
    remaining = iter(times)
    parts = {index: [*islice(remaining, compiled[index].partitions)] for index in sorted(compiled)}
    signatures = []
    for name, subgraph in model.entry_points():
        index = next(place for place, graph in enumerate(model.subgraphs) if graph is subgraph)
        if index not in compiled:
            raise CompilerFailedError(
                f"{path.name}: the Hexagon compiler says nothing of signature '{name}' (subgraph {index}): "
                f"its plugin may not know the chip, give another with chip=..."
            )
        entry, known = compiled[index], [time for time in parts[index] if time is not None]
        signatures.append(
            SpillFigures(
                signature=name,
                operators=entry.operators,
                taken=entry.taken,
                partitions=entry.partitions,
                floor=read_floor(subgraph),
                time=reduce(add, known) if known else None,
                **entry.figures,
            )
        )
    return tuple(signatures)
