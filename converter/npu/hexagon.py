"""Compiles a model for a Hexagon NPU on this machine, with LiteRT's ahead-of-time tool: no phone takes part.

Each entry point is compiled alone, so every figure in the tool's log is of one graph. Nothing is kept of a compilation
but the figures. The compiler is somebody else's and may crash.

LiteRT's tool prints to standard error, the QNN libraries to standard output. Both are buffered apart, so the two texts
must be taken apart too: in one pipe they cut each other's lines. Our probe writes a file.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Thread

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.ir import Model, save
from edge_opt.npu.figures import Figures, Measured, TimeEstimate, read_floor
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.sdk import LIBRARY, CompilerFailedError, find_sdk, search_path
from edge_opt.targets.chips import CHIPS, DEFAULT_CHIP

_PARTITIONED = re.compile(
    r"Partitioned subgraph<0>, selected (?P<taken>\d+) ops, from a total of (?P<operators>\d+) ops\. "
    r"resulted in (?P<partitions>\d+) partitions"
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

    `finalized` has a return code and `events` the profile for each graph, that is partition. Of the graph in the
    emulator: its `missing` inputs, and in `ran` the library's return code of the last run; None after `running` means
    that the process ended there.
    """

    interface: str = ""
    known: bool = False
    finalized: list[int] = field(default_factory=list)
    events: list[dict[int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    running: bool = False
    ran: int | None = None


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
                heard.running, heard.ran = True, None
            case ["ran", _, status, *_]:
                heard.ran = int(status)
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
        partitions = int(found["partitions"])
        sums = {name: int(text) for name, text in found.groupdict().items()}
        for name, wanted in _FIGURES.items():
            values = wanted.findall(self.output)
            if len(values) != partitions:
                raise CompilerFailedError(
                    f"the compiler's log cannot be read: it has {len(values)} figures for {name} and "
                    f"{partitions} partitions"
                )
            sums[name] = sum(map(int, values))
        return sums

    def time(self, chip: str) -> TimeEstimate | None:
        """The estimate for this chip, of all partitions one after the other; None where one has none."""
        found, every = _PARTITIONED.search(self.errors), self.heard.events
        complete = all(events.keys() >= _EVENTS.keys() for events in every)
        if found is None or not every or len(every) != int(found["partitions"]) or not complete:
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

    def run(self, path: Path, folders: Path | None = None) -> Outcome:
        """Compile one file.

        Args:
            path: a model with one entry point.
            folders: names folders of inputs, see `probe.c`; the graph then runs on them in the emulator.

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
            searched = [sdk.libraries] if sdk.probe is None else [sdk.probe, sdk.libraries]
            environment = {
                **os.environ,
                "EDGE_OPT_QNN_REAL": str(sdk.libraries / LIBRARY),
                "EDGE_OPT_PROBE_LOG": str(log),
                **({} if folders is None else {"EDGE_OPT_PROBE_RUN": str(folders)}),
                "LD_LIBRARY_PATH": search_path(*searched, scratch=Path(folder)),
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


def measure(model: Model, signature: str, compiler: Compiler) -> Measured:
    """Compile one entry point of a model alone; for the nearest chip too, where its own has no estimate of time.

    A compiler that ends without a result, or takes too long, is a failure; an operator that it refuses is none, nor is
    it one if only the estimate is not to be had.
    """
    alone, judge = cut_entry_point(model, signature), compiler.judge()
    try:
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder, compiling_threads(2) as threads:
            file = Path(folder) / "model.tflite"
            save(alone, file)
            judging = threads.submit(judge.run, file) if judge.chip != compiler.chip else None
            outcome = compiler.run(file)
            if outcome.code:
                failure = f"the Hexagon compiler ended with code {outcome.code}: {outcome.reason}"
                return Measured(signature, failure=failure)
            judged = outcome if judging is None else judging.result()
        figures = outcome.figures()
    except CompilerFailedError as error:
        return Measured(signature, failure=str(error))
    time = judged.time(judge.chip)
    note = CHIPS[compiler.chip].note if compiler.chip in CHIPS else ""
    if time is None:
        note = f"no estimate of time: {judged.why_no_time(judge.chip)}"
    named = _VERSION.search(outcome.errors)
    qnn = outcome.heard.interface if named is None else named[1]
    floor = read_floor(alone.subgraphs[0])
    return Measured(signature, Figures(signature, **figures, floor=floor, time=time, note=note, qnn=qnn))


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
