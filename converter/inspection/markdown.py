"""A report as Markdown, for a pull request or a wiki, with pictures drawn by Mermaid. No name in it is markup."""

import re
from collections.abc import Iterable, Iterator, Sequence

from edge_opt.base.words import one_line
from edge_opt.inspection.picture import Example, draw
from edge_opt.inspection.section import Section, Table

_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_TAGS = {"&": "&amp;", "<": "&lt;"}


def to_markdown(title: str, summary: str, sections: Iterable[Section]) -> str:
    """The whole report."""
    parts = [f"# edge-opt: {_text(title)}", _text(summary)]
    for section in sections:
        parts.append(f"## {_text(section.title)}")
        for part in section.parts:
            if isinstance(part, str):
                parts.append(_text(part))
            elif isinstance(part, Example):
                parts += _drawn(part)
            else:
                parts.append(_table(part))
    return "\n\n".join(parts) + "\n"


def _drawn(example: Example) -> Iterator[str]:
    for word, operators in example.versions.items():
        drawing = draw(operators, example.name)
        yield f"{_text(example.caption(word))}:"
        if drawing is None:
            yield _fenced("text", example.lines(operators))
        else:
            yield _fenced("mermaid", [drawing.to_mermaid()])


def _fenced(kind: str, lines: Sequence[str]) -> str:
    """A block of code that no name in it can end."""
    plain = [one_line(line) for text in lines for line in text.splitlines()]
    longest = max((len(run) for line in plain for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{kind}", *plain, fence])


def _table(rows: Table) -> str:
    head, *body = (f"| {' | '.join(map(_text, row))} |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _text(text: str) -> str:
    """Names come from the model, so they may hold anything."""
    plain = "".join(_TAGS.get(letter, letter) for letter in one_line(text))
    return _MARKS.sub(lambda match: f"\\{match[0]}", plain)
