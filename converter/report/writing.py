"""A report written down, in the format that the file's ending names: JSON, Markdown or the HTML page."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from edge_opt.base.atomic import AnyPath, resolve_target, write_whole
from edge_opt.base.errors import UsageError
from edge_opt.base.record import to_json
from edge_opt.base.words import one_line
from edge_opt.conversion.result import entry_points, masked_rows, proof
from edge_opt.report.document import NO_LINT, Example, Report
from edge_opt.report.page import to_html

FORMATS = (".json", ".md", ".html")
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_TAGS = {"&": "&amp;", "<": "&lt;"}


def check_report_path(
    path: AnyPath, *, overwrite: bool = False, others: Iterable[AnyPath | None] = ()
) -> Path:
    """Whether a report can be written there, asked before the work; `others` are files that it must not be.

    Raises:
        UsageError: no format has that ending, or the file exists and `overwrite` is False, or is one of the others.
        OutputError: its folder does not exist.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"report {path}: the ending must be one of {', '.join(FORMATS)}")
    target = resolve_target(path, overwrite=overwrite)
    for other in others:
        if other is not None and Path(other).resolve() == target:
            raise UsageError(f"report {path} is a file that this run reads or writes: give another name")
    return target


def write_report(report: Report, path: AnyPath, *, overwrite: bool = False) -> None:
    """Write the report in the format that the path's ending names.

    Raises:
        UsageError: no format has that ending, or the file exists and `overwrite` is False.
        OutputError: it cannot be written.
    """
    check_report_path(path, overwrite=overwrite)
    text = render(report, Path(path).suffix.lower())
    write_whole(path, text.encode(errors="backslashreplace"), overwrite=overwrite)


def render(report: Report, suffix: str) -> str:
    """The report as text of one format."""
    if suffix == ".json":
        return json.dumps(to_json(report), indent=2, allow_nan=False) + "\n"
    return to_markdown(report) if suffix == ".md" else to_html(report)


def to_markdown(report: Report) -> str:
    """The whole report, for a pull request or a wiki."""
    lint = [f"- **{severity}**: {_cell(message)}" for severity, message in report.lint] or [NO_LINT]
    parts = [
        f"# edge-opt: {_cell(report.title)}",
        report.summary,
        "## Signatures",
        _table(entry_points(report.result)),
        "## Sites",
        _sites(report),
        "## What the proofs measured",
        *_measured(report),
        *_whole(report),
        "## For the target",
        "\n".join(lint),
        *([] if report.example is None else _example(report.example)),
        "## Where this comes from",
        _table([("", ""), *report.origin.items(), ("time", f"{report.result.seconds:.1f} s")]),
    ]
    return "\n\n".join(parts) + "\n"


def _sites(report: Report) -> str:
    rows = [
        (site.pass_name, site.signature, str(site.index), str(site.status), site.reason or proof(site))
        for site in report.result.sites
    ]
    head = ("pass", "signature", "site", "verdict", "why, or what the proof showed")
    return _table([head, *rows]) if rows else "No pass found a place where it could apply."


def _measured(report: Report) -> list[str]:
    counts = report.errors()
    if not counts:
        return ["No region was run."]
    return [_counts(("largest difference", "sites"), counts), *masked_rows(report.result)]


def _whole(report: Report) -> list[str]:
    if not report.result.whole:
        return []
    counts = report.distances()
    heads = ("units in the last place", "elements of float outputs")
    title = "## The whole models, before and after"
    return [title, _table(report.whole()), *([_counts(heads, counts)] if counts else [])]


def _example(example: Example) -> list[str]:
    before, after = (_fenced(example.lines(version)) for version in (example.before, example.after))
    return [f"## One block of {_cell(example.signature)}", "Before:", before, "After:", after]


def _fenced(lines: Iterable[str]) -> str:
    """A block of code that no name in it can end."""
    plain = [one_line(line) for line in lines]
    longest = max((len(run) for line in plain for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *plain, fence])


def _counts(heads: tuple[str, str], counts: Iterable[tuple[str, int]]) -> str:
    return _table([heads, *((bucket, f"{count:,}") for bucket, count in counts)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _cell(text: str) -> str:
    """Names come from the model, so they may hold anything."""
    plain = "".join(_TAGS.get(letter, letter) for letter in one_line(text))
    return _MARKS.sub(lambda match: f"\\{match[0]}", plain)
