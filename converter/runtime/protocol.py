"""Messages between parent and worker, and the errors of both sides.

A message is a line of JSON, then arrays in numpy's format; no pickled objects. The JSON's `arrays` lists the names of
the arrays that follow. Dataclasses in a header become dicts, and `edge_opt.base.record.from_dict` restores them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import BufferedRWPair
from typing import Any

import numpy as np
from numpy.lib.format import read_array, write_array
from numpy.typing import NDArray

from edge_opt.base.errors import EdgeOptError

Array = NDArray[Any]
Arrays = dict[str, Array]
Header = dict[str, Any]
RunModel = Callable[[str, Any, Sequence[Array]], Sequence[Array]]
"""In the worker: runs a model, by name, on a kernel set; inputs and outputs are by position.

Raises DeclinedError if the kernels do not support the model.
"""

_MAX_HEADER = 64 << 20
KINDS = "biuf"
"""The kinds of numpy's types that are passed on: real numbers and flags."""


class RuntimeUnavailable(EdgeOptError):  # noqa: N818 - not an error in a model
    """The runtime's process cannot be started on this machine, whatever the model."""


class RuntimeFailed(EdgeOptError):  # noqa: N818 - its kinds say what the runtime did
    """The native runtime gave no result for this model."""


class RuntimeRefused(RuntimeFailed):
    """The runtime declined the model or its inputs; `reason` is the runtime's own message."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RuntimeCrashed(RuntimeFailed):
    """The runtime's process ended in the middle of a request."""


class RuntimeTimedOut(RuntimeFailed):
    """The runtime gave no answer within the time limit and was stopped."""


class DeclinedError(Exception):
    """In the worker: the runtime rejects a model or its inputs; the message is its reason."""


def check_types(arrays: Mapping[str, Array]) -> None:
    """Raise DeclinedError for an array of strings, objects or complex numbers."""
    for name, array in arrays.items():
        if array.dtype.kind not in KINDS:
            raise DeclinedError(
                f"tensor '{name}' has type {array.dtype}, which cannot be passed on"
            )


def send(channel: BufferedRWPair, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Send a message.

    Raises:
        DeclinedError: an array has strings, objects or complex numbers.
        OSError: the connection is closed.
    """
    check_types(arrays)
    line = json.dumps({**header, "arrays": list(arrays)}, default=asdict)
    channel.write(f"{line}\n".encode())
    for array in arrays.values():
        write_array(channel, np.asarray(array, order="C"), allow_pickle=False)
    channel.flush()


def receive(channel: BufferedRWPair) -> tuple[Header, Arrays]:
    """Receive the next message.

    Raises:
        EOFError, OSError: the connection is closed, or the data is not a message.
        TimeoutError: the socket's time limit passed.
    """
    line = channel.readline(_MAX_HEADER)
    try:
        header: Header = json.loads(line)
        arrays: Arrays = {}
        for name in header.pop("arrays"):
            arrays[name] = read_array(channel, allow_pickle=False)
        return header, arrays
    except (ValueError, TypeError, KeyError) as error:
        raise EOFError("not a message" if line else "nothing more is sent") from error
