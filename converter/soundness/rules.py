"""Every rule of soundness, and all that they find in a model."""

from collections.abc import Callable, Iterator
from typing import Final

from edge_opt.ir import Model
from edge_opt.soundness.findings import Unsound
from edge_opt.soundness.ranges import broken_ranges

RULES: Final[tuple[Callable[[Model], Iterator[Unsound]], ...]] = (broken_ranges,)


def soundness(model: Model) -> list[Unsound]:
    """What was ruined in a model before it came here; nothing in a float model, or in one with proper ranges."""
    return [found for rule in RULES for found in rule(model)]
