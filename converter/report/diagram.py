"""A region's operators as a picture (SVG): boxes in layers, data flowing down. Laid out by igraph (Sugiyama)."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import NamedTuple

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.composites import composite_name
from edge_opt.output.words import escape
from edge_opt.report.document import longest_repeat

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 148, 38, 14, 30, 8
NO_PICTURE = "for a picture, pip install '.[report]' in a checkout of edge-opt"

Point = tuple[float, float]


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
