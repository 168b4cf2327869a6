"""Hexagon NPUs by the chip that they are in: version, on-chip memory, and whether its time can be estimated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip as the compiler calls it; `vtcm` is its NPU's on-chip memory in MiB."""

    name: str
    hexagon: int
    vtcm: int


# https://github.com/google-ai-edge/LiteRT, litert/vendors/qualcomm/core/schema/soc_table.cc; SA8775 and SA8797 are in
# no public table: their versions are those whose graphs and estimates they share (measured, docs/npu.md).
_CHIPS = {
    68: "SA8295:8 SM8350:4",
    69: "SM8450:8 SM8475:8 SXR2230P:8",
    73: "SA8255:8 SA8775:8 SC8380XP:8 SM8550:8 QCS9100:8 QCS9075:8 SSG2125P:2 SAR1130P:2",
    75: "SM8650:8 QCS8300:8 QCS8275:8",
    79: "SM8750:8 SXR2330P:8",
    81: "SA8797:8 SM8850:8 SAR2230P:4 SW6100:4",
}
CHIPS = {
    name: Chip(name, hexagon, int(vtcm))
    for hexagon, entries in _CHIPS.items()
    for name, _, vtcm in (entry.partition(":") for entry in entries.split())
}
"""Chips whose Hexagon version is known."""

ESTIMATED = frozenset({"SA8255", "SA8775", "QCS9100", "SAR2230P", "SA8797"})
"""Chips for which the compiler of QNN interface 2.36 to 2.40 estimates time; phones' are not among them."""

_JUDGES = ("SA8775", "SA8797")


def estimate_for(chip: str) -> Chip | None:
    """The chip whose estimate is taken: itself, else one of the nearest Hexagon version; None for one unknown here."""
    known = CHIPS.get(chip)
    if known is None or chip in ESTIMATED:
        return known
    return min((CHIPS[name] for name in _JUDGES), key=lambda judge: abs(judge.hexagon - known.hexagon))


def estimate_note(chip: str, judge: Chip) -> str:
    """What an estimate of another chip is, in one sentence; nothing where it is of the chip itself."""
    if judge.name == chip:
        return ""
    version = CHIPS[chip].hexagon
    same = "the same version" if version == judge.hexagon else "the nearest that has an estimate"
    return (
        f"the compiler estimates no time for {chip} (Hexagon v{version}): times are of {judge.name} "
        f"(v{judge.hexagon}, {same})"
    )
