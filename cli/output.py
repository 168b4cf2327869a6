"""Prints: lines and tables for people, one JSON object for programs, complaints and progress on standard error.

Text from a model is untrusted: control characters are shown, not sent to the terminal.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from edge_opt.base.words import Progress

EXIT_BUG = 70
"""Of a mistake of ours."""

GOOD, BAD = "32", "1;31"
"""The colours of verdicts."""


def make_tolerant() -> None:
    """Let no name in a model or path break printing, whatever the terminal's encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(*lines: str, colour: str = "") -> None:
    """Lines on standard output; a line break within one is written out, for it came from a name in a file."""
    text = "".join(f"{_printable(line)}\n" for line in lines)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    coloured = colour and not plain and sys.stdout is not None and sys.stdout.isatty()
    _write(f"\x1b[{colour}m{text}\x1b[0m" if coloured else text)


def answer(values: dict[str, Any], show: Callable[[], None], *, as_json: bool, quiet: bool = False) -> None:
    """What a command found: as JSON where that is asked for, else for people, unless they asked for quiet."""
    if as_json:
        say_json(values)
    elif not quiet:
        show()


def say_json(value: dict[str, Any]) -> None:
    """The one JSON object of `--json`; a figure that is not a finite number is null."""
    from edge_opt.base.record import to_json

    _write(json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


def complain(sentence: str) -> None:
    """One line on standard error; there is nothing left to do where even that fails."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{_printable(' '.join(sentence.splitlines()))}\n")
            sys.stderr.flush()


@contextlib.contextmanager
def bar(*, wanted: bool = True) -> Iterator[Progress | None]:
    """A bar on standard error, as a library call takes `progress`; None where that is no terminal, or not `wanted`."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    # Loaded here: a bar is only ever needed by a person who waits.
    from rich import progress as parts
    from rich.console import Console

    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.TaskProgressColumn(),
        parts.TimeElapsedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, parts.TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage)
            shown.update(tasks[stage], completed=done, total=total)

        yield update


def flush() -> None:
    """Hand everything printed so far to the operating system.

    Raises:
        OutputError: standard output cannot be written.
        BrokenPipeError: nobody reads it any more.
    """
    _write("")


def discard_rest() -> None:
    """Send what is still buffered for standard output nowhere, so that the interpreter ends in silence."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def table(rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows as aligned columns, the first row being the heads; all but the first `left` columns end flush right."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return [line.rstrip() for line in lines]


def _write(text: str) -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from edge_opt.base.errors import OutputError

        discard_rest()
        raise OutputError(f"standard output could not be written: {error.strerror}") from error


def _printable(text: str) -> str:
    from edge_opt.base.words import one_line

    return one_line(text)
