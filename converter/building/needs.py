"""Estimates what the build of a checkpoint will need, from the number of its weights, before it begins."""

import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_opt.base.words import size
from edge_opt.building.checkpoint import DAMAGED, stored_in
from edge_opt.building.stages import MORE_MEMORY

_EXPORT_IN_MEMORY = "export in memory"
_MEMORY = {
    "round": (1.0, 2.0),
    "export": (2.5, 5.0),
    _EXPORT_IN_MEMORY: (1.5, 12.0),
    "calibrate": (1.5, 2.5),
    "quantize": (1.5, 2.5),
    "narrow": (1.5, 2.5),
    "optimize": (1.5, 6.0),
    "compile": (1.0, 7.5),
}
"""Bytes of memory that a stage needs: billions for any model, and those for each weight.

Measured with Qwen2.5-Coder-0.5B and 1.5B.
"""
_DISK = 16
"""Bytes for each weight: two copies in float32, and a bundle in 8 bits for each stage."""
_SECONDS = 440
"""Time for a billion weights, on two cores."""


class Needs(NamedTuple):
    """Bytes of memory by stage, bytes of disk, and minutes on two cores without the evaluation."""

    memory: dict[str, int]
    disk: int
    minutes: int

    def lines(self, folder: Path) -> list[str]:
        """The estimate, and a warning for each resource of which this machine has less."""
        stage = max(self.memory, key=self.memory.__getitem__)
        most = self.memory[stage]
        estimate = (
            f"Estimated need: {size(most)} of memory (stage {stage}), {size(self.disk)} of disk, and on two cores "
            f"{self.minutes} minutes without the evaluation"
        )
        lines = [estimate]
        memory = _free_memory()
        if memory < most:
            lines.append(f"Warning: only {size(memory)} of memory is free: {MORE_MEMORY}")
        disk = shutil.disk_usage(folder).free
        if disk < self.disk:
            lines.append(
                f"Warning: only {size(disk)} of disk is free in {folder}: give another work=..."
            )
        return lines


def needs_of(files: Sequence[Path], stages: Iterable[str], *, streams: bool) -> Needs:
    """The needs of these stages for a checkpoint with these files; `streams` as the setting `use_v2`."""
    weights = sum(map(_weights_in, files))
    memory: dict[str, int] = {}
    for stage in stages:
        kind = _EXPORT_IN_MEMORY if stage == "export" and not streams else stage
        always, each = _MEMORY[kind]
        memory[stage] = int(always * 1e9 + each * weights)
    return Needs(memory, _DISK * weights, math.ceil((1 + weights / 1e9 * _SECONDS) / 60))


def _weights_in(file: Path) -> int:
    """The number of weights in a file; of other files than safetensors, by the size of 16-bit ones."""
    try:
        return sum(math.prod(one.shape) for one in stored_in(file).values())
    except DAMAGED:
        return file.stat().st_size // 2


def _free_memory() -> int:
    """Bytes of memory and swap that can be used."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {name: text.split()[0] for name, _, text in (line.partition(":") for line in lines)}
    return 1024 * (int(fields["MemAvailable"]) + int(fields["SwapFree"]))
