"""One block of a conversion before and after, as written: as text, as a Mermaid graph, and as SVG in layers."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from edge_opt.base.words import escape, many, one_line
from edge_opt.conversion import ConversionResult
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.composites import composite_name, composites
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import backward_slice, topological, walked

_WIDTH, _HEIGHT, _ACROSS, _DOWN, _MARGIN = 148, 38, 162, 68, 8
_SWEEPS = 24

Point = tuple[float, float]
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One region before and after; `name` gives a tensor's short name."""

    signature: str
    before: Sequence[Operator]
    after: Sequence[Operator]
    name: Callable[[Tensor], str]

    @property
    def versions(self) -> dict[str, Sequence[Operator]]:
        """Both versions, by the words for them."""
        return {"before": self.before, "after": self.after}

    def caption(self, word: str) -> str:
        """How many operators a version has, and its composites with their attributes."""
        operators = self.versions[word]
        return ", ".join([f"{many(len(operators), 'operator')} {word}", *map(str, composites(operators))])

    def lines(self, operators: Sequence[Operator]) -> list[str]:
        """One of both versions in the text form, with one of several heads that are alike."""
        lines = [operator_text(operator, self.name) for operator in operators]
        stretch = longest_repeat([operator.name for operator in operators])
        if stretch.hidden:
            note = f"... {stretch.times - 1} more like these {stretch.period} ..."
            lines[stretch.hidden.start : stretch.hidden.stop] = [note]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        texts = {
            word: [operator_text(operator, self.name) for operator in operators]
            for word, operators in self.versions.items()
        }
        return {"signature": self.signature, **texts}


def find_example(result: ConversionResult) -> Example | None:
    """The first attention block that was converted, or else the first site; None where nothing was.

    `before` is everything above the block's results that any rewrite took out of the graph, `after` everything between
    the same tensors in the model as it was written.
    """
    makers: dict[Tensor, Operator] = {}
    for operator in (operator for site in result.converted for operator in site.replaced):
        for tensor in operator.outputs:
            makers.setdefault(tensor, operator)

    def above(operator: Operator) -> Iterable[Operator]:
        return [makers[tensor] for tensor in operator.inputs if tensor is not None and tensor in makers]

    for site in sorted(result.converted, key=lambda site: (site.heads or 0) < 2):
        made = [tensor for operator in site.replaced for tensor in operator.outputs]
        results = [tensor for tensor in made if tensor.producer is not None]
        before = topological(walked([makers[tensor] for tensor in results], above))
        read = [tensor for operator in before for tensor in operator.inputs if tensor is not None]
        after = backward_slice(results, {tensor for tensor in read if tensor not in makers})[0]
        if before and after:
            return Example(site.signature, before, _heads_last(after), _short_names(result))
    return None


def _heads_last(operators: Collection[Operator]) -> list[Operator]:
    """The operators of a graph in execution order, but those that belong to no head (no cut leads there) first."""
    graph = next(iter(operators)).subgraph
    assert graph is not None
    ordered = [operator for operator in graph.operators if operator in operators]
    of_heads: set[Tensor | None] = set()
    for operator in ordered:
        if len(operator.outputs) > 1 or not of_heads.isdisjoint(operator.inputs):
            of_heads.update(operator.outputs)
    return sorted(ordered, key=lambda operator: not of_heads.isdisjoint(operator.inputs))


def _short_names(result: ConversionResult) -> Callable[[Tensor], str]:
    """Arguments have their own names, other tensors numbers."""
    labels: dict[Tensor, str] = {}
    for signature in [] if result.model is None else result.model.signatures:
        for arguments in (signature.outputs, signature.inputs):
            labels |= {tensor: label for label, tensor in arguments.items()}
    numbers: dict[Tensor, int] = {}
    return lambda tensor: f"%{labels.get(tensor) or numbers.setdefault(tensor, len(numbers))}"


class Stretch(NamedTuple):
    """`times` repetitions of `period` items, the first at `start`; no repetition where `times` is 0."""

    start: int = 0
    period: int = 0
    times: int = 0

    @property
    def hidden(self) -> range:
        """Places of the items that are like others before them."""
        return range(self.start + self.period, self.start + self.period * self.times)


def longest_repeat(kinds: Sequence[str], at_least: int = 4) -> Stretch:
    """The repetitions of `at_least` so many items that cover most; of equal ones the last, which ends with a head."""
    best = Stretch()
    for period in range(at_least, len(kinds) // 2 + 1):
        same = 0
        for end in range(period, len(kinds)):
            same = same + 1 if kinds[end] == kinds[end - period] else 0
            times = 1 + same // period
            gain = times * period - best.times * best.period
            if times > 1 and (gain > 0 or (gain == 0 and period == best.period)):
                best = Stretch(end + 1 - times * period, period, times)
    return best


class Box(NamedTuple):
    """What is drawn for an operator, an input, or the heads that are like one that is shown."""

    title: str
    detail: str
    kind: str = "operator"


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, and edges between them by their places, each with the shape of what goes along it."""

    boxes: list[Box]
    edges: dict[Edge, str]

    def to_mermaid(self) -> str:
        """The text of a Mermaid graph."""
        lines = ["graph TB"]
        for place, box in enumerate(self.boxes):
            lines.append(f'  n{place}["{_entities(box.title)}"]')
            lines += [f"  n{place}@{{shape: text}}"] if box.kind == "input" else []
        lines += [f'  n{a} --> |"{_entities(label)}"| n{b}' for (a, b), label in self.edges.items()]
        return "\n".join(lines)

    def to_svg(self, label: str) -> str:
        """An SVG; its colours are those of the page that it is part of."""
        places, routes = lay_out(len(self.boxes), [*self.edges])
        points = [*places, *(point for route in routes for point in route)]
        width = max(x for x, _ in points) + _WIDTH + _MARGIN
        height = max(y for _, y in points) + _HEIGHT + _MARGIN
        size = f'width="{width:.0f}" height="{height:.0f}"'
        head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img" aria-label="{escape(label)}">'
        drawn = [_svg_box(box, place) for box, place in zip(self.boxes, places, strict=True)]
        return "".join([head, *map(_svg_edge, routes), *drawn, "</svg>"])


def draw(operators: Sequence[Operator], name: Callable[[Tensor], str]) -> Drawing:
    """The operators as a drawing, in which heads that are like another are one box."""
    stretch = longest_repeat([operator.name for operator in operators])
    hidden = stretch.hidden
    boxes: list[Box] = []
    edges: dict[Edge, str] = {}
    made: dict[Tensor, int] = {}
    for place, operator in enumerate(operators):
        if place not in hidden or place == hidden.start:
            sources = [tensor for tensor in operator.inputs if tensor is not None and not tensor.is_constant]
            box = Box(composite_name(operator) or operator.name, _shape(operator.outputs[0]))
            if place in hidden:  # what all heads read is drawn at the one that is shown
                sources = [tensor for tensor in sources if tensor in made][:1]
                box = Box(f"{stretch.times - 1} more like it", f"{len(hidden)} operators", "folded")
            for tensor in sources:
                if tensor not in made:
                    made[tensor] = len(boxes)
                    boxes.append(Box(name(tensor), _shape(tensor), "input"))
            edges |= {(made[tensor], len(boxes)): _shape(tensor) for tensor in sources}
            boxes.append(box)
        made |= dict.fromkeys(operator.outputs, len(boxes) - 1)
    return Drawing(boxes, edges)


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape_signature or tensor.shape))}]"


def lay_out(count: int, edges: Sequence[Edge]) -> tuple[list[Point], list[list[Point]]]:
    """The upper left corner of each box, and the corners that each edge passes; edges come in the order of their ends.

    Boxes stand in layers, each right above the first box that reads it. An edge has a place of its own in every layer
    that it passes. Again and again, each layer is put in the order of the middles of what it is joined to.
    """
    heights = [0] * count
    for a, b in reversed(edges):
        heights[a] = max(heights[a], heights[b] + 1)
    levels = [max(heights, default=0) - height for height in heights]
    layers: list[list[int]] = [[] for _ in range(max(levels, default=0) + 1)]
    for box, level in enumerate(levels):
        layers[level].append(box)
    joined: defaultdict[int, list[int]] = defaultdict(list)
    routes: list[list[int]] = []
    free = count
    for a, b in edges:
        passed = range(free, free := free + levels[b] - levels[a] - 1)
        for level, place in enumerate(passed, levels[a] + 1):
            layers[level].append(place)
        routes.append([a, *passed, b])
        for above, below in pairwise(routes[-1]):
            joined[above].append(below)
            joined[below].append(above)
    across = {node: float(place) for layer in layers for place, node in enumerate(layer)}
    for sweep in range(_SWEEPS):
        for layer in layers[:: -1 if sweep % 2 else 1]:
            wanted = {node: fmean([across[one] for one in joined[node]] or [across[node]]) for node in layer}
            layer.sort(key=wanted.__getitem__)
            right = -math.inf
            for node in layer:
                right = across[node] = max(wanted[node], right + 1)
            shift = fmean(across[node] - wanted[node] for node in layer)
            across |= {node: across[node] - shift for node in layer}
    left = min(across.values(), default=0)
    corners = {
        node: ((across[node] - left) * _ACROSS + _MARGIN, float(level * _DOWN + _MARGIN))
        for level, layer in enumerate(layers)
        for node in layer
    }
    return [corners[box] for box in range(count)], [[corners[node] for node in route] for route in routes]


def _svg_edge(route: Sequence[Point]) -> str:
    """From the lower edge of the first box to the upper one of the last, straight down past every layer between."""
    x, y = route[0][0] + _WIDTH / 2, route[0][1] + _HEIGHT
    curve = [f"M{x:.1f} {y:.1f}"]
    for left, top in route[1:]:
        middle, bend = left + _WIDTH / 2, (top - y) / 2
        curve.append(f"C{x:.1f} {y + bend:.1f} {middle:.1f} {top - bend:.1f} {middle:.1f} {top:.1f}")
        x, y = middle, top + _HEIGHT
        curve.append(f"V{y:.1f}")
    return f'<path class="edge" d="{"".join(curve[:-1])}"/>'


def _svg_box(box: Box, place: Point) -> str:
    x, y = place
    middle = x + _WIDTH / 2
    return (
        f'<g class="{box.kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{middle:.1f}" y="{y + 16:.1f}">{escape(_cut(box.title))}</text>'
        f'<text class="detail" x="{middle:.1f}" y="{y + 30:.1f}">{escape(_cut(box.detail))}</text></g>'
    )


def _cut(text: str) -> str:
    return text if len(text) <= 22 else f"{text[:21]}…"


def _entities(text: str) -> str:
    """Text in quotes of a Mermaid graph: everything but plain characters as an entity, so that no name can end it."""
    plain = one_line(text)
    return "".join(
        letter if letter.isalnum() or letter in " _.,[]-%" else f"#{ord(letter)};" for letter in plain
    )
