"""The worker process, and the frames between us and it: a length, a JSON header, raw array bytes; no pickled objects.

    magic (4 bytes) | header length (uint32, little-endian) | header | the arrays one after the other

The header's `arrays` lists name, dtype and shape of each. Dataclasses go into a header by `asdict`, and
`edge_opt.base.record.from_dict` makes them again. What frames mean is not known here.
"""

import fcntl
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base import processes
from edge_opt.base.words import signal_name
from edge_opt.runtime.errors import RuntimeUnavailable

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


ENDED = (EOFError, ConnectionError, FrameError)
"""What an exchange raises when the worker is gone, or somebody else answers."""

_STARTUP_SECONDS = 120.0
_ENDING_SECONDS = 2.0
_LOG_KEPT = 16 << 10
# glibc gives each thread a heap of its own, and what one of them frees is not there for the next.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "MALLOC_ARENA_MAX": "1"}


class ChildProcess:
    """One child process, the socket for requests and replies, and the last of what the child prints.

    Raises:
        RuntimeUnavailable: the system starts no process.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise RuntimeUnavailable(
                "the Python interpreter's own path is unknown, so no worker process can be started: "
                "run python by its full path"
            )
        self._channel, theirs = map(_above_streams, socket.socketpair())
        try:
            self._child = processes.start_module(
                "edge_opt.runtime.worker",
                theirs.fileno(),
                environment={name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()},
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            self._channel.close()
            raise RuntimeUnavailable(
                f"no worker process can be started ({error.strerror}): free memory or processes, or verify nothing"
            ) from error
        finally:
            theirs.close()
        self.pid = self._child.pid
        self._log = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Waits for the first frame, which says that the runtime is loaded.

        Raises:
            RuntimeUnavailable: it is not, and no model is to blame; the child has been ended.
        """
        if self._ready:
            return
        try:
            reply, _ = receive(self._channel, time.monotonic() + _STARTUP_SECONDS)
        except (*ENDED, TimeoutError) as error:
            self.end(error)
            reply = {"reason": f"the worker process ended with {self.ending()}"}
        if "reason" in reply:
            raise RuntimeUnavailable(
                f"the LiteRT runtime could not be loaded ({reply['reason']}): check the installation of "
                "ai-edge-litert, or go on without verification (verify='none')"
            )
        self._ready = True

    def exchange(self, header: Header, arrays: Arrays, seconds: float) -> tuple[Header, Arrays]:
        """Sends a request and reads its answer, both before the deadline."""
        deadline = time.monotonic() + seconds
        send(self._channel, frame(header, arrays), deadline)
        return receive(self._channel, deadline)

    def end(self, why: BaseException | None = None) -> None:
        """Ends the child, and collects it.

        One that hung up (so `why` is one of `ENDED`) is ending by itself: its own exit status says why.
        """
        try:
            self._child.wait(_ENDING_SECONDS if isinstance(why, ENDED) else 0)
        except subprocess.TimeoutExpired:
            processes.end(self._child)
        self._listener.join(_ENDING_SECONDS)
        self._channel.close()

    def stop(self) -> None:
        """Kill the child and leave the rest to whoever waits for its answer."""
        self._ready = False
        processes.kill(self._child)

    def ending(self) -> str:
        """How the child ended, in words, with the last line that the runtime printed."""
        status = self._child.returncode
        how = signal_name(-status) if status < 0 else f"exit status {status}"
        lines = self._log.decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith(("INFO:", "WARNING:"))]
        return f"{how}; its last words: {said[-1][:300]}" if said else how

    def _listen(self) -> None:
        """Takes what the runtime prints off its pipe, so that it never waits for a reader."""
        assert self._child.stdout is not None
        with self._child.stdout as printed:
            while words := printed.read(1 << 16):
                self._log += words
                del self._log[:-_LOG_KEPT]


def _above_streams(end: socket.socket) -> socket.socket:
    """The same socket under a number above 2: 0 to 2 are free in a daemon, and the child's own streams take them."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
