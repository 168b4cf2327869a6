"""Renders a report as Markdown with Mermaid diagrams, or as one HTML page; names from a model are escaped.

The page needs no network and no scripts; its template is `page.html`, its style `page.css`.
"""

import re
from collections.abc import Iterable
from importlib import resources
from string import Template

from edge_opt.base.words import escape, html_table, many, one_line
from edge_opt.inspection.picture import Example

Table = list[tuple[str, ...]]
"""Rows; the first has the headings."""
Part = str | Table | Example
"""A sentence, a table, or a block before and after."""

_ROWS_OPEN = 12
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_TAGS = {"&": "&amp;", "<": "&lt;"}


def to_markdown(title: str, summary: str, sections: Iterable[tuple[str, Part]]) -> str:
    """Render the report; each section has a title and one part."""
    parts = [f"# edge-opt: {_text(title)}", _text(summary)]
    for heading, part in sections:
        parts.append(f"## {_text(heading)}")
        if isinstance(part, str):
            parts.append(_text(part))
        elif isinstance(part, Example):
            for caption, operators in part.versions().items():
                parts += [f"{_text(caption)}:", f"```mermaid\n{part.mermaid(operators)}\n```"]
        else:
            head, *body = (f"| {' | '.join(map(_text, row))} |" for row in part)
            parts.append("\n".join([head, "|" + " --- |" * len(part[0]), *body]))
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Escape untrusted text for Markdown."""
    plain = "".join(_TAGS.get(letter, letter) for letter in one_line(text))
    return _MARKS.sub(lambda match: f"\\{match[0]}", plain)


def to_html(title: str, summary: str, sections: Iterable[tuple[str, Part]]) -> str:
    """Render the report as a page; each section has a title and one part."""
    frame, style = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css")
    )
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{_html_part(part)}</section>" for heading, part in sections
    )
    return Template(frame).substitute(title=escape(title), summary=escape(summary), style=style, body=body)


def _html_part(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Example):
        texts = {key: "\n".join(map(escape, part.lines(one))) for key, one in part.versions().items()}
        return "".join(
            f"<figure><figcaption>{escape(caption)}</figcaption><pre>{text}</pre></figure>"
            for caption, text in texts.items()
        )
    rows, table = len(part) - 1, html_table(part)
    folded = f"<details><summary>{many(rows, 'row')}</summary>{table}</details>"
    return folded if rows > _ROWS_OPEN else table
