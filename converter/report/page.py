"""A report as one HTML page: no network, no script, light and dark, readable on a phone.

The operators of a region are drawn as SVG: boxes in layers, data flowing down, laid out by igraph (Sugiyama).
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

from edge_opt.base.words import escape, html_table, many, shortened
from edge_opt.conversion.result import entry_points, masked_rows, proof
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.composites import composite_name, composites
from edge_opt.passes import SiteReport, Status
from edge_opt.report.document import NO_LINT, Example, Report, longest_repeat

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
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 148, 38, 14, 30, 8
NO_PICTURE = "for a picture, pip install '.[report]' in a checkout of edge-opt"
Point = tuple[float, float]


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


class _Box(NamedTuple):
    title: str
    detail: str
    kind: str


def can_draw() -> bool:
    """False where the layout library (extra `report`) is not installed."""
    return find_spec("igraph") is not None


def draw(operators: Sequence[Operator], name: Callable[[Tensor], str], label: str) -> str:
    """An SVG of the operators; colours come from the page's CSS variables."""
    boxes, edges = _graph(operators, name)
    places, routes = _layout(len(boxes), edges)
    width = max(x for x, _ in (*places, *chain(*routes))) + _WIDTH + 2 * _MARGIN
    height = max(y for _, y in places) + _HEIGHT + 2 * _MARGIN
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img" aria-label="{escape(label)}">'
    drawn = [_box(box, place) for box, place in zip(boxes, places, strict=True)]
    return "".join([head, *map(_edge, routes), *drawn, "</svg>"])


def _graph(
    operators: Sequence[Operator], name: Callable[[Tensor], str]
) -> tuple[list[_Box], list[tuple[int, int]]]:
    """Boxes and edges by box number; heads that are like another are one box."""
    stretch = longest_repeat([operator.name for operator in operators])
    boxes: list[_Box] = []
    made: dict[int, int] = {}
    edges: dict[tuple[int, int], None] = {}
    folded: int | None = None
    fed = False
    for place, operator in enumerate(operators):
        if place not in stretch.hidden:
            shape = "x".join(str(size) for size in operator.outputs[0].shape)
            index, box = len(boxes), _Box(composite_name(operator) or operator.name, shape, "operator")
        elif folded is None:
            index = folded = len(boxes)
            box = _Box(f"{stretch.times - 1} more like it", f"{len(stretch.hidden)} operators", "folded")
        else:
            index, box = folded, boxes[folded]
        boxes[index : index + 1] = [box]  # a new one at the end, or the folded one again
        for tensor in operator.inputs:
            if tensor is None or tensor.is_constant:
                continue
            if index == folded and (id(tensor) not in made or fed):
                continue  # what all heads read is drawn at the one that is shown
            fed = fed or index == folded
            if id(tensor) not in made:
                made[id(tensor)] = len(boxes)
                boxes.append(_Box(name(tensor), "x".join(map(str, tensor.shape)), "input"))
            if made[id(tensor)] != index:
                edges[made[id(tensor)], index] = None
        for tensor in operator.outputs:
            made[id(tensor)] = index
    return boxes, list(edges)


def _layout(count: int, edges: list[tuple[int, int]]) -> tuple[list[Point], list[list[Point]]]:
    """Where each box has its upper left corner, and the corners that each edge passes: between boxes, not behind."""
    import igraph  # noqa: PLC0415  an optional package

    graph = igraph.Graph(n=count, edges=edges, directed=True)
    layout = graph.layout_sugiyama(layers=_layers(count, edges), maxiter=200)
    passed = [[*map(tuple, points)] for points in layout.edge_routing]
    across, down = _WIDTH + _GAP_X, _HEIGHT + _GAP_Y
    left = min(x for x, _ in chain(layout.coords, *passed))

    def place(point: Sequence[float]) -> Point:
        return (point[0] - left) * across + _MARGIN, point[1] * down + _MARGIN

    places = [place(point) for point in layout.coords]
    return places, [
        [places[a], *(place(point) for point in between), places[b]]
        for (a, b), between in zip(edges, passed, strict=True)
    ]


def _layers(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """Put each box right above the first that reads it: no long line from the top to where a cache is used."""
    below = [0] * count
    # A box is read by later ones, but what comes in is numbered after its first reader: again until nothing moves.
    moved = True
    while moved:
        moved = False
        for a, b in reversed(edges):
            if below[a] <= below[b]:
                below[a], moved = below[b] + 1, True
    return [max(below, default=0) - place for place in below]


def _edge(route: list[Point]) -> str:
    """From the lower edge of the first box to the upper one of the last, straight down past every layer between."""
    x, y = route[0][0] + _WIDTH / 2, route[0][1] + _HEIGHT
    curve = [f"M{x:.1f} {y:.1f}"]
    for left, top in route[1:]:
        middle, bend = left + _WIDTH / 2, (top - y) / 2
        curve.append(f"C{x:.1f} {y + bend:.1f} {middle:.1f} {top - bend:.1f} {middle:.1f} {top:.1f}")
        x, y = middle, top + _HEIGHT
        curve.append(f"V{y:.1f}")
    return f'<path class="edge" d="{"".join(curve[:-1])}"/>'


def _box(box: _Box, place: Point) -> str:
    x, y = place
    middle = x + _WIDTH / 2
    return (
        f'<g class="{box.kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{middle:.1f}" y="{y + 16:.1f}">{escape(_short(box.title))}</text>'
        f'<text class="detail" x="{middle:.1f}" y="{y + 30:.1f}">{escape(_short(box.detail))}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:19]}…"
