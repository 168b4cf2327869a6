"""Builds libraries in C in the user's cache, once for each source: the probe that listens to Qualcomm's library."""

import hashlib
import os
import platform
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from edge_opt.base import processes
from edge_opt.npu.compiler import CompilerMissingError

LIBRARY = "libQnnHtp.so"
"""The file name of Qualcomm's library, and of the probe that takes its place."""
_NEEDS = "Qualcomm's estimate and emulator need"


def build_probe() -> Path:
    """Build the probe unless it is built already, and return its folder; or raise CompilerMissingError."""
    source = resources.files(__package__) / "probe.c"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CompilerMissingError(f"{_NEEDS} an x86-64 Linux machine")
    try:
        return build_library(source.read_bytes(), LIBRARY)
    except CompilerMissingError as error:
        raise CompilerMissingError(f"{_NEEDS} {error}") from error


def build_library(source: bytes, name: str) -> Path:
    """Build a library of this file name unless it is built already, and return its folder.

    CompilerMissingError if that needs what is missing; its message is only what.
    """
    folder = _cache_folder(hashlib.sha256(source).hexdigest()[:16])
    if (folder / name).is_file():
        return folder
    compiler = _c_compiler()
    with tempfile.TemporaryDirectory(prefix="edge-opt-", dir=folder) as scratch:
        code = Path(scratch) / "source.c"
        library = Path(scratch) / name
        code.write_bytes(source)
        flags = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        done = processes.run([*compiler.split(), *flags, "-o", str(library), str(code), "-ldl"])
        if not library.is_file():
            lines = done.stderr.strip().splitlines()
            reason = lines[0][:200] if lines else "no reason given"
            raise CompilerMissingError(
                f"a C compiler to build a small library, and `{compiler}` fails: {reason}"
            )
        # Rename, do not write in place: another process may be using or building the same one.
        library.replace(folder / name)
    return folder


def _cache_folder(digest: str) -> Path:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "edge-opt" / f"library-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise CompilerMissingError(
            f"a folder for a small library ({error}): name one of yours in XDG_CACHE_HOME"
        ) from error
    return folder


def _c_compiler() -> str:
    if os.environ.get("CC"):
        return os.environ["CC"]
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    raise CompilerMissingError(
        "a C compiler to build a small library: install one (as `cc`), or name it in CC"
    )
