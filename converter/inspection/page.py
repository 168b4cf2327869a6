"""A report as one HTML page: no network, no script, light and dark, readable on a phone.

The frame of the page and its style are the files `page.html` and `page.css` beside this module.
"""

from collections.abc import Iterable
from importlib import resources
from string import Template

from edge_opt.base.words import escape, html_table, many
from edge_opt.inspection.picture import Example, draw
from edge_opt.inspection.section import Section, Table

_ROWS_OPEN = 12


def to_html(title: str, summary: str, sections: Iterable[Section]) -> str:
    """The whole page."""
    frame, style = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css")
    )
    body = "".join(_section(section) for section in sections)
    return Template(frame).substitute(title=escape(title), summary=escape(summary), style=style, body=body)


def _section(section: Section) -> str:
    return f"<section><h2>{escape(section.title)}</h2>{''.join(map(_part, section.parts))}</section>"


def _part(part: str | Table | Example) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Example):
        return _figures(part)
    rows = len(part) - 1
    table = html_table(part)
    is_long = rows > _ROWS_OPEN
    return f"<details><summary>{many(rows, 'row')}</summary>{table}</details>" if is_long else table


def _figures(example: Example) -> str:
    """Both versions as pictures; as lists where they have too many operators."""
    figures = []
    for word, operators in example.versions.items():
        label = example.caption(word)
        drawing = draw(operators, example.name)
        if drawing is None:
            shown = "\n".join(map(escape, example.lines(operators)))
            shown = f"<pre>{shown}</pre>"
        else:
            shown = drawing.to_svg(f"The block {word}: {label}")
        caption = f"<figcaption>{escape(label)}</figcaption>"
        figures.append(f"<figure>{caption}<div class=scroll>{shown}</div></figure>")
    return "".join(figures)
