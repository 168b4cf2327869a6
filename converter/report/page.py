"""A report as one HTML page: no network, no script, light and dark, readable on a phone."""

from collections.abc import Sequence

from edge_opt.conversion.result import entry_points, masked_rows, proof
from edge_opt.ir import Operator
from edge_opt.ir.composites import composites
from edge_opt.output.words import escape, html_table, many, shortened
from edge_opt.passes import SiteReport, Status
from edge_opt.report.diagram import NO_PICTURE, can_draw, draw
from edge_opt.report.document import NO_LINT, Example, Report

STYLE = """
:root{--ground:#fbfbfa;--paper:#fff;--ink:#1c1f23;--faint:#60666e;--line:#dfe2e6;--good:#14713c;--good-ground:#e2f4e8;
--left:#8a4b00;--left-ground:#fdf0dc;--bar:#2f6fd0;--box:#eef3fb;--box-line:#9db6dc;--input:#f4f1ea;--input-line:#cbbf9f}
@media(prefers-color-scheme:dark){:root{--ground:#15181c;--paper:#1c2026;--ink:#e7e9ec;--faint:#9ba3ad;--line:#343a42;
--good:#7fdca0;--good-ground:#143322;--left:#f3c37c;--left-ground:#3a2a10;--bar:#6aa2f0;--box:#222c3b;--box-line:#49618a;
--input:#2a2820;--input-line:#5f573f}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:clamp(1.5rem,4vw,2.2rem);line-height:1.2;margin:.1em 0 .4em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem}
.kicker{margin:0;color:var(--faint);letter-spacing:.06em;text-transform:uppercase;font-size:.78rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.75rem;margin:1.5rem 0 0}
.cards div,details,figure,.lint{background:var(--paper);border:1px solid var(--line);border-radius:10px}
.cards div{padding:.8rem 1rem}
dt{color:var(--faint);font-size:.85rem}
dd{margin:0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.45rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--faint);font-weight:500;white-space:nowrap}
.scroll td{white-space:nowrap}
.wide{overflow-x:auto}.wide td:first-child{white-space:nowrap}
details{margin:.6rem 0;padding:.6rem 1rem}
summary{cursor:pointer}
details[open] summary{margin-bottom:.6rem}
.tag{display:inline-block;padding:.05rem .5rem;border-radius:99px;font-size:.82rem;
background:var(--left-ground);color:var(--left)}
.tag.good,.tag.info{background:var(--good-ground);color:var(--good)}
.lint{padding:.8rem 1rem .8rem 2rem;margin:0}
.lint li{margin:.3rem 0}
.histogram th{width:9rem;font-weight:500;white-space:nowrap}
.histogram td{display:flex;align-items:center;gap:.6rem}
.bar{display:block;height:.9rem;min-width:2px;border-radius:3px;background:var(--bar);
flex:none;max-width:calc(100% - 4rem)}
figure{margin:0 0 1rem;padding:1rem}
figcaption{color:var(--faint);margin-bottom:.6rem}
svg{display:block}
svg text{fill:var(--ink);font:600 11px system-ui,sans-serif;text-anchor:middle}
svg text.detail{fill:var(--faint);font-weight:400}
svg rect{fill:var(--box);stroke:var(--box-line)}
svg .input rect{fill:var(--input);stroke:var(--input-line)}
svg .edge{fill:none;stroke:var(--faint);stroke-width:1.2;opacity:.8}
@media(max-width:40rem){main{padding:1.25rem 1rem 3rem}section>.scroll :is(td,th){white-space:normal}
th,td{padding:.4rem .5rem}details,figure{padding:.6rem .7rem}svg{width:100%;height:auto;min-width:30rem}}
"""


_MOST_DRAWN = 160
_NO_SITES = "<p>No pass found a place where it could apply.</p>"


def to_html(report: Report) -> str:
    """The whole page."""
    name = escape(report.title)
    body = [
        f"<header><p class=kicker>edge-opt report</p><h1>{name}</h1><p>{escape(report.summary)}</p></header>",
        _cards(report),
        _section("Signatures", html_table(entry_points(report.result))),
        _section("Verdicts", "".join(_verdict(*verdict) for verdict in report.verdicts()) or _NO_SITES),
        _section("What the proofs measured", _measured(report)),
    ]
    if report.result.whole:
        body.append(_section("The whole models, before and after", _whole(report)))
    body.append(_section(f"Lint for {report.result.target}", _lint(report)))
    if report.example is not None:
        body.append(_section("One block, before and after", _example(report.example)))
    origin = [*report.origin.items(), ("time", f"{report.result.seconds:.1f} s")]
    body.append(_section("Where this comes from", html_table([("", ""), *origin])))
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
    listed = html_table([("signature", "site", "heads", "proof", "tensor"), *rows])
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
    signatures, counts = html_table(report.whole(), kind="wide"), report.distances()
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
    label = ", ".join([f"{many(len(operators), 'operator')} {word}", *map(str, composites(operators))])
    small = len(operators) <= _MOST_DRAWN
    if can_draw() and small:
        shown = draw(operators, example.name, f"The block {word}: {label}")
    else:
        listed = "\n".join(map(escape, example.lines(operators)))
        label += f"; {NO_PICTURE}" if small else ""
        shown = f"<pre>{listed}</pre>"
    return f"<figure><figcaption>{escape(label)}</figcaption><div class=scroll>{shown}</div></figure>"
