"""Chips by name: their vendors with the targets for these, and what is known about the NPUs of Qualcomm's."""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Final

_DATA: Final = tomllib.loads((resources.files(__package__) / "chips.toml").read_text(encoding="utf-8"))
ESTIMATED = frozenset({"SA8255", "SA8775", "QCS9100", "SAR2230P", "SA8797"})
"""Chips for which the compiler of QNN interface 2.36 to 2.40 estimates time; phones' are not among them."""
_JUDGES = ("SA8775", "SA8797")
DEFAULT_CHIP = "SM8750"


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip as the compiler calls it; `vtcm` is its NPU's on-chip memory in MiB."""

    name: str
    hexagon: int
    vtcm: int

    @property
    def judge(self) -> "Chip":
        """The chip whose estimate of time is taken: this one, or one of the nearest Hexagon version."""
        if self.name in ESTIMATED:
            return self
        return min((CHIPS[name] for name in _JUDGES), key=lambda judge: abs(judge.hexagon - self.hexagon))

    @property
    def note(self) -> str:
        """The chip that the estimate of time is for; empty where it is this one."""
        judge = self.judge
        if judge is self:
            return ""
        same = "the same version" if self.hexagon == judge.hexagon else "the nearest that has an estimate"
        missing = f"the compiler estimates no time for {self.name} (Hexagon v{self.hexagon})"
        return f"{missing}: times are of {judge.name} (v{judge.hexagon}, {same})"


CHIPS: Final = {
    name: Chip(name, int(version), vtcm)
    for version, chips in _DATA["hexagon"].items()
    for name, vtcm in chips.items()
}
"""Chips whose Hexagon version is known."""
VENDORS: Final[dict[str, tuple[str, ...]]] = {
    "qualcomm": tuple(CHIPS),
    **{vendor: tuple(chips) for vendor, chips in _DATA["others"].items()},
}
"""The chips that LiteRT knows by vendor, as litert-torch's pipeline calls these."""
TARGETS: Final[dict[str, str]] = _DATA["targets"]
"""The target for each vendor, as LiteRT and its pipeline call them."""


def find_chip(name: str) -> tuple[str, str] | None:
    """The vendor of a chip, and the chip as LiteRT spells it; None where there is no such chip."""
    chips = {chip.lower(): (vendor, chip) for vendor, chips in VENDORS.items() for chip in chips}
    return chips.get(name.strip().lower())
