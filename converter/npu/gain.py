"""Says of each entry point whether it is better as converted or as exported, by a compiler's figures. Runs nothing."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_opt.npu.figures import Figures, SpillFigures

Kept = Literal["converted", "exported"]


@dataclass(frozen=True, slots=True)
class Gain:
    """One entry point: the compiler's figures as exported and as converted, which of the two was kept, and why.

    Figures are None where nothing was measured.
    """

    signature: str
    before: Figures | None
    after: Figures | None
    kept: Kept
    why: str

    def __str__(self) -> str:
        return f"{self.signature}: {self.kept}, {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        both = {"before": self.before, "after": self.after}
        told = {name: None if figures is None else figures.to_dict() for name, figures in both.items()}
        return {**asdict(self), **told}


def gain(signature: str, before: Figures, after: Figures) -> Gain:
    """The better of the two; as exported where nothing is gained.

    What leaves the NPU counts first, then in how many pieces the rest is, then the estimated time where both have one,
    else the bytes moved (for Vela: cycles).
    """
    timed = all(isinstance(one, SpillFigures) and one.time is not None for one in (before, after))
    old, new = _facts(before, timed=timed), _facts(after, timed=timed)
    telling = next((text for text in old if old[text] != new[text]), [*old][-1])
    kept: Kept = "converted" if new[telling] < old[telling] else "exported"
    ratio = f" ({new[telling] / old[telling]:.3f} of it)" if old[telling] and new[telling] else ""
    numbers = f"{telling.format(old[telling])} as exported, {telling.format(new[telling])} as converted"
    return Gain(signature, before, after, kept, numbers + ratio)


def _facts(figures: Figures, *, timed: bool) -> dict[str, float]:
    """What ranks, first things first, by how it is told; smaller is better."""
    facts: dict[str, float] = {"{} operators off the NPU": figures.operators - figures.taken}
    if not isinstance(figures, SpillFigures):
        return {**facts, "{:,} cycles": figures.cycles}
    facts["{} pieces on the NPU"] = figures.partitions
    if timed and figures.time is not None:
        return {**facts, "estimated {:.3f} ms": figures.time.us / 1000}
    return {**facts, "{:,} bytes moved": figures.ddr_read + figures.ddr_written}
