"""The frames between us and the worker: a length, a JSON header, then raw array bytes; never pickled objects.

    magic (4 bytes) | header length (uint32, little-endian) | header | the arrays one after the other

The header's `arrays` lists name, dtype and shape of each. Both sides move bytes through callbacks, so that one
can block and the other can watch the clock.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]
Header = dict[str, Any]

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"EOv1"
_MAX_HEADER = 64 << 20
_MAX_PAYLOAD = 1 << 40
_KINDS = "biufc"


class FrameError(Exception):
    """The bytes are not a frame: the other side wrote something else. Never reaches a user."""


def frame(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    """The pieces of one frame; array bytes are views, not copies.

    Raises:
        FrameError: an array's dtype has no raw bytes (strings, objects).
    """
    listed = []
    pieces = []
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise FrameError(f"tensor '{name}' has elements of type {array.dtype}, which cannot be passed on")
        flat = np.ascontiguousarray(array)
        listed.append([name, array.dtype.str, list(array.shape)])
        if flat.size:
            pieces.append(flat.reshape(-1).view(np.uint8).data)
    encoded = json.dumps({**header, "arrays": listed}).encode()
    yield memoryview(_PREFIX.pack(_MAGIC, len(encoded)) + encoded)
    yield from pieces


def read_frame(fill: Callable[[memoryview], None]) -> tuple[Header, Arrays]:
    """One frame; `fill` must fill the whole view or raise.

    Raises:
        FrameError: what came is not a frame.
    """
    prefix = bytearray(_PREFIX.size)
    fill(memoryview(prefix))
    magic, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > _MAX_HEADER:
        raise FrameError("not a frame")
    text = bytearray(length)
    fill(memoryview(text))
    header: Header = json.loads(text)
    arrays: Arrays = {}
    total = 0
    for name, code, shape in header.pop("arrays"):
        dtype = np.dtype(code)
        total += math.prod(shape) * dtype.itemsize
        if dtype.kind not in _KINDS or total > _MAX_PAYLOAD:
            raise FrameError("not an array")
        array: Array = np.empty(shape, dtype)
        if array.size:
            fill(array.reshape(-1).view(np.uint8).data)
        arrays[name] = array
    return header, arrays
