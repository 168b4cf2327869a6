"""Compiles a model for a Hexagon NPU on this machine: LiteRT's ahead-of-time tool with the user's own QNN libraries.

No phone takes part and nothing is kept but the figures. The libraries are never copied or bundled.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.npu.chips import CHIPS, estimate_for, estimate_note
from edge_opt.npu.errors import CompilerFailedError, CompilerMissingError, CompilerTimeoutError
from edge_opt.npu.figures import SpillFigures, TimeEstimate, read_floor
from edge_opt.npu.hexagon_log import Compiled, first_complaint, library_version, read_log
from edge_opt.npu.probe import KNOWN_INTERFACES, LIBRARY, Heard, build_probe, read_heard
from edge_opt.schema.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_opt.ir import Model
    from edge_opt.npu.chips import Chip
    from edge_opt.npu.probe import Graph

DEFAULT_CHIP = "SM8750"
SDK_VARIABLES = ("EDGE_OPT_QNN", "QNN_SDK_ROOT")
_VTCM_FLAG = "qualcomm_vtcm_size"
_UNKNOWN_CHIP = "Unexpected SoC model"
_running: set[subprocess.Popen[str]] = set()
# QnnHtpProfile.h: events of a graph's finalization.
_EVENTS = {
    2006: "cycles",
    2007: "cycles_low",
    2008: "cycles_high",
    2017: "without_cost",
    2019: "us",
    2020: "us_low",
    2021: "us_high",
}
# Qualcomm's SDK keeps its x86-64 libraries in the first, the wheel of onnxruntime-qnn in the second.
_PLACES = ("lib/x86_64-linux-clang", "onnxruntime_qnn", ".")
# The plugin is linked against this one for chips without an HTP and calls nothing of it here; the wheel lacks it.
_UNUSED_LIBRARY, _STAND_IN = "libQnnLpai.so", "libQnnSystem.so"
_COMPILING = "lib*Htp*.so"
_HOW_TO_GET = (
    "give the folder of Qualcomm's AI Engine Direct SDK, or of an unpacked wheel (`pip download --no-deps "
    "onnxruntime-qnn` on x86-64 Linux), with --sdk or in EDGE_OPT_QNN or QNN_SDK_ROOT"
)


def find_libraries(sdk: str | os.PathLike[str] | None) -> Path:
    """The folder with the QNN libraries for this machine, of `sdk` or else of the environment.

    Raises:
        CompilerMissingError: no SDK is given, or it holds no such libraries.
    """
    named = next((os.environ[name] for name in SDK_VARIABLES if os.environ.get(name)), None)
    root = named if sdk is None else os.fspath(sdk)
    if root is None:
        raise CompilerMissingError(f"the Hexagon compiler needs Qualcomm's QNN libraries: {_HOW_TO_GET}")
    for place in _PLACES:
        folder = Path(root) / place
        if (folder / LIBRARY).is_file():
            return folder.resolve()
    raise CompilerMissingError(f"{root} holds no {LIBRARY} for x86-64 Linux: {_HOW_TO_GET}")


def libraries_digest(sdk: str | os.PathLike[str] | None) -> str:
    """What the libraries that compile are, by their bytes, wherever they lie; empty where there are none."""
    try:
        folder = find_libraries(sdk)
    except CompilerMissingError:
        return ""
    found = sorted(folder.glob(_COMPILING))
    known = [(path, status.st_size, status.st_mtime_ns) for path in found for status in [path.stat()]]
    return " ".join(f"{path.name}:{_digest(path, size, at)}" for path, size, at in known)


@lru_cache
def _digest(path: Path, size: int, changed: int) -> str:
    """Of a file as it is now: `size` and when it was `changed` are there to tell it from what it was before."""
    del size, changed
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Sdk:
    """The compiler as it stands on this machine: LiteRT's tool and plugin, Qualcomm's libraries, and our probe.

    `silence` says why there is no probe, and so neither an estimate of time nor an emulator; empty where there is one.
    """

    tool: Path
    plugin: Path
    libraries: Path
    probe: Path | None
    silence: str = ""

    def probed(self) -> Path:
        """The probe.

        Raises:
            CompilerMissingError: there is none.
        """
        if self.probe is None:
            raise CompilerMissingError(self.silence)
        return self.probe


def find_sdk(sdk: str | os.PathLike[str] | None) -> Sdk:
    """All that it takes to compile for a Hexagon NPU.

    Raises:
        CompilerMissingError: LiteRT's tool or Qualcomm's libraries are not here; the probe may be missing.
    """
    libraries = find_libraries(sdk)
    tool, plugin = _find_tool()
    try:
        return Sdk(tool, plugin, libraries, build_probe())
    except CompilerMissingError as error:
        return Sdk(tool, plugin, libraries, None, str(error))


@dataclass(frozen=True, slots=True)
class CompilerRun:
    """One run of the compiler: how it ended, what it printed on both streams, and what the probe heard."""

    code: int
    output: str
    errors: str
    heard: Heard


@dataclass(frozen=True, slots=True)
class Compilation:
    """Figures of every entry point of a model, the versions that they were measured with, and what to say of them."""

    figures: list[SpillFigures]
    versions: dict[str, str]
    notes: tuple[str, ...]


def compile_model(
    path: Path,
    model: Model,
    *,
    sdk: str | os.PathLike[str] | None,
    chip: str | None,
    flags: Sequence[str],
    seconds: float | None = None,
) -> Compilation:
    """Compile `model`, which `path` holds, for a chip; where that has no estimate of time, for the nearest one too.

    Raises:
        CompilerMissingError: the tool or the libraries are not here.
        CompilerFailedError: the compiler ended without a result, or took longer than `seconds`; an operator that it
            refuses is no such failure, nor is it one if only the estimate is not to be had.
    """
    found, name = find_sdk(sdk), chip or DEFAULT_CHIP
    judge = estimate_for(name)
    if judge is None or judge.name == name or found.probe is None:
        own = run_compiler(found, path, name, flags, seconds)
        return _compilation(path, model, own, name, judge, own.heard, found.silence)
    with ThreadPoolExecutor(1) as beside:
        judging = beside.submit(run_compiler, found, path, judge.name, with_memory_of(name, flags), seconds)
        own = run_compiler(found, path, name, flags, seconds)
        try:
            heard, silence = judging.result().heard, ""
        except CompilerFailedError as error:
            heard, silence = Heard(), str(error).partition(": ")[2]
    return _compilation(path, model, own, name, judge, heard, silence)


def with_memory_of(chip: str, flags: Sequence[str]) -> list[str]:
    """The flags, and the on-chip memory of this chip where they do not say how much: another one is to judge for it."""
    named = any(flag.startswith(f"--{_VTCM_FLAG}") for flag in flags)
    return [*flags] if named or chip not in CHIPS else [*flags, f"--{_VTCM_FLAG}={CHIPS[chip].vtcm}"]


def judged_by(chip: str, flags: Sequence[str]) -> tuple[str, list[str]]:
    """The chip whose estimate is taken for this one and the flags for it: one compilation, and only to rank."""
    judge = estimate_for(chip)
    return (chip, [*flags]) if judge is None else (judge.name, with_memory_of(chip, flags))


def run_compiler(
    sdk: Sdk,
    path: Path,
    chip: str,
    flags: Sequence[str],
    seconds: float | None = None,
    *,
    run: Path | None = None,
) -> CompilerRun:
    """Compile one file; with a folder `run`, its graphs run in the emulator on the inputs in it, see `probe.c`.

    Raises:
        CompilerFailedError: it was not done after `seconds`, or ended with an error; with `run` the outcome tells.
        UsageError: the compiler does not know the chip.
    """
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        log = Path(folder) / "probe"
        command = [
            str(sdk.tool),
            "--cmd=apply",
            f"--model={path}",
            f"--o={folder}/compiled.tflite",
            f"--libs={sdk.plugin}",
            "--soc_manufacturer=Qualcomm",
            f"--soc_model={chip}",
            *flags,
        ]
        try:
            done = _carried_out(command, _environment(sdk, Path(folder), log, run), seconds)
        except subprocess.TimeoutExpired as error:
            raise CompilerTimeoutError(
                f"{path.name}: the Hexagon compiler was not done after {seconds:g} seconds; --seconds gives it more"
            ) from error
        heard = read_heard(log.read_text(errors="replace") if log.exists() else "")
    if done.returncode and run is None:
        if _UNKNOWN_CHIP in done.stderr:
            raise UsageError(f"the Hexagon compiler knows no chip '{chip}', {did_you_mean(chip, CHIPS)}")
        reason = first_complaint(done.stdout, done.stderr) or ended(done.returncode)
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler ended with code {done.returncode}: {reason}; try other compiler flags "
            f"or another form"
        )
    return CompilerRun(done.returncode, done.stdout, done.stderr, heard)


def end_compilers() -> None:
    """Kill every compiler that is running for this process, in whichever thread; what waits for it gets its failure."""
    for process in tuple(_running):
        process.kill()


def _carried_out(
    command: Sequence[str], environment: Mapping[str, str], seconds: float | None
) -> subprocess.CompletedProcess[str]:
    streams: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(command, env=environment, text=True, errors="replace", **streams) as process:
        _running.add(process)
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def ended(code: int) -> str:
    """What is known of a process that does not say why it ended."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "it does not say why"


def library_folders(libraries: Path, scratch: Path) -> list[str]:
    """Where a plugin's libraries are found: in `libraries`, and the one that Qualcomm's wheel lacks in `scratch`."""
    if (libraries / _UNUSED_LIBRARY).exists() or not (libraries / _STAND_IN).exists():
        return [str(libraries)]
    (scratch / _UNUSED_LIBRARY).symlink_to(libraries / _STAND_IN)
    return [str(libraries), str(scratch)]


def _environment(sdk: Sdk, folder: Path, log: Path, run: Path | None) -> dict[str, str]:
    search = [] if sdk.probe is None else [str(sdk.probe)]
    search += library_folders(sdk.libraries, folder)
    known = os.environ.get("LD_LIBRARY_PATH")
    added = {"EDGE_OPT_QNN_REAL": str(sdk.libraries / LIBRARY), "EDGE_OPT_PROBE_LOG": str(log)}
    if run is not None:
        added["EDGE_OPT_PROBE_RUN"] = str(run)
    return {**os.environ, **added, "LD_LIBRARY_PATH": ":".join([*search, *([known] if known else [])])}


def _compilation(
    path: Path, model: Model, own: CompilerRun, chip: str, judge: Chip | None, heard: Heard, silence: str
) -> Compilation:
    try:
        compiled = {entry.subgraph: entry for entry in read_log(own.output, own.errors)}
    except ValueError as error:
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler's log cannot be read: {error}"
        ) from error
    versions = {"ai-edge-litert": version("ai-edge-litert")}
    qnn = library_version(own.errors) or own.heard.interface
    if qnn:
        versions["qnn"] = qnn
    partitions = sum(entry.partitions for entry in compiled.values())
    times = [] if judge is None else [_time(graph, judge.name) for graph in heard.graphs]
    if len(times) == partitions and None not in times:
        note = "" if judge is None else estimate_note(chip, judge)
    else:
        times = [None] * partitions
        note = f"no estimate of time: {silence or _silence(chip, judge, heard)}"
    return Compilation(_figures(path, model, compiled, times), versions, (note,) if note else ())


def _silence(chip: str, judge: Chip | None, heard: Heard) -> str:
    """Why nothing was heard of time."""
    if judge is None:
        return f"the Hexagon version of {chip} is not known here; known chips are {', '.join(sorted(CHIPS))}"
    if not heard.known:
        return (
            f"the libraries have QNN interface {heard.interface or '(unknown)'}, and edge-opt's probe was tried with "
            f"{KNOWN_INTERFACES} (onnxruntime-qnn 2.3 to 2.7)"
        )
    return f"the compiler gave none for {judge.name}"


def _time(graph: Graph, chip: str) -> TimeEstimate | None:
    if not _EVENTS.keys() <= graph.events.keys():
        return None
    return TimeEstimate(chip=chip, **{name: graph.events[event] for event, name in _EVENTS.items()})


def _find_tool() -> tuple[Path, Path]:
    spec = find_spec("ai_edge_litert")
    assert spec is not None, "ai-edge-litert is a requirement of this package"
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    tool, plugin = root / "tools" / "apply_plugin_main", root / "vendors" / "qualcomm" / "compiler"
    if not tool.is_file() or not plugin.is_dir():
        raise CompilerMissingError(
            f"ai-edge-litert {version('ai-edge-litert')} in {root} has no ahead-of-time compiler for Qualcomm: its "
            f"wheel for x86-64 Linux has one from 2.1 on"
        )
    return tool, plugin


def _figures(
    path: Path, model: Model, compiled: dict[int, Compiled], times: Sequence[TimeEstimate | None]
) -> list[SpillFigures]:
    # The probe hears the partitions in the order in which the subgraphs stand in the file.
    parts, heard = {}, list(times)
    for index in sorted(compiled):
        count = compiled[index].partitions
        parts[index], heard = heard[:count], heard[count:]
    found = []
    for name, subgraph in model.entry_points():
        index = next(place for place, graph in enumerate(model.subgraphs) if graph is subgraph)
        entry = compiled.get(index)
        if entry is None:
            raise CompilerFailedError(
                f"{path.name}: the Hexagon compiler says nothing of signature '{name}' (subgraph {index}): "
                f"its plugin may not know the chip, see --soc"
            )
        found.append(
            SpillFigures(
                signature=name,
                operators=entry.operators,
                taken=entry.taken,
                partitions=entry.partitions,
                floor=read_floor(subgraph),
                time=_sum(parts[index]),
                **entry.figures,
            )
        )
    return found


def _sum(times: Sequence[TimeEstimate | None]) -> TimeEstimate | None:
    known = [time for time in times if time is not None]
    return sum(known[1:], start=known[0]) if known else None
