"""Names and sizes in words, the same in every format."""

from __future__ import annotations

import html
import re

# Control characters, line separators, what turns the direction of writing, and halves of characters.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_UNITS = ("bytes", "KiB", "MiB", "GiB")


def one_line(text: str) -> str:
    """Text of a model, which may hold anything; characters that cannot be seen become their numbers."""
    return _UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escape(text: str) -> str:
    """Text of a model for HTML."""
    return html.escape(one_line(text))


def size(count: int) -> str:
    """A number of bytes, in powers of 1024."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[0]}" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"
