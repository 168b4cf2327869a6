"""Messages between us and the worker: JSON, then the raw bytes of arrays; no pickled objects.

A message begins with a JSON header whose `arrays` lists name, dtype and shape of each array that follows. Dataclasses
go into a header as they are, and `edge_opt.base.record.from_dict` makes them again.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.runtime.errors import DeclinedError

Array = NDArray[Any]
Arrays = dict[str, Array]
Header = dict[str, Any]

_MAX_HEADER = 64 << 20
_MAX_PAYLOAD = 1 << 40
_KINDS = "biufc"


class MessageError(Exception):
    """What came is no message. Never reaches a user."""


def send(channel: Connection, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Send a message.

    Raises:
        DeclinedError: an array's dtype has no raw bytes (strings, objects).
        OSError: the other side is gone.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            text = f"tensor '{name}' has elements of type {array.dtype}, which cannot be passed on"
            raise DeclinedError(text)
    listed = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    channel.send_bytes(json.dumps({**header, "arrays": listed}, default=asdict).encode())
    for array in arrays.values():
        if array.size:
            channel.send_bytes(_raw(np.ascontiguousarray(array)))


def receive(channel: Connection, deadline: float = math.inf) -> tuple[Header, Arrays]:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone.
        MessageError: what came is no message.
        TimeoutError: the deadline (of `time.monotonic`) passed.
    """
    _wait(channel, deadline)
    try:
        header: Header = json.loads(channel.recv_bytes(_MAX_HEADER))
        listed = [(name, np.dtype(code), shape) for name, code, shape in header.pop("arrays")]
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in listed)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError("not a message") from error
    if size > _MAX_PAYLOAD or any(dtype.kind not in _KINDS for _, dtype, _ in listed):
        raise MessageError("not arrays")
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in listed}
    for array in filter(np.size, arrays.values()):
        _wait(channel, deadline)
        try:
            taken = channel.recv_bytes_into(_raw(array))
        except BufferTooShort:
            taken = 0
        if taken != array.nbytes:
            raise MessageError("not the array that was announced")
    return header, arrays


def _raw(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _wait(channel: Connection, deadline: float) -> None:
    if not channel.poll(None if math.isinf(deadline) else max(deadline - time.monotonic(), 0)):
        raise TimeoutError
