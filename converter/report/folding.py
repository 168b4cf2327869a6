"""Finds what repeats itself in a list of operators, so that one of many equal heads is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.ir import Operator


@dataclass(frozen=True, slots=True)
class Stretch:
    """`times` repetitions of `period` items, the first at `start`; no repetition where `times` is 0."""

    start: int = 0
    period: int = 0
    times: int = 0

    @property
    def hidden(self) -> range:
        """Places of the items that are like others before them."""
        return range(self.start + self.period, self.start + self.period * self.times)


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


def longest_repeat(kinds: Sequence[str], at_least: int = 2) -> Stretch:
    """The stretch of repetitions of `at_least` so many items that covers most."""
    best, covered = Stretch(), 0
    for period in range(at_least, len(kinds) // 2 + 1):
        start = 0
        while start + 2 * period <= len(kinds):
            times = _times(kinds, start, period)
            # Of equal ones the last: it ends where a head ends, an earlier one begins in the middle of one.
            longer = times * period > covered or (times * period == covered and best.period == period)
            if times > 1 and longer:
                best, covered = Stretch(start, period, times), times * period
            start += 1
    return best


def _times(kinds: Sequence[str], start: int, period: int) -> int:
    """How often the `period` items at `start` come one after the other."""
    times, length = 1, len(kinds)
    while (begin := start + times * period) + period <= length:
        if any(kinds[start + place] != kinds[begin + place] for place in range(period)):
            break
        times += 1
    return times
