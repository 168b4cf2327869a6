"""A conversion of a model as a report that draws one block before and after, and as node data for Model Explorer.

Node data have the format of ai-edge-model-explorer's `node_data_builder.ModelNodeData`: by graph (the name of the
subgraph) and node (the place of the operator in it), a text and a colour.
"""

import hashlib
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edge_opt.conversion import GENERIC, ConversionResult, convert
from edge_opt.conversion.container import Part, Sections, open_container
from edge_opt.conversion.result import unsound
from edge_opt.inspection import example_rewrite
from edge_opt.ir import load
from edge_opt.passes import PASSES, SiteReport, Status
from edge_opt.report import Example, Report
from edge_opt.targets import Target, lint, load_target

_COLOURS = {Status.CONVERTED: "#bfe5cb", Status.SKIPPED: "#f7dcae", Status.ROLLED_BACK: "#f3b8b0"}
_SETTLED = "#e3e6ea"


def node_data(
    source: str | os.PathLike[str] | bytes, *, target: str | Target | None = None
) -> dict[str, Any]:
    """What a conversion makes of each operator of a model.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: there is no such target.
    """
    model = load(source)
    places = {
        operator: (graph.name, str(place))
        for graph in model.subgraphs
        for place, operator in enumerate(graph.operators)
    }
    makers = {tensor.name: place for operator, place in places.items() for tensor in operator.outputs}
    overlay: dict[str, Any] = {}
    for site in convert(model, target=target, verify="none").sites:
        if site.status is Status.CONVERTED:
            text = f"{len(site.replaced)} operators become {site.added}"
            nodes = [places[operator] for operator in site.replaced if operator in places]
        else:
            text, nodes = site.reason, [makers[site.operator]] if site.operator in makers else []
        for graph, node in nodes:
            data = {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
            # What came first about a node stays.
            overlay.setdefault(graph, data)["results"].setdefault(node, _result(site, text))
    return overlay


def _result(site: SiteReport, text: str) -> dict[str, str]:
    name = f"{site.pass_name} #{site.index}"
    verdict = f"{'nothing to do' if site.settled else site.status} ({name})"
    title = f"converted by {name}" if site.status is Status.CONVERTED else verdict
    colour = _SETTLED if site.settled else _COLOURS[site.status]
    return {"value": f"{title}: {text}", "bgColor": colour, "textColor": "#111111"}


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
