"""Chips by name, their vendors, the vendors' targets, and facts about Qualcomm's NPUs."""

import tomllib
from importlib import resources
from itertools import chain
from typing import NamedTuple

_DATA = tomllib.loads((resources.files(__package__) / "chips.toml").read_text(encoding="utf-8"))
ESTIMATED = frozenset({"SA8255", "SA8775", "QCS9100", "SAR2230P", "SA8797"})
"""Chips for which the compiler of QNN interface 2.36 to 2.40 estimates time; none is a phone's."""
_JUDGES = ("SA8775", "SA8797")
DEFAULT_CHIP = "SM8750"


class Chip(NamedTuple):
    """A chip, by the compiler's name for it; `vtcm` is its NPU's on-chip memory in MiB."""

    name: str
    hexagon: int
    vtcm: int

    @property
    def judge(self) -> "Chip":
        """The chip whose time estimate is used: this one, or the one with the nearest Hexagon version."""
        if self.name in ESTIMATED:
            return self
        judges = [CHIPS[name] for name in _JUDGES]
        return min(judges, key=lambda judge: abs(judge.hexagon - self.hexagon))

    @property
    def note(self) -> str:
        """A note on the chip that the time estimate is for; empty if it is this one."""
        judge = self.judge
        if judge is self:
            return ""
        is_same = self.hexagon == judge.hexagon
        relation = "the same version" if is_same else "the nearest with an estimate"
        missing = f"the compiler has no time estimate for {self.name} (Hexagon v{self.hexagon})"
        return f"{missing}: times are for {judge.name} (v{judge.hexagon}, {relation})"


CHIPS = {
    name: Chip(name, int(version), vtcm)
    for version, chips in _DATA["hexagon"].items()
    for name, vtcm in chips.items()
}
"""Chips whose Hexagon version is known."""
VENDORS: dict[str, list[str]] = {"qualcomm": list(CHIPS), **_DATA["others"]}
"""LiteRT's chips by vendor, with the vendor names of litert-torch's pipeline."""
NAMES = [*chain.from_iterable(VENDORS.values())]
"""All chips."""
TARGETS: dict[str, str] = _DATA["targets"]
"""The target for each vendor, by the vendor names of LiteRT and its pipeline."""


class ListedChip(NamedTuple):
    """A chip by its name in LiteRT, and its vendor by the name in litert-torch's pipeline."""

    vendor: str
    chip: str


def find_chip(name: str) -> ListedChip | None:
    """LiteRT's chip of this name, in upper or lower case; None if there is none."""
    wanted = name.strip().lower()
    for vendor, chips in VENDORS.items():
        for chip in chips:
            if chip.lower() == wanted:
                return ListedChip(vendor, chip)
    return None
