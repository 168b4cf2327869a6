"""The errors that a user can cause; a message is one sentence: what, where, expected, actual, what to do."""

from typing import ClassVar


class EdgeOptError(Exception):
    """Base of every error that input, options or the machine can cause; `exit_code` is the command line's."""

    exit_code: ClassVar[int] = 3


class UsageError(EdgeOptError):
    """An option or argument has a value that cannot work."""

    exit_code: ClassVar[int] = 2


class ModelFormatError(EdgeOptError):
    """The file is not a model we can read; names the table, the field and the byte offset."""

    def __init__(
        self, message: str, *, table: str | None = None, field: str | None = None, offset: int | None = None
    ) -> None:
        place = ".".join(part for part in (table, field) if part)
        where = f"{place}: " if place else ""
        at = f" (at byte {offset})" if offset is not None else ""
        super().__init__(f"{where}{message}{at}")
        self.table = table
        self.field = field
        self.offset = offset


class OutputError(EdgeOptError):
    """The output could not be written; nothing was left behind."""

    exit_code: ClassVar[int] = 5
