"""The file with the codes and scales of rounded weights: written while they are rounded, read when they are stored."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt.building.checkpoint import Layout, Streamed, create
from edge_opt.building.gptq import Floats, Grid

CODES = "codes.safetensors"
"""Name of the file."""
_LOGITS = "logits_inputs"


class CodesFile:
    """A new file: the rounded weights of modules by name, their biases, and the moments of the logits' inputs."""

    def __init__(self, path: Path, weights: Streamed, names: Iterable[str]) -> None:
        width = weights.model.config.hidden_size
        tensors: dict[str, Layout] = {_LOGITS: ("F32", (width, width))}
        biases: list[str] = []
        for name in names:
            module = weights.model.get_submodule(name)
            rows, columns = module.weight.shape
            tensors[f"{name}.codes"] = "I8", (rows, columns)
            tensors[f"{name}.scales"] = "F32", (rows,)
            if module.bias is not None:
                tensors[f"{name}.bias"] = "F32", (rows,)
                biases.append(f"{name}.bias")
        self._places = create(path, tensors)
        for name in biases:
            self._write(name, weights.read(name))

    def _write(self, name: str, numbers: Any) -> None:
        self._places[name].codes("r+")[:] = numbers

    def keep_moments(self, moments: Floats) -> None:
        """Write the moments."""
        self._write(_LOGITS, moments)

    def keep(self, name: str, grid: Grid) -> None:
        """Write the weights of a module."""
        self._write(f"{name}.codes", grid.codes)
        self._write(f"{name}.scales", grid.scales)

    def grid(self, name: str) -> Grid:
        """Read the weights of a module."""
        return Grid(self._places[f"{name}.codes"].codes(), self._places[f"{name}.scales"].codes())


@dataclass(frozen=True, slots=True)
class Rounded:
    """The products that the stage rounded, by name: weights, and biases if they have any (float32 `[rows]`).

    `moments` `[hidden, hidden]`: the sum of `x x'` over inputs x of the logits' product.
    """

    grids: dict[str, Grid]
    biases: dict[str, Floats]
    moments: Floats


def read_rounded(folder: Path) -> Rounded:
    """Read what the stage wrote."""
    from safetensors.numpy import load_file

    arrays = load_file(folder / CODES)
    moments = arrays.pop(_LOGITS)
    grids: dict[str, Grid] = {}
    biases: dict[str, Floats] = {}
    for key, array in arrays.items():
        name, _, part = key.rpartition(".")
        if part == "codes":
            grids[name] = Grid(array, arrays[f"{name}.scales"])
        elif part == "bias":
            biases[name] = array
    return Rounded(grids, biases, moments)
