"""A part of a report, before it is written in one of the formats."""

from collections.abc import Sequence
from typing import NamedTuple

from edge_opt.inspection.picture import Example

Table = list[tuple[str, ...]]
"""Rows, the first being the heads."""


class Section(NamedTuple):
    """A title, and below it sentences, tables and blocks that are drawn before and after."""

    title: str
    parts: Sequence[str | Table | Example]
