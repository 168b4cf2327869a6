"""A report written down, in the format that the file's ending names."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from edge_opt.output.atomic import resolve_target, write_whole
from edge_opt.output.errors import UsageError
from edge_opt.output.record import to_json
from edge_opt.report.document import Report

FORMATS = (".json", ".md", ".html")


def check_report_path(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    others: Iterable[str | os.PathLike[str] | None] = (),
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


def write_report(report: Report, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
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
    from edge_opt.report.markdown import to_markdown  # noqa: PLC0415  only the chosen format is loaded
    from edge_opt.report.page import to_html  # noqa: PLC0415

    if suffix == ".json":
        return json.dumps(to_json(report), indent=2, allow_nan=False) + "\n"
    return to_markdown(report) if suffix == ".md" else to_html(report)
