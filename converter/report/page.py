"""A report as one HTML page: no network, no script, light and dark, readable on a phone."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from edge_opt.passes import Status
from edge_opt.report import words
from edge_opt.report.diagram import can_draw, draw
from edge_opt.report.style import STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_opt.report.document import Example, Report, Verdict

_MOST_DRAWN = 160


def escape(text: str) -> str:
    """For HTML: names come from the model, so they may hold anything."""
    return html.escape(words.one_line(text))


def to_html(report: Report) -> str:
    """The whole page."""
    name = escape(words.title(report.subject))
    done = escape(words.summary(report.subject))
    body = [
        f"<header><p class=kicker>edge-opt report</p><h1>{name}</h1><p>{done}</p></header>",
        _cards(report),
        _section("Signatures", _signatures(report)),
        _section("Verdicts", "".join(_verdict(verdict) for verdict in report.verdicts()) or _NO_SITES),
        _section("What the proofs measured", _histogram(report)),
    ]
    if report.subject.whole:
        body.append(_section("The whole models, before and after", _whole(report)))
    body.append(_section(f"Lint for {report.subject.target}", _lint(report)))
    if report.example is not None:
        body.append(_section("One block, before and after", _example(report.example)))
    body.append(f"<footer>edge-opt {escape(report.version)}, {report.subject.seconds:.1f} s</footer>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>edge-opt: {name}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


_NO_SITES = "<p>No pass found a place where it could apply.</p>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _cards(report: Report) -> str:
    figures = report.subject.signatures
    before = sum(item.operators_before for item in figures)
    after = sum(item.operators_after for item in figures)
    proofs = [site.proof for site in report.subject.sites if site.proof is not None]
    exact = sum(proof.bitwise for proof in proofs)
    cards = [
        ("blocks split", f"{sum(f.converted for f in figures)} of {sum(f.blocks for f in figures)}"),
        ("proved bit for bit", f"{exact} of {len(proofs)}"),
        ("operators", f"{before} → {after}"),
        ("target", report.subject.target),
    ]
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in cards)
    return f"<dl class=cards>{items}</dl>"


def _signatures(report: Report) -> str:
    rows = [
        (
            figures.name,
            f"{figures.converted} of {figures.blocks}",
            f"{figures.operators_before} → {figures.operators_after}",
            f"{words.size(figures.largest_tensor_before)} → {words.size(figures.largest_tensor_after)}",
        )
        for figures in report.subject.signatures
    ]
    return _table(("signature", "blocks split", "operators", "largest tensor"), rows)


def _verdict(verdict: Verdict) -> str:
    rows = [
        (
            site.signature,
            str(site.index),
            str(site.heads or ""),
            words.proof(site),
            words.shortened(site.operator),
        )
        for site in verdict.sites
    ]
    count = f"{len(rows)} site{'s' if len(rows) != 1 else ''}"
    reason = f": {escape(verdict.reason)}" if verdict.reason else ""
    kind = "good" if verdict.status == Status.CONVERTED else "left"
    tag = f"<span class='tag {kind}'>{escape(verdict.status)}</span>"
    head = f"{tag} {escape(verdict.pass_name)}, {count}{reason}"
    table = _table(("signature", "site", "heads", "proof", "tensor"), rows)
    return f"<details><summary>{head}</summary>{table}</details>"


def _histogram(report: Report) -> str:
    counts = report.errors()
    if not any(count for _, count in counts):
        return "<p>No region was run.</p>"
    masked = words.masked_rows(report.subject)
    return (
        "<p>Largest difference between a region before and after, over all its outputs and kernels that ran; "
        f"number of sites.</p>{_bars(counts)}" + (f"<p>{escape(masked)}</p>" if masked else "")
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
    rows = [(item.name, item.found_text(), item.demanded()) for item in report.subject.whole]
    parts = [_table(("signature", "found", "demanded"), rows, kind="wide")]
    counts = report.distances()
    if counts:
        parts.append(
            "<p>Elements of all float outputs, by distance in units in the last place.</p>" + _bars(counts)
        )
    return "".join(parts)


def _lint(report: Report) -> str:
    if not report.lint:
        return f"<p>{words.NO_LINT}</p>"
    items = "".join(
        f"<li><span class='tag {escape(severity)}'>{escape(severity)}</span> {escape(message)}</li>"
        for severity, message in report.lint
    )
    return f"<ul class=lint>{items}</ul>"


def _example(example: Example) -> str:
    if not can_draw():
        return "<p>Install <code>edge-opt[report]</code> for the picture.</p>"
    pictures = []
    for word, operators in (("before", example.before), ("after", example.after)):
        label = f"{len(operators)} operator{'s' if len(operators) != 1 else ''} {word}"
        if len(operators) > _MOST_DRAWN:
            pictures.append(f"<p>{label}: too many to draw.</p>")
            continue
        svg = draw(operators, example.name, f"The block {word}: {label}")
        pictures.append(
            f"<figure><figcaption>{escape(label)}</figcaption><div class=scroll>{svg}</div></figure>"
        )
    return f"<p>The first block of <code>{escape(example.signature)}</code>.</p>" + "".join(pictures)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "scroll") -> str:
    cells = "".join(f"<th scope=col>{escape(text)}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<div class={kind}><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"
