"""Find the NPU compiler on this machine: LiteRT's tool and plugin, the user's QNN libraries, our probe.

The libraries are never copied or bundled.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import distribution
from pathlib import Path

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import EdgeOptError, UsageError

LIBRARY = "libQnnHtp.so"
SDK_VARIABLES = ("EDGE_OPT_QNN", "QNN_SDK_ROOT")
# Qualcomm's SDK keeps its x86-64 libraries in the first, the wheel of onnxruntime-qnn in the second.
_PLACES = ("lib/x86_64-linux-clang", "onnxruntime_qnn", ".")
# The plugin links to this library for chips without an HTP, but never calls it here; the wheel lacks it.
_UNUSED_LIBRARY, _STAND_IN = "libQnnLpai.so", "libQnnSystem.so"
_HOW_TO_GET = (
    "give the folder of Qualcomm's AI Engine Direct SDK, or of an unpacked wheel (`pip download --no-deps "
    "onnxruntime-qnn==2.7.0` on x86-64 Linux), with sdk=DIR or in EDGE_OPT_QNN or QNN_SDK_ROOT"
)
_PROBE_NEEDS = "Qualcomm's estimate and emulator need"


class CompilerMissingError(UsageError):
    """The compiler, or a vendor library that it needs, is not on this machine."""


class CompilerFailedError(EdgeOptError):
    """The compiler ended without a result, or its figures cannot be read."""


def find_libraries(sdk: AnyPath | None) -> Path:
    """Return the folder with QNN libraries, from `sdk` or the environment; or raise CompilerMissingError."""
    named = next((os.environ[name] for name in SDK_VARIABLES if os.environ.get(name)), None)
    root = named if sdk is None else os.fspath(sdk)
    if root is None:
        raise CompilerMissingError(f"the Hexagon compiler needs Qualcomm's QNN libraries: {_HOW_TO_GET}")
    for place in _PLACES:
        folder = Path(root) / place
        if (folder / LIBRARY).is_file():
            return folder.resolve()
    if not Path(root).is_dir():
        raise CompilerMissingError(f"folder {root} does not exist: {_HOW_TO_GET}")
    raise CompilerMissingError(f"{root} holds no {LIBRARY} for x86-64 Linux: {_HOW_TO_GET}")


@dataclass(frozen=True, slots=True)
class Sdk:
    """The compiler on this machine: LiteRT's tool and plugin, Qualcomm's libraries, and our probe.

    `no_probe` says why there is no probe, and so no time estimate or emulator; empty if there is one.
    """

    tool: Path
    plugin: Path
    libraries: Path
    probe: Path | None
    no_probe: str = ""


def find_sdk(sdk: AnyPath | None) -> Sdk:
    """Find the Hexagon compiler; raise CompilerMissingError if more than the probe is missing."""
    libraries = find_libraries(sdk)
    tool, plugin = _find_tool()
    try:
        return Sdk(tool, plugin, libraries, build_probe())
    except CompilerMissingError as error:
        return Sdk(tool, plugin, libraries, None, str(error))


def search_path(*folders: Path, scratch: Path) -> str:
    """LD_LIBRARY_PATH for a plugin: these folders (the last has the vendor's libraries), then its current value.

    The library that Qualcomm's wheel lacks is created in `scratch`.
    """
    libraries = folders[-1]
    if (libraries / _STAND_IN).exists() and not (libraries / _UNUSED_LIBRARY).exists():
        (scratch / _UNUSED_LIBRARY).symlink_to(libraries / _STAND_IN)
        folders = *folders, scratch
    known = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([*map(str, folders), *([known] if known else [])])


def _find_tool() -> tuple[Path, Path]:
    litert = distribution("ai-edge-litert")
    root = Path(str(litert.locate_file("ai_edge_litert")))
    tool, plugin = root / "tools" / "apply_plugin_main", root / "vendors" / "qualcomm" / "compiler"
    if not tool.is_file() or not plugin.is_dir():
        raise CompilerMissingError(
            f"ai-edge-litert {litert.version} in {root} has no ahead-of-time compiler for Qualcomm: its wheel for "
            f"x86-64 Linux has one from 2.1 on"
        )
    return tool, plugin


def build_probe() -> Path:
    """Build the probe in the user's cache, once per source, and return its folder; or raise CompilerMissingError."""
    source = (resources.files(__package__) / "probe.c").read_bytes()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CompilerMissingError(f"{_PROBE_NEEDS} an x86-64 Linux machine")
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "edge-opt" / f"probe-{hashlib.sha256(source).hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise CompilerMissingError(
            f"{_PROBE_NEEDS} a folder for a small probe ({error}): name one of yours in XDG_CACHE_HOME"
        ) from error
    if (folder / LIBRARY).is_file():
        return folder
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CompilerMissingError(
            f"{_PROBE_NEEDS} a C compiler to build a small probe: install one (as `cc`), or name it in CC"
        )
    with tempfile.TemporaryDirectory(prefix="edge-opt-", dir=folder) as scratch:
        code, library = Path(scratch) / "probe.c", Path(scratch) / LIBRARY
        code.write_bytes(source)
        flags = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
        done = processes.run([*compiler.split(), *flags, "-o", str(library), str(code), "-ldl"])
        if not library.is_file():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[0][:200]
            raise CompilerMissingError(
                f"{_PROBE_NEEDS} a C compiler to build a small probe, and `{compiler}` fails: {reason}"
            )
        # Rename, do not write in place: another process may be using or building the same probe.
        library.replace(folder / LIBRARY)
    return folder
