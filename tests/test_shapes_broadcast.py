"""Broadcasting, as the `Broadcastable` trait has it: the page's examples by name, then properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.schema.errors import EdgeOptError
from edge_opt.shapes import Dim, ShapeError, broadcast, verify_broadcast

UNRANKED = None


def test_page_table_dynamic_and_dynamic_is_dynamic() -> None:
    assert broadcast((-1,), (-1,)) == (-1,)


@pytest.mark.parametrize(
    ("left", "right", "inferred"),
    [(-1, -1, -1), (-1, 1, -1), (-1, 5, 5), (1, 1, 1), (1, 5, 5), (5, 5, 5)],
)
def test_page_dimension_table_in_both_orders(left: int, right: int, inferred: int) -> None:
    assert broadcast((left,), (right,)) == (inferred,)
    assert broadcast((right,), (left,)) == (inferred,)


def test_page_dimension_table_two_sizes_over_1_that_differ_are_an_error() -> None:
    with pytest.raises(ShapeError, match=r"2 in operand 0 \(axis 0\), 3 in operand 1 \(axis 0\)"):
        broadcast((2,), (3,))


def test_page_ranks_are_made_equal_with_1s_on_the_left() -> None:
    assert broadcast((4,), (2, 3, 1)) == (2, 3, 4)
    assert broadcast((2, 3, 1), (4,)) == (2, 3, 4)


def test_page_unranked_operands_are_left_out() -> None:
    assert broadcast(UNRANKED, (2, 1), UNRANKED, (3,)) == (2, 3)


def test_page_one_ranked_operand_gives_the_result() -> None:
    assert broadcast((7, -1)) == (7, -1)
    assert broadcast(UNRANKED, (7, -1)) == (7, -1)


def test_page_no_ranked_operand_infers_nothing() -> None:
    assert broadcast(UNRANKED, UNRANKED) is None


def test_page_any_number_of_operands_folds_from_the_left() -> None:
    assert broadcast((-1, 1), (1, 4), (3, 1), (1,)) == (3, 4)


# The page's examples of correct uses.


def test_correct_exact_match_of_static_sizes() -> None:
    verify_broadcast([(1, 2), (1, 2)], (1, 2))


def test_correct_dynamic_sizes_match() -> None:
    verify_broadcast([(-1,), (-1,)], (-1,))


def test_correct_shape_of_arg0_is_broadcast() -> None:
    verify_broadcast([(1,), (4,)], (4,))


def test_correct_static_inferred_dynamic_recorded() -> None:
    verify_broadcast([(4,)], (-1,))


def test_correct_arg0_is_expanded_and_broadcast() -> None:
    verify_broadcast([(4,), (2, 3, 4)], (2, 3, 4))


def test_correct_element_types_do_not_matter() -> None:
    verify_broadcast([np.zeros(2, bool).shape, np.zeros(2, np.int32).shape], np.zeros(2, np.int64).shape)


def test_correct_unranked_result_needs_no_check() -> None:
    verify_broadcast([(2,)], UNRANKED)


def test_correct_all_operands_unranked_needs_no_check() -> None:
    verify_broadcast([UNRANKED, UNRANKED], (2,))


# The page's examples of incorrect uses.


def test_incorrect_operands_static_but_not_equal() -> None:
    with pytest.raises(ShapeError, match="do not broadcast: 3 in operand 0"):
        verify_broadcast([(3,), (2,)], (-1,))


def test_the_first_operand_with_the_size_is_named() -> None:
    complaint = r"4 in operand 1 \(axis 1\), 5 in operand 3 \(axis 0\)"
    with pytest.raises(ShapeError, match=complaint):
        broadcast((2, 1), (2, 4), (-1,), (5,))


def test_incorrect_result_of_another_rank() -> None:
    with pytest.raises(ShapeError, match=r"\[1,3\] does not fit \[3\]: rank 1 expected, rank 2 recorded"):
        verify_broadcast([(3,), (3,)], (1, 3))


def test_incorrect_dynamic_inferred_static_recorded() -> None:
    with pytest.raises(ShapeError, match=r"\[4\] does not fit \[\?\]"):
        verify_broadcast([(-1,), (-1,)], (4,))


def test_incorrect_result_of_another_size() -> None:
    with pytest.raises(ShapeError, match="axis 0 is 2, recorded as 4"):
        verify_broadcast([(2,), (2,)], (4,))


def test_incorrect_results_do_not_broadcast() -> None:
    with pytest.raises(ShapeError, match="axis 0 is 1, recorded as 4"):
        verify_broadcast([(1,), (1,)], (4,))


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
    """Inferred `?` against static: OK by the page's table, an error by its pseudo-code and examples."""
    verify_broadcast([(-1,), (-1,)], (4,), allow_refinement=True)
    with pytest.raises(ShapeError):
        verify_broadcast([(-1,), (-1,)], (4,))


def test_refinement_does_not_excuse_a_static_mismatch_or_another_rank() -> None:
    with pytest.raises(ShapeError):
        verify_broadcast([(2, -1)], (3, 4), allow_refinement=True)
    with pytest.raises(ShapeError):
        verify_broadcast([(-1,)], (4, 4), allow_refinement=True)


# What the page does not name.


def test_size_0_behaves_as_in_numpy() -> None:
    assert broadcast((0,), (1,)) == (0,)
    assert broadcast((0,), (0,)) == (0,)
    assert broadcast((0,), (-1,)) == (0,)
    with pytest.raises(ShapeError):
        broadcast((0,), (3,))


def test_scalars_broadcast_to_anything() -> None:
    assert broadcast((), ()) == ()
    assert broadcast((), (2, -1)) == (2, -1)


def test_an_unranked_operand_is_not_a_scalar() -> None:
    assert broadcast((), UNRANKED) == ()
    assert broadcast(UNRANKED) is None


def test_no_operand_is_refused() -> None:
    with pytest.raises(ShapeError, match="at least one operand"):
        broadcast()


@pytest.mark.parametrize("bad", [(-2,), (1.5,), ("3",)])
def test_a_dimension_that_is_no_size_is_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="operand 1 has the dimension"):
        broadcast((1,), bad)


def test_numpy_integers_are_sizes() -> None:
    result = broadcast(tuple(np.array([1, 3])), [np.int64(2), 1])
    assert result == (2, 3)
    assert all(type(dim) is int for dim in result)


def test_a_shape_error_is_an_edge_opt_error() -> None:
    with pytest.raises(EdgeOptError):
        broadcast((2,), (3,))


def test_the_error_names_the_operand_that_gave_the_size() -> None:
    with pytest.raises(ShapeError, match=r"4 in operand 1 \(axis 2\), 2 in operand 2 \(axis 1\)"):
        broadcast((3, 1), (7, 1, 4), (1, 2))


def test_a_named_dimension_keeps_its_name() -> None:
    length = Dim("T")
    (a, b) = broadcast((length, 1), (length, 5)) or ()
    assert isinstance(a, Dim)
    assert a.name == "T"
    assert b == 5
    (kept,) = broadcast((1,), (length,)) or ()
    assert isinstance(kept, Dim)


def test_two_named_dimensions_of_different_names_are_just_dynamic() -> None:
    (dim,) = broadcast((Dim("T"),), (Dim("S"),)) or ()
    assert dim == -1
    assert not isinstance(dim, Dim)


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
