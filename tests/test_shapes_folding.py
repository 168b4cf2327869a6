"""Folding: each operator against the values that the interpreter computes, then unknown and named elements."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import Options, T, const, derived_shapes, folded_values, one_operator, runtime_values

from edge_opt.ir import DType, Model, Tensor
from edge_opt.shapes import ShapeError
from edge_opt.shapes.folding import fold
from edge_opt.shapes.rules import Call

MATRIX = [[3, -4, 5], [0, 7, -9]]
CASES: dict[str, tuple[list[T], Options, list[str]]] = {
    "SHAPE": ([const(MATRIX)], {"outType": 2}, ["INT32"]),
    "SHAPE int64": ([const(MATRIX)], {"outType": 4}, ["INT64"]),
    "RANK": ([const(MATRIX)], None, ["INT32"]),
    "RESHAPE": ([const(MATRIX), const([3, -1])], {}, ["INT32"]),
    "SQUEEZE": ([const([[[1], [2]]])], {"squeezeDims": [0]}, ["INT32"]),
    "EXPAND_DIMS": ([const([1, 2]), const(1)], {}, ["INT32"]),
    "CAST": ([const([1.7, -1.7, 2.5], "FLOAT32")], None, ["INT32"]),
    "CAST to real": ([const([1, -3])], None, ["FLOAT32"]),
    "TRANSPOSE": ([const(MATRIX), const([1, 0])], {}, ["INT32"]),
    "CONCATENATION": ([const([1, 2]), const([3])], {"axis": 0}, ["INT32"]),
    "PACK": ([const([1, 2]), const([3, 4])], {"axis": 1, "valuesCount": 2}, ["INT32"]),
    "UNPACK": ([const(MATRIX)], {"axis": 0, "num": 2}, ["INT32", "INT32"]),
    "SPLIT": ([const(1), const([[1, 2, 3, 4]])], {"numSplits": 2}, ["INT32", "INT32"]),
    "SPLIT_V": ([const([1, 2, 3, 4]), const([1, -1]), const(0)], {"numSplits": 2}, ["INT32", "INT32"]),
    "SLICE": ([const(MATRIX), const([0, 1]), const([2, -1])], {}, ["INT32"]),
    "GATHER": ([const(MATRIX), const([2, 0])], {"axis": 1}, ["INT32"]),
    "TILE": ([const([1, 2]), const([3])], {}, ["INT32"]),
    "BROADCAST_TO": ([const([1, 2]), const([2, 2])], {}, ["INT32"]),
    "BROADCAST_ARGS": ([const([3, 1]), const([2, 1, 5])], None, ["INT32"]),
    "FILL": ([const([2, 2]), const(7)], {}, ["INT32"]),
    "ZEROS_LIKE": ([const(MATRIX)], None, ["INT32"]),
    "RANGE": ([const(1), const(9), const(3)], {}, ["INT32"]),
    "RANGE down": ([const(9), const(1), const(-3)], {}, ["INT32"]),
    "SELECT_V2": ([const([True, False], "BOOL"), const([1, 2]), const([3])], None, ["INT32"]),
    "NEG": ([const(MATRIX)], None, ["INT32"]),
    "UNSORTED_SEGMENT_PROD": ([const([3, 4, 5]), const([1, 0, 1]), const(2)], {}, ["INT32"]),
    "UNSORTED_SEGMENT_PROD of rows": ([const(MATRIX), const([1, 1]), const(2)], {}, ["INT32"]),
    "ABS": ([const(MATRIX)], None, ["INT32"]),
    "LOGICAL_NOT": ([const([True, False], "BOOL")], None, ["BOOL"]),
    "ADD real": ([const([1.5], "FLOAT32"), const([0.25], "FLOAT32")], {}, ["FLOAT32"]),
    "MUL real": ([const([1.5], "FLOAT32"), const([3.0], "FLOAT32")], {}, ["FLOAT32"]),
}


def compare(model: bytes) -> None:
    derived, actual = folded_values(model), runtime_values(model)
    for ours, theirs in zip(derived, actual, strict=True):
        assert ours is not None
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_the_interpreter_computes(case: str) -> None:
    inputs, options, outputs = CASES[case]
    compare(one_operator(case.split(maxsplit=1)[0], inputs, [T((), dtype) for dtype in outputs], options))


ARITHMETIC = {
    **{key: {} for key in ("ADD", "SUB", "MUL", "DIV")},
    **dict.fromkeys(("FLOOR_DIV", "FLOOR_MOD", "MAXIMUM", "MINIMUM")),
}
COMPARISONS = ["EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"]
NUMBERS = st.lists(st.integers(-20, 20), min_size=3, max_size=3)
few = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("name", ARITHMETIC)
@few
@given(left=NUMBERS, right=NUMBERS)
def test_arithmetic(name: str, left: list[int], right: list[int]) -> None:
    """DIV of whole numbers goes towards zero, FLOOR_DIV down."""
    right = [number or 1 for number in right]
    compare(one_operator(name, [const(left), const(right)], [T((), "INT32")], ARITHMETIC[name]))


@pytest.mark.parametrize("name", COMPARISONS)
@few
@given(left=NUMBERS, right=NUMBERS)
def test_comparisons(name: str, left: list[int], right: list[int]) -> None:
    compare(one_operator(name, [const(left), const(right)], [T((), "BOOL")]))


@pytest.mark.parametrize("name", ["LOGICAL_AND", "LOGICAL_OR"])
def test_logic(name: str) -> None:
    left, right = const([True, True, False], "BOOL"), const([True, False, False], "BOOL")
    compare(one_operator(name, [left, right], [T((), "BOOL")]))


@pytest.mark.parametrize(("name", "dtype"), [
    ("SUM", "INT32"), ("REDUCE_PROD", "INT32"), ("REDUCE_MAX", "INT32"), ("REDUCE_MIN", "INT32"),
    ("REDUCE_ANY", "BOOL"), ("REDUCE_ALL", "BOOL"),
])  # fmt: skip
@pytest.mark.parametrize("axes", [[0], [1], [0, 1], [-1]])
@pytest.mark.parametrize("keep", [False, True])
def test_reductions(name: str, dtype: str, axes: list[int], keep: bool) -> None:
    options = {"keepDims": keep}
    compare(one_operator(name, [const(MATRIX, dtype), const(axes)], [T((), dtype)], options))


BOUNDS = st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.sampled_from([1, 2, -1]))


@settings(max_examples=100, deadline=None)
@given(BOUNDS, BOUNDS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3))
def test_strided_slices(
    rows: tuple[int, int, int], columns: tuple[int, int, int], begin: int, end: int, new: int, shrink: int
) -> None:
    ranges = list(zip(rows, columns, strict=True))
    assume(all(0 <= ranges[0][axis] < 2 and ranges[2][axis] > 0 for axis in range(2) if shrink >> axis & 1))
    options = {"beginMask": begin, "endMask": end, "newAxisMask": new, "shrinkAxisMask": shrink & ~new}
    inputs = [const(MATRIX), *(const(list(numbers)) for numbers in ranges)]
    compare(one_operator("STRIDED_SLICE", inputs, [T((), "INT32")], options))


def test_a_division_by_zero_is_unknown() -> None:
    model = one_operator("FLOOR_DIV", [const([1, 2]), const([0, 0])], [T((), "INT32")])
    assert folded_values(model) == [None]


def test_a_value_that_leaves_its_type_is_unknown() -> None:
    model = one_operator("MUL", [const([2**30]), const([4])], [T((), "INT32")], {})
    assert folded_values(model) == [None]


def test_a_value_that_leaves_64_bits_is_unknown() -> None:
    model = one_operator("MUL", [const([2**40], "INT64")] * 2, [T((), "INT64")], {})
    assert folded_values(model) == [None]


@pytest.mark.parametrize("numbers", [(np.nan, 1.0, 1.0), (0.0, np.inf, 1.0)])
def test_a_range_without_an_end_is_refused(numbers: tuple[float, ...]) -> None:
    model = one_operator("RANGE", [const(number, "FLOAT32") for number in numbers], [T((), "FLOAT32")], {})
    assert isinstance(derived_shapes(model), ShapeError)


@pytest.mark.filterwarnings("error")
def test_a_complex_value_is_not_folded_into_a_real_one() -> None:
    model = one_operator("CAST", [const([1j, 2], "COMPLEX64")], [T((), "INT32")])
    assert folded_values(model) == [None]


def test_a_fused_activation_is_not_folded() -> None:
    options = {"fusedActivationFunction": 1}
    assert folded_values(one_operator("ADD", [const([-3]), const([1])], [T((), "INT32")], options)) == [None]


def test_large_results_are_not_computed() -> None:
    model = one_operator("FILL", [const([1000, 1000]), const(0)], [T((), "INT32")], {})
    assert folded_values(model) == [None]


# Elements that are not known.


def folded(name: str, *values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """The elements of the result; all None where nothing is known."""
    arrays = list(map(np.array, values))
    inputs = [Tensor(str(place), array.shape, DType.INT32) for place, array in enumerate(arrays)]
    operator = Model().new_operator(name, inputs, [Tensor("result", shape, DType.INT32)])
    call = Call(operator, [array.shape for array in arrays], arrays.__getitem__)
    (result,) = fold(call, [shape])
    return [None] * shape[0] if result is None else result.tolist()


@pytest.mark.parametrize(("name", "left", "right", "expected"), [
    ("MUL", None, 0, 0), ("MUL", 0, None, 0), ("MUL", None, 2, None), ("ADD", None, 0, None), ("SUB", None, None, None),
    ("EQUAL", None, None, None), ("MAXIMUM", None, None, None), ("EQUAL", None, 4, None), ("SUB", 5, 3, 2),
])  # fmt: skip
def test_arithmetic_with_an_unknown_element(name: str, left: Any, right: Any, expected: Any) -> None:
    assert folded(name, [left], [right], shape=(1,)) == [expected]


def test_a_selection_between_known_sides_needs_no_more_than_its_condition() -> None:
    sides = [6, 2, 3, 5], [7, None, 3, 6]
    assert folded("SELECT_V2", [True, False, None, None], *sides, shape=(4,)) == [6, None, 3, None]


def test_a_product_with_an_unknown_size_is_unknown() -> None:
    ids, count = [0, 1, 1], [2]
    assert folded("UNSORTED_SEGMENT_PROD", [3, None, 4], ids, count, shape=(2,)) == [3, None]


@pytest.mark.parametrize(("left", "right", "expected"), [(1, 5, 5), (5, 1, 5), (None, 4, 4), (None, 1, None)])
def test_sizes_that_broadcast_give_the_size_of_the_result(left: Any, right: Any, expected: Any) -> None:
    assert folded("BROADCAST_ARGS", [left], [right], shape=(1,)) == [expected]


def test_sizes_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"sizes do not broadcast: 2 in tensor .0. .*, 3 in tensor .1."):
        folded("BROADCAST_ARGS", [2], [3], shape=(1,))
