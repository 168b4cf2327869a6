"""A row that is changed anywhere is what a list would be, and its numbers grow."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_opt.ir.order import Order


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_items_are_where_they_were_put(data: st.DataObject) -> None:
    order, expected = Order[int](), list[int]()
    for item in range(data.draw(st.integers(1, 40))):
        if expected and data.draw(st.integers(0, 3)) == 0:
            removed = data.draw(st.sampled_from(expected))
            order.remove(removed)
            expected.remove(removed)
        before = data.draw(st.sampled_from([None, *expected]))
        order.put(item, before)
        expected.insert(len(expected) if before is None else expected.index(before), item)
    assert list(order) == expected
    assert len(order) == len(expected)
    assert all(order.number(one) < order.number(other) for one, other in pairwise(expected))
    assert [order.after(item) for item in expected] == [*expected[1:], None]


def test_a_gap_that_is_full_gets_room() -> None:
    for in_front in (False, True):
        order = Order[int]()
        order.put(0)
        for item in range(1, 3000):
            order.put(item, item - 1 if in_front else 0)
        assert all(order.number(one) < order.number(other) for one, other in pairwise(order))
