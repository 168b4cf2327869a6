"""A graph's operators are where they were put, as in a list, and their places grow."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_opt.ir import Operator, OperatorCode, Subgraph


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_operators_are_where_they_were_put(data: st.DataObject) -> None:
    graph, expected = Subgraph(), list[Operator]()
    for _ in range(data.draw(st.integers(1, 40))):
        item = Operator(OperatorCode(0), (), ())
        change = data.draw(st.integers(0, 3))
        if expected and change == 0:
            removed = data.draw(st.sampled_from(expected))
            graph.remove(removed)
            expected.remove(removed)
        if expected and change == 1:
            item = data.draw(st.sampled_from(expected))
            expected.remove(item)
        if change == 2:
            graph.append(item)
            expected.append(item)
            continue
        before = data.draw(st.sampled_from([None, *expected]))
        graph.put(item, before)
        expected.insert(len(expected) if before is None else expected.index(before), item)
    assert [*graph] == expected
    assert len(graph) == len(expected)
    assert all(graph.place(one) < graph.place(other) for one, other in pairwise(expected))
    assert [graph.after(item) for item in expected] == [*expected[1:], None]
