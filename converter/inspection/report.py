"""Conversion reports, with the same content as JSON, as Markdown with Mermaid diagrams, and as one HTML page.

Names from a model are escaped. The page is rendered from Markdown and needs no network and no scripts; its template is
`page.html`, its style `page.css`.
"""

import hashlib
import html
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from edge_opt.base.atomic import AnyPath, input_file, resolve_target, write_whole
from edge_opt.base.errors import UsageError
from edge_opt.base.packages import RUNTIME, version_of
from edge_opt.base.record import Record, to_json
from edge_opt.base.words import many, one_line
from edge_opt.conversion import ConversionResult
from edge_opt.conversion.result import entry_point_table, headline, proof_text, unsound_lines
from edge_opt.inspection.picture import Example, find_example
from edge_opt.ir import Operator
from edge_opt.ir.composites import composites
from edge_opt.passes import Verdict
from edge_opt.targets import TargetLike, lint, load_target

FORMATS = (".json", ".md", ".html")
_NO_LINT = "No known problems with the result on this target."
# Also what GitHub makes links and formulas of.
_MARKS = re.compile(
    r"[\\`*\[\]|~$]|:(?=//)|(?<=www)\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|#(?=\s*$)"
)
_BARS = re.compile("█+|░+")
_TAGS = {"&": "&amp;", "<": "&lt;"}

Table = list[tuple[str, ...]]
"""Rows; the first has the headings."""
Content = str | Table | Example
"""A sentence, a table, or a block before and after."""


class GainPicture(NamedTuple):
    """NPU estimates before and after, as a title and a table, with a note on their limits."""

    title: str
    rows: Table
    note: str


@dataclass(frozen=True, slots=True)
class Report(Record):
    """Report of a conversion; `lint` has (severity, sentence) pairs about the result.

    `origin`: date, versions, and digests of the files, by name. `gain`: NPU estimates of `draw_gain`, as title, rows
    and note. A pickled report has no example.
    """

    result: ConversionResult
    example: Example | None = None
    lint: Sequence[tuple[str, str]] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    gain: GainPicture | None = None

    _only_here = ("example",)

    @property
    def summary(self) -> str:
        """The headline, and why nothing was written, if so."""
        outcome = headline(self.result)
        failure = self.result.failure
        return outcome if failure is None else f"{outcome} Refused: {failure}."

    def sections(self) -> Iterator[tuple[str, Content]]:
        """Sections of the Markdown and HTML formats, in order."""
        result = self.result
        sites: Table = [("site", "heads", "verdict", "reason, or result of verification")]
        sites += map(_site_row, result.sites)
        if self.gain is not None:
            yield self.gain.title, self.gain.rows
            yield "Limits of the estimates", self.gain.note
        yield "Signatures", entry_point_table(result)
        yield "Sites", sites if result.sites else "No pass applies to this model."
        if result.whole:
            rows: Table = [("signature", "found", "required")]
            rows += ((one.name, one.outcome, str(one.allowance)) for one in result.whole)
            yield "The whole models, before and after", rows
        findings: Table = [("severity", "finding"), *self.lint]
        yield f"Findings for {result.target}", findings if self.lint else _NO_LINT
        if self.example is not None:
            yield f"One block of {self.example.signature}", self.example
        yield "Origin", [("", ""), *self.origin.items(), ("time", f"{result.seconds:.1f} s")]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values: those of `convert --json`, plus origin, summary, findings and example."""
        more = {
            "version": version("edge-opt"),
            "origin": self.origin,
            "summary": self.summary,
            "lint": [{"severity": severity, "message": message} for severity, message in self.lint],
            "gain": self.gain,
            "example": self.example,
        }
        return {**self.result.to_dict(), **to_json(more)}

    def render(self, suffix: str) -> str:
        """Render the report in the format with this suffix."""
        if suffix == ".json":
            return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        title = Path(self.result.input).name if self.result.input else "model in memory"
        render = to_markdown if suffix == ".md" else to_html
        return render(title, self.summary, self.sections())

    def write(self, path: AnyPath, *, overwrite: bool = False) -> None:
        """Write the report in the format of the path's suffix.

        Raises:
            UsageError: no format has that suffix, or the file exists and `overwrite` is False.
            OutputError: the report cannot be written.
        """
        check_report_path(path, overwrite=overwrite)
        text = self.render(Path(path).suffix.lower())
        write_whole(path, text.encode(errors="backslashreplace"), overwrite=overwrite)


def _site_row(site: Verdict) -> tuple[str, ...]:
    where = f"{site.pass_name} {site.signature}#{site.index}"
    return where, str(site.heads or ""), str(site.status), site.reason or proof_text(site)


def check_report_path(
    path: AnyPath, *, overwrite: bool, others: Iterable[AnyPath | None] = ()
) -> None:
    """Check before a conversion that a report can be written to `path`.

    UsageError if no format has that suffix, the file exists and `overwrite` is False, or it is one of `others`;
    OutputError if it cannot be written.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"report {path}: the ending must be one of {', '.join(FORMATS)}")
    target = resolve_target(path, overwrite=overwrite)
    if target in [input_file(other).resolve() for other in others if other is not None]:
        raise UsageError(
            f"report {path} is a file that this run reads or writes: give another name"
        )


def conversion_report(
    result: ConversionResult,
    *,
    target: TargetLike | None = None,
    gain: GainPicture | None = None,
) -> Report:
    """The report of a conversion, with findings for `target` (as for `convert`), and estimates.

    Raises:
        UsageError: the target is unknown.
    """
    lints = [] if result.model is None else lint(result.model, load_target(target))
    findings = [("error", text) for text in unsound_lines(result)]
    findings += [("note", text) for text in result.notes]
    findings += [(one.severity, str(one)) for one in lints]
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "edge-opt": version("edge-opt"),
        "ai-edge-litert": version_of(RUNTIME) or "unknown",
        "Python": platform.python_version(),
    }
    for name, path in (("input", result.input), ("output", result.output)):
        if path is not None and Path(path).is_file():
            with Path(path).open("rb") as file:
                origin[f"{name}, SHA-256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return Report(result, find_example(result), findings, origin, gain)


def to_markdown(
    title: str, summary: str, sections: Iterable[tuple[str, Content]], *, drawn: bool = True
) -> str:
    """Render the report; each section has a title and one part. Blocks are `drawn` as graphs, or listed as text."""
    parts = [f"# edge-opt: {_text(title)}", _text(summary)]
    for heading, part in sections:
        parts.append(f"## {_text(heading)}")
        if isinstance(part, str):
            parts.append(_text(part))
        elif isinstance(part, Example):
            parts += _block(part, "before", part.before, drawn=drawn)
            parts += _block(part, "after", part.after, drawn=drawn)
        else:
            head, *body = map(_row, part)
            parts.append("\n".join([head, "|" + " --- |" * len(part[0]), *body]))
    return "\n\n".join(parts) + "\n"


def _block(part: Example, word: str, operators: Sequence[Operator], *, drawn: bool) -> list[str]:
    """One version of a block: what it holds, then the graph or the operators."""
    contents = [
        f"{many(len(operators), 'operator')} {word}",
        *map(str, composites(operators)),
    ]
    heading = f"{_text(', '.join(contents))}:"
    if drawn:
        return [heading, f"```mermaid\n{part.mermaid(operators)}\n```"]
    return [heading, "\n".join(f"    {one_line(line)}" for line in part.lines(operators))]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Escape untrusted text for Markdown."""
    plain = "".join(_TAGS.get(letter, letter) for letter in one_line(text))
    return _MARKS.sub(lambda match: f"\\{match[0]}", plain)


def _bar(found: re.Match[str]) -> str:
    """A run of block characters as a coloured bar."""
    kind = "after" if found[0].startswith("█") else "before"
    return f'<i class="{kind}" style="width:{len(found[0]) / 2}em"></i>'


def to_html(title: str, summary: str, sections: Iterable[tuple[str, Content]]) -> str:
    """Render the report as a page; each section has a title and one part."""
    from markdown_it import MarkdownIt  # noqa: PLC0415 - not needed for other formats

    page = resources.files(__package__)
    frame = (page / "page.html").read_text()
    style = (page / "page.css").read_text()
    text = to_markdown(title, summary, sections, drawn=False)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = _BARS.sub(_bar, body)
    return Template(frame).substitute(title=html.escape(one_line(title)), style=style, body=body)
