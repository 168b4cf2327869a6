"""A vendor's compiler as a process, and how it can fail."""

from collections.abc import Mapping, Sequence
from subprocess import CompletedProcess, TimeoutExpired

from edge_opt import processes
from edge_opt.output.errors import EdgeOptError, UsageError


class CompilerMissingError(UsageError):
    """The compiler, or the vendor's libraries that it needs, are not on this machine."""


class CompilerFailedError(EdgeOptError):
    """The compiler ended without a result, or printed figures that we cannot read."""


class CompilerTimeoutError(CompilerFailedError):
    """The compiler was not done in the time that it was given; with more it may be."""


def run(
    name: str,
    command: Sequence[str],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """How it ended, and what it printed on both streams; CompilerTimeoutError after `seconds`."""
    try:
        return processes.run(command, seconds, environment)
    except TimeoutExpired as error:
        raise CompilerTimeoutError(
            f"{name} was not done after {seconds:g} seconds; give more with seconds=..."
        ) from error


def ended(code: int) -> str:
    """What is known of a process that does not say why it ended."""
    return processes.killed_by(code) or "it does not say why"
