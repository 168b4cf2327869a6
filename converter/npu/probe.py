"""Builds the probe that listens to QNN's HTP library (`probe.c` says how), and reads what it writes."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from edge_opt.npu.errors import CompilerMissingError

LIBRARY = "libQnnHtp.so"
_COMPILERS = ("cc", "gcc", "clang")
KNOWN_INTERFACES = "2.36 to 2.40"


@dataclass(slots=True)
class Graph:
    """One compiled graph: what its profile says by event type, and what became of it in the emulator.

    `ran` is the library's return code and the seconds; None after `running` means that the process ended there.
    """

    name: str
    finalized: int
    events: dict[int, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    running: bool = False
    ran: tuple[int, float] | None = None
    outputs: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Heard:
    """Everything that the probe wrote; `interface` is the version of the library's own, `known` if it is trusted."""

    interface: str = ""
    known: bool = False
    graphs: list[Graph] = field(default_factory=list)


def read_heard(text: str) -> Heard:
    """What the probe's log says; its lines are described in `probe.c`."""
    heard = Heard()
    for line in text.splitlines():
        kind, *values = line.split("\t")
        graph = heard.graphs[-1] if heard.graphs else Graph("", 0)
        if kind == "interface":
            heard.known, heard.interface = values[0] == "known", values[1]
        elif kind == "finalized":
            heard.graphs.append(Graph(values[0], int(values[1])))
        elif kind == "event":
            graph.events.setdefault(int(values[0]), int(values[1]))
        elif kind == "missing":
            graph.missing.append(values[0])
        elif kind == "running":
            graph.running = True
        elif kind == "output":
            graph.outputs[values[2]] = int(values[0])
        elif kind == "ran":
            graph.ran = int(values[1]), float(values[2])
    return heard


def build_probe() -> Path:
    """The folder with the built probe: made once for each version of its source, in the user's cache.

    Raises:
        CompilerMissingError: this machine is no x86-64 Linux, or has no C compiler that can build it.
    """
    source = (resources.files(__package__) / "probe.c").read_bytes()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CompilerMissingError("Qualcomm's estimate and emulator need an x86-64 Linux machine")
    folder = cache_folder() / f"probe-{hashlib.sha256(source).hexdigest()[:16]}"
    if (folder / LIBRARY).is_file():
        return folder
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CompilerMissingError(
            "Qualcomm's estimate and emulator need a C compiler to build a small probe with: install one (as `cc`), "
            "or name it in CC"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _build([*compiler.split()], source, folder)
    return folder


def _build(compiler: list[str], source: bytes, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="edge-opt-", dir=folder) as scratch:
        code, library = Path(scratch) / "probe.c", Path(scratch) / LIBRARY
        code.write_bytes(source)
        flags = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
        command = [*compiler, *flags, "-o", str(library), str(code), "-ldl"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            complaint = done.stderr.strip()
        except OSError as error:
            complaint = str(error)
        if not library.is_file():
            reason = (complaint.splitlines() or ["it does not say why"])[0][:200]
            raise CompilerMissingError(
                f"Qualcomm's estimate and emulator need a C compiler to build a small probe with, and "
                f"`{' '.join(compiler)}` fails: {reason}"
            )
        # Renamed, not written in place: another process may be using or building the same one.
        library.replace(folder / LIBRARY)


def cache_folder() -> Path:
    """The user's cache folder for us; a temporary one where it cannot be written.

    Raises:
        CompilerMissingError: both belong to somebody else.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):
        folder = (Path(named) if named else Path.home() / ".cache") / "edge-opt"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    fallback = Path(tempfile.gettempdir()) / f"edge-opt-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    if fallback.stat().st_uid != os.getuid():
        raise CompilerMissingError(
            f"{fallback} belongs to somebody else: name a folder of yours in XDG_CACHE_HOME"
        )
    return fallback
