"""Child processes that end with their parent.

`run` runs any program; `start_module` runs a module of edge-opt that calls `begin_child`.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_opt.base.words import signal_name

MORE_MEMORY = "close other programs, add swap, or use a larger machine"
"""What to do if memory runs out."""

_COUNTERS = Path("/proc/vmstat")
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_CONTAINERS = (
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
)
"""Of both versions of control groups: the file of the limit, that of figures, and the figure of used memory."""

# Asks Linux for a SIGKILL when the parent ends, then executes the program under the same process id.
_LAUNCHER = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""

_running: set[subprocess.Popen[str]] = set()


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program; return its exit status, stdout and stderr."""
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _LAUNCHER, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    ) as process:
        _running.add(process)
        try:
            output, errors = process.communicate()
        finally:
            process.kill()
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def end_all() -> None:
    """Kill all programs that `run` waits for, in any thread; each `run` then returns."""
    for process in tuple(_running):
        process.kill()


def start_module(
    module: str, *arguments: object, environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a module of edge-opt in its own session, out of reach of the terminal's signals.

    Its main function gets the `arguments` as text from `begin_child`. `environment` has variables to set, `streams` are
    options of `subprocess.Popen`. OSError if the system cannot start a process.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
    # The child finds the same packages, even if `sys.path` was changed here.
    variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path)  # noqa: PTH100
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, arguments)],
        stderr=subprocess.STDOUT,
        env={**variables, **environment},
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, **streams},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child of `start_module` and all processes that it left, even if it has ended itself, and wait for it."""
    with suppress(ProcessLookupError, PermissionError):  # macOS may not kill one that has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killed_by(status: int) -> str:
    """'killed by SIGKILL' for the exit status of a process that a signal ended, else ''."""
    return f"killed by {signal_name(-status)}" if status < 0 else ""


def ended_for_memory() -> int:
    """How many processes Linux has ended since it started because memory ran out; 0 on other systems."""
    with suppress(OSError):
        return _figures(_COUNTERS)["oom_kill"]
    return 0


def free_memory() -> int:
    """Bytes of memory and swap that can be used; without Linux's figures, all memory of the machine.

    At most what the limit of the container leaves.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        figures = _figures(_MEMORY_INFO)
        free = 1024 * (figures["MemAvailable:"] + figures["SwapFree:"])
    for limit_file, figures_file, used in _CONTAINERS:
        with suppress(OSError, ValueError):  # "max" if there is no limit
            most = int((_CONTROL_GROUPS / limit_file).read_text(encoding="ascii"))
            free = min(free, most)
            figures = _figures(_CONTROL_GROUPS / figures_file)
            free = min(free, max(most - figures[used], 0))
    return free


def _figures(path: Path) -> Counter[str]:
    """The numbers of a file of Linux with a name and a number in each line; 0 for other names."""
    figures: Counter[str] = Counter()
    for line in path.read_text(encoding="ascii").splitlines():
        name, count, *_ = line.split()
        figures[name] = int(count)
    return figures


def begin_child() -> list[str]:
    """Return this child process's arguments; from now on it ends with its parent, without core dumps."""
    parent, *arguments = sys.argv[1:]
    limit(resource.RLIMIT_CORE, 0)

    def end_with_parent() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    return arguments


def limit(what: int, value: int) -> None:
    """Set only the soft limit of a resource, so that it can be raised later."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
