"""A progress bar on standard error, where that is a terminal and nobody asked for quiet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


@contextmanager
def bar(*, wanted: bool = True) -> Iterator[Progress | None]:
    """What a library call takes as `progress`; None where no bar is to be seen."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    # Loaded here: a bar is only ever needed by a person who waits.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage)
            shown.update(tasks[stage], completed=done, total=total)

        yield update
