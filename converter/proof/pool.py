"""Several worker processes that share the work, which is begun in the order in which it is submitted.

Work that asks for a worker of its own gets one while there are any left. Other work shares the workers that run
already: it is prepared while a worker does something else. A worker does one thing at a time.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from edge_opt.proof.runner import Worker

Result = TypeVar("Result")


def free_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """At most `count` workers and as many things at a time; the first is started by `start`, or when there is work."""

    def __init__(self, count: int) -> None:
        self.count = max(count, 1)
        self.workers = [Worker() for _ in range(self.count)]
        self._users = dict.fromkeys(range(self.count), 0)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.count, "proof")

    def start(self) -> None:
        """Start the first, so that loading the runtime overlaps with other work."""
        self.workers[0].start()

    def submit(self, do: Callable[[Worker], Result], *, alone: bool = True) -> Future[Result]:
        """Have a worker do something. Without `alone`, no worker is started for it if one runs."""
        return self._threads.submit(self._carry_out, do, alone)

    def close(self) -> None:
        """End all of them, what still runs included."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.retire()
        self._threads.shutdown()
        for worker in self.workers:
            worker.close()

    def _carry_out(self, do: Callable[[Worker], Result], alone: bool) -> Result:
        with self._lock:
            there = [place for place, worker in enumerate(self.workers) if worker.pid is not None]
            usable = range(self.count) if alone else there or [0]
            # Of equally busy ones that which is there: a start takes time and memory.
            chosen = min(usable, key=lambda place: (self._users[place], place not in there))
            self._users[chosen] += 1
        try:
            return do(self.workers[chosen])
        finally:
            with self._lock:
                self._users[chosen] -= 1
