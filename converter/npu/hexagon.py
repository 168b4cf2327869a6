"""Compiles a model for a Hexagon NPU on this machine: LiteRT's ahead-of-time tool with the user's own QNN libraries.

No phone takes part and nothing is kept but the figures. The libraries are never copied or bundled.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.npu.errors import CompilerFailedError, CompilerMissingError
from edge_opt.npu.figures import SpillFigures
from edge_opt.npu.floor import read_floor
from edge_opt.npu.hexagon_log import Compiled, first_complaint, library_version, read_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.ir import Model

DEFAULT_CHIP = "SM8750"
SDK_VARIABLES = ("EDGE_OPT_QNN", "QNN_SDK_ROOT")
_LIBRARY = "libQnnHtp.so"
# Qualcomm's SDK keeps its x86-64 libraries in the first, the wheel of onnxruntime-qnn in the second.
_PLACES = ("lib/x86_64-linux-clang", "onnxruntime_qnn", ".")
# The plugin is linked against this one for chips without an HTP and calls nothing of it here; the wheel lacks it.
_UNUSED_LIBRARY, _STAND_IN = "libQnnLpai.so", "libQnnSystem.so"
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
        if (folder / _LIBRARY).is_file():
            return folder.resolve()
    raise CompilerMissingError(f"{root} holds no {_LIBRARY} for x86-64 Linux: {_HOW_TO_GET}")


def compile_model(
    path: Path,
    model: Model,
    *,
    sdk: str | os.PathLike[str] | None,
    chip: str | None,
    flags: Sequence[str],
    seconds: float | None = None,
) -> tuple[list[SpillFigures], dict[str, str]]:
    """Figures of every entry point of `model`, which `path` holds, and the versions that they were measured with.

    Raises:
        CompilerMissingError: the tool or the libraries are not here.
        CompilerFailedError: the compiler ended without a result, or took longer than `seconds`; an operator that it
            refuses is no such failure.
    """
    libraries = find_libraries(sdk)
    tool, plugin = _find_tool()
    try:
        done = _run(tool, plugin, libraries, path, chip or DEFAULT_CHIP, flags, seconds)
    except subprocess.TimeoutExpired as error:
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler was not done after {seconds:g} seconds"
        ) from error
    if done.returncode:
        reason = first_complaint(done.stdout, done.stderr) or "it does not say why"
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler ended with code {done.returncode}: {reason}; try other compiler flags "
            f"or another form"
        )
    try:
        compiled = {entry.subgraph: entry for entry in read_log(done.stdout, done.stderr)}
    except ValueError as error:
        raise CompilerFailedError(
            f"{path.name}: the Hexagon compiler's log cannot be read: {error}"
        ) from error
    versions = {"ai-edge-litert": version("ai-edge-litert")}
    qnn = library_version(done.stderr)
    if qnn is not None:
        versions["qnn"] = qnn
    return _figures(path, model, compiled), versions


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


def _run(
    tool: Path,
    plugin: Path,
    libraries: Path,
    path: Path,
    chip: str,
    flags: Sequence[str],
    seconds: float | None,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        search = [str(libraries)]
        if not (libraries / _UNUSED_LIBRARY).exists():
            (Path(folder) / _UNUSED_LIBRARY).symlink_to(libraries / _STAND_IN)
            search.append(folder)
        known = os.environ.get("LD_LIBRARY_PATH")
        command = [
            str(tool),
            "--cmd=apply",
            f"--model={path}",
            f"--o={folder}/compiled.tflite",
            f"--libs={plugin}",
            "--soc_manufacturer=Qualcomm",
            f"--soc_model={chip}",
            *flags,
        ]
        return subprocess.run(
            command,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join([*search, *([known] if known else [])])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )


def _figures(path: Path, model: Model, compiled: dict[int, Compiled]) -> list[SpillFigures]:
    found = []
    for name, subgraph in model.entry_points():
        index = next(place for place, graph in enumerate(model.subgraphs) if graph is subgraph)
        entry = compiled.get(index)
        if entry is None:
            raise CompilerFailedError(
                f"{path.name}: the Hexagon compiler says nothing of signature '{name}' (subgraph {index}): "
                f"its plugin may not know the chip, see --chip"
            )
        found.append(
            SpillFigures(
                signature=name,
                operators=entry.operators,
                taken=entry.taken,
                partitions=entry.partitions,
                floor=read_floor(subgraph),
                **entry.figures,
            )
        )
    return found
