"""Every rule of soundness, and all that they find in a model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from edge_opt.ir import Model
from edge_opt.soundness.findings import Unsound
from edge_opt.soundness.ranges import broken_ranges

Rule = Callable[[Model], Iterator[Unsound]]
RULES: Final[tuple[Rule, ...]] = (broken_ranges,)


def soundness(model: Model, rules: Iterable[Rule] = RULES) -> list[Unsound]:
    """What was ruined in a model before it came here; nothing in a float model, or in one with proper ranges."""
    return [found for rule in rules for found in rule(model)]
