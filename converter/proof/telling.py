"""Do the results of a run tell right from wrong? Where all is NaN or one value, or heads are alike, anything passes."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from edge_opt.proof.protocol import Array


def untold(results: Sequence[Array], parts: int) -> str:
    """Why the results do not tell, of the first output that does not; empty where all do.

    `parts`: along every axis that they divide, so many equal stretches (heads or tiles) must differ from each other.
    """
    for place, array in enumerate(results):
        if not np.isfinite(array).any():
            return f"output {place} is nowhere a finite number"
        if array.size == 1:
            continue
        numbers = array[~np.isnan(array)] if array.dtype.kind == "f" else array
        if numbers.min() == numbers.max():
            return f"output {place} is the same value everywhere"
        for axis, size in enumerate(array.shape):
            if parts > 1 and size % parts == 0 and len({*map(_digest, np.split(array, parts, axis))}) < parts:
                return f"of the {parts} parts of output {place} along axis {axis} some are equal"
    return ""


def _digest(piece: Array) -> bytes:
    return blake2b(piece.tobytes(), digest_size=16).digest()
