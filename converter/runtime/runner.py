"""The parent's side of a worker process: checks of models, requests and errors.

Nothing here loads the native runtime, and models that our own reader or graph checks refuse never reach it.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np

from edge_opt.base import processes
from edge_opt.base.atomic import scratch_file
from edge_opt.base.errors import EdgeOptError
from edge_opt.base.packages import warn_if_overwritten
from edge_opt.base.record import from_dict
from edge_opt.base.words import signal_name
from edge_opt.ir import load
from edge_opt.ir.opening import Part, check_weights_inside
from edge_opt.runtime.inputs import Planned
from edge_opt.runtime.loop import Loop
from edge_opt.runtime.protocol import (
    Array,
    Arrays,
    Header,
    RunModel,
    RuntimeCrashed,
    RuntimeFailed,
    RuntimeRefused,
    RuntimeTimedOut,
    RuntimeUnavailable,
    receive,
    send,
)
from edge_opt.runtime.tensors import MAIN, Kernels

Runnable = str | os.PathLike[str] | bytes
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_BASE_MEMORY = 4 << 30
_MEMORY_PER_BYTE = 3
_UNKNOWN_OPERATOR = re.compile(r"unresolved custom op: ([^.\s]+)")
_STARTUP_SECONDS = 120.0
_ENDING_SECONDS = 2.0
_LOG_READ = 16 << 10
# By default, glibc gives each thread its own heap, and memory freed in one cannot be reused in another.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "MALLOC_ARENA_MAX": "1"}


class ChildProcess:
    """One child process, the socket for requests and replies, and a file with the child's output.

    Raises:
        RuntimeUnavailable: the process cannot be started.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._channel = self._socket.makefile("rwb")
        self._log = scratch_file()
        try:
            with theirs:
                self._child = processes.start_module(
                    "edge_opt.runtime.native",
                    environment={
                        name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()
                    },
                    stdin=theirs,
                    stdout=self._log,
                )
        except OSError as error:
            self._close()
            raise RuntimeUnavailable(
                f"no worker process can be started ({error.strerror}): free memory or processes, or skip verification"
            ) from error
        self._ready = False

    def exchange(self, header: Header, arrays: Arrays, seconds: float) -> tuple[Header, Arrays]:
        """Send a request and read its answer; the time for loading the runtime is not counted.

        Raises:
            RuntimeUnavailable: the runtime cannot be loaded, whatever the model.
            RuntimeTimedOut, RuntimeCrashed: the child did not answer in time, or ended.
        """
        try:
            self._socket.settimeout(_STARTUP_SECONDS)
            if not self._ready:
                receive(self._channel)
            self._ready = True
            self._socket.settimeout(seconds)
            send(self._channel, header, arrays)
            return receive(self._channel)
        except (EOFError, OSError) as error:
            raise self._failure(error, seconds) from None

    def _failure(self, error: Exception, seconds: float) -> EdgeOptError:
        """The error for a request without an answer."""
        if not self._ready:
            return RuntimeUnavailable(
                f"the LiteRT runtime could not be loaded (the worker process ended with {self._ending(error)}): "
                "check the installation of ai-edge-litert, or skip verification (verify='none')"
            )
        if isinstance(error, TimeoutError):
            return RuntimeTimedOut(
                f"the runtime gave no answer within {seconds:g} s and was stopped; "
                "look for an endless loop in the model"
            )
        return RuntimeCrashed(
            f"the runtime's process ended with {self._ending(error)}; unless it was killed from outside, LiteRT's "
            "kernels abort on this model (`edge-opt inspect` names known causes)"
        )

    def end(self) -> None:
        """End the child and wait for it."""
        processes.end(self._child)
        self._close()

    def _close(self) -> None:
        with suppress(OSError):  # unsent data is lost
            self._channel.close()
        self._socket.close()
        self._log.close()

    def _ending(self, error: Exception) -> str:
        """Describe how the child ended, with the last line that it printed."""
        try:
            # A child that closed the socket is about to exit; its exit status says why.
            self._child.wait(0 if isinstance(error, TimeoutError) else _ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            processes.end(self._child)
        status = self._child.returncode
        how = signal_name(-status) if status < 0 else f"exit status {status}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _LOG_READ, 0))
        printed = self._log.read().decode(errors="replace")
        lines = map(str.strip, printed.splitlines())
        said = [line for line in lines if line and not line.startswith(("INFO:", "WARNING:"))]
        return f"{how}; its last output: {said[-1][:300]}" if said else how


class Worker(AbstractContextManager["Worker"]):
    """A child process that runs models; a context manager, started at the first request or by `start()`.

    A request may take `time_limit` seconds, and 4 GiB of private memory plus 3 times the model's size (XNNPACK packs
    float weights), not counting mapped files. Only Linux enforces the memory limit (RLIMIT_DATA).

    Every request raises `RuntimeRefused` (the runtime's reason is in `.reason`), `RuntimeCrashed`, `RuntimeTimedOut`,
    or for a fault of edge-opt `RuntimeFailed`; the worker remains usable after each of them. An interrupt kills the
    child at once.
    """

    def __init__(self, *, time_limit: float = 600.0) -> None:
        self.time_limit = time_limit
        self._process: ChildProcess | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> ChildProcess:
        """Return the child process, after starting it if necessary; it loads the runtime in the background."""
        if self._process is None:
            warn_if_overwritten()
            self._process = ChildProcess()
        return self._process

    def close(self) -> None:
        """End the child; a later request starts a new one."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()

    def run(
        self,
        model: Runnable,
        signature: str | None,
        inputs: Mapping[str, Array],
        kernels: Kernels = "xnnpack",
    ) -> Arrays:
        """Run one signature on one set of inputs (by the signature's names) and return its outputs.

        `signature` may be None if the model has at most one; without any, `description` names the inputs of subgraph 0.
        """
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        return self.run_calls(model, [(signature, ())], kernels, arrays)[0]

    def run_calls(
        self,
        model: Runnable,
        calls: Sequence[Planned],
        kernels: Kernels = "xnnpack",
        arrays: Arrays | None = None,
    ) -> list[Arrays]:
        """Load a model, call its signatures in order and return the outputs of each call; state is kept between calls.

        The worker makes the inputs from each call's plans; a call without plans uses `arrays`.
        """
        names = ", ".join(dict.fromkeys(f"'{signature or MAIN}'" for signature, _ in calls))
        where = f"model {_name(model)}, signature {names}, {kernels} kernels"
        _, results = self._ask("run", where, {MAIN: model}, arrays, kernels=kernels, calls=calls)
        outputs: list[Arrays] = [{} for _ in calls]
        for key, array in results.items():
            number, _, name = key.partition("/")
            outputs[int(number)][name] = array
        return outputs

    def generate(
        self, models: Mapping[str, Runnable], loop: Loop, kernels: Kernels = "xnnpack"
    ) -> Array:
        """Run a loop of prefill and decode; the logits of every step.

        All `models` are loaded at once; keys are the names in the loop's calls, including "main".
        """
        where = f"model {_name(models[MAIN])}, generating {loop.count} tokens on {kernels} kernels"
        _, results = self._ask("generate", where, models, kernels=kernels, loop=loop)
        return results["logits"]

    def apply(
        self,
        function: Callable[[Asked, RunModel], Answer],
        models: Mapping[str, Runnable],
        asked: Asked,
        *,
        seconds: float | None,
        where: str,
    ) -> Answer:
        """Call a function of this package in the worker, which can run these models; returns its answer.

        The function must be annotated: its argument `asked` and its result are dataclasses or tuples of them, and are
        sent as JSON. `seconds` replaces the worker's time limit; `where` begins messages. The reason of a refusal
        starts with the name of the model.
        """
        name = (function.__module__, function.__name__)
        reply, _ = self._ask("apply", where, models, seconds=seconds, function=name, asked=asked)
        answer: Answer = from_dict(get_type_hints(function)["return"], reply["answer"])
        return answer

    def _ask(
        self,
        operation: str,
        where: str,
        models: Mapping[str, Runnable],
        arrays: Arrays | None = None,
        seconds: float | None = None,
        **asked: Any,
    ) -> tuple[Header, Arrays]:
        """Make a request about models, which the worker reads from files; error messages begin with `where`."""
        arrays = arrays or {}
        seconds = self.time_limit if seconds is None else seconds
        size = sum(array.nbytes for array in arrays.values())
        paths: dict[str, str] = {}
        with ExitStack() as stack:
            for name, model in models.items():
                check_model(model)
                path = stack.enter_context(Part(model).file())
                size += path.stat().st_size
                paths[name] = str(path)
            memory = _BASE_MEMORY + _MEMORY_PER_BYTE * size
            header = {
                "operation": operation,
                "models": paths,
                "memory_limit": memory,
                "time_limit": seconds,
                **asked,
            }
            try:
                reply, results = self.start().exchange(header, arrays, seconds)
            except BaseException as error:
                self.close()
                if isinstance(error, RuntimeFailed):
                    error.args = (f"{where}: {error}",)
                raise
        if "error" in reply:
            raise _refusal(reply, where, memory)
        return reply, results


def _name(model: Runnable) -> str:
    """A model's name for messages: its quoted path, or its size if it is only bytes."""
    return f"of {len(model)} bytes" if isinstance(model, bytes) else f"'{os.fspath(model)}'"


def _refusal(reply: Header, where: str, memory: int) -> RuntimeFailed:
    kind = reply["error"]
    reason = reply["reason"]
    if kind == "internal":
        return RuntimeFailed(f"{where}: a fault of edge-opt, please report it: {reason}")
    if reason.startswith("no reason given") or reason == "out of memory":
        reason += f"; it was allowed {memory >> 20} MiB of memory"
    custom = _UNKNOWN_OPERATOR.search(reason)
    said = f"the runtime refused it: {reason}"
    if custom is not None:
        said = (
            f"the runtime has no kernel for the custom operator '{custom[1]}', so the model cannot be run; "
            "its rewrites can still be verified (verify='regions')"
        )
    return RuntimeRefused(f"{where}: {said}", reason)


def check_model(model: Runnable) -> None:
    """Check the model's tables and graphs; a file that passed and is unchanged since is not read again.

    Raises:
        ModelFormatError: the model is not valid.
    """
    if isinstance(model, bytes) or not Path(model).exists():
        check_weights_inside(load(model))  # the reader has the message for a missing file
    else:
        status = Path(model).stat()
        _check_file(os.fspath(model), status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _check_file(path: str, *_identity: int) -> None:
    check_weights_inside(load(path))
