"""The errors that a user can cause; a message is one sentence: what, where, expected, actual, what to do."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final

_MOST_NAMED = 40

TRACEBACK: Final = "EDGE_OPT_TRACEBACK"
"""Set in the environment: mistakes of edge-opt end the program at once, and show where they are."""


class EdgeOptError(Exception):
    """Base of every error that input, options or the machine can cause; `exit_code` is the command line's.

    `result` is what was done until then, as the function would have returned it; None where that was nothing.
    """

    exit_code: ClassVar[int] = 3
    result: Any = None


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that does not exist: the nearest one that does, or else what there is."""
    names = list(known)
    if close := get_close_matches(str(name), names, 1):
        return f"did you mean '{close[0]}'?"
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return f"there are: {', '.join(names[:_MOST_NAMED] + more) or 'none'}"


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist."""
    return UsageError(f"{kind} '{name}' does not exist, {did_you_mean(name, known)}")


def match_names(kind: str, wanted: str | Iterable[str], known: Collection[str]) -> list[str]:
    """The known names that fit `wanted` names or patterns such as `prefill_*`; UsageError where one fits none."""
    found: dict[str, None] = {}
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        fitting = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise unknown(kind, pattern, known)
        found |= dict.fromkeys(fitting)
    return list(found)
