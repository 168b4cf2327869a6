"""A row of items in which any place is reached, compared and changed without a search."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)

_GAP = 1 << 20
"""Distance between the numbers of items that are added at the end."""


class Order(Generic[_Item]):
    """Distinct items in a row, linked to their neighbours.

    Adding or removing an item costs the same at every place. `number` grows along the row, so two places compare
    without a search. Numbers leave gaps; where a gap is full, the items behind it get new numbers, as few as leave
    wide gaps again (Dietz and Sleator, "Two algorithms for maintaining order in a list": on average log n).
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
            self._make_room(previous)
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

    def _make_room(self, item: _Item | None) -> None:
        """Spread the items behind this one evenly, up to the first that is far enough away."""
        start = self._start(item)
        crowded: list[_Item] = []
        following = self._after[item]
        while following is not None and self._numbers[following] - start <= (len(crowded) + 1) ** 2:
            crowded.append(following)
            following = self._after[following]
        end = start + _GAP * (len(crowded) + 1) if following is None else self._numbers[following]
        for place, each in enumerate(crowded, 1):
            self._numbers[each] = start + (end - start) * place // (len(crowded) + 1)
