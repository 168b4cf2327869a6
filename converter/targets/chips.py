"""Chips by name: their vendors with the targets for these, and what is known about the NPUs of Qualcomm's."""

from dataclasses import dataclass

# https://github.com/google-ai-edge/LiteRT, litert/vendors/qualcomm/core/schema/soc_table.cc; SA8775 and SA8797 are in
# no public table: their versions are those whose graphs and estimates they share (measured, docs/npu.md). SM8845 is not
# in that table either, only in LiteRT's list of chips: QNN's log on such a phone names v81.
_CHIPS = {
    68: "SA8295:8 SM8350:4",
    69: "SM8450:8 SM8475:8 SXR2230P:8",
    73: "SA8255:8 SA8775:8 SC8380XP:8 SM8550:8 QCS9100:8 QCS9075:8 SSG2125P:2 SAR1130P:2",
    75: "SM8650:8 QCS8300:8 QCS8275:8",
    79: "SM8750:8 SXR2330P:8",
    81: "SA8797:8 SM8845:8 SM8850:8 SAR2230P:4 SW6100:4",
}
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
        """Which chip the estimate of time is for; nothing where it is for this one."""
        judge = self.judge
        if judge is self:
            return ""
        same = "the same version" if self.hexagon == judge.hexagon else "the nearest that has an estimate"
        return (
            f"the compiler estimates no time for {self.name} (Hexagon v{self.hexagon}): times are of {judge.name} "
            f"(v{judge.hexagon}, {same})"
        )


CHIPS = {
    name: Chip(name, hexagon, int(vtcm))
    for hexagon, entries in _CHIPS.items()
    for name, _, vtcm in (entry.partition(":") for entry in entries.split())
}
"""Chips whose Hexagon version is known."""

VENDORS = {
    "qualcomm": tuple(CHIPS),
    "mediatek": (
        *("MT6853", "MT6877", "MT6878", "MT6879", "MT6886", "MT6893", "MT6895", "MT6897", "MT6983", "MT6985"),
        *("MT6989", "MT6991", "MT6993", "MT8171", "MT8188", "MT8189"),
    ),
    "google_tensor": ("Tensor_G3", "Tensor_G4", "Tensor_G5", "Tensor_G6"),
}
"""The chips of LiteRT (litert/python/aot/vendors/*/target.py) by vendor, as litert-torch's pipeline calls these."""
TARGETS = {
    "qualcomm": "qualcomm-htp",
    "mediatek": "mediatek",
    "google": "google-tensor",
    "google_tensor": "google-tensor",
    "intel_openvino": "intel-npu",
}
"""The target for each vendor, as LiteRT and its pipeline call them."""


def find_chip(name: str) -> tuple[str, str] | None:
    """The vendor of a chip, and the chip as LiteRT spells it; None where there is no such chip."""
    chips = {chip.lower(): (vendor, chip) for vendor, chips in VENDORS.items() for chip in chips}
    return chips.get(name.strip().lower())
