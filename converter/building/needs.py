"""Estimates what the build of a checkpoint will need, from the number of its weights, before it begins."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge_opt.base import processes
from edge_opt.base.words import many, size
from edge_opt.building import large_blocks
from edge_opt.building.checkpoint import DAMAGED, stored_in
from edge_opt.schema.litertlm import SUFFIX

_MEMORY = {
    "round": (3.0, 2.3),
    "export": (4.0, 6.5),
    "check": (0.7, 2.9),
    "calibrate": (1.4, 3.8),
    "quantize": (1.3, 4.7),
    "narrow": (0.4, 1.9),
    "optimize": (0.2, 5.3),
    "compile": (1.0, 8.5),
    "evaluate": (2.4, 2.0),
    "emulate": (1.0, 8.5),
}
"""Memory of a stage: billions of bytes for any model, and bytes for each weight.

Of its largest process; of all its processes for `evaluate` and `emulate`. From Qwen2.5-Coder-0.5B and 1.5B, except that
`emulate`, which compiles the same graphs, is assumed to need as much as `compile`.
"""
_EXPORT_IN_MEMORY = (2.6, 13.1)
"""The same for an export that does not stream the weights."""
_DISK = 22
"""Bytes for each weight: three copies in float32 during the export, and a bundle for each stage."""
_LARGEST_GRAPH = 3_670_016 << 10
"""Bytes that Qualcomm's compiler takes in one graph: its limit for SM8750 (QAIRT 2.51); other chips were not tried."""
_GRAPH = 1.045
"""Bytes of a graph for each byte of weights: 3,958,532 KiB for Gemma 3 4B's shape at 8 bits."""
_SECONDS = 500
"""Time for a billion weights, on two cores."""
_SECONDS_TO_ROUND = 1050
"""The same for the stage `round`."""


class Needs(NamedTuple):
    """Bytes of memory by stage, of disk and of a graph, and minutes on two cores without the evaluation."""

    memory: dict[str, int]
    disk: int
    graph: int
    minutes: int

    def lines(self, folder: Path, vendor: str) -> list[str]:
        """The estimate, and a warning for each resource of which this machine, or the vendor's compiler, has less."""
        stage = max(self.memory, key=self.memory.__getitem__)
        most = self.memory[stage]
        disk = self.disk
        warnings: list[str] = []
        memory = processes.free_memory()
        if memory < most:
            warning = f"Warning: only {size(memory)} of memory is free"
            if large_blocks.variables(folder):
                disk += most
                warning += f", so stages that need more keep a part of theirs in files in {folder}, and take longer"
            warnings.append(f"{warning}: {processes.MORE_MEMORY}")
        free = shutil.disk_usage(folder).free
        if free < disk:
            warnings.append(
                f"Warning: only {size(free)} of disk is free in {folder}: use another work folder"
            )
        if vendor == "qualcomm" and self.graph > _LARGEST_GRAPH:
            warnings.append(
                f"Warning: a graph may need {size(self.graph)}, and the compiler takes {size(_LARGEST_GRAPH)} for "
                f"SM8750: use a smaller checkpoint, or weights in 4 bits if they are not"
            )
        estimate = (
            f"Estimated need: {size(most)} of memory (stage {stage}), {size(disk)} of disk, and on two cores "
            f"{many(self.minutes, 'minute')} without the evaluation"
        )
        return [estimate, *warnings]


def needs_of(files: Sequence[Path], *, rounds: bool, streams: bool) -> Needs:
    """The needs of the stages for a checkpoint, or a bundle, with these files.

    `rounds` is true if its weights are rounded; `streams` is the setting `use_v2`.
    """
    weights = sum(map(_weights_in, files))
    figures = _MEMORY if streams else {**_MEMORY, "export": _EXPORT_IN_MEMORY}
    memory: dict[str, int] = {}
    for stage, (always, each) in figures.items():
        if rounds or stage != "round":
            memory[stage] = int(always * 1e9 + each * weights)
    seconds = _SECONDS + (_SECONDS_TO_ROUND if rounds else 0)
    graph = int(_GRAPH * (weights / 2 if rounds else weights))
    return Needs(memory, _DISK * weights, graph, math.ceil((60 + seconds * weights / 1e9) / 60))


def _weights_in(file: Path) -> int:
    """The number of weights in a file; if it is not of safetensors, by its size: of 8 bits in a bundle, else of 16."""
    if file.suffix == SUFFIX:
        return file.stat().st_size
    try:
        return sum(math.prod(one.shape) for one in stored_in(file).values())
    except DAMAGED:
        return file.stat().st_size // 2
