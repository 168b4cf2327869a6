"""The vendors' compilers that edge-opt can run, by the name that targets have for them.

    targets/chips.toml      chip -> vendor -> target
    the target's file       target -> its fact `compiler`
    here                    `compiler` -> Backend

A new vendor's compiler is a module with a `Backend`, and an entry at each of these steps.
"""

from edge_opt.base.errors import UsageError
from edge_opt.npu.compiler import Backend
from edge_opt.npu.mediatek import MediaTek
from edge_opt.npu.qualcomm import Qualcomm
from edge_opt.targets import load_target
from edge_opt.targets.chips import TARGETS, find_chip

_BACKENDS: dict[str, Backend] = {"qualcomm": Qualcomm(), "mediatek": MediaTek()}
_UNLISTED = "qualcomm"  # whose compiler knows more chips than LiteRT lists


def backend_of(chip: str) -> Backend:
    """The compiler for a chip; UsageError if edge-opt cannot run it."""
    found = find_chip(chip)
    vendor = _UNLISTED if found is None else found.vendor
    backend = vendor_backend(vendor)
    if backend is None:
        raise UsageError(
            f"edge-opt cannot run the compiler for {chip}, of {vendor}: give another chip"
        )
    return backend


def vendor_backend(vendor: str) -> Backend | None:
    """The compiler that a vendor's target names, None without one; `vendor` is LiteRT's name of the vendor."""
    return target_backend(load_target(TARGETS[vendor]).compiler) if vendor in TARGETS else None


def target_backend(name: str | None) -> Backend | None:
    """The compiler of this name in a target; None if the target has none.

    Raises:
        UsageError: there is no such compiler.
    """
    if name is None:
        return None
    if name not in _BACKENDS:
        raise UsageError(f"compiler '{name}' does not exist: give one of {', '.join(_BACKENDS)}")
    return _BACKENDS[name]
