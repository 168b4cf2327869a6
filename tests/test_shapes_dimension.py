"""Broadcasting and matrix products as the `Broadcastable` trait and MatMul-1 have them: the pages' examples by name,
then numpy as the referee."""

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes_referee import fits

from edge_opt.shapes import ShapeError, broadcast, matmul, verify_broadcast

Shape = tuple[int, ...]
UNRANKED = None
SIZES = st.integers(0, 3)
STATIC = st.lists(SIZES, max_size=4).map(tuple)
MAYBE_OPEN = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), max_size=3).map(tuple)


@pytest.mark.parametrize(("operands", "result"), [
    ([(-1,), (-1,)], (-1,)), ([(-1,), (1,)], (-1,)), ([(-1,), (5,)], (5,)), ([(1,), (1,)], (1,)),
    ([(1,), (5,)], (5,)), ([(5,), (5,)], (5,)), ([(4,), (2, 3, 1)], (2, 3, 4)), ([(7, -1)], (7, -1)),
    ([UNRANKED, (2, 1), UNRANKED, (3,)], (2, 3)), ([UNRANKED, UNRANKED], None), ([(), (2, -1)], (2, -1)),
    ([(-1, 1), (1, 4), (3, 1), (1,)], (3, 4)), ([(0,), (1,)], (0,)), ([(0,), (-1,)], (0,)), ([(), ()], ()),
])  # fmt: skip
def test_page_inference_in_both_orders(operands: list[Shape | None], result: Shape | None) -> None:
    assert broadcast(*operands) == broadcast(*operands[::-1]) == result


@pytest.mark.parametrize(("operands", "complaint"), [
    ([(2,), (3,)], r"2 in operand 0 \(axis 0\), 3 in operand 1 \(axis 0\)"),
    ([(2, 1), (2, 4), (-1,), (5,)], r"4 in operand 1 \(axis 1\), 5 in operand 3 \(axis 0\)"),
    ([(3, 1), (7, 1, 4), (1, 2)], r"4 in operand 1 \(axis 2\), 2 in operand 2 \(axis 1\)"),
    ([(0,), (3,)], "0 in operand 0"), ([], "at least one operand"), ([(1,), (-2,)], "operand 1 has the dimension"),
    ([(1,), (1.5,)], "operand 1 has the dimension"), ([(1,), ("3",)], "operand 1 has the dimension"),
])  # fmt: skip
def test_what_does_not_broadcast_is_refused_by_name(operands: list[Any], complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        broadcast(*operands)


@pytest.mark.parametrize(("operands", "result", "complaint"), [
    ([(1, 2), (1, 2)], (1, 2), None), ([(-1,), (-1,)], (-1,), None), ([(1,), (4,)], (4,), None),
    ([(4,)], (-1,), None), ([(4,), (2, 3, 4)], (2, 3, 4), None), ([(2,)], UNRANKED, None),
    ([UNRANKED, UNRANKED], (2,), None),
    ([(3,), (2,)], (-1,), "do not broadcast: 3 in operand 0"),
    ([(3,), (3,)], (1, 3), r"\[1,3\] does not fit \[3\]: rank 1 expected, rank 2"),
    ([(-1,), (-1,)], (4,), r"\[4\] does not fit \[\?\]"), ([(2,), (2,)], (4,), "axis 0 is 2, recorded as 4"),
    ([(1,), (1,)], (4,), "axis 0 is 1, recorded as 4"),
])  # fmt: skip
def test_page_uses(
    operands: list[Shape | None], result: Shape | None, complaint: str | None
) -> None:
    """Inferred `?` against static: OK by the page's table, an error by its pseudo-code and examples."""
    for refine in (False, True):
        wrong = complaint is not None and not (refine and operands == [(-1,), (-1,)])
        with pytest.raises(ShapeError, match=complaint) if wrong else nullcontext():
            verify_broadcast(operands, result, allow_refinement=refine)


def test_numpy_integers_are_sizes() -> None:
    result = broadcast(tuple(np.array([1, 3])), [np.int64(2), 1])
    assert result == (2, 3)
    assert all(type(size) is int for size in result)


@given(st.lists(STATIC, min_size=1, max_size=5))
def test_static_shapes_broadcast_as_in_numpy(shapes: list[Shape]) -> None:
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ShapeError):
            broadcast(*shapes)
    else:
        assert broadcast(*shapes) == expected


@given(st.lists(MAYBE_OPEN, min_size=1, max_size=2))
def test_every_legal_choice_of_runtime_sizes_fits_and_none_where_refused(
    shapes: list[Shape],
) -> None:
    try:
        inferred = broadcast(*shapes)
    except ShapeError:
        inferred = None
    for sizes in itertools.product(
        range(4), repeat=sum(size < 0 for shape in shapes for size in shape)
    ):
        fill = iter(sizes)
        runtime = [tuple(next(fill) if size < 0 else size for size in shape) for shape in shapes]
        try:
            actual = np.broadcast_shapes(*runtime)
        except ValueError:
            continue
        assert fits(inferred, actual)


@pytest.mark.parametrize(("a", "b", "transposes", "result"), [
    ((5,), (5,), "", ()), ((5,), (2, 3, 5, 7), "", (2, 3, 7)), ((2, 3, 5, 7), (7,), "", (2, 3, 5)),
    ((2, 3, 5, 7), (2, 3, 7, 4), "", (2, 3, 5, 4)), ((5,), (5,), "ab", ()), ((5,), (5, 7), "a", (7,)),
    ((7, 5), (5,), "b", (7,)), ((2, 7, 5), (2, 7, 4), "a", (2, 5, 4)), ((2, 5, 7), (2, 4, 7), "b", (2, 5, 4)),
    ((2, 7, 5), (2, 4, 7), "ab", (2, 5, 4)), ((1024,), (1024, 1000), "", (1000,)),
    ((1000, 1024), (1024,), "", (1000,)), ((1, 1024), (1024, 1000), "", (1, 1000)),
    ((1024,), (1000, 1024), "b", (1000,)), ((10, 1024), (1024, 1000), "", (10, 1000)),
    ((5, 10, 1024), (1024, 1000), "", (5, 10, 1000)), ((4, 1, 2, 3), (5, 3, 6), "", (4, 5, 2, 6)),
    ((1, 5), (5,), "", (1,)), ((5,), (5, 1), "", (1,)), ((-1, 2, -1), (-1, 3, 4), "", (-1, 2, 4)),
    ((-1, 5), (5, -1), "", (-1, -1)), ((8, -1, 5), (1, 5, 6), "", (8, -1, 6)), (None, (3, 4), "", None),
    ((3, 4), None, "", None),
])  # fmt: skip
def test_page_products(
    a: Shape | None, b: Shape | None, transposes: str, result: Shape | None
) -> None:
    assert matmul(a, b, transpose_a="a" in transposes, transpose_b="b" in transposes) == result


@pytest.mark.parametrize(("a", "b", "complaint"), [
    ((), (5,), "operand 0 is a scalar"), (None, (), "operand 1 is a scalar"),
    ((2, 3), (4, 5), r"3 in operand 0 \(axis 1\), 4 in operand 1 \(axis 0\)"),
    ((3,), (4, 5), r"3 in operand 0 \(axis 0\), 4 in operand 1 \(axis 0\)"),
    ((7, 2, 3), (7, 4, 5), r"3 in operand 0 \(axis 2\), 4 in operand 1 \(axis 1\)"),
    ((9, 2, 4, 4), (3, 4, 4), r"2 in operand 0 \(axis 1\), 3 in operand 1 \(axis 0\)"),
])  # fmt: skip
def test_products_that_do_not_fit_name_sizes_and_axes(
    a: Shape | None, b: Shape, complaint: str
) -> None:
    with pytest.raises(ShapeError, match=complaint):
        matmul(a, b)


def numpy_matmul(a: Shape, b: Shape, transpose_a: bool, transpose_b: bool) -> Shape:
    left, right = np.zeros(a), np.zeros(b)
    left = left.swapaxes(-1, -2) if transpose_a and left.ndim > 1 else left
    right = right.swapaxes(-1, -2) if transpose_b and right.ndim > 1 else right
    return np.shape(np.matmul(left, right))


@given(
    st.lists(SIZES, min_size=1, max_size=4).map(tuple),
    STATIC,
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_shapes_multiply_as_in_numpy(
    a: Shape, batch: Shape, ta: bool, tb: bool, data: st.DataObject
) -> None:
    """Random pairs rarely agree on the inner size: mostly it is made to. Then some sizes are hidden."""
    inner = data.draw(st.sampled_from([*[a[-2] if ta and len(a) > 1 else a[-1]] * 3, 2]))
    b = data.draw(st.sampled_from([(inner,), (*batch, 2, inner) if tb else (*batch, inner, 2)]))
    hidden_a, hidden_b = (
        tuple(data.draw(st.sampled_from([-1, size])) for size in shape) for shape in (a, b)
    )
    try:
        expected = numpy_matmul(a, b, ta, tb)
    except ValueError:
        with pytest.raises(ShapeError):
            matmul(a, b, transpose_a=ta, transpose_b=tb)
    else:
        assert matmul(a, b, transpose_a=ta, transpose_b=tb) == expected
        assert fits(matmul(hidden_a, hidden_b, transpose_a=ta, transpose_b=tb), expected)
