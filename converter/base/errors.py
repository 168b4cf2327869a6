"""Errors that a user can cause; each message is one line: problem, place, expected, actual, fix."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

_MOST_NAMED = 16
_NEAREST = 5

TRACEBACK = "EDGE_OPT_TRACEBACK"
"""Environment variable: if set, a bug in edge-opt ends the program at once with a traceback."""


class EdgeOptError(Exception):
    """Base of all errors that input, options or the machine can cause; `exit_code` is the command line's.

    `result` is the partial result, of the type that the function returns; None if there is none.
    """

    exit_code: ClassVar[int] = 3
    result: Any = None


class UsageError(EdgeOptError):
    """An option or argument has a value that cannot work."""

    exit_code: ClassVar[int] = 2


class ModelFormatError(EdgeOptError):
    """The file is not a readable model; the message names the table, the field and the byte offset."""

    def __init__(
        self,
        message: str,
        *,
        table: str | None = None,
        field: str | None = None,
        offset: int | None = None,
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


def did_you_mean(name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: the closest name in `known` or `also`, or else those to choose from.

    These are the names that begin with the same two letters, as chips of one vendor do, or else all in `known`. If they
    are many, only the nearest are named.
    """
    wanted = str(name).lower()
    names = [*known]
    in_lower_case = {each.lower(): each for each in [*names, *also]}
    close = get_close_matches(wanted, in_lower_case, 1)
    if close:
        return f"did you mean '{in_lower_case[close[0]]}'?"
    alike = [one for lower, one in in_lower_case.items() if lower[:2] == wanted[:2]] or names
    if len(alike) > _MOST_NAMED:
        nearest = get_close_matches(str(name), alike, _NEAREST, cutoff=0)
        return f"the nearest of {len(alike)} are: {', '.join(nearest)}"
    return f"there are: {', '.join(alike) or 'none'}"


def unknown(kind: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> UsageError:
    """The error for an unknown name; names in `also` are suggested, but not listed."""
    return UsageError(f"{kind} '{name}' does not exist, {did_you_mean(name, known, also)}")


def match_names(kind: str, wanted: str | Iterable[str] | None, known: Collection[str]) -> list[str]:
    """The known names that match `wanted` names or patterns such as `prefill_*`; UsageError if one matches none.

    None stands for all names.
    """
    if wanted is None:
        wanted = "*"
    found: dict[str, None] = {}
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        fitting = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise unknown(kind, pattern, known)
        found |= dict.fromkeys(fitting)
    return list(found)
