"""Text for users: names, counts, sizes and progress.

Text from a model may contain any characters.
"""

import math
import re
import signal
from collections.abc import Callable, Iterable, Sequence

_LONGEST = 70
_KIBI = 1024
# Control characters, line separators, bidirectional marks, lone surrogates and noncharacters.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_PACKAGES = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z])")
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps done, and the total number of steps."""


def shortened(name: str) -> str:
    """Shorten a tensor's name, which has a module path for each fused operator, to the end of the first."""
    first, *fused = name.split(";")
    parts = [_PACKAGES.sub("", part) for part in first.split("/")]
    if fused and fused[0].isdigit():
        parts[-1] += f";{fused[0]}"
    whole = "/".join(parts)
    while len(parts) > 1 and len("/".join(parts)) > _LONGEST:
        del parts[0]
    kept = "/".join(parts)[-_LONGEST:]
    return kept if kept == whole else f"...{kept}"


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
    return [name if name and names.count(name) == 1 else f"{name}#{n}" for n, name in enumerate(names)]


def listed(texts: Iterable[str], most: int = 6) -> str:
    """The first few texts, and the number of the others: 'a, b and 3 more'."""
    every = list(texts)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"{', '.join(every[:most])}{more}"


def one_line(text: str) -> str:
    """Escape invisible characters, including line breaks, so that no name in a file can forge a line."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {'KMGT'[power - 1]}iB"
