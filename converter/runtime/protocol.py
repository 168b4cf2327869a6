"""Messages between parent and worker: a line of JSON, then arrays in numpy's format; no pickled objects.

The JSON's `arrays` lists the names of the arrays that follow. Dataclasses in a header become dicts, and
`edge_opt.base.record.from_dict` restores them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from io import BufferedRWPair
from typing import Any

import numpy as np
from numpy.lib.format import read_array, write_array
from numpy.typing import NDArray

from edge_opt.runtime.errors import DeclinedError

Array = NDArray[Any]
Arrays = dict[str, Array]
Header = dict[str, Any]

_MAX_HEADER = 64 << 20
_KINDS = "biufc"


def send(channel: BufferedRWPair, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Send a message.

    Raises:
        DeclinedError: an array's dtype has no raw bytes (strings, objects).
        OSError: the connection is closed.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            text = f"tensor '{name}' has elements of type {array.dtype}, which cannot be passed on"
            raise DeclinedError(text)
    channel.write(json.dumps({**header, "arrays": list(arrays)}, default=asdict).encode() + b"\n")
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
        return header, {name: read_array(channel, allow_pickle=False) for name in header.pop("arrays")}
    except (ValueError, TypeError, KeyError) as error:
        raise EOFError("not a message" if line else "nothing more is sent") from error
