"""Elementwise, reducing and multiplying operators: each rule against the interpreter, on models of one operator."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import Options, Shape, T, check, const

UNARY = [
    ("ABS", None), ("CEIL", None), ("COS", None), ("ELU", None), ("EXP", None), ("FLOOR", None),
    ("GELU", ("GeluOptions", {})), ("HARD_SWISH", None), ("LEAKY_RELU", ("LeakyReluOptions", {})), ("LOG", None),
    ("LOGISTIC", None), ("LOG_SOFTMAX", None), ("NEG", None), ("RELU", None), ("RELU6", None),
    ("RELU_0_TO_1", None), ("RELU_N1_TO_1", None), ("ROUND", None), ("RSQRT", None), ("SIGN", None), ("SIN", None),
    ("SOFTMAX", ("SoftmaxOptions", {"beta": 1.0})), ("SQRT", None), ("SQUARE", None), ("TANH", None),
    ("ZEROS_LIKE", None), ("L2_NORMALIZATION", ("L2NormOptions", {})),
    ("FAKE_QUANT", ("FakeQuantOptions", {"min": -1.0, "max": 1.0, "numBits": 8})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), UNARY, ids=[name for name, _ in UNARY])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 4, 0, 2), (2, 1, 3, 4, 5)])
def test_unary_operators_keep_the_shape(name: str, options: Options, shape: Shape) -> None:
    per_row = name in {"SOFTMAX", "L2_NORMALIZATION"}
    check(name, [T(shape)], options, accepted=not (per_row and shape == ()))


@pytest.mark.parametrize(
    ("name", "source", "result"),
    [
        ("CAST", T((2, 3), "INT32"), T((), "FLOAT32")),
        ("QUANTIZE", T((2, 3)), T((), "INT8", scale=0.1)),
        ("DEQUANTIZE", T((2, 3), "INT8", scale=0.1), T(())),
        ("LOGICAL_NOT", T((2, 3), "BOOL"), T((), "BOOL")),
        ("COMPLEX_ABS", T((2, 3), "COMPLEX64"), T(())),
        ("REAL", T((2, 3), "COMPLEX64"), T(())),
        ("IMAG", T((2, 3), "COMPLEX64"), T(())),
        ("BUCKETIZE", T((2, 3)), T((), "INT32")),
    ],
)
def test_unary_operators_that_change_the_type_keep_the_shape(name: str, source: T, result: T) -> None:
    options = ("BucketizeOptions", {"boundaries": [0.0, 1.0]}) if name == "BUCKETIZE" else None
    check(name, [source], options, [result], accepted=True)


BINARY = [
    ("ADD", "AddOptions", "FLOAT32", "FLOAT32"), ("SUB", "SubOptions", "FLOAT32", "FLOAT32"),
    ("MUL", "MulOptions", "FLOAT32", "FLOAT32"), ("DIV", "DivOptions", "FLOAT32", "FLOAT32"),
    ("FLOOR_DIV", None, "INT32", "INT32"), ("FLOOR_MOD", None, "INT32", "INT32"),
    ("MAXIMUM", None, "FLOAT32", "FLOAT32"), ("MINIMUM", None, "FLOAT32", "FLOAT32"),
    ("POW", None, "FLOAT32", "FLOAT32"), ("SQUARED_DIFFERENCE", None, "FLOAT32", "FLOAT32"),
    ("EQUAL", None, "FLOAT32", "BOOL"), ("NOT_EQUAL", None, "FLOAT32", "BOOL"),
    ("GREATER", None, "FLOAT32", "BOOL"), ("GREATER_EQUAL", None, "FLOAT32", "BOOL"),
    ("LESS", None, "FLOAT32", "BOOL"), ("LESS_EQUAL", None, "FLOAT32", "BOOL"),
    ("LOGICAL_AND", None, "BOOL", "BOOL"), ("LOGICAL_OR", None, "BOOL", "BOOL"),
    ("BITWISE_XOR", None, "INT32", "INT32"), ("RIGHT_SHIFT", None, "INT32", "INT32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "table", "dtype", "result"), BINARY, ids=[row[0] for row in BINARY])
@pytest.mark.parametrize(
    ("left", "right", "accepted"),
    [
        ((2, 3), (2, 3), True),
        ((2, 1, 3), (4, 1), True),
        ((), (2, 3), True),
        ((5,), (), True),
        ((0, 3), (1, 3), True),
        ((1,), (0,), True),
        ((2, 3), (2, 4), False),
        ((0,), (3,), False),
    ],
)
def test_binary_operators_broadcast(
    name: str, table: str | None, dtype: str, result: str, left: Shape, right: Shape, accepted: bool
) -> None:
    options = (table, {}) if table else None
    check(name, [T(left, dtype), T(right, dtype)], options, result, accepted=accepted)


@pytest.mark.parametrize(("left", "right"), [((2, 3), (2, 3)), ((2, 3), (1, 3))])
def test_atan2_does_not_broadcast(left: Shape, right: Shape) -> None:
    """The interpreter takes the first operand's shape without a look at the second: only equal ones are right."""
    check("ATAN2", [T(left), T(right)], accepted=True, stricter=left != right)


@pytest.mark.parametrize(
    ("slopes", "accepted"),
    [((3,), True), ((1, 1, 3), True), ((2, 3), True), ((4, 2, 3), False), ((4,), False)],
)
def test_prelu_slopes_broadcast_to_the_input(slopes: Shape, accepted: bool) -> None:
    check("PRELU", [T((1, 2, 3)), T(slopes)], accepted=accepted)


@pytest.mark.parametrize("second", [(2, 3), (1, 3), (3,)])
def test_add_n_takes_equal_shapes(second: Shape) -> None:
    check("ADD_N", [T((2, 3)), T(second), T((2, 3))], accepted=second == (2, 3))


@pytest.mark.parametrize("name", ["SELECT", "SELECT_V2"])
@pytest.mark.parametrize(
    ("condition", "x", "y"),
    [
        ((2, 3), (2, 3), (2, 3)),
        ((), (2, 3), (2, 3)),
        ((2,), (2, 3), (2, 3)),
        ((3,), (2, 3), (2, 3)),
        ((2, 1), (2, 3), (2, 3)),
        ((2, 1), (1, 3), ()),
        ((2, 2), (3,), ()),
        ((4,), (2, 3), (2, 3)),
        ((0,), (1,), ()),
    ],
)
def test_select(name: str, condition: Shape, x: Shape, y: Shape) -> None:
    check(name, [T(condition, "BOOL"), T(x), T(y)])


REDUCTIONS = [
    ("MEAN", "FLOAT32"), ("SUM", "FLOAT32"), ("REDUCE_PROD", "FLOAT32"), ("REDUCE_MAX", "FLOAT32"),
    ("REDUCE_MIN", "FLOAT32"), ("REDUCE_ANY", "BOOL"), ("REDUCE_ALL", "BOOL"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), REDUCTIONS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("shape", "axes", "accepted"),
    [
        ((2, 3, 4), [1], True),
        ((2, 3, 4), [0, -1], True),
        ((2, 3, 4), [0, 1, 2], True),
        ((2, 3, 4), [1, 1, -2], True),
        ((2, 3, 4), [], True),
        ((), [], True),
        ((2, 0), [0], True),
        ((2, 3, 4), [3], False),
        ((2, 3, 4), [-4], False),
    ],
)
def test_reductions(name: str, dtype: str, keep: bool, shape: Shape, axes: list[int], accepted: bool) -> None:
    check(
        name, [T(shape, dtype), const(axes)], ("ReducerOptions", {"keepDims": keep}), dtype, accepted=accepted
    )


def test_a_reduction_takes_a_scalar_axis() -> None:
    check("SUM", [T((2, 3)), const(1)], ("ReducerOptions", {"keepDims": False}), accepted=True)


@pytest.mark.parametrize("name", ["ARG_MAX", "ARG_MIN"])
@pytest.mark.parametrize(("shape", "axis", "accepted"), [
    ((2, 3, 4), 1, True), ((2, 3, 4), -1, True), ((5,), 0, True), ((2, 3), 2, False), ((), 0, False),
])  # fmt: skip
def test_positions_of_extremes(name: str, shape: Shape, axis: int, accepted: bool) -> None:
    table = {"ARG_MAX": "ArgMaxOptions", "ARG_MIN": "ArgMinOptions"}[name]
    options = (table, {"outputType": 2})
    check(name, [T(shape), const(axis)], options, "INT32", accepted=accepted)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 1), ((4,), 0), ((), 0)])
def test_cumsum(shape: Shape, axis: int) -> None:
    check("CUMSUM", [T(shape), const(axis)], ("CumsumOptions", {}), accepted=shape != ())


@pytest.mark.parametrize(("shape", "k", "accepted"), [
    ((2, 5), 3, True), ((5,), 5, True), ((2, 5), 0, True), ((2, 5), 6, False), ((2, 0), 1, False), ((), 1, False),
])  # fmt: skip
def test_top_k(shape: Shape, k: int, accepted: bool) -> None:
    check("TOPK_V2", [T(shape), const(k)], None, [T(()), T((), "INT32")], accepted=accepted)


@pytest.mark.parametrize(("shape", "depth", "axis", "accepted"), [
    ((2, 3), 4, -1, True), ((2, 3), 4, 0, True), ((2, 3), 4, 2, True), ((), 4, -1, True), ((2, 3), 0, 1, True),
    ((2, 3), 4, 3, False), ((2, 3), 4, -2, False), ((2, 3), -1, 0, False),
])  # fmt: skip
def test_one_hot(shape: Shape, depth: int, axis: int, accepted: bool) -> None:
    inputs = [T(shape, "INT32"), const(depth), const(1.0, "FLOAT32"), const(0.0, "FLOAT32")]
    check("ONE_HOT", inputs, ("OneHotOptions", {"axis": axis}), accepted=accepted)


@pytest.mark.parametrize("adj_x", [False, True])
@pytest.mark.parametrize("adj_y", [False, True])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((2, 3), (3, 4)),
        ((3, 3), (3, 3)),
        ((5, 2, 3), (3, 4)),
        ((2, 1, 4, 3), (5, 3, 4)),
        ((1, 4, 16, 8), (1, 1, 8, 16)),
        ((2, 3, 3), (3, 3, 3)),
        ((3,), (3, 4)),
        ((1, 1, 1, 1, 2, 3), (3, 2)),
        ((1, 1, 1, 2, 3), (3, 2)),
        ((0, 2, 3), (1, 3, 2)),
    ],
)
def test_batch_matmul(x: Shape, y: Shape, adj_x: bool, adj_y: bool) -> None:
    check("BATCH_MATMUL", [T(x), T(y)], ("BatchMatMulOptions", {"adjX": adj_x, "adjY": adj_y}))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("shape", "weights", "bias", "accepted"),
    [
        ((2, 3), (4, 3), None, (True, True)),
        ((2, 5, 3), (4, 3), (4,), (True, True)),
        ((1, 2, 6), (4, 3), None, (True, False)),
        ((3,), (4, 3), (4,), (True, True)),
        ((2, 3), (4, 3), (5,), (False, False)),
        ((2, 3), (2, 4, 3), None, (False, False)),
        ((2, 0), (4, 0), None, (True, True)),
        ((0, 3), (4, 3), None, (True, True)),
        ((0, 6), (4, 3), None, (True, False)),
    ],
)
def test_fully_connected(
    keep: bool, shape: Shape, weights: Shape, bias: Shape | None, accepted: tuple[bool, bool]
) -> None:
    inputs = [T(shape), T(weights), None if bias is None else T(bias)]
    check(
        "FULLY_CONNECTED", inputs, ("FullyConnectedOptions", {"keepNumDims": keep}), accepted=accepted[keep]
    )


def test_fully_connected_refuses_elements_that_do_not_make_rows() -> None:
    """The interpreter rounds the number of rows down and drops the rest: the recorded shape would be a lie."""
    check(
        "FULLY_CONNECTED",
        [T((2, 5)), T((4, 3)), None],
        ("FullyConnectedOptions", {}),
        accepted=True,
        stricter=True,
    )


SMALL = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(SMALL, SMALL)
def test_any_two_shapes_add(left: Shape, right: Shape) -> None:
    check("ADD", [T(left), T(right)], ("AddOptions", {}))


@settings(max_examples=100, deadline=None)
@given(SMALL, SMALL, SMALL)
def test_any_three_shapes_select(condition: Shape, x: Shape, y: Shape) -> None:
    """Of three single elements the interpreter leaves the recorded shape as it is, whatever it says."""
    assume(not all(set(shape) <= {1} for shape in (condition, x, y)))
    check("SELECT_V2", [T(condition, "BOOL"), T(x), T(y)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=5).map(tuple), st.data(), st.booleans(), st.booleans())
def test_any_two_shapes_multiply(x: Shape, data: st.DataObject, adj_x: bool, adj_y: bool) -> None:
    inner = 2 if len(x) < 2 else x[-2] if adj_x else x[-1]
    columns, batch = data.draw(st.integers(1, 3)), data.draw(st.lists(st.integers(1, 2), max_size=3))
    y = (*batch, columns, inner) if adj_y else (*batch, inner, columns)
    check("BATCH_MATMUL", [T(x), T(y)], ("BatchMatMulOptions", {"adjX": adj_x, "adjY": adj_y}))


@settings(max_examples=100, deadline=None)
@given(SMALL, st.lists(st.integers(-4, 4), max_size=3), st.booleans())
def test_any_axes_reduce(shape: Shape, axes: list[int], keep: bool) -> None:
    check("REDUCE_MAX", [T(shape), const(axes)], ("ReducerOptions", {"keepDims": keep}))
