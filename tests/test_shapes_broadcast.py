"""Broadcasting, as the `Broadcastable` trait has it: the page's examples by name, then properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.shapes import ShapeError, broadcast, verify_broadcast

Shape = tuple[int, ...]
UNRANKED = None


@pytest.mark.parametrize(
    ("left", "right", "inferred"),
    [(-1, -1, -1), (-1, 1, -1), (-1, 5, 5), (1, 1, 1), (1, 5, 5), (5, 5, 5)],
)
def test_page_dimension_table_in_both_orders(left: int, right: int, inferred: int) -> None:
    assert broadcast((left,), (right,)) == (inferred,)
    assert broadcast((right,), (left,)) == (inferred,)


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        pytest.param([(4,), (2, 3, 1)], (2, 3, 4), id="page: ranks are made equal with 1s on the left"),
        pytest.param([(2, 3, 1), (4,)], (2, 3, 4), id="page: so they are in the other order"),
        pytest.param([UNRANKED, (2, 1), UNRANKED, (3,)], (2, 3), id="page: unranked operands are left out"),
        pytest.param([(7, -1)], (7, -1), id="page: one operand gives the result"),
        pytest.param([UNRANKED, (7, -1)], (7, -1), id="page: one ranked operand gives the result"),
        pytest.param([UNRANKED, UNRANKED], None, id="page: no ranked operand infers nothing"),
        pytest.param([(-1, 1), (1, 4), (3, 1), (1,)], (3, 4), id="page: any number folds from the left"),
        pytest.param([(0,), (1,)], (0,), id="size 0 and 1 as in numpy"),
        pytest.param([(0,), (0,)], (0,), id="size 0 and 0 as in numpy"),
        pytest.param([(0,), (-1,)], (0,), id="size 0 and dynamic"),
        pytest.param([(), ()], (), id="scalars"),
        pytest.param([(), (2, -1)], (2, -1), id="a scalar broadcasts to anything"),
        pytest.param([(), UNRANKED], (), id="an unranked operand beside a scalar is left out"),
        pytest.param([UNRANKED], None, id="an unranked operand is not a scalar"),
    ],
)
def test_operands_give_a_result(operands: list[Shape | None], result: Shape | None) -> None:
    assert broadcast(*operands) == result


@pytest.mark.parametrize(
    ("operands", "complaint"),
    [
        ([(2,), (3,)], r"2 in operand 0 \(axis 0\), 3 in operand 1 \(axis 0\)"),
        ([(2, 1), (2, 4), (-1,), (5,)], r"4 in operand 1 \(axis 1\), 5 in operand 3 \(axis 0\)"),
        ([(3, 1), (7, 1, 4), (1, 2)], r"4 in operand 1 \(axis 2\), 2 in operand 2 \(axis 1\)"),
        ([(0,), (3,)], "0 in operand 0"),
        ([], "at least one operand"),
        ([(1,), (-2,)], "operand 1 has the dimension"),
        ([(1,), (1.5,)], "operand 1 has the dimension"),
        ([(1,), ("3",)], "operand 1 has the dimension"),
    ],
)
def test_two_sizes_over_1_and_what_is_no_size_are_refused_by_the_operands_that_have_them(
    operands: list[Shape | None], complaint: str
) -> None:
    with pytest.raises(ShapeError, match=complaint):
        broadcast(*operands)


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        pytest.param([(1, 2), (1, 2)], (1, 2), id="exact match of static sizes"),
        pytest.param([(-1,), (-1,)], (-1,), id="dynamic sizes match"),
        pytest.param([(1,), (4,)], (4,), id="the shape of the first is broadcast"),
        pytest.param([(4,)], (-1,), id="static inferred, dynamic recorded"),
        pytest.param([(4,), (2, 3, 4)], (2, 3, 4), id="the first is expanded and broadcast"),
        pytest.param([np.zeros(2, bool).shape] * 2, np.zeros(2, np.int64).shape, id="types do not matter"),
        pytest.param([(2,)], UNRANKED, id="an unranked result needs no check"),
        pytest.param([UNRANKED, UNRANKED], (2,), id="unranked operands need no check"),
    ],
)
def test_page_correct_uses(operands: list[Shape | None], result: Shape | None) -> None:
    verify_broadcast(operands, result)


@pytest.mark.parametrize(
    ("operands", "result", "complaint"),
    [
        pytest.param([(3,), (2,)], (-1,), "do not broadcast: 3 in operand 0", id="operands not equal"),
        pytest.param([(3,), (3,)], (1, 3), r"\[1,3\] does not fit \[3\]: rank 1 expected, rank 2", id="rank"),
        pytest.param(
            [(-1,), (-1,)], (4,), r"\[4\] does not fit \[\?\]", id="dynamic inferred, static recorded"
        ),
        pytest.param([(2,), (2,)], (4,), "axis 0 is 2, recorded as 4", id="another size"),
        pytest.param([(1,), (1,)], (4,), "axis 0 is 1, recorded as 4", id="results do not broadcast"),
    ],
)
def test_page_incorrect_uses(operands: list[Shape], result: Shape, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        verify_broadcast(operands, result)


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize(
    ("inferred", "actual", "table"), [(-1, -1, True), (5, -1, True), (5, 5, True), (5, 6, False)]
)
def test_page_verification_table(inferred: int, actual: int, table: bool, refine: bool) -> None:
    if table:
        verify_broadcast([(inferred,)], (actual,), allow_refinement=refine)
    else:
        with pytest.raises(ShapeError):
            verify_broadcast([(inferred,)], (actual,), allow_refinement=refine)


def test_page_disagreement_the_table_is_followed_only_with_allow_refinement() -> None:
    """Inferred `?` against static: OK by the page's table, an error by its pseudo-code and examples (above)."""
    verify_broadcast([(-1,), (-1,)], (4,), allow_refinement=True)


def test_refinement_does_not_excuse_a_static_mismatch_or_another_rank() -> None:
    with pytest.raises(ShapeError):
        verify_broadcast([(2, -1)], (3, 4), allow_refinement=True)
    with pytest.raises(ShapeError):
        verify_broadcast([(-1,)], (4, 4), allow_refinement=True)


# What the page does not name.


def test_numpy_integers_are_sizes() -> None:
    result = broadcast(tuple(np.array([1, 3])), [np.int64(2), 1])
    assert result == (2, 3)
    assert all(type(dim) is int for dim in result)


SIZES = st.integers(0, 4)
STATIC = st.lists(SIZES, max_size=4).map(tuple)
MAYBE_DYNAMIC = st.lists(st.sampled_from([-1, -1, 0, 1, 2, 3]), max_size=3).map(tuple)


@given(st.lists(STATIC, min_size=1, max_size=5))
def test_static_shapes_broadcast_as_in_numpy(shapes: list[tuple[int, ...]]) -> None:
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ShapeError):
            broadcast(*shapes)
    else:
        assert broadcast(*shapes) == expected


@given(st.lists(MAYBE_DYNAMIC, min_size=1, max_size=3), st.data())
def test_for_every_legal_choice_of_runtime_sizes_the_derived_shape_fits(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    runtime = [tuple(data.draw(st.integers(0, 3)) if d < 0 else d for d in shape) for shape in shapes]
    try:
        actual = np.broadcast_shapes(*runtime)
    except ValueError:
        return
    derived = broadcast(*shapes)
    assert derived is not None
    assert len(derived) == len(actual)
    assert all(d in (-1, size) for d, size in zip(derived, actual, strict=True))


@given(st.lists(MAYBE_DYNAMIC, min_size=1, max_size=2))
def test_shapes_are_refused_only_where_no_runtime_size_is_legal(shapes: list[tuple[int, ...]]) -> None:
    try:
        broadcast(*shapes)
    except ShapeError:
        slots = sum(dim < 0 for shape in shapes for dim in shape)
        for sizes in itertools.product(range(4), repeat=slots):
            fill = iter(sizes)
            runtime = [tuple(next(fill) if d < 0 else d for d in shape) for shape in shapes]
            with pytest.raises(ValueError, match="broadcast"):
                np.broadcast_shapes(*runtime)
