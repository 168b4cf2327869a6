"""One worker process and its pipes: starting it, moving bytes before a deadline, and saying how it ended.

Knows frames but not what they mean.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time

from edge_opt.proof.errors import RuntimeUnavailable
from edge_opt.proof.protocol import Arrays, FrameError, Header, frame, read_frame

_STARTUP_SECONDS = 120.0
_LOG_KEPT = 16 << 10


class EndedError(Exception):
    """The worker closed its end of a pipe."""


class OutOfTimeError(Exception):
    """The deadline passed."""


class NotReadyError(Exception):
    """The child did not get as far as taking requests; the text is its reason, empty where it gave none."""


class ChildProcess:
    """One child process and its three pipes: requests, replies, and the log of whatever it prints.

    Raises:
        RuntimeUnavailable: the system starts no process.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise RuntimeUnavailable(
                "the Python interpreter's own path is unknown, so no worker process can be started: "
                "run python by its full path"
            )
        self._replies, answers = os.pipe()
        requests, self._requests = os.pipe()
        self._log, log = os.pipe()
        module = [sys.executable, "-P", "-m", "edge_opt.proof.worker", str(os.getpid()), str(answers)]
        try:
            self._child = subprocess.Popen(
                module, stdin=requests, stdout=log, stderr=log, pass_fds=(answers,), env=_environment()
            )
        except OSError as error:
            for descriptor in (self._requests, self._replies, self._log):
                os.close(descriptor)
            raise RuntimeUnavailable(
                f"no worker process can be started ({error.strerror}): free memory or processes, or verify nothing"
            ) from error
        finally:
            for descriptor in (requests, answers, log):
                os.close(descriptor)
        for descriptor in (self._requests, self._replies, self._log):
            os.set_blocking(descriptor, False)
        self.pid = self._child.pid
        self.log = bytearray()
        self._log_ended = False
        self._deadline = 0.0
        self._ready = False

    def wait_until_ready(self) -> None:
        """Waits for the first frame, which says that the runtime is loaded.

        Raises:
            NotReadyError: it is not, and no model is to blame.
        """
        if self._ready:
            return
        self._deadline = time.monotonic() + _STARTUP_SECONDS
        try:
            reply, _ = read_frame(self._fill)
        except (EndedError, OutOfTimeError, FrameError, json.JSONDecodeError) as error:
            raise NotReadyError from error
        if "error" in reply:
            raise NotReadyError(reply["reason"])
        self._ready = True

    def exchange(self, header: Header, arrays: Arrays, seconds: float) -> tuple[Header, Arrays]:
        """Sends a request and reads its answer, both before the deadline."""
        self._deadline = time.monotonic() + seconds
        for piece in frame(header, arrays):
            self._send(piece)
        return read_frame(self._fill)

    def kill(self, patience: float = 0.0) -> None:
        """Ends the child, after waiting `patience` seconds for it to end by itself; collects it, closes the pipes."""
        try:
            self._child.wait(patience)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child.wait()
        self._drain()
        for descriptor in (self._requests, self._replies, self._log):
            os.close(descriptor)

    def stop(self) -> None:
        """End the child and leave its pipes to whoever reads them."""
        self._child.kill()

    def ending(self) -> str:
        """How the child ended, in words, with the last line that the runtime printed."""
        status = self._child.returncode
        try:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        except ValueError:
            how = f"signal {-status}"
        lines = self.log.decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith(("INFO:", "WARNING:"))]
        return f"{how}; its last words: {said[-1][:300]}" if said else how

    def _send(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            self._wait(self._requests, select.POLLOUT)
            try:
                done += os.write(self._requests, piece[done:])
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EndedError from error

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            self._wait(self._replies, select.POLLIN)
            try:
                count = os.readv(self._replies, [view[done:]])
            except BlockingIOError:
                continue
            if count == 0:
                raise EndedError
            done += count

    def _wait(self, descriptor: int, event: int) -> None:
        """Until the descriptor is ready; what the runtime prints meanwhile is taken off its pipe."""
        poll = select.poll()
        poll.register(descriptor, event)
        if not self._log_ended:
            poll.register(self._log, select.POLLIN)
        while True:
            left = self._deadline - time.monotonic()
            ready = dict(poll.poll(left * 1000)) if left > 0 else {}
            if not ready:
                raise OutOfTimeError
            if self._log in ready:
                self._drain()
                if self._log_ended:
                    poll.unregister(self._log)
            if descriptor in ready:
                return

    def _drain(self) -> None:
        while not self._log_ended:
            try:
                words = os.read(self._log, 1 << 16)
            except BlockingIOError:
                return
            self._log_ended = not words
            self.log += words
            del self.log[:-_LOG_KEPT]


def _environment() -> dict[str, str]:
    """The child finds the same packages as we do, whatever was done to `sys.path` here."""
    environment = dict(os.environ)
    environment.pop("PYTHONINSPECT", None)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)  # noqa: PTH100
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # glibc gives each thread a heap of its own, and what one of them frees is not there for the next.
    environment.setdefault("MALLOC_ARENA_MAX", "1")
    return environment
