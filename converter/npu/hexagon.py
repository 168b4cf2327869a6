"""Compile a model for a Hexagon NPU on this machine, with LiteRT's ahead-of-time tool; no phone is needed.

Only the figures in the compiler's log are kept. The compiler is third-party code and may crash.

LiteRT's tool prints to standard error, the QNN libraries to standard output. Each has its own buffer, so they must be
read separately: in one pipe their lines would mix. Our probe writes a file.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.base.record import Record
from edge_opt.ir import Model
from edge_opt.ir.opening import check_weights_inside
from edge_opt.ir.walk import cut_signature
from edge_opt.npu.sdk import LIBRARY, CompilerFailedError, find_sdk, search_path
from edge_opt.targets.chips import CHIPS, DEFAULT_CHIP

_PARTITIONED = re.compile(
    r"Partitioned subgraph<0>, selected (?P<taken>\d+) ops, from a total of (?P<operators>\d+) ops\. "
    r"resulted in (?P<partitions>\d+) partitions"
)
_FIGURES = {
    "spill": "spill_bytes",
    "fill": "fill_bytes",
    "ddr_read": "read_total_bytes",
    "ddr_written": "write_total_bytes",
    "run_list": "in_runlist",
}
# QnnHtpProfile.h: events of a graph's finalization.
_EVENTS = {
    2017: "without_cost",
    2019: "us",
    2020: "us_low",
    2021: "us_high",
}
_COMPLAINTS = re.compile(r"^(?:.*::ERROR:|.*?\[ ERROR \]\s+(?:<E>\s+)?|ERROR: |└ )(.*)$", re.MULTILINE)
# The plugin sets an option that is newer than the library; the library ignores it.
_HARMLESS = "unexpected GraphHtpSettings option"
_KNOWN_INTERFACES = "2.36 to 2.40"
_VTCM_FLAG = "--qualcomm_vtcm_size"
_UNKNOWN_CHIP = "Unexpected SoC model"


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """The Hexagon compiler's estimate for one run of an entry point in microseconds, with bounds.

    It is for `chip`, and only for ranking graphs: it is not calibrated on a device. It excludes the `without_cost`
    operators, for which the compiler has no cost.
    """

    chip: str
    us: int
    us_low: int
    us_high: int
    without_cost: int


@dataclass(frozen=True, slots=True)
class Figures(Record):
    """The Hexagon compiler's static figures for one entry point; sizes are in bytes.

    `taken` of `operators` run on the NPU, in `partitions` pieces. Data that overflows on-chip memory is written out
    (`spill`) and read back (`fill`); both are part of `ddr_written` and `ddr_read`. `run_list` counts the steps of the
    compiled graph. `time` is None if there is no estimate; `note` says why, or which other chip it is for. `qnn` is the
    version of the libraries' interface.
    """

    signature: str
    operators: int
    taken: int
    partitions: int
    spill: int
    fill: int
    ddr_read: int
    ddr_written: int
    run_list: int
    time: TimeEstimate | None = None
    note: str = ""
    qnn: str = ""

    def ranking(self) -> dict[str, float]:
        """Figures that rank entry points, most important first, by the text that reports them; smaller is better."""
        return {
            "{} operators off the NPU": self.operators - self.taken,
            "{} pieces on the NPU": self.partitions,
            "estimated {:.3f} ms": math.inf if self.time is None else self.time.us / 1000,
            "{:,} bytes moved": self.ddr_read + self.ddr_written,
            "{:,} steps": self.run_list,
        }

    def gain(self, after: "Figures") -> tuple[bool, str]:
        """Return whether `after`, as converted, is better than this one, as exported, and the deciding figures."""
        old, new = self.ranking(), after.ranking()
        off, pieces, time, moved, _ = old
        last = moved if math.inf in (old[time], new[time]) else time
        text = next((text for text in (off, pieces) if old[text] != new[text]), last)
        ratio = f" (ratio {new[text] / old[text]:.3f})" if old[text] and new[text] else ""
        why = f"{text.format(old[text])} as exported, {text.format(new[text])} as converted{ratio}"
        return new[text] < old[text], why


def first_complaint(*logs: str) -> str:
    """Return the first line marked as an error, in the order of the logs; empty if there is none."""
    texts = (found[1].strip() for log in logs for found in _COMPLAINTS.finditer(log))
    return next((text[:200] for text in texts if text and _HARMLESS not in text), "")


@dataclass(slots=True)
class Outcome:
    """How the compiler ended with one graph, its output, and the probe's log; `no_probe` says why there is no log.

    `interface` is the version of the library's interface, `known` if the probe supports it. `finalized` has a return
    code and `events` a profile for each graph (partition). For the emulator: `missing` inputs, and in `ran` the
    library's return code of the last run; None after `running` means that the process ended during the run.
    """

    code: int = 0
    output: str = ""
    errors: str = ""
    no_probe: str = ""
    interface: str = ""
    known: bool = False
    finalized: list[int] = field(default_factory=list)
    events: list[dict[int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    running: bool = False
    ran: int | None = None

    def hear(self, text: str) -> "Outcome":
        """Add the content of the probe's log (described in `probe.c`), and return self."""
        for line in text.splitlines():
            match line.split("\t"):
                case ["interface", trusted, core, *_]:
                    self.known, self.interface = trusted == "known", core
                case ["finalized", _, status, *_]:
                    self.finalized.append(int(status))
                    self.events.append({})
                case ["event", event, value, *_]:
                    self.events[-1].setdefault(int(event), int(value))
                case ["missing", name, *_]:
                    self.missing.append(name)
                case ["running", *_]:
                    self.running, self.ran = True, None
                case ["ran", _, status, *_]:
                    self.ran = int(status)
        return self

    @property
    def reason(self) -> str:
        """Why the compiler ended, if it says so."""
        return first_complaint(self.output, self.errors) or self.ended

    @property
    def ended(self) -> str:
        """The signal that ended the process, if one did."""
        return processes.killed_by(self.code) or "no reason given"

    def figures(self) -> dict[str, int]:
        """The compiler's figures, summed over the graph's partitions; CompilerFailedError if some are missing."""
        found = _PARTITIONED.search(self.errors)
        if found is None:
            raise CompilerFailedError(
                "the compiler reports nothing for the graph: its plugin may not know the chip"
            )
        sums = {name: int(text) for name, text in found.groupdict().items()}
        for name, wanted in _FIGURES.items():
            values = re.findall(rf"\b{wanted}=(\d+)", self.output)
            if len(values) != sums["partitions"]:
                counts = f"{len(values)} figures for {name}, expected {sums['partitions']}"
                raise CompilerFailedError(f"the compiler's log cannot be read: {counts}")
            sums[name] = sum(map(int, values))
        return sums

    def time(self, chip: str) -> tuple[TimeEstimate | None, str]:
        """The estimate for this chip, summed over all partitions; or None and the reason."""
        found, every = _PARTITIONED.search(self.errors), self.events
        complete = all(events.keys() >= _EVENTS.keys() for events in every)
        if found is not None and every and len(every) == int(found["partitions"]) and complete:
            sums = {name: sum(one[event] for one in every) for event, name in _EVENTS.items()}
            return TimeEstimate(chip, **sums), ""
        if self.no_probe or self.known:
            return None, self.no_probe or f"the compiler gives none for {chip}"
        return None, (
            f"the libraries have QNN interface {self.interface or '(unknown)'}, edge-opt's probe supports "
            f"{_KNOWN_INTERFACES}: use onnxruntime-qnn 2.3 to 2.7"
        )


@dataclass(frozen=True, slots=True)
class Compiler:
    """The Hexagon compiler's settings, as plain values.

    `chip` is the compiler's name for the chip, `flags` are such as `--qualcomm_optimization_level=O2`. `sdk` is the
    folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
    """

    chip: str = DEFAULT_CHIP
    flags: tuple[str, ...] = ()
    sdk: AnyPath | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if a flag is malformed."""
        wrong = next((flag for flag in self.flags if not re.match(r"--\w", flag)), None)
        if wrong is not None:
            raise UsageError(f"'{wrong}' is not a compiler flag: write --qualcomm_optimization_level=O2")

    def judge(self) -> "Compiler":
        """Return the compiler for the chip that estimates time, with this chip's memory unless the flags set it."""
        chip = CHIPS.get(self.chip)
        if chip is None:
            return self
        named = any(flag.startswith(_VTCM_FLAG) for flag in self.flags)
        vtcm = () if named else (f"{_VTCM_FLAG}={chip.vtcm}",)
        return replace(self, chip=chip.judge.name, flags=(*self.flags, *vtcm))

    def run(self, path: Path, folders: Path | None = None) -> Outcome:
        """Compile a model with one entry point, and run it in the emulator on `folders`, a pipe (see `probe.c`).

        Raises:
            UsageError: the compiler does not know the chip.
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
            done = processes.run(command, environment)
            outcome = Outcome(done.returncode, done.stdout, done.stderr, sdk.no_probe)
            outcome.hear(log.read_text(errors="replace") if log.exists() else "")
        if done.returncode and _UNKNOWN_CHIP in done.stderr:
            raise UsageError(
                f"the Hexagon compiler does not know chip '{self.chip}', {did_you_mean(self.chip, CHIPS)}"
            )
        return outcome


def cut_entry_point(model: Model, signature: str) -> Model:
    """Cut out one entry point, as the compiler needs it, without inputs that nothing reads."""
    check_weights_inside(model)
    graph, inputs, outputs = model.arguments(signature)
    read = {name: tensor for name, tensor in inputs.items() if tensor.consumers}
    made = {name: tensor for name, tensor in outputs.items() if tensor.producer is not None}
    return cut_signature(model, signature, graph.operators, read, made)


@contextmanager
def compiling_threads(count: int) -> Iterator[Executor]:
    """Threads that each wait for a compiler; an interrupt ends every compiler."""
    with ThreadPoolExecutor(count) as executor:
        try:
            yield executor
        except Exception:
            executor.shutdown(cancel_futures=True)
            raise
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Repeat: a thread may be about to start its compiler.
            waiting = Thread(target=executor.shutdown)
            waiting.start()
            while waiting.is_alive():
                processes.end_all()
                waiting.join(0.05)
            raise
