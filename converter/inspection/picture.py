"""One block of a conversion before and after, as text and as Mermaid graphs."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from edge_opt.base.words import one_line
from edge_opt.conversion import ConversionResult
from edge_opt.ir import Model, Operator, Tensor
from edge_opt.ir.composites import composite_name
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import backward_slice, makers_of, reads, topological, walked

_LEAST = 4  # operators of a head that is worth hiding


@dataclass(frozen=True, slots=True)
class Example:
    """One region before and after, as operators; `name` gives a tensor's short name."""

    signature: str
    before: Sequence[Operator]
    after: Sequence[Operator]
    name: Callable[[Tensor], str]

    def lines(self, operators: Sequence[Operator]) -> list[str]:
        """One version in the text form, with only the first of several equal heads."""
        lines = self._texts(operators)
        hidden = _hidden(operators)
        if hidden:
            note = f"... {len(hidden)} more like these {hidden.step} ..."
            lines[hidden.start : hidden.stop] = [note]
        return lines

    def _texts(self, operators: Sequence[Operator]) -> list[str]:
        return [operator_text(operator, self.name) for operator in operators]

    def mermaid(self, operators: Sequence[Operator]) -> str:
        """One version as a Mermaid graph, with one box for the repetitions of a head."""
        hidden = _hidden(operators)
        drawing = _Drawing(self.name)
        for place, operator in enumerate(operators):
            sources = operator.computed
            if place not in range(hidden.start, hidden.stop):
                drawing.draw(composite_name(operator) or operator.name, sources)
            elif place == hidden.start:
                # Inputs of all heads are drawn at the first one.
                drawn = [tensor for tensor in sources if tensor in drawing.made]
                drawing.draw(f"{len(hidden)} more like it", drawn)
            drawing.made |= dict.fromkeys(operator.outputs, len(drawing.boxes) - 1)
        return drawing.text()

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        return {
            "signature": self.signature,
            "before": self._texts(self.before),
            "after": self._texts(self.after),
        }


class _Drawing:
    """A Mermaid graph in the making; `made` has the number of the box that each tensor comes from."""

    def __init__(self, name: Callable[[Tensor], str]) -> None:
        self._name = name
        self._edges: dict[str, None] = {}
        self.boxes: list[str] = []
        self.made: dict[Tensor, int] = {}

    def draw(self, title: str, sources: Sequence[Tensor]) -> None:
        """Add a box with an edge from each of its sources, which get boxes of their own if nothing made them."""
        for tensor in sources:
            if tensor not in self.made:
                self.made[tensor] = len(self.boxes)
                self.boxes.append(f'(["{_entities(self._name(tensor))}"])')
        for tensor in sources:
            shape = list(tensor.shape_signature or tensor.shape)
            self._edges[f'  n{self.made[tensor]} --> |"{shape}"| n{len(self.boxes)}'] = None
        self.boxes.append(f'["{_entities(title)}"]')

    def text(self) -> str:
        """The graph."""
        boxes = [f"  n{number}{box}" for number, box in enumerate(self.boxes)]
        return "\n".join(["graph TB", *boxes, *self._edges])


def find_example(result: ConversionResult) -> Example | None:
    """The first attention block that was converted, or else the first site; None if there is none.

    `before` has all operators above the block's results that any rewrite removed, `after` those between the same
    tensors in the converted model.
    """
    removed = [*chain.from_iterable(site.replaced for site in result.converted)]
    # A tensor that several rewrites redefined belongs to the first.
    makers = makers_of(reversed(removed))

    def above(operator: Operator) -> Iterable[Operator]:
        return [makers[tensor] for tensor in operator.inputs if tensor in makers]

    for site in sorted(result.converted, key=lambda site: (site.heads or 0) < 2):
        results = [one for one in makers_of(site.replaced) if one.producer is not None]
        before = topological(walked([makers[tensor] for tensor in results], above))
        after = backward_slice(results, reads(before))[0]
        if before and after:
            graph = next(iter(after)).subgraph
            assert graph is not None
            ordered = [operator for operator in graph.operators if operator in after]
            return Example(site.signature, before, ordered, _names(result.model).__getitem__)
    return None


def _names(model: Model | None) -> Mapping[Tensor, str]:
    """Names as signatures have them; any other tensor gets the next number when it is first asked for."""
    numbers = count()
    names: dict[Tensor, str] = defaultdict(lambda: f"%{next(numbers)}")
    for signature in [] if model is None else model.signatures:
        for label, tensor in chain(signature.outputs.items(), signature.inputs.items()):
            names[tensor] = f"%{label}"
    return names


def _hidden(operators: Sequence[Operator]) -> range:
    """The repetitions of a head, see `repeats`."""
    return repeats([operator.name for operator in operators])


def repeats(kinds: Sequence[str]) -> range:
    """Starts of the repetitions of a sequence of four items or more, chosen to cover as many items as possible.

    The first occurrence is not included. The step of the range is the length of the sequence.
    """
    best = range(0)
    covered = 0
    for period in range(_LEAST, len(kinds) // 2 + 1):
        same = 0
        for end in range(period, len(kinds)):
            same = same + 1 if kinds[end] == kinds[end - period] else 0
            hidden = same // period * period
            gain = hidden + period - covered
            # In a tie the last range, which ends with a head.
            if hidden and (gain > 0 or (gain == 0 and period == best.step)):
                best = range(end + 1 - hidden, end + 1, period)
                covered = hidden + period
    return best


def _entities(text: str) -> str:
    """Escape quoted text of a Mermaid graph: all but plain characters become entities, so that no name can end it."""
    return "".join(
        letter if letter.isalnum() or letter in " _.,[]-%" else f"#{ord(letter)};"
        for letter in one_line(text)
    )
