"""The worker process, and the messages between us and it: JSON, then the raw bytes of arrays; no pickled objects.

A message begins with a JSON header whose `arrays` lists name, dtype and shape of each array that follows. Dataclasses
go into a header as they are, and `edge_opt.base.record.from_dict` makes them again.
"""

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base import processes
from edge_opt.base.words import signal_name
from edge_opt.runtime.errors import RuntimeUnavailable

Array = NDArray[Any]
Arrays = dict[str, Array]
Header = dict[str, Any]

_MAX_HEADER = 64 << 20
_MAX_PAYLOAD = 1 << 40
_KINDS = "biufc"


class MessageError(Exception):
    """What came, or is to go, is no message. Never reaches a user."""


ENDED = (EOFError, OSError, MessageError)
"""What an exchange raises when the worker is gone, or somebody else answers."""


def send(channel: Connection, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Send a message.

    Raises:
        MessageError: an array's dtype has no raw bytes (strings, objects).
        OSError: the other side is gone.
    """
    listed = []
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise MessageError(
                f"tensor '{name}' has elements of type {array.dtype}, which cannot be passed on"
            )
        listed.append([name, array.dtype.str, list(array.shape)])
    channel.send_bytes(json.dumps({**header, "arrays": listed}, default=asdict).encode())
    for array in arrays.values():
        if array.size:
            channel.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError("not a message") from error
    total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in listed)
    if total > _MAX_PAYLOAD or any(dtype.kind not in _KINDS for _, dtype, _ in listed):
        raise MessageError("not arrays")
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in listed}
    for array in arrays.values():
        if array.size:
            _wait(channel, deadline)
            try:
                taken = channel.recv_bytes_into(array.reshape(-1).view(np.uint8).data)
            except BufferTooShort:
                taken = 0
            if taken != array.nbytes:
                raise MessageError("not the array that was announced")
    return header, arrays


def _wait(channel: Connection, deadline: float) -> None:
    left = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0)
    if not channel.poll(left):
        raise TimeoutError


_STARTUP_SECONDS = 120.0
_ENDING_SECONDS = 2.0
_LOG_KEPT = 16 << 10
# glibc gives each thread a heap of its own, and what one of them frees is not there for the next.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "MALLOC_ARENA_MAX": "1"}


class ChildProcess:
    """One child process, the channel for requests and replies, and the last of what the child prints.

    Raises:
        RuntimeUnavailable: the system starts no process.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise RuntimeUnavailable(
                "the Python interpreter's own path is unknown, so no worker process can be started: "
                "run python by its full path"
            )
        ours, theirs = map(_above_streams, socket.socketpair())
        self._channel = Connection(ours)
        try:
            self._child = processes.start_module(
                "edge_opt.runtime.worker",
                theirs,
                environment={name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()},
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs,),
            )
        except OSError as error:
            self._channel.close()
            raise RuntimeUnavailable(
                f"no worker process can be started ({error.strerror}): free memory or processes, or verify nothing"
            ) from error
        finally:
            os.close(theirs)
        self.pid = self._child.pid
        self._log = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Waits for the first message, which says that the runtime is loaded.

        Raises:
            RuntimeUnavailable: it is not, and no model is to blame; the child has been ended.
        """
        if self._ready:
            return
        try:
            reply, _ = receive(self._channel, time.monotonic() + _STARTUP_SECONDS)
        except ENDED as error:
            self.end(error)
            reply = {"reason": f"the worker process ended with {self.ending()}"}
        if "reason" in reply:
            raise RuntimeUnavailable(
                f"the LiteRT runtime could not be loaded ({reply['reason']}): check the installation of "
                "ai-edge-litert, or go on without verification (verify='none')"
            )
        self._ready = True

    def exchange(self, header: Header, arrays: Arrays, seconds: float) -> tuple[Header, Arrays]:
        """Sends a request and reads its answer before the deadline."""
        deadline = time.monotonic() + seconds
        send(self._channel, header, arrays)
        return receive(self._channel, deadline)

    def end(self, why: BaseException | None = None) -> None:
        """Ends the child, and collects it.

        One that hung up (so `why` is one of `ENDED`, but no timeout) is ending by itself: its exit status says why.
        """
        hung_up = isinstance(why, ENDED) and not isinstance(why, TimeoutError)
        try:
            self._child.wait(_ENDING_SECONDS if hung_up else 0)
        except subprocess.TimeoutExpired:
            processes.end(self._child)
        self._listener.join(_ENDING_SECONDS)
        self._channel.close()

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


def _above_streams(end: socket.socket) -> int:
    """The same socket under a number above 2: 0 to 2 are free in a daemon, and the child's own streams take them."""
    with end:
        return fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3)
