"""Reads how the Hexagon compiler ended: its log, that of LiteRT's tool, and that of our probe.

LiteRT's tool prints to standard error, the QNN libraries to standard output. Each has its own buffer, so they must be
read separately: in one pipe their lines would mix. Our probe writes a file.
"""

import re
from dataclasses import dataclass, field

from edge_opt.npu.compiler import (
    CompilerFailedError,
    TimeEstimate,
    first_complaint,
    operator_counts,
    reason_of,
)
from edge_opt.targets.placement import OnCpu

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
_KNOWN_INTERFACES = "2.36 to 2.40"
_VERSIONS = {
    "qairt": re.compile(r"SDK version: v(\d+\.\d+\.\d+)"),
    "qnn": re.compile(r"Qnn library version ([\d.]+) is used"),
}
_LEFT = re.compile(r"LiteRT Op #(\d+) '\w+' \(code=\d+\) is not supported")
_INVALID = "QNN op validation failed"
_TYPE = re.compile(r"dtype=QNN_DATATYPE_(\w+)")
_OTHERS = "Partitioned subgraph<0>"  # what follows is about subgraphs that operators call
_VALIDATED = re.compile(r"Failed to validate op")


@dataclass(slots=True)
class Outcome:
    """How the compiler ended with one graph, its output, and the probe's log; `no_probe` says why there is no log.

    `interface` is the version of the library's interface, `known` if the probe supports it. `finalized` has a return
    code and `events` a profile for each graph (partition). For the emulator: `missing` inputs, and in `ran` the
    library's return code of the last run; None after `running` means that the process ended during the run. `on_cpu`:
    operators that the NPU does not run.
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
    on_cpu: tuple[OnCpu, ...] = ()

    def with_log(self, text: str) -> "Outcome":
        """Add what the probe's log has (its lines are described in `probe.c`), and return self."""
        for line in text.splitlines():
            match line.split("\t"):
                case ["interface", trusted, core, *_]:
                    self.known = trusted == "known"
                    self.interface = core
                case ["finalized", _, status, *_]:
                    self.finalized.append(int(status))
                    self.events.append({})
                case ["event", event, value, *_]:
                    self.events[-1].setdefault(int(event), int(value))
                case ["missing", name, *_]:
                    self.missing.append(name)
                case ["running", *_]:
                    self.running = True
                    self.ran = None
                case ["ran", _, status, *_]:
                    self.ran = int(status)
        return self

    @property
    def reason(self) -> str:
        """Why the compiler ended, if it says so."""
        return reason_of(self.code, self.output, self.errors)

    @property
    def ended(self) -> str:
        """The signal that ended the process, if one did."""
        return reason_of(self.code)

    @property
    def versions(self) -> dict[str, str]:
        """The version of Qualcomm's libraries, and that of their interface, as far as they are known."""
        found: dict[str, str] = {}
        for name, pattern in _VERSIONS.items():
            named = pattern.search(self.errors)
            if named is not None:
                found[name] = named[1]
        if self.interface:
            found.setdefault("qnn", self.interface)
        return found

    def refusals(self) -> dict[int, str]:
        """Why operators stay on the CPU, by their place in the model.

        For each operator that is not validated, the tool logs its types and then its place, and the library the reason:

            the tool     QNN op validation failed .. dtype=.. dtype=.. | LiteRT Op #3 .. is not supported | ..
            the library  [ ERROR ] reason .. Failed to validate op     | ..

        An operator that the plugin does not know has only its place.
        """
        complaints = iter(_VALIDATED.split(self.output))
        reasons: dict[int, str] = {}
        invalid = ""
        for block in self.errors.partition(_OTHERS)[0].split("ERROR: "):
            found = _LEFT.search(block)
            if _INVALID in block:
                types = ", ".join(dict.fromkeys(_TYPE.findall(block)))
                complaint = first_complaint(next(complaints, ""))
                said = complaint.partition(" requested for ")[0]
                invalid = f"{said or 'refused'} ({types})"
            elif found is not None:
                reasons[int(found[1])] = invalid or "LiteRT's plugin does not take this kind"
                invalid = ""
        return reasons

    def figures(self) -> dict[str, int]:
        """The compiler's figures, summed over the graph's partitions; CompilerFailedError if some are missing."""
        counts = operator_counts(self.errors)
        sums = counts._asdict()
        for name, wanted in _FIGURES.items():
            values = re.findall(rf"\b{wanted}=(\d+)", self.output)
            if len(values) != counts.partitions:
                found = f"{len(values)} figures for {name}, expected {counts.partitions}"
                raise CompilerFailedError(f"the compiler's log cannot be read: {found}")
            sums[name] = sum(map(int, values))
        return sums

    def time(self, chip: str) -> tuple[TimeEstimate | None, str]:
        """The estimate for this chip, summed over all partitions; or None and the reason."""
        if self._is_profiled():
            sums: dict[str, int] = {}
            for event, name in _EVENTS.items():
                sums[name] = sum(graph[event] for graph in self.events)
            return TimeEstimate(chip, **sums), ""
        if self.no_probe:
            return None, self.no_probe
        if self.known:
            return None, f"the compiler gives none for {chip}"
        return None, (
            f"the libraries have QNN interface {self.interface or '(unknown)'}, edge-opt's probe supports "
            f"{_KNOWN_INTERFACES}: use onnxruntime-qnn 2.3 to 2.7"
        )

    def _is_profiled(self) -> bool:
        """True if every partition has a profile with all events."""
        try:
            partitions = operator_counts(self.errors).partitions
        except CompilerFailedError:
            return False
        complete = [graph for graph in self.events if graph.keys() >= _EVENTS.keys()]
        return 0 < partitions == len(complete) == len(self.events)
