"""Do the results of a run tell right from wrong? Where all is NaN or one value, or heads are alike, anything passes."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Telling:
    """What is known of the results of all runs: values, and whether `parts` equal stretches of an axis differ."""

    def __init__(self, parts: int, outputs: int) -> None:
        self._parts = parts
        self._values: list[set[bytes]] = [set() for _ in range(outputs)]
        self._finite = [False] * outputs
        self._single = [True] * outputs
        self._stretches: list[dict[int, list[bytes]]] = [{} for _ in range(outputs)]

    def add(self, results: Sequence[Array]) -> None:
        """The results of one more run."""
        for place, array in enumerate(results):
            self._single[place] &= array.size <= 1
            self._finite[place] |= bool(np.isfinite(array).any())
            self._values[place] |= _two_values(array)
            for axis, size in enumerate(array.shape):
                if self._parts > 1 and size % self._parts == 0 and array.size:
                    known = self._stretches[place].setdefault(axis, [b""] * self._parts)
                    pieces = np.split(array, self._parts, axis)
                    known[:] = [_digest(before, piece) for before, piece in zip(known, pieces, strict=True)]

    def reason(self) -> str:
        """Why they do not tell, of the first output that does not; empty where all do."""
        for place, stretches in enumerate(self._stretches):
            if not self._finite[place]:
                return f"output {place} is nowhere a finite number"
            if self._single[place]:
                continue
            if len(self._values[place]) < 2:
                return f"output {place} is the same value everywhere"
            for axis, digests in stretches.items():
                if len(set(digests)) < self._parts:
                    return f"of the {self._parts} parts of output {place} along axis {axis} some are equal"
        return ""


def _two_values(array: Array) -> set[bytes]:
    """The bytes of one value, and of one that differs from it where there is one; NaN is none."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "f":
        flat = flat[~np.isnan(flat)]
    return {flat[place].tobytes() for place in (flat.argmin(), flat.argmax())} if flat.size else set()


def _digest(before: bytes, piece: Array) -> bytes:
    return blake2b(before + np.ascontiguousarray(piece).tobytes(), digest_size=16).digest()
