"""Renders a report as Markdown with Mermaid diagrams, and that as one HTML page; names from a model are escaped.

The page needs no network and no scripts; its template is `page.html`, its style `page.css`.
"""

import html
import re
from collections.abc import Iterable
from importlib import resources
from string import Template

from edge_opt.base.words import one_line
from edge_opt.inspection.picture import Example

Table = list[tuple[str, ...]]
"""Rows; the first has the headings."""
Part = str | Table | Example
"""A sentence, a table, or a block before and after."""

_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|#(?=\s*$)")
_TAGS = {"&": "&amp;", "<": "&lt;"}


def to_markdown(title: str, summary: str, sections: Iterable[tuple[str, Part]], *, drawn: bool = True) -> str:
    """Render the report; each section has a title and one part. Blocks are `drawn` as graphs, or listed as text."""
    parts = [f"# edge-opt: {_text(title)}", _text(summary)]
    for heading, part in sections:
        parts.append(f"## {_text(heading)}")
        if isinstance(part, str):
            parts.append(_text(part))
        elif isinstance(part, Example):
            for caption, operators in part.versions().items():
                listed = (f"    {one_line(line)}" for line in part.lines(operators))
                graph = f"```mermaid\n{part.mermaid(operators)}\n```" if drawn else "\n".join(listed)
                parts += [f"{_text(caption)}:", graph]
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
    from markdown_it import MarkdownIt  # noqa: PLC0415 - not needed for other formats

    frame, style = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css")
    )
    text = to_markdown(title, summary, sections, drawn=False)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return Template(frame).substitute(title=html.escape(one_line(title)), style=style, body=body)
