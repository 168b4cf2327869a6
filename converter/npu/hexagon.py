"""Compiles a model for a Hexagon NPU on this machine, with LiteRT's ahead-of-time tool: no phone takes part.

Each entry point is compiled alone, so every figure in the tool's log is of one graph. Nothing is kept of a compilation
but the figures. `emulate` also runs the graph, in the x86 emulator of QNN's HTP library: the NPU's own arithmetic.
Compiler and emulator are somebody else's and may crash.

LiteRT's tool prints to standard error, the QNN libraries to standard output. Both are buffered apart, so the two texts
must be taken apart too: in one pipe they cut each other's lines. Our probe writes a file.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Thread

import numpy as np

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.ir import Model, Subgraph, save
from edge_opt.npu.figures import Figures, TimeEstimate, read_floor
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.sdk import LIBRARY, CompilerFailedError, find_sdk, search_path
from edge_opt.runtime.protocol import Array
from edge_opt.targets.chips import CHIPS, DEFAULT_CHIP

_PARTITIONED = re.compile(
    r"Partitioned subgraph<0>, selected (\d+) ops, from a total of (\d+) ops\. resulted in (\d+) partitions"
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
# Without it the plugin wants memory that only a device shares with its NPU.
_RAW_MEMORY = "--qualcomm_graph_io_tensor_mem_type=raw"
_KNOWN_INTERFACES = "2.36 to 2.40"
_VTCM_FLAG = "--qualcomm_vtcm_size"
_UNKNOWN_CHIP = "Unexpected SoC model"


def first_complaint(*logs: str) -> str:
    """The first line in the libraries' log, or else in the tool's, that is marked as an error; empty without any."""
    texts = (found[1].strip() for log in logs for found in _COMPLAINTS.finditer(log))
    return next((text[:200] for text in texts if text and _HARMLESS not in text), "")


@dataclass(slots=True)
class ProbeLog:
    """Everything that the probe wrote; `interface` is the version of the library's own, `known` if it is trusted.

    `finalized` has a return code and `events` the profile for each graph, that is partition. Of the graph that ran in
    the emulator: its `missing` inputs, the numbers of its `outputs`, and in `ran` the library's return code and the
    seconds; None after `running` means that the process ended there.
    """

    interface: str = ""
    known: bool = False
    finalized: list[int] = field(default_factory=list)
    events: list[dict[int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    running: bool = False
    ran: tuple[int, float] | None = None
    outputs: dict[str, int] = field(default_factory=dict)


def read_probe_log(text: str) -> ProbeLog:
    """What the probe's log says; its lines are described in `probe.c`."""
    heard = ProbeLog()
    for line in text.splitlines():
        match line.split("\t"):
            case ["interface", trusted, core, *_]:
                heard.known, heard.interface = trusted == "known", core
            case ["finalized", _, status, *_]:
                heard.finalized.append(int(status))
                heard.events.append({})
            case ["event", event, value, *_]:
                heard.events[-1].setdefault(int(event), int(value))
            case ["missing", name, *_]:
                heard.missing.append(name)
            case ["running", *_]:
                heard.running = True
            case ["output", number, _, name, *_]:
                heard.outputs[name] = int(number)
            case ["ran", _, status, seconds, *_]:
                heard.ran = int(status), float(seconds)
    return heard


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the compiler ended with one graph, what it printed, and what the probe heard; `no_probe` says why nothing."""

    code: int
    output: str
    errors: str
    heard: ProbeLog
    no_probe: str

    @property
    def reason(self) -> str:
        """Why it ended, as far as it says so."""
        return first_complaint(self.output, self.errors) or self.ended

    @property
    def ended(self) -> str:
        """What is known of a process that does not say why it ended."""
        return processes.killed_by(self.code) or "it does not say why"

    def figures(self) -> dict[str, int]:
        """The compiler's figures, summed over the graph's partitions; CompilerFailedError where some are lost."""
        found = _PARTITIONED.search(self.errors)
        if found is None:
            raise CompilerFailedError(
                "the compiler reports nothing for the graph: its plugin may not know the chip"
            )
        taken, operators, partitions = map(int, found.groups())
        told = {
            name: [int(text) for text in wanted.findall(self.output)] for name, wanted in _FIGURES.items()
        }
        lost = [name for name, values in told.items() if len(values) != partitions]
        if lost:
            raise CompilerFailedError(
                f"the compiler's log cannot be read: it has {len(told[lost[0]])} figures for {lost[0]} and "
                f"{partitions} partitions"
            )
        sums = {name: sum(values) for name, values in told.items()}
        return {"taken": taken, "operators": operators, "partitions": partitions, **sums}

    def time(self, chip: str, partitions: int) -> TimeEstimate | None:
        """The estimate for this chip, of all partitions one after the other; None where one has none."""
        every = self.heard.events
        if not every or len(every) != partitions or any(_EVENTS.keys() - events.keys() for events in every):
            return None
        return TimeEstimate(
            chip, **{name: sum(one[event] for one in every) for event, name in _EVENTS.items()}
        )

    def why_no_time(self, chip: str) -> str:
        """Why the compiler estimated no time for this chip."""
        if self.no_probe or self.heard.known:
            return self.no_probe or f"the compiler gave none for {chip}"
        return (
            f"the libraries have QNN interface {self.heard.interface or '(unknown)'}, and edge-opt's probe was tried "
            f"with {_KNOWN_INTERFACES} (onnxruntime-qnn 2.3 to 2.7)"
        )


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compiler with its settings, as plain values; after so many `seconds` it is stopped, None never.

    `sdk` is the folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
    """

    chip: str = DEFAULT_CHIP
    flags: tuple[str, ...] = ()
    sdk: AnyPath | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """UsageError where a flag is none."""
        wrong = next((flag for flag in self.flags if not re.match(r"--\w", flag)), None)
        if wrong is not None:
            raise UsageError(f"'{wrong}' is not a compiler flag: write --qualcomm_optimization_level=O2")

    def judge(self) -> "Compiler":
        """The same for the chip whose estimate of time is taken, with this one's memory unless the flags name one."""
        chip = CHIPS.get(self.chip)
        if chip is None:
            return self
        named = any(flag.startswith(_VTCM_FLAG) for flag in self.flags)
        vtcm = () if named else (f"{_VTCM_FLAG}={chip.vtcm}",)
        return replace(self, chip=chip.judge.name, flags=(*self.flags, *vtcm))

    def run(self, path: Path, inputs: Path | None = None) -> Outcome:
        """Compile one file.

        Args:
            path: a model with one entry point.
            inputs: a folder of inputs, see `probe.c`; the graph then runs on them in the emulator.

        Raises:
            UsageError: the compiler does not know the chip.
            CompilerFailedError: it was not done in time.
        """
        sdk = find_sdk(self.sdk)
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
            log = Path(folder) / "probe"
            command = [
                str(sdk.tool),
                "--cmd=apply",
                f"--model={path}",
                f"--o={folder}/compiled.tflite",
                f"--libs={sdk.plugin}",
                "--soc_manufacturer=Qualcomm",
                f"--soc_model={self.chip}",
                *self.flags,
            ]
            folders = [sdk.libraries] if sdk.probe is None else [sdk.probe, sdk.libraries]
            environment = {
                **os.environ,
                "EDGE_OPT_QNN_REAL": str(sdk.libraries / LIBRARY),
                "EDGE_OPT_PROBE_LOG": str(log),
                **({} if inputs is None else {"EDGE_OPT_PROBE_RUN": str(inputs)}),
                "LD_LIBRARY_PATH": search_path(*folders, scratch=Path(folder)),
            }
            try:
                done = processes.run(command, self.seconds, environment)
            except TimeoutExpired as error:
                raise CompilerFailedError(
                    f"the Hexagon compiler was not done after {self.seconds:g} seconds; give more with seconds=..."
                ) from error
            heard = read_probe_log(log.read_text(errors="replace") if log.exists() else "")
        if done.returncode and _UNKNOWN_CHIP in done.stderr:
            raise UsageError(
                f"the Hexagon compiler does not know chip '{self.chip}', {did_you_mean(self.chip, CHIPS)}"
            )
        return Outcome(done.returncode, done.stdout, done.stderr, heard, sdk.no_probe)


def measure(model: Model, signature: str, compiler: Compiler) -> Figures:
    """Compile one entry point of a model alone; for the nearest chip too, where its own has no estimate of time.

    Raises:
        CompilerFailedError: the compiler ended without a result, or took too long; an operator that it refuses is no
            such failure, nor is it one if only the estimate is not to be had. The message is the reason alone.
    """
    alone, judge = cut_entry_point(model, signature), compiler.judge()
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder, compiling_threads(2) as threads:
        file = Path(folder) / "model.tflite"
        save(alone, file)
        judging = threads.submit(judge.run, file) if judge.chip != compiler.chip else None
        outcome = compiler.run(file)
        if outcome.code:
            raise CompilerFailedError(
                f"the Hexagon compiler ended with code {outcome.code}: {outcome.reason}"
            )
        judged = outcome if judging is None else judging.result()
    figures = outcome.figures()
    time = judged.time(judge.chip, figures["partitions"])
    note = CHIPS[compiler.chip].note if compiler.chip in CHIPS else ""
    if time is None:
        note = f"no estimate of time: {judged.why_no_time(judge.chip)}"
    named = _VERSION.search(outcome.errors)
    return Figures(
        signature=signature,
        floor=read_floor(alone.subgraphs[0]),
        time=time,
        note=note,
        qnn=outcome.heard.interface if named is None else named[1],
        **figures,
    )


@contextmanager
def compiling_threads(count: int) -> Iterator[Executor]:
    """Threads, each waiting for a compiler; an interrupt ends every compiler."""
    with ThreadPoolExecutor(count) as executor:
        try:
            yield executor
        except Exception:
            executor.shutdown(cancel_futures=True)
            raise
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Not once: a thread may be about to start its compiler just now.
            waiting = Thread(target=executor.shutdown)
            waiting.start()
            while waiting.is_alive():
                processes.end_all()
                waiting.join(0.05)
            raise


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
        outcome = replace(compiler, flags=(*compiler.flags, _RAW_MEMORY)).run(path, folder)
        _check_ran(outcome)
        heard, found = outcome.heard, {}
        assert heard.ran is not None
        for tensor in graph.outputs:
            file = folder / f"{heard.outputs.get(tensor.name)}.out"
            array = np.fromfile(file, tensor.dtype.numpy) if file.exists() else np.empty(0)
            if array.size != tensor.elements:
                raise CompilerFailedError(
                    f"the compiled graph gives no output '{tensor.name}' of its type and size"
                )
            found[tensor.name] = array.reshape(tensor.shape)
        return found, heard.ran[1]


def _check_ran(outcome: Outcome) -> None:
    """CompilerFailedError unless the whole graph was compiled as one, and ran in the emulator."""
    heard = outcome.heard
    if heard.interface and not heard.known:
        why = f"QNN interface {heard.interface} is not one that edge-opt's probe was tried with"
    elif not heard.finalized:
        why = f"the compiler ended with code {outcome.code}: {outcome.reason}"
    elif heard.finalized[0]:
        why = f"the compiler refuses the graph: {outcome.reason}"
    elif heard.missing:
        why = f"the compiled graph wants input '{heard.missing[0]}' in another type or size"
    elif heard.ran is None:
        where = "the emulator crashes on the compiled graph" if heard.running else "the compiler ends"
        why = f"{where} ({outcome.ended})"
    elif heard.ran[0]:
        why = f"the emulator refuses the compiled graph: error {heard.ran[0]}"
    else:
        taken, operators, partitions = (
            outcome.figures()[name] for name in ("taken", "operators", "partitions")
        )
        if (taken, partitions) == (operators, 1):
            return
        why = f"the compiler takes {taken} of {operators} operators in {partitions} pieces: no one graph can run"
    raise CompilerFailedError(why)
