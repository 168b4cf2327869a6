"""A report as Markdown, for a pull request or a wiki."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.ir.text import operator_text
from edge_opt.report import words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_opt.report.document import Example, Report

_LONGEST_EXAMPLE = 120


def to_markdown(report: Report) -> str:
    """The whole report."""
    parts = [
        f"# edge-opt: {_cell(words.title(report))}",
        words.summary(report),
        _signatures(report),
        _sites(report),
    ]
    if report.lint:
        lines = [f"- **{severity}**: {_cell(message)}" for severity, message in report.lint]
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


def _example(example: Example) -> str:
    def text(operators: Sequence[object]) -> str:
        lines = [operator_text(operator, example.name) for operator in operators]  # type: ignore[arg-type]
        if len(lines) > _LONGEST_EXAMPLE:
            lines = [*lines[:_LONGEST_EXAMPLE], f"... {len(lines) - _LONGEST_EXAMPLE} more ..."]
        return "```\n" + "\n".join(lines) + "\n```"

    before, after = text(example.before), text(example.after)
    return f"## One block of {_cell(example.signature)}\n\nBefore:\n\n{before}\n\nAfter:\n\n{after}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row([_cell(text) for text in row]) for row in rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Names come from the model, so they may hold anything."""
    plain = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return plain.replace("`", "\\`")
