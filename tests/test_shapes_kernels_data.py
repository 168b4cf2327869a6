"""Scatters, segments, generators, variables and data-dependent operators: each rule against the interpreter."""

import pytest
from shapes_referee import Shape, T, check, const, derived_shapes, one_operator, runtime_shapes


def test_shape_and_rank() -> None:
    check("SHAPE", [T((2, 3))], ("ShapeOptions", {"outType": 2}), "INT32", accepted=True)
    check("SHAPE", [T(())], ("ShapeOptions", {"outType": 2}), "INT32", accepted=True)
    check("RANK", [T((2, 3))], ("RankOptions", {}), "INT32", accepted=True)


@pytest.mark.parametrize(("dims", "accepted"), [([2, 3], True), ([], True), ([0, 3], True), ([2, -1], False)])
def test_fill(dims: list[int], accepted: bool) -> None:
    check("FILL", [const(dims), const(1.0, "FLOAT32")], ("FillOptions", {}), accepted=accepted)


@pytest.mark.parametrize(("numbers", "dtype", "accepted"), [
    ((0, 5, 1), "INT32", True), ((0, 5, 2), "INT32", True), ((5, 0, -2), "INT32", True), ((3, 3, 1), "INT32", True),
    ((0.0, 1.0, 0.3), "FLOAT32", True), ((1.0, -1.0, -0.5), "FLOAT32", True), ((0, 5, -1), "INT32", False),
    ((5, 0, 1), "INT32", False), ((0, 5, 0), "INT32", False),
])  # fmt: skip
def test_range(numbers: tuple[float, float, float], dtype: str, accepted: bool) -> None:
    check(
        "RANGE", [const(number, dtype) for number in numbers], ("RangeOptions", {}), dtype, accepted=accepted
    )


@pytest.mark.parametrize("name", ["RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"])
def test_random(name: str) -> None:
    check(name, [const([2, 3])], ("RandomOptions", {}), accepted=True)


@pytest.mark.parametrize(("shape", "sizes", "accepted"), [
    ((2, 4, 8), [4, 8], True), ((4, 8), [8, 4], True), ((4, 8), [3, 8], False), ((8,), [4, 8], False),
    ((4, 8), [4], False),
])  # fmt: skip
def test_rfft2d(shape: Shape, sizes: list[int], accepted: bool) -> None:
    check("RFFT2D", [T(shape), const(sizes)], ("Rfft2dOptions", {}), "COMPLEX64", accepted=accepted)


@pytest.mark.parametrize(("indices", "updates", "shape", "accepted"), [
    ((4, 1), (4,), [8], True), ((2, 1), (2, 4, 4), [4, 4, 4], True), ((3, 2), (3,), [4, 5], True),
    ((4, 1), (3,), [8], False), ((2, 1), (2, 4), [4, 4, 4], False), ((2, 1), (2, 4, 3), [4, 4, 4], False),
])  # fmt: skip
def test_scatter_nd(indices: Shape, updates: Shape, shape: list[int], accepted: bool) -> None:
    inputs = [T(indices, "INT32"), T(updates), const(shape)]
    check("SCATTER_ND", inputs, ("ScatterNdOptions", {}), accepted=accepted)


@pytest.mark.parametrize("name", [
    "UNSORTED_SEGMENT_SUM", "UNSORTED_SEGMENT_MAX", "UNSORTED_SEGMENT_MIN", "UNSORTED_SEGMENT_PROD",
])  # fmt: skip
@pytest.mark.parametrize(("shape", "ids", "accepted"), [
    ((3, 2), [0, 1, 0], True), ((2, 2, 4), [[0, 1], [1, 0]], True), ((3, 2), [0, 1], False),
])  # fmt: skip
def test_unsorted_segments(name: str, shape: Shape, ids: list[int], accepted: bool) -> None:
    table = name.title().replace("_", "") + "Options"
    check(name, [T(shape), const(ids), const(5)], (table, {}), accepted=accepted)


def test_variables() -> None:
    options = ("VarHandleOptions", {"sharedName": "v"})
    check("VAR_HANDLE", [], options, "RESOURCE", accepted=True)
    inputs = [T((1,), "RESOURCE"), T((2, 3))]
    check("ASSIGN_VARIABLE", inputs, ("AssignVariableOptions", {}), [], accepted=True)


def test_sparse_tensors() -> None:
    """The interpreter cannot allocate them here: it wants a table of sparsity."""
    assert derived_shapes(one_operator("DENSIFY", [const([[1.0, 0.0]], "FLOAT32")], [T(())])) == [(1, 2)]


@pytest.mark.parametrize("value", [[1, 0, 3], [[0, 0], [0, 5]], [0, 0]])
def test_where_of_constants(value: list[int]) -> None:
    check("WHERE", [const(value)], None, "INT64", accepted=True)


def bounded(derived: object, actual: list[Shape] | None) -> bool:
    """Each derived shape has the actual rank, and -1 or the actual size in every axis."""
    assert isinstance(derived, list)
    assert actual is not None
    pairs = list(zip(derived, actual, strict=True))
    return all(len(d) == len(a) and all(x in (-1, y) for x, y in zip(d, a, strict=True)) for d, a in pairs)


@pytest.mark.parametrize(("name", "inputs", "options", "outputs"), [
    ("WHERE", [T((2, 3), "BOOL")], None, [T((), "INT64")]),
    ("RESHAPE", [T((0, 3)), T((2,), "INT32")], ("ReshapeOptions", {}), [T((7, 7))]),
    ("TILE", [T((2, 3)), T((2,), "INT32")], ("TileOptions", {}), [T(())]),
    ("FILL", [T((2,), "INT32"), T(())], ("FillOptions", {}), [T(())]),
    ("SUM", [T((2, 3)), T((1,), "INT32")], ("ReducerOptions", {"keepDims": True}), [T(())]),
    ("TOPK_V2", [T((2, 3)), T((), "INT32")], None, [T(()), T((), "INT32")]),
    ("SLICE", [T((4, 5)), T((2,), "INT32"), T((2,), "INT32")], ("SliceOptions", {}), [T(())]),
    ("TRANSPOSE", [T((1, 1)), T((2,), "INT32")], ("TransposeOptions", {}), [T(())]),
    ("EXPAND_DIMS", [T((2, 3)), T((), "INT32")], ("ExpandDimsOptions", {}), [T(())]),
    ("SPLIT", [T((), "INT32"), T((2, 3))], ("SplitOptions", {"numSplits": 2}), [T(()), T(())]),
    ("PAD", [T((2, 3)), T((2, 2), "INT32")], ("PadOptions", {}), [T(())]),
])  # fmt: skip
def test_sizes_that_only_the_data_knows_are_dynamic(
    name: str, inputs: list[T], options: tuple[str, dict[str, int]] | None, outputs: list[T]
) -> None:
    """Run on zeros; what the interpreter then has must fit what the rule says, which must say -1 somewhere."""
    model = one_operator(name, inputs, outputs, options)
    derived = derived_shapes(model)
    assert bounded(derived, runtime_shapes(model, run=True))
    assert any(-1 in shape for shape in derived)  # type: ignore[union-attr]
