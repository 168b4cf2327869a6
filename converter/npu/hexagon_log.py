"""Reads what LiteRT's ahead-of-time tool and the QNN libraries print while they compile, and what our probe writes.

The tool writes to standard error, the libraries to standard output. Both are buffered apart, so the two texts must be
taken apart too: in one pipe they cut each other's lines.
"""

import re
from dataclasses import dataclass, field

from edge_opt.npu.figures import TimeEstimate

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
    expected = sum(row[3] for row in rows)
    for name, values in columns.items():
        if len(values) != expected:
            raise ValueError(
                f"{expected} partitions were compiled and {len(values)} have a figure for {name}"
            )
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
class Heard:
    """Everything that the probe wrote; `interface` is the version of the library's own, `known` if it is trusted."""

    interface: str = ""
    known: bool = False
    graphs: list[CompiledGraph] = field(default_factory=list)


def read_heard(text: str) -> Heard:
    """What the probe's log says; its lines are described in `probe.c`."""
    heard = Heard()
    for line in text.splitlines():
        kind, *values = line.split("\t")
        graph = heard.graphs[-1] if heard.graphs else CompiledGraph("", 0)
        if kind == "interface":
            heard.known, heard.interface = values[0] == "known", values[1]
        elif kind == "finalized":
            heard.graphs.append(CompiledGraph(values[0], int(values[1])))
        elif kind == "event":
            graph.events.setdefault(int(values[0]), int(values[1]))
        elif kind == "missing":
            graph.missing.append(values[0])
        elif kind == "running":
            graph.running = True
        elif kind == "output":
            graph.outputs[values[2]] = int(values[0])
        elif kind == "ran":
            graph.ran = int(values[1]), float(values[2])
    return heard
