"""A report as Markdown, for a pull request or a wiki."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edge_opt.ir.text import operator_text
from edge_opt.report import words
from edge_opt.report.folding import longest_repeat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_opt.ir import Operator
    from edge_opt.report.document import Example, Report

_LONGEST_EXAMPLE = 120
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_TAGS = {"&": "&amp;", "<": "&lt;"}


def to_markdown(report: Report) -> str:
    """The whole report."""
    parts = [
        f"# edge-opt: {_cell(words.title(report.subject))}",
        words.summary(report.subject),
        _signatures(report),
        _sites(report),
        _histogram(report),
    ]
    if report.subject.whole:
        parts.append(_whole(report))
    lines = [f"- **{severity}**: {_cell(message)}" for severity, message in report.lint] or [words.NO_LINT]
    parts.append("## For the target\n\n" + "\n".join(lines))
    if report.example is not None:
        parts.append(_example(report.example))
    parts.append(f"edge-opt {report.version}, {report.subject.seconds:.1f} s.")
    return "\n\n".join(parts) + "\n"


def _signatures(report: Report) -> str:
    rows = [
        (
            figures.name,
            f"{figures.converted} of {figures.blocks}",
            f"{figures.operators_before} -> {figures.operators_after}",
            f"{words.size(figures.largest_tensor_before)} -> {words.size(figures.largest_tensor_after)}",
        )
        for figures in report.subject.signatures
    ]
    return "## Signatures\n\n" + _table(("signature", "blocks split", "operators", "largest tensor"), rows)


def _sites(report: Report) -> str:
    rows = [
        (site.pass_name, site.signature, str(site.index), str(site.status), site.reason or words.proof(site))
        for site in report.subject.sites
    ]
    if not rows:
        return "## Sites\n\nNo pass found a place where it could apply."
    return "## Sites\n\n" + _table(
        ("pass", "signature", "site", "verdict", "why, or what the proof showed"), rows
    )


def _histogram(report: Report) -> str:
    rows = [(bucket, str(count)) for bucket, count in report.errors()]
    if not any(count for _, count in report.errors()):
        return "## What the proofs measured\n\nNo region was run."
    masked = words.masked_rows(report.subject)
    table = _table(("largest difference", "sites"), rows)
    return f"## What the proofs measured\n\n{table}" + (f"\n\n{masked}" if masked else "")


def _whole(report: Report) -> str:
    rows = [(item.name, item.found_text(), item.demanded()) for item in report.subject.whole]
    parts = [_table(("signature", "found", "demanded"), rows)]
    counts = [(bucket, f"{count:,}") for bucket, count in report.distances()]
    if counts:
        parts.append(_table(("units in the last place", "elements of float outputs"), counts))
    return "## The whole models, before and after\n\n" + "\n\n".join(parts)


def _example(example: Example) -> str:
    def text(operators: Sequence[Operator]) -> str:
        return _fenced(_folded([operator_text(operator, example.name) for operator in operators], operators))

    before, after = text(example.before), text(example.after)
    return f"## One block of {_cell(example.signature)}\n\nBefore:\n\n{before}\n\nAfter:\n\n{after}"


def _folded(lines: list[str], operators: Sequence[Operator]) -> list[str]:
    stretch = longest_repeat([operator.name for operator in operators], at_least=4)
    if stretch.hidden:
        note = f"... {stretch.times - 1} more like these {stretch.period} ..."
        lines = [*lines[: stretch.hidden.start], note, *lines[stretch.hidden.stop :]]
    if len(lines) > _LONGEST_EXAMPLE:
        lines = [*lines[:_LONGEST_EXAMPLE], f"... {len(lines) - _LONGEST_EXAMPLE} more ..."]
    return lines


def _fenced(lines: Iterable[str]) -> str:
    """A block of code that no name in it can end."""
    plain = [words.one_line(line) for line in lines]
    longest = max((len(run) for line in plain for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *plain, fence])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row([_cell(text) for text in row]) for row in rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Names come from the model, so they may hold anything."""
    plain = "".join(_TAGS.get(letter, letter) for letter in words.one_line(text))
    return _MARKS.sub(lambda match: f"\\{match[0]}", plain)
