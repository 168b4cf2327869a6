"""One block of a conversion before and after: as text, as a Mermaid graph, and as an SVG picture in layers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
_LONGEST = 22

Point = tuple[float, float]
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One region before and after, as operators; `name` gives a tensor's short name."""

    signature: str
    before: Sequence[Operator]
    after: Sequence[Operator]
    name: Callable[[Tensor], str]

    def lines(self, operators: Sequence[Operator]) -> list[str]:
        """One version in the text form, with only the first of several equal heads."""
        lines = [operator_text(operator, self.name) for operator in operators]
        if hidden := repeats([operator.name for operator in operators]):
            note = f"... {len(hidden)} more like these {hidden.step} ..."
            lines[hidden.start : hidden.stop] = [note]
        return lines

    def drawings(self) -> dict[str, "Drawing"]:
        """Both versions by caption: the number of operators, and the composites."""
        captions = {}
        for word, operators in (("before", self.before), ("after", self.after)):
            parts = [f"{many(len(operators), 'operator')} {word}", *map(str, composites(operators))]
            captions[", ".join(parts)] = draw(operators, self.name)
        return captions

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        before, after = (
            [operator_text(operator, self.name) for operator in operators]
            for operators in (self.before, self.after)
        )
        return {"signature": self.signature, "before": before, "after": after}


def find_example(result: ConversionResult) -> Example | None:
    """The first attention block that was converted, or else the first site; None if there is none.

    `before` has all operators above the block's results that any rewrite removed, `after` those between the same
    tensors in the converted model.
    """
    makers: dict[Tensor, Operator] = {}
    for operator in (operator for site in result.converted for operator in site.replaced):
        for tensor in operator.outputs:
            makers.setdefault(tensor, operator)
    labels: dict[Tensor, str] = {}
    for signature in [] if result.model is None else result.model.signatures:
        for arguments in (signature.outputs, signature.inputs):
            labels |= {tensor: label for label, tensor in arguments.items()}
    numbers: dict[Tensor, int] = {}

    def above(operator: Operator) -> Iterable[Operator]:
        return [makers[tensor] for tensor in operator.inputs if tensor is not None and tensor in makers]

    def short_name(tensor: Tensor) -> str:
        return f"%{labels.get(tensor) or numbers.setdefault(tensor, len(numbers))}"

    for site in sorted(result.converted, key=lambda site: (site.heads or 0) < 2):
        made = [tensor for operator in site.replaced for tensor in operator.outputs]
        results = [tensor for tensor in made if tensor.producer is not None]
        before = topological(walked([makers[tensor] for tensor in results], above))
        read = [tensor for operator in before for tensor in operator.inputs if tensor is not None]
        after = backward_slice(results, {tensor for tensor in read if tensor not in makers})[0]
        if before and after:
            graph = next(iter(after)).subgraph
            assert graph is not None
            ordered = [operator for operator in graph.operators if operator in after]
            return Example(site.signature, before, ordered, short_name)
    return None


def repeats(kinds: Sequence[str], at_least: int = 4) -> range:
    """Starts of the repetitions of a sequence of `at_least` items, chosen to cover as many items as possible.

    The first occurrence is not included. The step of the range is the length of the sequence.
    """
    best, covered = range(0), 0
    for period in range(at_least, len(kinds) // 2 + 1):
        same = 0
        for end in range(period, len(kinds)):
            same = same + 1 if kinds[end] == kinds[end - period] else 0
            hidden = same // period * period
            gain = hidden + period - covered
            # In a tie the last range, which ends with a head.
            if hidden and (gain > 0 or (gain == 0 and period == best.step)):
                best, covered = range(end + 1 - hidden, end + 1, period), hidden + period
    return best


class Box(NamedTuple):
    """An operator, an input, or the repetitions of a head."""

    title: str
    detail: str
    kind: str = "operator"


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes, and the edges between their indices, each with the shape of its tensor."""

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
        """An SVG, in the colours of the page around it; edges go straight down past the boxes between."""
        places, routes = lay_out(len(self.boxes), [*self.edges])
        parts = []
        for route in routes:
            curve = ""
            for (x, y), (end, top) in pairwise(route):
                low, bend = y + _HEIGHT, (top - y - _HEIGHT) / 2
                curve += f"M{x:.1f} {low:.1f}C{x:.1f} {low + bend:.1f} {end:.1f} {top - bend:.1f} "
                curve += f"{end:.1f} {top:.1f}V{top + _HEIGHT:.1f}"  # the last one ends behind its box
            parts.append(f'<path class="edge" d="{curve}"/>')
        for box, (x, y) in zip(self.boxes, places, strict=True):
            size = f'width="{_WIDTH}" height="{_HEIGHT}" rx="6"'
            parts.append(
                f'<g class="{box.kind}"><rect x="{x - _WIDTH / 2:.1f}" y="{y:.1f}" {size}/>'
                f'<text x="{x:.1f}" y="{y + 16:.1f}">{escape(_cut(box.title))}</text>'
                f'<text class="detail" x="{x:.1f}" y="{y + 30:.1f}">{escape(_cut(box.detail))}</text></g>'
            )
        points = [*places, *(point for route in routes for point in route)]
        width = max(x for x, _ in points) + _WIDTH / 2 + _MARGIN
        height = max(y for _, y in points) + _HEIGHT + _MARGIN
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def draw(operators: Sequence[Operator], name: Callable[[Tensor], str]) -> Drawing:
    """Draw operators, with one box for the repetitions of a head."""
    hidden = repeats([operator.name for operator in operators])
    boxes: list[Box] = []
    edges: dict[Edge, str] = {}
    made: dict[Tensor, int] = {}
    for place, operator in enumerate(operators):
        is_hidden = hidden.start <= place < hidden.stop
        if not is_hidden or place == hidden.start:
            sources = [tensor for tensor in operator.inputs if tensor is not None and not tensor.is_constant]
            box = Box(composite_name(operator) or operator.name, _shape(operator.outputs[0]))
            if is_hidden:  # inputs of all heads are drawn at the first one
                sources = [tensor for tensor in sources if tensor in made][:1]
                box = Box(f"{len(hidden)} more like it", f"{hidden.stop - hidden.start} operators", "folded")
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
    """Top centre of each box, and the points on each edge; `edges` must be sorted by their ends.

    Boxes stand in layers, each directly above the first box that reads it. An edge takes a place in every layer that it
    crosses. Layers are sorted repeatedly by the mean position of each node's neighbours.
    """
    heights = [0] * count
    for a, b in reversed(edges):
        heights[a] = max(heights[a], heights[b] + 1)
    layers: list[list[int]] = [[] for _ in range(max(heights) + 1)]  # from the top
    for box, height in enumerate(heights):
        layers[-1 - height].append(box)
    joined: defaultdict[int, list[int]] = defaultdict(list)
    routes, free = [], count
    for a, b in edges:
        passed = range(free, free := free + heights[a] - heights[b] - 1)
        for node, layer in zip(passed, layers[len(layers) - heights[a] :], strict=False):
            layer.append(node)
        routes.append([a, *passed, b])
        for above, below in pairwise(routes[-1]):
            joined[above].append(below)
            joined[below].append(above)
    across = {node: float(place) for layer in layers for place, node in enumerate(layer)}
    for sweep in range(_SWEEPS):
        for layer in layers[:: -1 if sweep % 2 else 1]:
            wanted = {node: fmean(across[one] for one in joined[node] or [node]) for node in layer}
            layer.sort(key=wanted.__getitem__)
            right = -math.inf
            for node in layer:
                right = across[node] = max(wanted[node], right + 1)
            shift = fmean(across[node] - wanted[node] for node in layer)
            across |= {node: across[node] - shift for node in layer}
    left = min(across.values())
    points = {
        node: ((across[node] - left) * _ACROSS + _WIDTH / 2 + _MARGIN, float(level * _DOWN + _MARGIN))
        for level, layer in enumerate(layers)
        for node in layer
    }
    return [points[box] for box in range(count)], [[points[node] for node in route] for route in routes]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _entities(text: str) -> str:
    """Escape quoted text of a Mermaid graph: all but plain characters become entities, so that no name can end it."""
    return "".join(
        letter if letter.isalnum() or letter in " _.,[]-%" else f"#{ord(letter)};"
        for letter in one_line(text)
    )
