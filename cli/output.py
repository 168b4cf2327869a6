"""Prints lines, tables and JSON on standard output, errors and progress on standard error.

Text from a model is untrusted: control characters are escaped.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from edge_opt.base.errors import OutputError
from edge_opt.base.words import Progress, cut, one_line

EXIT_BUG = 70
"""The exit code for a bug in edge-opt."""
GOOD = "32"
"""The colour of a good verdict."""
BAD = "1;31"
"""The colour of a bad verdict."""
Found = TypeVar("Found")


def make_tolerant() -> None:
    """Escape characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(*lines: str, colour: str = "") -> None:
    """Print lines; a line break inside one comes from a name in a file, and is escaped."""
    text = "".join(f"{one_line(line)}\n" for line in lines)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    coloured = colour and not plain and sys.stdout is not None and sys.stdout.isatty()
    write(f"\x1b[{colour}m{text}\x1b[0m" if coloured else text)


def answer(
    found: Found, show: Callable[[Found], None], *, as_json: bool, quiet: bool = False
) -> None:
    """Print a command's result as JSON, or else with `show` unless `quiet`."""
    if as_json:
        say_json(found)
    elif not quiet:
        show(found)


def say_json(value: Any) -> None:
    """Print a value as one JSON object; NaN and infinities become null."""
    from edge_opt.base.record import to_json

    # The text is ASCII, in which only DEL is not escaped.
    text = json.dumps(to_json(value), indent=2, allow_nan=False)
    write(text.replace("\x7f", "\\u007f") + "\n")


def complain(sentence: str) -> None:
    """Print one line on standard error, ignoring failures."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{one_line(' '.join(sentence.splitlines()))}\n")
            sys.stderr.flush()


@contextlib.contextmanager
def bar(*, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error, for the library's `progress`; None without a terminal or if `quiet`."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as parts  # slow to load, and only needed here
    from rich.console import Console

    # Stages hold names from files: no markup in them is interpreted. A narrow terminal has no room for a longer bar.
    columns = (
        parts.TextColumn("{task.description}", markup=False),
        parts.BarColumn(20),
        *parts.Progress.get_default_columns()[2:],
    )
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, parts.TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(cut(one_line(stage)))
            shown.update(tasks[stage], completed=done, total=total)

        yield update


def table(rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Align rows in columns; all but the first `left` columns are right-aligned."""
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        cells = [cut(one_line(cell)) for cell in column]
        width = max(map(len, cells))
        align = str.ljust if place < left else str.rjust
        columns.append([align(cell, width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def write(text: str) -> None:
    """Write text and flush it; OutputError if that fails, BrokenPipeError if the reader has closed the pipe."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Else the interpreter fails to write the rest when it exits, and complains.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"standard output could not be written: {error.strerror}") from error
