"""What a compiler says of a model, as data. Runs nothing and prints nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SpillFigures:
    """One entry point as the Hexagon compiler made it; bytes. All but `floor` are the compiler's own static figures.

    `taken` of `operators` run on the NPU, in `partitions` pieces; what it refuses shows only here. On-chip memory that
    overflows is written out (`spill`) and read back (`fill`); both are part of `ddr_written` and `ddr_read`. `run_list`
    counts the steps of the compiled graph. `floor`: what has to be read at the very least, see `read_floor`.
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
    """A model as one target's compiler makes it: figures of every entry point, and what they were measured with."""

    model: str
    target: str
    chip: str
    flags: tuple[str, ...]
    versions: dict[str, str]
    seconds: float
    signatures: tuple[Figures, ...]

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
        }
