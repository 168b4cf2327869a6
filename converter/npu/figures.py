"""What a compiler says of a model, as data. Runs nothing and prints nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """What the Hexagon compiler estimates one run of an entry point to take, and between which bounds.

    Cycles of the NPU and microseconds, on `chip`. It ranks graphs; nobody calibrated it on a device. `without_cost`
    operators are not in it, since the compiler has no cost for them.
    """

    chip: str
    cycles: int
    cycles_low: int
    cycles_high: int
    us: int
    us_low: int
    us_high: int
    without_cost: int

    def __add__(self, other: TimeEstimate) -> TimeEstimate:
        """Two partitions of one entry point run one after the other."""
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items() if name != "chip"}
        return TimeEstimate(chip=self.chip, **sums)


@dataclass(frozen=True, slots=True)
class SpillFigures:
    """One entry point as the Hexagon compiler made it; bytes. All but `floor` are the compiler's own static figures.

    `taken` of `operators` run on the NPU, in `partitions` pieces; what it refuses shows only here. On-chip memory that
    overflows is written out (`spill`) and read back (`fill`); both are part of `ddr_written` and `ddr_read`. `run_list`
    counts the steps of the compiled graph. `floor`: what has to be read at the very least, see `read_floor`. `time` is
    None where the compiler estimates none.
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
    floor: int
    time: TimeEstimate | None = None

    @property
    def read_ratio(self) -> float | None:
        """DDR read over the floor; None where there is nothing to read."""
        return self.ddr_read / self.floor if self.floor else None

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports."""
        return {**asdict(self), "read_ratio": self.read_ratio}


@dataclass(frozen=True, slots=True)
class VelaFigures:
    """One entry point as Vela made it. Bytes, and the cycles of its performance model.

    `taken` of `operators` run on the NPU, counted after Vela's own graph rewrites; `on_cpu` says for each kind of
    operator and reason how many stay on the CPU.
    """

    signature: str
    operators: int
    taken: int
    cycles: int
    npu_cycles: int
    sram: int
    dram: int
    sram_traffic: int
    dram_traffic: int
    floor: int
    on_cpu: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports."""
        return asdict(self)


Figures = SpillFigures | VelaFigures


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as one target's compiler makes it: figures of every entry point, and what they were measured with.

    `notes` are sentences: of which chip the estimated time is, or why there is none.
    """

    model: str
    target: str
    chip: str
    flags: tuple[str, ...]
    versions: dict[str, str]
    seconds: float
    signatures: tuple[Figures, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports."""
        return {
            "model": self.model,
            "target": self.target,
            "chip": self.chip,
            "flags": list(self.flags),
            "versions": self.versions,
            "seconds": round(self.seconds, 2),
            "signatures": [figures.to_dict() for figures in self.signatures],
            "notes": list(self.notes),
        }
