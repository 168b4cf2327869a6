"""One block of a conversion before and after, as text and as Mermaid graphs."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from edge_opt.base.words import one_line
from edge_opt.conversion import ConversionResult
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.composites import composite_name
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import backward_slice, reads, topological, walked


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
        hidden = repeats([operator.name for operator in operators])
        if hidden:
            note = f"... {len(hidden)} more like these {hidden.step} ..."
            lines[hidden.start : hidden.stop] = [note]
        return lines

    def mermaid(self, operators: Sequence[Operator]) -> str:
        """One version as a Mermaid graph, with one box for the repetitions of a head."""
        hidden = repeats([operator.name for operator in operators])
        boxes: list[str] = []
        edges: dict[str, None] = {}
        made: dict[Tensor, int] = {}
        for place, operator in enumerate(operators):
            is_hidden = hidden.start <= place < hidden.stop
            if not is_hidden or place == hidden.start:
                sources = [tensor for tensor in operator.inputs if tensor and not tensor.is_constant]
                title = composite_name(operator) or operator.name
                if is_hidden:  # inputs of all heads are drawn at the first one
                    sources = [tensor for tensor in sources if tensor in made]
                    title = f"{len(hidden)} more like it"
                for tensor in sources:
                    if tensor not in made:
                        made[tensor] = len(boxes)
                        boxes.append(f'(["{_entities(self.name(tensor))}"])')
                for tensor in sources:
                    shape = list(tensor.shape_signature or tensor.shape)
                    edges[f'  n{made[tensor]} --> |"{shape}"| n{len(boxes)}'] = None
                boxes.append(f'["{_entities(title)}"]')
            made |= dict.fromkeys(operator.outputs, len(boxes) - 1)
        return "\n".join(["graph TB", *(f"  n{place}{box}" for place, box in enumerate(boxes)), *edges])

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        return {
            "signature": self.signature,
            "before": [operator_text(operator, self.name) for operator in self.before],
            "after": [operator_text(operator, self.name) for operator in self.after],
        }


def find_example(result: ConversionResult) -> Example | None:
    """The first attention block that was converted, or else the first site; None if there is none.

    `before` has all operators above the block's results that any rewrite removed, `after` those between the same
    tensors in the converted model.
    """
    makers: dict[Tensor, Operator] = {}
    for operator in chain.from_iterable(site.replaced for site in result.converted):
        for tensor in operator.outputs:
            makers.setdefault(tensor, operator)  # one that several rewrites redefined belongs to the first
    numbers = count()
    names: dict[Tensor, str] = defaultdict(lambda: f"%{next(numbers)}")
    for signature in [] if result.model is None else result.model.signatures:
        for label, tensor in chain(signature.outputs.items(), signature.inputs.items()):
            names[tensor] = f"%{label}"

    def above(operator: Operator) -> Iterable[Operator]:
        return [makers[tensor] for tensor in operator.inputs if tensor in makers]

    for site in sorted(result.converted, key=lambda site: (site.heads or 0) < 2):
        made = chain.from_iterable(operator.outputs for operator in site.replaced)
        results = [tensor for tensor in made if tensor.producer is not None]
        before = topological(walked([makers[tensor] for tensor in results], above))
        after = backward_slice(results, reads(before))[0]
        if before and after:
            graph = next(iter(after)).subgraph
            assert graph is not None
            ordered = [operator for operator in graph.operators if operator in after]
            return Example(site.signature, before, ordered, names.__getitem__)
    return None


def repeats(kinds: Sequence[str], at_least: int = 4) -> range:
    """Starts of the repetitions of a sequence of `at_least` items, chosen to cover as many items as possible.

    The first occurrence is not included. The step of the range is the length of the sequence.
    """
    best = range(0)
    covered = 0
    for period in range(at_least, len(kinds) // 2 + 1):
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
