"""MatMul, as OpenVINO's MatMul-1 has it: the page's examples by name, then numpy and OpenVINO as referees."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.shapes import ShapeError, matmul

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("a", "b", "transposes", "result"),
    [
        pytest.param((5,), (5,), "", (), id="1d by 1d is a scalar"),
        pytest.param((5,), (2, 3, 5, 7), "", (2, 3, 7), id="1d by nd"),
        pytest.param((2, 3, 5, 7), (7,), "", (2, 3, 5), id="nd by 1d"),
        pytest.param((2, 3, 5, 7), (2, 3, 7, 4), "", (2, 3, 5, 4), id="nd by nd"),
        pytest.param((5,), (5,), "a", (), id="transposes are ignored for 1d: a"),
        pytest.param((5,), (5,), "b", (), id="transposes are ignored for 1d: b"),
        pytest.param((5,), (5,), "ab", (), id="transposes are ignored for 1d: both"),
        pytest.param((5,), (5, 7), "a", (7,), id="a transpose is ignored for a 1d a"),
        pytest.param((7, 5), (5,), "b", (7,), id="a transpose is ignored for a 1d b"),
        pytest.param((2, 7, 5), (2, 7, 4), "a", (2, 5, 4), id="a transpose swaps the two last axes of a"),
        pytest.param((2, 5, 7), (2, 4, 7), "b", (2, 5, 4), id="a transpose swaps the two last axes of b"),
        pytest.param((2, 7, 5), (2, 4, 7), "ab", (2, 5, 4), id="transposes swap the two last axes of both"),
        pytest.param((1024,), (1024, 1000), "", (1000,), id="example: vector, matrix"),
        pytest.param((1000, 1024), (1024,), "", (1000,), id="example: matrix, vector"),
        pytest.param((1, 1024), (1024, 1000), "", (1, 1000), id="example: fully connected, batch size 1"),
        pytest.param((1024,), (1000, 1024), "b", (1000,), id="example: embedded transposition"),
        pytest.param((10, 1024), (1024, 1000), "", (10, 1000), id="example: fully connected, batch size 10"),
        pytest.param(
            (5, 10, 1024), (1024, 1000), "", (5, 10, 1000), id="example: a batch of 5 by one matrix"
        ),
        pytest.param((4, 1, 2, 3), (5, 3, 6), "", (4, 5, 2, 6), id="ranks are aligned, batches broadcast"),
        pytest.param((1, 5), (5,), "", (1,), id="an axis of size 1 of a that was not temporary stays"),
        pytest.param((5,), (5, 1), "", (1,), id="an axis of size 1 of b that was not temporary stays"),
    ],
)
def test_page(a: Shape, b: Shape, transposes: str, result: Shape) -> None:
    assert matmul(a, b, transpose_a="a" in transposes, transpose_b="b" in transposes) == result


@pytest.mark.parametrize(("a", "b"), [((), (5,)), ((5,), ()), ((), ()), ((), None), (None, ())])
def test_a_scalar_is_refused(a: Shape | None, b: Shape | None) -> None:
    with pytest.raises(ShapeError, match=r"operand \d is a scalar"):
        matmul(a, b)


def test_inner_sizes_that_differ_are_named_with_their_axes() -> None:
    with pytest.raises(ShapeError, match=r"256 in operand 0 \(axis 3\), 128 in operand 1 \(axis 3\)"):
        matmul((1, 4, 16, 256), (1, 4, 64, 128), transpose_b=True)
    with pytest.raises(ShapeError, match=r"7 in operand 0 \(axis 0\), 3 in operand 1 \(axis 1\)"):
        matmul((7, 2), (5, 3), transpose_a=True, transpose_b=True)


@pytest.mark.parametrize(
    ("a", "b", "axes"),
    [
        ((2, 3), (4, 5), (1, 0)),
        ((3,), (4, 5), (0, 0)),
        ((2, 3), (4,), (1, 0)),
        ((7, 2, 3), (7, 4, 5), (2, 1)),
    ],
)
def test_inner_sizes_that_differ_are_named_with_the_axes_of_their_own_operand(
    a: Shape, b: Shape, axes: tuple[int, int]
) -> None:
    named = rf"3 in operand 0 \(axis {axes[0]}\), 4 in operand 1 \(axis {axes[1]}\)"
    with pytest.raises(ShapeError, match=named):
        matmul(a, b)


def test_batch_sizes_that_differ_are_named_with_their_axes() -> None:
    with pytest.raises(ShapeError, match=r"2 in operand 0 \(axis 1\), 3 in operand 1 \(axis 0\)"):
        matmul((9, 2, 4, 4), (3, 4, 4))


def test_an_unranked_operand_gives_an_unranked_result() -> None:
    assert matmul(None, (3, 4)) is None
    assert matmul((3, 4), None) is None


def test_dynamic_dimensions() -> None:
    assert matmul((-1, 2, -1), (-1, 3, 4)) == (-1, 2, 4)
    assert matmul((-1, 5), (5, -1)) == (-1, -1)
    assert matmul((8, -1, 5), (1, 5, 6)) == (8, -1, 6)


SHAPE = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=4).map(tuple)
MAYBE_DYNAMIC = st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=4).map(tuple)


def numpy_matmul(a: Shape, b: Shape, transpose_a: bool, transpose_b: bool) -> Shape:
    left, right = np.zeros(a), np.zeros(b)
    if transpose_a and left.ndim > 1:
        left = left.swapaxes(-1, -2)
    if transpose_b and right.ndim > 1:
        right = right.swapaxes(-1, -2)
    return np.shape(np.matmul(left, right))


def check_against_numpy(a: Shape, b: Shape, transpose_a: bool, transpose_b: bool) -> None:
    try:
        expected = numpy_matmul(a, b, transpose_a, transpose_b)
    except ValueError:
        with pytest.raises(ShapeError):
            matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    else:
        assert matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b) == expected


@given(SHAPE, SHAPE, st.booleans(), st.booleans())
def test_static_shapes_multiply_as_in_numpy(a: Shape, b: Shape, transpose_a: bool, transpose_b: bool) -> None:
    check_against_numpy(a, b, transpose_a, transpose_b)


@given(
    SHAPE, st.lists(st.sampled_from([1, 2, 3]), max_size=2), st.integers(1, 3), st.booleans(), st.booleans()
)
def test_matching_operands_multiply_as_in_numpy(
    a: Shape, batch: list[int], columns: int, transpose_a: bool, transpose_b: bool
) -> None:
    """Random pairs rarely agree on the inner size; here the second operand is made to."""
    inner = a[-2] if transpose_a and len(a) > 1 else a[-1]
    b = (*batch, columns, inner) if transpose_b else (*batch, inner, columns)
    check_against_numpy(a, b, transpose_a, transpose_b)


@given(MAYBE_DYNAMIC, MAYBE_DYNAMIC, st.booleans(), st.booleans(), st.data())
def test_for_every_legal_choice_of_runtime_sizes_the_derived_shape_fits(
    a: Shape, b: Shape, transpose_a: bool, transpose_b: bool, data: st.DataObject
) -> None:
    runtime = [tuple(data.draw(st.integers(1, 3)) if d < 0 else d for d in shape) for shape in (a, b)]
    try:
        actual = numpy_matmul(*runtime, transpose_a, transpose_b)
    except ValueError:
        return
    derived = matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    assert derived is not None
    assert len(derived) == len(actual)
    assert all(d in (-1, size) for d, size in zip(derived, actual, strict=True))


def random_pair(rng: random.Random) -> tuple[Shape, Shape, bool, bool]:
    sizes = [-1, 1, 2, 3] if rng.random() < 0.5 else [1, 2, 3]
    transpose_a, transpose_b = rng.random() < 0.5, rng.random() < 0.5
    a = [rng.choice(sizes) for _ in range(rng.randint(1, 5))]
    b = [rng.choice(sizes) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.7:
        b[-1 if len(b) == 1 or transpose_b else -2] = a[-2 if transpose_a and len(a) > 1 else -1]
    return tuple(a), tuple(b), transpose_a, transpose_b


@pytest.mark.slow
def test_openvino_agrees_on_thousands_of_random_pairs() -> None:
    """The referee of the specification is its own implementation; both refuse the same pairs."""
    openvino = pytest.importorskip("openvino", reason="openvino is in the dev extra")
    opset = pytest.importorskip("openvino.opset13", reason="openvino is in the dev extra")
    rng, refused = random.Random(0), 0
    for _ in range(5000):
        a, b, transpose_a, transpose_b = random_pair(rng)
        inputs = [opset.parameter(openvino.PartialShape(list(shape)), np.float32) for shape in (a, b)]
        try:
            node = opset.matmul(*inputs, transpose_a, transpose_b)
        except RuntimeError:
            refused += 1
            with pytest.raises(ShapeError):
                matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
            continue
        shape = node.get_output_partial_shape(0)
        expected = tuple(dim.get_length() if dim.is_static else -1 for dim in shape)
        derived = matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
        assert derived == expected, (a, b, transpose_a, transpose_b)
    assert 500 < refused < 4500
