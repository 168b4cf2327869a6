"""Finds what repeats itself in a list of operators, so that one of many equal heads is shown."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge_opt.ir import Operator, Tensor
from edge_opt.ir.region import needed_for
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
    cut = [tensor for operator in operators if len(operator.outputs) > 1 for tensor in operator.outputs]
    early = set(needed_for(cut, operators))
    return sorted(operators, key=lambda operator: operator not in early)


def longest_repeat(kinds: Sequence[str], at_least: int = 4) -> Stretch:
    """The stretch of repetitions of `at_least` so many items that covers most."""
    best, covered = Stretch(), 0
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    numbers = np.array([places[kind] for kind in kinds], np.int64)
    for period in range(at_least, len(kinds) // 2 + 1):
        others = np.flatnonzero(numbers[:-period] != numbers[period:])
        starts = np.arange(len(kinds) - period)
        # From each start on, as many items as this are the same a period later.
        same = np.append(others, len(starts))[np.searchsorted(others, starts)] - starts
        times = 1 + same // period
        most = int(times.max())
        if most > 1 and most * period > covered:
            # Of stretches that cover as much the last one ends where a head ends; others begin in the middle of a head.
            start = int(np.flatnonzero(times == most)[-1])
            best, covered = Stretch(start, period, most), most * period
    return best
