"""A row of items in which any place is reached, compared and changed without a search."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)

_GAP = 1 << 1024
"""Distance between the numbers of items that are added at the end. Each item that is put in between halves a gap."""


class Order(Generic[_Item]):
    """Distinct items in a row, linked to their neighbours.

    Adding or removing an item costs the same at every place. `number` grows along the row, so two places compare
    without a search. Numbers leave gaps; once one is full, after a thousand items at one place, all get new numbers.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Item, int] = {}
        # None is before the first item and after the last one.
        self._after: dict[_Item | None, _Item | None] = {None: None}
        self._before: dict[_Item | None, _Item | None] = {None: None}

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, item: object) -> bool:
        return item in self._numbers

    def __iter__(self) -> Iterator[_Item]:
        """The items in order; the row must not change meanwhile."""
        item = self._after[None]
        while item is not None:
            yield item
            item = self._after[item]

    def number(self, item: _Item) -> int:
        """A number that is larger for items further behind; valid until the next `put`."""
        return self._numbers[item]

    def after(self, item: _Item) -> _Item | None:
        """The next item; None after the last one."""
        return self._after[item]

    def put(self, item: _Item, before: _Item | None = None) -> None:
        """Add an item in front of another one, or at the end."""
        assert item not in self._numbers
        previous = self._before[before]
        if before is not None and self._numbers[before] - self._start(previous) < 2:
            self._renumber()
        start = self._start(previous)
        end = start + 2 * _GAP if before is None else self._numbers[before]
        self._numbers[item] = (start + end) // 2
        self._link(previous, item)
        self._link(item, before)

    def remove(self, item: _Item) -> None:
        """Remove an item."""
        del self._numbers[item]
        self._link(self._before.pop(item), self._after.pop(item))

    def _link(self, item: _Item | None, following: _Item | None) -> None:
        self._after[item] = following
        self._before[following] = item

    def _start(self, item: _Item | None) -> int:
        return 0 if item is None else self._numbers[item]

    def _renumber(self) -> None:
        for place, item in enumerate(self, 1):
            self._numbers[item] = place * _GAP
