"""Text for people, the same wherever it is shown: names, counts and sizes, HTML, and how far work is.

Text of a model may hold anything.
"""

import html
import math
import re
import signal
from collections.abc import Callable, Sequence

_LONGEST = 70
_KIBI = 1024
# Control characters, line separators, what turns the direction of writing, and halves of characters.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_PACKAGES = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z])")
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps that are done, and the steps in all."""


def shortened(name: str) -> str:
    """A tensor's name for people: of a path of Python modules for each fused operator, the end of the first."""
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
    """What a signal is called; most real-time ones have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_below(name: str, part: str) -> str:
    """The name of a tensor that is made of another: `attn/add;19` and `head_0` give `attn/add/head_0;19`.

    Model Explorer draws an operator in the box of the last path that `;` separates, so what is new goes in front of it.
    """
    path, mark, fused = name.partition(";")
    return f"{path}/{part}{mark}{fused}"


def one_line(text: str) -> str:
    """The text with what cannot be seen written out, a line break among it: no name in a file can forge a line."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def many(count: int, noun: str) -> str:
    """'1 block', '2 blocks'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: int | None) -> str:
    """Bytes, with three digits that count: 1536 -> '1.50 KiB'."""
    if count is None:
        return "?"
    if count < _KIBI:
        return f"{count} B"
    power = min(int(math.log(count, _KIBI)), 4)
    value = count / _KIBI**power
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {'KMGT'[power - 1]}iB"


def escape(text: str) -> str:
    """Text for HTML."""
    return html.escape(one_line(text))


def html_table(rows: Sequence[Sequence[str]], kind: str = "scroll") -> str:
    """Rows as a table, the first being its heads."""
    head, *body = rows
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in body)
    return f'<div class="{kind}"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def as_html(text: str, rows: Sequence[Sequence[str]]) -> str:
    """What a notebook shows of an object: its lines, and a table."""
    return "".join(f"<div>{escape(line)}</div>" for line in text.splitlines()) + html_table(rows)
