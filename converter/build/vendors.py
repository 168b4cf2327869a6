"""Chips by name: whose they are, which target is theirs, and where their compiler's libraries are."""

import importlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_opt.npu.chips import CHIPS
from edge_opt.npu.process import CompilerMissingError
from edge_opt.npu.sdk import SDK_VARIABLES, find_libraries
from edge_opt.output.errors import unknown


@dataclass(frozen=True, slots=True)
class Vendor:
    """A vendor of NPUs: `name` as litert-torch's pipeline calls it.

    `library` is a pattern of the one that has to be in a folder of the vendor's; empty where no stage of the pipeline
    compiles for the vendor.
    """

    name: str
    title: str
    chips: tuple[str, ...]
    library: str

    @property
    def package(self) -> str:
        """LiteRT's, with the vendor's libraries."""
        return f"ai_edge_litert_sdk_{self.name}"


# Of LiteRT, litert/python/aot/vendors/*/target.py.
_MEDIATEK_CHIPS = (
    *("MT6853", "MT6877", "MT6878", "MT6879", "MT6886", "MT6893", "MT6895", "MT6897", "MT6983", "MT6985"),
    *("MT6989", "MT6991", "MT6993", "MT8171", "MT8188", "MT8189"),
)
_GOOGLE = ("Tensor_G3", "Tensor_G4", "Tensor_G5", "Tensor_G6")
QUALCOMM = Vendor("qualcomm", "Qualcomm", (*CHIPS, "SM8845"), "libQnnHtp.so")
MEDIATEK = Vendor("mediatek", "MediaTek", _MEDIATEK_CHIPS, "libneuron*_adapter*.so")
VENDORS = (
    QUALCOMM,
    MEDIATEK,
    Vendor("google_tensor", "Google Tensor", _GOOGLE, ""),
)


def find_chip(name: str) -> tuple[Vendor, str]:
    """Whose the chip is, and how LiteRT spells it; UsageError where there is no such chip."""
    known = {chip.lower(): (vendor, chip) for vendor in VENDORS for chip in vendor.chips}
    if name.strip().lower() not in known:
        raise unknown("chip", name.strip(), [chip for _, chip in known.values()])
    return known[name.strip().lower()]


def find_compiler(vendor: Vendor, sdk: str | os.PathLike[str] | None) -> Path | None:
    """The folder with the vendor's libraries for this machine; None where LiteRT finds its package with them."""
    pip_name = vendor.package.replace("_", "-")
    if not vendor.library:
        raise CompilerMissingError(
            f"litert-torch's pipeline has no compiler for {vendor.title}: compile the bundle's models with LiteRT's "
            f"aot_compile and the vendor's SDK (pip install {pip_name})"
        )
    packaged = find_spec(vendor.package) is not None
    if vendor is QUALCOMM:
        if sdk is None and packaged and not any(map(os.environ.get, SDK_VARIABLES)):
            sdk = importlib.import_module(vendor.package).path_to_sdk_libs()
        return find_libraries(sdk)
    if sdk is None and not packaged:
        raise CompilerMissingError(
            f"{vendor.title}'s compiler is missing: `pip install {pip_name}`, which gets it from {vendor.title}, or "
            f"give its folder with sdk=DIR"
        )
    if sdk is None:
        return None
    for found in Path(sdk).rglob(vendor.library):
        return found.resolve().parent
    raise CompilerMissingError(f"{sdk} holds no {vendor.library}: give the folder of {vendor.title}'s SDK")
