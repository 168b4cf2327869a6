"""A vendor's compiler as a process: it has so many seconds, does not outlive whoever waits for it, and may fail."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from edge_opt.output.errors import EdgeOptError, UsageError
from edge_opt.output.words import signal_name


class CompilerMissingError(UsageError):
    """The compiler, or the vendor's libraries that it needs, are not on this machine."""


class CompilerFailedError(EdgeOptError):
    """The compiler ended without a result, or printed figures that we cannot read."""


class CompilerTimeoutError(CompilerFailedError):
    """The compiler was not done in the time that it was given; with more it may be."""


# Asks Linux for a SIGKILL when whoever started it is gone, then becomes the compiler: the number of the process stays.
_WITH_PARENT = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

_running: set[subprocess.Popen[str]] = set()


def run(
    name: str,
    command: Sequence[str],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """How it ended, and what it printed on both streams; CompilerTimeoutError after `seconds`."""
    with subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WITH_PARENT, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    ) as process:
        _running.add(process)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise CompilerTimeoutError(
                f"{name} was not done after {seconds:g} seconds; give more with seconds=..."
            ) from error
        except BaseException:
            process.kill()
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def end_all() -> None:
    """Kill every compiler that is running for this process, in whichever thread; what waits for it gets its failure."""
    for process in tuple(_running):
        process.kill()


def ended(code: int) -> str:
    """What is known of a process that does not say why it ended."""
    return f"killed by {signal_name(-code)}" if code < 0 else "it does not say why"
