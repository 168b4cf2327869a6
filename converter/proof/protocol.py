"""The frames between us and the worker: a length, a JSON header, then raw array bytes; never pickled objects.

    magic (4 bytes) | header length (uint32, little-endian) | header | the arrays one after the other

The header's `arrays` lists name, dtype and shape of each. Dataclasses go into a header by `asdict`, and
`edge_opt.output.record.from_dict` makes them again.
"""

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
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


def frame(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[memoryview]:
    """The pieces of one frame; array bytes are views, not copies.

    Raises:
        FrameError: an array's dtype has no raw bytes (strings, objects).
    """
    listed = []
    pieces = []
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise FrameError(f"tensor '{name}' has elements of type {array.dtype}, which cannot be passed on")
        listed.append([name, array.dtype.str, list(array.shape)])
        if array.size:
            pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    encoded = json.dumps({**header, "arrays": listed}).encode()
    return [memoryview(_PREFIX.pack(_MAGIC, len(encoded)) + encoded), *pieces]


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
    try:
        header: Header = json.loads(text)
    except ValueError as error:
        raise FrameError("not a frame") from error
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


def send(channel: socket.socket, pieces: Iterable[memoryview], deadline: float | None = None) -> None:
    """Send all of a frame.

    Raises:
        ConnectionError: the other side is gone.
        TimeoutError: the deadline (of `time.monotonic`) passed.
    """
    for piece in pieces:
        _watch(channel, deadline)
        channel.sendall(piece)


def receive(channel: socket.socket, deadline: float | None = None) -> tuple[Header, Arrays]:
    """The next frame.

    Raises:
        EOFError, ConnectionError: the other side is gone.
        FrameError: what came is not a frame.
        TimeoutError: the deadline (of `time.monotonic`) passed.
    """

    def fill(view: memoryview) -> None:
        while view:
            _watch(channel, deadline)
            count = channel.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]

    return read_frame(fill)


def _watch(channel: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)
