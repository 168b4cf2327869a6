"""The arithmetic of factored shapes: whatever is done to a shape, every head keeps its own elements."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_shapes import elements, labelled_shapes

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored

PLAIN = Factor(3)
quick = settings(max_examples=100, derandomize=True, deadline=None, database=None)


@st.composite
def shapes_of(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """A shape of that many elements."""
    shape: list[int] = []
    while count > 1:
        size = draw(st.sampled_from([n for n in range(count, 0, -1) if count % n == 0]))
        shape.append(size)
        count //= size
    return (*shape, *[1] * draw(st.integers(0, 1)))


@quick
@given(st.data())
def test_a_reshape_leaves_every_head_its_elements(data: st.DataObject) -> None:
    factored, heads = data.draw(labelled_shapes())
    shape = data.draw(shapes_of(math.prod(fx.sizes(factored))))
    regrouped = fx.regroup(factored, shape)
    if regrouped is None:
        return
    assert fx.sizes(regrouped) == shape
    for head in range(heads):
        assert elements(regrouped, head) == elements(factored, head)


@quick
@given(labelled_shapes())
def test_the_pieces_make_up_the_whole(case: tuple[Factored, int]) -> None:
    factored, heads = case
    assert fx.piece_count(factored) == heads
    assert sorted(e for head in range(heads) for e in elements(factored, head)) == list(
        range(math.prod(fx.sizes(factored)))
    )
    for keep in (True, False):
        assert math.prod(fx.piece_shape(factored, keep=keep)) * heads == math.prod(fx.sizes(factored))
    assert len({fx.piece_index(factored, head) for head in range(heads)}) == heads


@quick
@given(st.data())
def test_an_axis_cut_in_two_is_the_axis(data: st.DataObject) -> None:
    factored, heads = data.draw(labelled_shapes())
    axis = tuple(factor for own in factored for factor in own)
    count = data.draw(st.integers(1, math.prod(factor.size for factor in axis)))
    cut = fx.cut_axis(axis, count)
    if cut is not None:
        assert math.prod(factor.size for factor in cut[0]) == count
        for head in range(heads):
            assert elements((cut[0] + cut[1],), head) == elements((axis,), head)


def test_neighbours_that_are_one_factor_cut_in_two_become_one() -> None:
    assert fx.merge_neighbours([Factor(2), Factor(1), PLAIN]) == [Factor(6)]
    assert fx.merge_neighbours([Factor(2, 6), Factor(3, 2), Factor(2, 1)]) == [Factor(12, 1)]
    interleaved = [Factor(3, 1), Factor(2, 3)]
    assert fx.merge_neighbours(interleaved) == interleaved
    assert fx.merge_neighbours([Factor(2, 1), PLAIN]) == [Factor(2, 1), PLAIN]
