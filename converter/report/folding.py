"""Finds what repeats itself in a list of operators, so that one of many equal heads is shown."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.text import operator_text


class Stretch(NamedTuple):
    """`times` repetitions of `period` items, the first at `start`; no repetition where `times` is 0."""

    start: int = 0
    period: int = 0
    times: int = 0

    @property
    def hidden(self) -> range:
        """Places of the items that are like others before them."""
        return range(self.start + self.period, self.start + self.period * self.times)


def folded(operators: Sequence[Operator], name: Callable[[Tensor], str]) -> list[str]:
    """The operators in the text form, with the longest stretch that repeats itself shown once."""
    lines = [operator_text(operator, name) for operator in operators]
    stretch = longest_repeat([operator.name for operator in operators])
    if not stretch.hidden:
        return lines
    note = f"... {stretch.times - 1} more like these {stretch.period} ..."
    return [*lines[: stretch.hidden.start], note, *lines[stretch.hidden.stop :]]


def hoisted(operators: Sequence[Operator]) -> list[Operator]:
    """The operators in another valid order: what cuts tensors for several heads comes before the first head."""
    producers = {id(tensor): operator for operator in operators for tensor in operator.outputs}
    early: set[int] = set()
    pending = [operator for operator in operators if len(operator.outputs) > 1]
    while pending:
        operator = pending.pop()
        if id(operator) not in early:
            early.add(id(operator))
            sources = (producers.get(id(tensor)) for tensor in operator.inputs)
            pending.extend(source for source in sources if source is not None)
    return sorted(operators, key=lambda operator: id(operator) not in early)


def longest_repeat(kinds: Sequence[str], at_least: int = 4) -> Stretch:
    """The stretch of repetitions of `at_least` so many items that covers most."""
    best, covered = Stretch(), 0
    for period in range(at_least, len(kinds) // 2 + 1):
        for start in range(len(kinds) - 2 * period + 1):
            times = _times(kinds, start, period)
            # Of stretches that cover as much the last one ends where a head ends; others begin in the middle of a head.
            longer = times * period > covered or (times * period == covered and best.period == period)
            if times > 1 and longer:
                best, covered = Stretch(start, period, times), times * period
    return best


def _times(kinds: Sequence[str], start: int, period: int) -> int:
    """How often the `period` items at `start` come one after the other."""
    times, first = 1, kinds[start : start + period]
    while kinds[(begin := start + times * period) : begin + period] == first:
        times += 1
    return times
