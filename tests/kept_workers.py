"""Worker processes that serve more than one caller: starting them took a third of the suite's time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from edge_opt.runtime import runner
from edge_opt.runtime.runner import ChildProcess, Worker


def is_idle(process: ChildProcess) -> bool:
    return process._ready and process._child.poll() is None


class _Idle(list[ChildProcess]):
    """Worker processes that ended one test well and serve the next."""

    def take(self) -> ChildProcess:
        while self:
            process = self.pop()
            if is_idle(process):
                return process
        return ChildProcess()

    def put(self, worker: Worker) -> None:
        process, worker._process = worker._process, None
        if process is not None and is_idle(process) and sys.exception() is None:
            self.append(process)
        elif process is not None:
            process.end()


@contextmanager
def kept_workers() -> Iterator[None]:
    """Workers that are closed here leave their processes to those that are started later."""
    idle = _Idle()

    def close(worker: Worker) -> None:
        idle.put(worker)

    with patch.object(runner, "ChildProcess", idle.take), patch.object(Worker, "close", close):
        yield
    for process in idle:
        process.end()
