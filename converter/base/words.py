"""Text for users: names, counts, sizes and progress.

Text from a model may contain any characters.
"""

import math
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

_LONGEST = 70  # characters of a name
_WIDEST = 200  # characters of a column
_KIBI = 1024
# Characters that count as printable, but draw nothing: fillers, an empty Braille cell, and variation selectors.
_BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
)
_PACKAGES = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z])")
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps done, and the total number of steps."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def shortened(name: str) -> str:
    """Shorten a tensor's name, which has a module path for each fused operator, to the end of the first."""
    first, *fused = name.split(";")
    parts = [_PACKAGES.sub("", part) for part in first.split("/")]
    if fused and fused[0].isdigit():
        parts[-1] += f";{fused[0]}"
    whole = "/".join(parts)
    if len(whole) <= _LONGEST:
        return whole
    end = whole[-_LONGEST - 1 :]  # with the character before, which may be the slash
    _, slash, last_parts = end.partition("/")
    return f"...{last_parts if slash else end[1:]}"


def cut(text: str) -> str:
    """The text, or its first characters if it is too long for a column."""
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def signal_name(number: int) -> str:
    """The name of a signal; `signal N` for most real-time ones, which have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_below(name: str, part: str) -> str:
    """Name a tensor derived from another: `attn/add;19` and `head_0` give `attn/add/head_0;19`.

    Model Explorer draws an operator in the box of the last path that `;` separates, so the new part goes before it.
    """
    path, mark, fused = name.partition(";")
    return f"{path}/{part}{mark}{fused}"


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with their place if they are empty or repeated."""
    counts = Counter(names)
    return [name if name and counts[name] == 1 else f"{name}#{n}" for n, name in enumerate(names)]


class UniqueNames:
    """Tells names apart: a name that is `taken` gets a number, from 2 on, after a mark."""

    def __init__(self, taken: Iterable[str] = (), mark: str = "_") -> None:
        self._taken = set(taken)
        self._mark = mark
        self._counts = Counter[str]()  # by name, the numbers that are taken

    def unique(self, name: str) -> str:
        """The name, or the name with its first free number; it is taken from now on."""
        found = name
        while found in self._taken:
            self._counts[name] += 1
            found = f"{name}{self._mark}{self._counts[name] + 1}"
        self._taken.add(found)
        return found


def listed(texts: Iterable[str], most: int = 6) -> str:
    """The first few texts, and the number of the others: 'a, b and 3 more'."""
    every = list(texts)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"{', '.join(every[:most])}{more}"


def one_line(text: str) -> str:
    """Escape all but visible characters and spaces: no text from a file can forge a line or steer a terminal.

    Line breaks, controls, zero-width characters, marks that change the direction and lone surrogates are not visible.
    """
    if text.isprintable() and _BLANK.isdisjoint(text):
        return text
    return "".join(_visible(letter) for letter in text)


def _visible(letter: str) -> str:
    if letter.isprintable() and letter not in _BLANK:
        return letter
    return letter.encode("unicode_escape").decode()


def many(count: int, noun: str) -> str:
    """'1 block', '2 blocks'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: int | None) -> str:
    """Bytes with three significant digits: 1536 -> '1.50 KiB'."""
    if count is None:
        return "?"
    if count < _KIBI:
        return f"{count} B"
    power = min(int(math.log(count, _KIBI)), 4)
    value = count / _KIBI**power
    unit = f"{'KMGT'[power - 1]}iB"
    if value >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
