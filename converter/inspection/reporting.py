"""A conversion's report, made of its result and of the original model; draws one block as it was and as it became."""

import hashlib
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from edge_opt.conversion import GENERIC, ConversionResult
from edge_opt.conversion.container import Part, Sections, open_container
from edge_opt.conversion.result import unsound
from edge_opt.inspection import example_rewrite
from edge_opt.passes import PASSES
from edge_opt.report import Example, Report
from edge_opt.targets import Target, lint, load_target


def conversion_report(
    result: ConversionResult,
    original: str | os.PathLike[str] | bytes | None = None,
    *,
    target: str | Target | None = None,
    sections: Sections = "prefill-decode",
) -> Report:
    """What `edge_opt.report.write_report` takes.

    Args:
        result: of `edge_opt.convert`.
        original: the model as it was, for the picture of one block; without it, the file that `result` names, if any.
        target: as given to `convert`.
        sections: as given to `convert`.

    Raises:
        ModelFormatError: the original cannot be read again.
        UsageError: there is no such target.
    """
    source = result.input if original is None else original
    facts = load_target(target or GENERIC)
    example = None
    if source is not None and result.converted:
        parts = open_container(source, sections).parts
        examples = (_example(result, part, facts) for part in parts)
        example = next(filter(None, examples), None)
    findings = [("error", text) for text in unsound(result)]
    for finding in [] if result.model is None else lint(result.model, facts):
        where = f"{finding.signature}: " if finding.signature else ""
        findings.append((finding.severity, f"{where}{finding.message}"))
    return Report(result, version("edge-opt"), example, findings, _origin(result))


def _origin(result: ConversionResult) -> dict[str, str]:
    """When the report was made and with what, and the digests of the files that it is about."""
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "edge-opt": version("edge-opt"),
        "ai-edge-litert": version("ai-edge-litert"),
        "Python": platform.python_version(),
    }
    for name, path in (("input", result.input), ("output", result.output)):
        if path is not None and Path(path).is_file():
            with Path(path).open("rb") as file:
                origin[f"{name}, SHA-256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return origin


def _example(result: ConversionResult, part: Part, target: Target) -> Example | None:
    """Of the first converted block with several heads, else of whatever else was converted."""
    names = {part.signature(name): name for name, _ in part.model.entry_points()}
    sites = sorted(result.converted, key=lambda site: (site.heads or 0) < 2)
    # Of a caller's own pass there is no more than the verdicts.
    places = dict.fromkeys(
        (s.signature, s.pass_name) for s in sites if s.signature in names and s.pass_name in PASSES
    )
    examples = (example_rewrite(part.model, names[signature], chosen, target) for signature, chosen in places)
    return next(filter(None, examples), None)
