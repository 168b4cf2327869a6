"""Text and tables as HTML, for reports and for what a notebook shows. Text of a model may hold anything."""

import html
from collections.abc import Sequence

from edge_opt.output.words import one_line


def escape(text: str) -> str:
    """Text for HTML."""
    return html.escape(one_line(text))


def table(rows: Sequence[Sequence[str]], kind: str = "scroll") -> str:
    """Rows as a table, the first being its heads."""
    head, *body = rows
    cells = "".join(f"<th scope=col>{escape(text)}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in body)
    return f"<div class={kind}><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"


def shown(text: str, rows: Sequence[Sequence[str]]) -> str:
    """What a notebook shows of an object: its lines, and a table."""
    return "".join(f"<div>{escape(line)}</div>" for line in text.splitlines()) + table(rows)
