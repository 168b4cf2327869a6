"""Several worker processes behind one door: what is submitted runs on the first that is free, in the order it came."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from edge_opt.proof.runner import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

Result = TypeVar("Result")
_STEP = 0.1  # seconds


def free_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """At most `count` workers; one is started when there is work for it and the others are busy."""

    def __init__(self, count: int) -> None:
        self.count = max(count, 1)
        self.workers = [Worker() for _ in range(self.count)]
        self._idle = self.workers[::-1]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.count, "proof")
        self._submitted: list[Future[Any]] = []

    def start(self) -> None:
        """Start the first, so that loading the runtime overlaps with other work."""
        self.workers[0].start()

    def submit(self, do: Callable[[Worker], Result]) -> Future[Result]:
        """Have a worker do something."""
        future = self._threads.submit(self._carry_out, do)
        self._submitted = [known for known in self._submitted if not known.done()] + [future]
        return future

    def close(self) -> None:
        """End all of them; what still runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while True:
            for worker in self.workers:
                worker.retire()
            if not wait(self._submitted, timeout=_STEP).not_done:
                break
        for worker in self.workers:
            worker.close()

    def _carry_out(self, do: Callable[[Worker], Result]) -> Result:
        with self._lock:
            worker = self._idle.pop()
        try:
            return do(worker)
        finally:
            with self._lock:
                self._idle.append(worker)
