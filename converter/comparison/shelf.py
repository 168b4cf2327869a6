"""Keeps the outputs of one model while the other one runs: in memory while they are small, else in a file."""

import tempfile
from contextlib import ExitStack
from typing import IO, Self

import numpy as np

from edge_opt.proof.protocol import Array, Arrays

_KEPT_IN_MEMORY = 64 << 20


class Shelf:
    """Arrays by run and name; the file has no name and goes with the shelf."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, str], Array] = {}
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()
        self._in_memory = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()
        self._stack.close()

    def keep(self, run: int, outputs: Arrays) -> None:
        """Takes the arrays out of `outputs`."""
        for name in list(outputs):
            array = outputs.pop(name)
            if self._in_memory + array.nbytes > _KEPT_IN_MEMORY and array.nbytes:
                array = self._to_file(array)
            else:
                self._in_memory += array.nbytes
            self._arrays[run, name] = array

    def get(self, run: int, name: str) -> Array:
        """The array of that run."""
        return self._arrays[run, name]

    def _to_file(self, array: Array) -> Array:
        if self._file is None:
            self._file = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is
        offset = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._file.flush()
        return np.memmap(self._file, array.dtype, "r", offset, array.shape)
