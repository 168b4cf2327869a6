"""Keeps arrays in a file while something else runs, so that they take no memory."""

from pathlib import Path

import numpy as np

from edge_opt.proof.protocol import Arrays


def keep(arrays: Arrays, path: Path) -> Arrays:
    """The same arrays, mapped from the end of a file that they are written to; they are taken out of `arrays`."""
    kept: Arrays = {}
    with path.open("ab") as file:
        for name in list(arrays):
            array = np.ascontiguousarray(arrays.pop(name))
            place = file.tell()
            file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            kept[name] = np.memmap(path, array.dtype, "r", place, array.shape) if array.size else array
    return kept
