"""A report as one HTML page: no network, no script, light and dark, readable on a phone."""

from collections.abc import Sequence

from edge_opt.conversion.result import entry_points, masked_rows, proof
from edge_opt.ir import Operator
from edge_opt.output.html import escape, table
from edge_opt.output.words import many, shortened
from edge_opt.passes import SiteReport, Status
from edge_opt.report.diagram import NO_PICTURE, can_draw, draw
from edge_opt.report.document import NO_LINT, Example, Report
from edge_opt.report.style import STYLE

_MOST_DRAWN = 160
_NO_SITES = "<p>No pass found a place where it could apply.</p>"


def to_html(report: Report) -> str:
    """The whole page."""
    name = escape(report.title)
    body = [
        f"<header><p class=kicker>edge-opt report</p><h1>{name}</h1><p>{escape(report.summary)}</p></header>",
        _cards(report),
        _section("Signatures", table(entry_points(report.result))),
        _section("Verdicts", "".join(_verdict(*verdict) for verdict in report.verdicts()) or _NO_SITES),
        _section("What the proofs measured", _measured(report)),
    ]
    if report.result.whole:
        body.append(_section("The whole models, before and after", _whole(report)))
    body.append(_section(f"Lint for {report.result.target}", _lint(report)))
    if report.example is not None:
        body.append(_section("One block, before and after", _example(report.example)))
    origin = [*report.origin.items(), ("time", f"{report.result.seconds:.1f} s")]
    body.append(_section("Where this comes from", table([("", ""), *origin])))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>edge-opt: {name}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _cards(report: Report) -> str:
    found = report.result.signatures
    before, after = sum(f.operators_before for f in found), sum(f.operators_after for f in found)
    proofs = [site.proof for site in report.result.sites if site.proof is not None]
    cards = [
        ("blocks split", f"{sum(f.blocks_converted for f in found)} of {sum(f.blocks for f in found)}"),
        ("proved bit for bit", f"{sum(proof.bitwise for proof in proofs)} of {len(proofs)}"),
        ("operators", f"{before} → {after}"),
        ("target", report.result.target),
    ]
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in cards)
    return f"<dl class=cards>{items}</dl>"


def _verdict(name: str, status: Status, reason: str, sites: Sequence[SiteReport]) -> str:
    rows = [
        (site.signature, str(site.index), str(site.heads or ""), proof(site), shortened(site.operator))
        for site in sites
    ]
    kind = "good" if status is Status.CONVERTED else "left"
    head = f"<span class='tag {kind}'>{escape(status)}</span> {escape(name)}, {many(len(sites), 'site')}"
    head += f": {escape(reason)}" if reason else ""
    listed = table([("signature", "site", "heads", "proof", "tensor"), *rows])
    return f"<details><summary>{head}</summary>{listed}</details>"


def _measured(report: Report) -> str:
    counts = report.errors()
    if not counts:
        return "<p>No region was run.</p>"
    masked = "".join(f"<p>{escape(text)}</p>" for text in masked_rows(report.result))
    return (
        "<p>Largest difference between a region before and after, over all its outputs and kernels that ran; "
        f"number of sites.</p>{_bars(counts)}{masked}"
    )


def _bars(counts: Sequence[tuple[str, int]]) -> str:
    most = max(count for _, count in counts)
    bars = "".join(
        f"<tr><th scope=row>{escape(bucket)}</th><td><span class=bar style='width:{100 * count / most:.1f}%'></span>"
        f"<span class=count>{count:,}</span></td></tr>"
        for bucket, count in counts
    )
    return f"<table class=histogram><tbody>{bars}</tbody></table>"


def _whole(report: Report) -> str:
    signatures, counts = table(report.whole(), kind="wide"), report.distances()
    lead = "<p>Elements of all float outputs, by distance in units in the last place.</p>"
    return f"{signatures}{lead}{_bars(counts)}" if counts else signatures


def _lint(report: Report) -> str:
    if not report.lint:
        return f"<p>{NO_LINT}</p>"
    items = "".join(
        f"<li><span class='tag {escape(severity)}'>{escape(severity)}</span> {escape(message)}</li>"
        for severity, message in report.lint
    )
    return f"<ul class=lint>{items}</ul>"


def _example(example: Example) -> str:
    both = _figure(example, "before", example.before) + _figure(example, "after", example.after)
    return f"<p>The first block of <code>{escape(example.signature)}</code>.</p>{both}"


def _figure(example: Example, word: str, operators: Sequence[Operator]) -> str:
    """The operators as a picture; as a list where there is no library that lays one out, or they are too many."""
    label = f"{many(len(operators), 'operator')} {word}"
    small = len(operators) <= _MOST_DRAWN
    if can_draw() and small:
        shown = draw(operators, example.name, f"The block {word}: {label}")
    else:
        listed = "\n".join(map(escape, example.lines(operators)))
        label += f"; {NO_PICTURE}" if small else ""
        shown = f"<pre>{listed}</pre>"
    return f"<figure><figcaption>{escape(label)}</figcaption><div class=scroll>{shown}</div></figure>"
