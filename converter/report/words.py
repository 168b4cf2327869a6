"""Text of a model, which may hold anything, made fit for a page."""

import html
import re

# Control characters, line separators, what turns the direction of writing, and halves of characters.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def one_line(text: str) -> str:
    """Text in one line; characters that cannot be seen become their numbers."""
    return _UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escape(text: str) -> str:
    """Text for HTML."""
    return html.escape(one_line(text))
