"""Runs a program and watches the memory of it and of all its descendants together; Linux only."""

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_EVERY_SECONDS = 0.03


@dataclass(frozen=True)
class Run:
    """Seconds, the most bytes that all processes held at one time, and what became of it.

    Pages of files (libraries, in the main) are counted once, of the process that has most of them.
    """

    seconds: float
    peak: int
    status: int
    timed_out: bool
    said: str
    complaint: str


def run(
    command: list[str], *, most_bytes: int | None = None, most_seconds: float | None = None
) -> Run:
    """Run it to its end, or until it has used up its time; `most_bytes` limits each process's private memory."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=_as_installed())
        if most_bytes is not None:
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))
        watch = _Watch(process.pid)
        watch.start()
        timed_out = _wait(process, most_seconds)
        seconds = time.perf_counter() - started
        watch.ended.set()
        watch.join()
        out.seek(0)
        err.seek(0)
        said, complaint = (file.read().decode(errors="replace") for file in (out, err))
        return Run(seconds, watch.peak, process.returncode, timed_out, said, complaint)


def _as_installed() -> dict[str, str]:
    """The environment in which Python keeps compiled modules, as an installation has them from the start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _wait(process: subprocess.Popen[bytes], most_seconds: float | None) -> bool:
    try:
        process.wait(most_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


class _Watch(threading.Thread):
    """Looks at the processes again and again; what grows and shrinks in between is missed."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.peak = 0
        self._pid = pid

    def run(self) -> None:
        while not self.ended.wait(_EVERY_SECONDS):
            self.peak = max(self.peak, _together(_family(self._pid)))


def _family(pid: int) -> list[int]:
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        found.append(current)
        try:
            for task in Path(f"/proc/{current}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile
    return found


def _together(pids: list[int]) -> int:
    private, shared = 0, 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        sizes = {
            line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")
        }
        private += int(sizes.get("RssAnon", 0)) + int(sizes.get("RssShmem", 0))
        shared = max(shared, int(sizes.get("RssFile", 0)))
    return (private + shared) << 10


def python(code: str, *arguments: str | Path, interpreter: str = sys.executable) -> list[str]:
    """The command that runs a piece of Python."""
    return [interpreter, "-c", code, *map(str, arguments)]
