"""Each rule against the interpreter, on models of one operator: what both accept, with equal shapes, and both refuse.

A row is an operator, its inputs, its options (None: it has none), the types of its results, and whether the interpreter
accepts it. `check` then hides parts of the inputs and asks the rule again. Operators that fold are drawn at random, see
`test_shapes_folding.py`: here are those that both refuse.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import page_shapes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes_referee import (
    Options,
    Shape,
    T,
    check,
    const,
    fits,
    inferred,
    one_operator,
    runtime_values,
)

from edge_opt.attention.rules import RULES as ATTENTION_RULES
from edge_opt.ir.operators import UNARY
from edge_opt.schema.table import ENUMS
from edge_opt.shapes.rules import RULES

Row = tuple[str, list[T | None], dict[str, Any] | None, Sequence[T] | str, bool]
F, INT, B = "FLOAT32", "INT32", "BOOL"
SHAPES = [(), (5,), (1, 4, 0, 2), (2, 1, 3, 4, 5)]
WITH_ROWS = SHAPES[1:]
PAIRS = [
    ((2, 1, 3), (4, 1), True),
    ((), (2, 3), True),
    ((0, 3), (1, 3), True),
    ((2, 3), (2, 4), False),
    ((0,), (3,), False),
]
OF_OTHERS = "CAST QUANTIZE DEQUANTIZE LOGICAL_NOT COMPLEX_ABS REAL IMAG BUCKETIZE GELU LEAKY_RELU FAKE_QUANT"

ELEMENTWISE: list[Row] = [
    *[(name, [T(s)], None, F, True) for name, s in product(sorted(UNARY - set(OF_OTHERS.split())), SHAPES)],
    *[(name, [T(s)], {}, F, True) for name, s in product(("GELU", "LEAKY_RELU"), SHAPES)],
    ("FAKE_QUANT", [T((2, 3))], {"min": -1.0, "max": 1.0, "num_bits": 8}, F, True),
    *[("SOFTMAX", [T(s)], {"beta": 1.0}, F, True) for s in WITH_ROWS],
    *[("L2_NORMALIZATION", [T(s)], {}, F, True) for s in WITH_ROWS],
    ("QUANTIZE", [T((2, 3))], None, [T((), "INT8", scale=0.1)], True),
    ("DEQUANTIZE", [T((2, 3), "INT8", scale=0.1)], None, F, True),
    *[(name, [T((2, 3), "COMPLEX64")], None, F, True) for name in ("COMPLEX_ABS", "REAL", "IMAG")],
    ("BUCKETIZE", [T((2, 3))], {"boundaries": [0.0, 1.0]}, INT, True),
    *[
        (name, [T(x, dtype), T(y, dtype)], None, dtype, ok)
        for names, dtype in [
            ("MAXIMUM POW SQUARED_DIFFERENCE", F), ("FLOOR_MOD BITWISE_XOR RIGHT_SHIFT", INT), ("LOGICAL_OR", B),
        ]
        for name, (x, y, ok) in product(names.split(), PAIRS)
    ],
    *[("PRELU", [T((1, 2, 3)), T(s)], None, F, ok) for s, ok in [((2, 3), True), ((4,), False)]],
    *[("ADD_N", [T((2, 3)), T(s), T((2, 3))], None, F, s == (2, 3)) for s in [(2, 3), (1, 3), (3,)]],
    *[
        (f"STABLEHLO_{name}", [T((2, 3)), T(y)], None, F, y == (2, 3))
        for name in ("ADD", "MULTIPLY", "MAXIMUM", "MINIMUM")
        for y in [(2, 3), (1, 3), (3,)]
    ],
    ("STABLEHLO_AND", [T((2, 3), B), T((2, 3), B)], None, B, True),
    ("STABLEHLO_SHIFT_LEFT", [T((2, 3), INT), T((2, 3), INT)], None, INT, True),
    *[("SELECT", [T(c, B), T((2, 3)), T(y)], None, F, ok) for c, y, ok in [
        ((2, 3), (2, 3), True), ((), (2, 3), True), ((2,), (2, 3), True), ((3,), (2, 3), False),
        ((2, 1), (2, 3), False), ((2, 3), (1, 3), False),
    ]],
    *[("SELECT_V2", [T(c, B), T((2, 3)), T(y)], None, F, ok) for c, y, ok in [
        ((3,), (2, 3), True), ((2, 1), (), True), ((2,), (2, 3), False), ((2, 2), (3,), False),
    ]],
]  # fmt: skip

ALONG_AXES: list[Row] = [
    *[("MEAN", [T(s), const(axes)], {"keep_dims": keep}, F, ok) for keep in (False, True) for s, axes, ok in [
        ((2, 3, 4), [1, 1, -2], True), ((2, 3, 4), [], True), ((), [], True), ((2, 0), [0], True), ((2, 3), [2], False),
    ]],
    *[("CUMSUM", [T(s), const(0)], {}, F, True) for s in WITH_ROWS],
    *[("ONE_HOT", [T(s, INT), const(n), const(1.0, F), const(0.0, F)], {"axis": axis}, F, ok) for s, n, axis, ok in [
        ((2, 3), 4, -1, True), ((2, 3), 4, 1, True), ((), 4, -1, True), ((2, 3), 4, 3, False), ((2, 3), -1, 0, False),
    ]],
    *[("UNSORTED_SEGMENT_PROD", [T(s), const(ids), const(5)], {}, F, ok) for s, ids, ok in [
        ((3, 2), [0, 1, 0], True), ((2, 2, 4), [[0, 1], [1, 0]], True), ((3, 2), [0, 1], False),
    ]],
]  # fmt: skip

PARTS: list[Row] = [
    *[("GATHER", [T(s), T(indices, INT)], {"axis": axis, "batch_dims": n}, F, ok) for s, indices, axis, n, ok in [
        ((2, 4, 5), (2, 3), 2, 1, True), ((2, 4, 5), (2, 3), 1, -1, True), ((4, 5), (3,), 2, 0, False),
        ((2, 4, 5), (3, 3), 1, 1, False), ((2, 4), (2, 4), 0, 1, False),
    ]],
    *[("DYNAMIC_UPDATE_SLICE", [T((4, 5)), T(update), T(start, INT)], None, F, ok) for update, start, ok in [
        ((2, 5), (2,), True), ((5, 5), (2,), False), ((5,), (2,), False), ((2, 5), (1,), False),
        ((2, 5), (2, 1), False),
    ]],
    *[("EMBEDDING_LOOKUP", [T(lookup, INT), T(table)], None, F, ok) for lookup, table, ok in [
        ((3,), (10, 2, 4), True), ((3, 1), (10, 4), False), ((3,), (10,), False),
    ]],
    *[("PAD", [T((2, 3)), const(n)], {}, F, ok) for n, ok in [
        ([[1, 0], [0, 2]], True), ([[1, 0]], False), ([[1, 0], [0, -2]], False), ([1, 2], False),
    ]],
    ("PADV2", [T((2, 3)), const([[1, 0], [0, 2]]), const(0.0, F)], {}, F, True),
    ("MIRROR_PAD", [T((2, 3)), const([[1, 0], [2, 2]])], {"mode": 0}, F, True),
    ("RANGE", [const(0.0, F), const(1.0, F), const(0.3, F)], {}, F, True),
]  # fmt: skip

REFUSED: list[Row] = [
    *[("RESHAPE", [T(s), const(target)], {}, F, False) for s, target in [
        ((2, 6), [5]), ((2, 6), [-1, 5]), ((2, 6), [-1, -1]), ((2, 6), [-2, 6]), ((2, 6), [0, -1]), ((0,), [1]),
    ]],
    *[("EXPAND_DIMS", [T((2, 3)), const(axis)], {}, F, False) for axis in (3, -4)],
    *[("SQUEEZE", [T((1, 2, 1))], {"squeeze_dims": axes}, F, False) for axes in ([1], [3])],
    *[("TRANSPOSE", [T((2, 3)), const(permutation)], {}, F, False) for permutation in ([0], [0, 2])],
    *[("CONCATENATION", [T(x), T(y)], {"axis": axis}, F, False) for x, y, axis in [
        ((2, 3), (2, 5), 0), ((2, 3), (2,), 0), ((2, 3), (2, 3), 2), ((2, 3), (2, 3), -3), ((), (), 0),
    ]],
    *[("PACK", [T((2, 3)), T(y)], {"axis": axis, "values_count": 2}, F, False) for y, axis in [
        ((2, 4), 0), ((2, 3), 3), ((2,), 0),
    ]],
    ("PACK", [T((2, 3))] * 3, {"axis": 0, "values_count": 2}, F, False),
    *[("UNPACK", [T(s)], {"axis": axis, "num": 2}, [T(())] * 2, False) for s, axis in [
        ((2, 3), 1), ((2, 3), 2), ((2, 0), 0),
    ]],
    *[("SPLIT", [const(axis), T((2, 5))], {"num_splits": 2}, [T(())] * 2, False) for axis in (1, 2)],
    *[("SPLIT_V", [T((2, 6)), const(n), const(axis)], {"num_splits": 2}, [T(())] * 2, False) for n, axis in [
        ([2, 3], 1), ([-1, -1], 1), ([7, -1], 1), ([2, 4], 2),
    ]],
    *[("TILE", [T((2, 3)), const(times)], {}, F, False) for times in ([2], [2, -1])],
    *[("BROADCAST_TO", [T(s), const(target)], {}, F, False) for s, target in [
        ((2, 3), [2, 4]), ((2, 3), [3]), ((3,), [3, 1]),
    ]],
    *[("FILL", [const(dims), const(1.0, F)], {}, F, False) for dims in ([2, -1], [-3])],
    *[("RANGE", [const(n) for n in numbers], {}, INT, False) for numbers in ((0, 5, -1), (5, 0, 1), (0, 5, 0))],
    *[("SLICE", [T((4, 5)), const(begin), const(size)], {}, F, False) for begin, size in [
        ([3, 0], [2, 1]), ([0, 0], [-2, 1]), ([-1, 0], [1, 1]),
    ]],
    ("SUM", [T((2, 3)), const([2])], {}, F, False),
]  # fmt: skip

WEIGHTED: list[Row] = [
    *[
        ("FULLY_CONNECTED", [T(s), T(weights), bias and T(bias)], {"keep_num_dims": keep}, F, accepted[keep])
        for keep in (False, True)
        for s, weights, bias, accepted in [
            ((2, 3), (4, 3), None, (True, True)), ((2, 5, 3), (4, 3), (4,), (True, True)),
            ((1, 2, 6), (4, 3), None, (True, False)), ((3,), (4, 3), (4,), (True, True)),
            ((2, 3), (4, 3), (5,), (False, False)), ((2, 3), (2, 4, 3), None, (False, False)),
            ((2, 0), (4, 0), None, (True, True)), ((0, 6), (4, 3), None, (True, False)),
        ]
    ],
    *[("BATCH_MATMUL", [T(x), T(y)], {}, F, False) for x, y in [((3,), (3, 4)), ((1, 1, 1, 1, 2, 3), (3, 2))]],
]  # fmt: skip

ROWS = [*ELEMENTWISE, *ALONG_AXES, *PARTS, *REFUSED, *WEIGHTED]
examples = settings(max_examples=40, deadline=None)
SMALL = st.integers(1, 3)


@pytest.mark.parametrize(
    ("name", "inputs", "options", "outputs", "accepted"),
    ROWS,
    ids=[f"{row[0]}-{row[4]}" for row in ROWS],
)
def test_rule_and_interpreter_agree(
    name: str, inputs: list[T | None], options: Options, outputs: Sequence[T] | str, accepted: bool
) -> None:
    check(name, inputs, options, outputs, accepted=accepted)


@pytest.mark.parametrize(("name", "inputs"), [
    ("ATAN2", [T((2, 3)), T((1, 3))]), ("FULLY_CONNECTED", [T((2, 5)), T((4, 3)), None]),
])  # fmt: skip
def test_what_the_interpreter_computes_wrongly_is_refused(
    name: str, inputs: list[T | None]
) -> None:
    """ATAN2 does not look at the second operand; FULLY_CONNECTED rounds the number of rows down."""
    check(name, inputs, None if name == "ATAN2" else {}, accepted=True, stricter=True)


@pytest.mark.parametrize(
    ("target", "shape"), [([3, 4], (2, 6)), ([-1, 2], (2, 6)), ([0], (1,)), ([0], (2,)), ([], (1,))]
)
def test_reshape_by_its_options(target: list[int], shape: Shape) -> None:
    """`[0]` in the options stands for a scalar."""
    check("RESHAPE", [T(shape)], {"new_shape": target})


@pytest.mark.parametrize("operand", [const([[4, 3]]), const([4, 3], "INT64"), const([4, 3])])
def test_the_options_of_reshape_count_where_the_operand_is_not_a_vector_of_int32(
    operand: T,
) -> None:
    check("RESHAPE", [T((2, 6)), operand], {"new_shape": [3, 4]}, accepted=True)


@examples
@given(st.lists(st.integers(1, 3), max_size=5).map(tuple), st.data(), st.booleans(), st.booleans())
def test_any_two_shapes_multiply(x: Shape, data: st.DataObject, adj_x: bool, adj_y: bool) -> None:
    inner = 2 if len(x) < 2 else x[-2] if adj_x else x[-1]
    columns, batch = (
        data.draw(st.integers(1, 3)),
        data.draw(st.lists(st.integers(1, 2), max_size=3)),
    )
    y = (*batch, columns, inner) if adj_y else (*batch, inner, columns)
    check("BATCH_MATMUL", [T(x), T(y)], {"adj_x": adj_x, "adj_y": adj_y})


@examples
@given(st.integers(3, 6), SMALL, SMALL, st.integers(1, 2), st.integers(0, 1))
def test_any_window(height: int, window: int, stride: int, dilation: int, padding: int) -> None:
    source, options = T((2, height, 5, 4)), {"padding": padding, "stride_h": stride, "stride_w": 1}
    options |= {"dilation_h_factor": min(dilation, (height + 1) // 2), "dilation_w_factor": 1}
    check("CONV_2D", [source, T((6, min(window, 2), 2, 4)), T((6,))], options)
    check(
        "DEPTHWISE_CONV_2D", [source, T((1, 2, 2, 8)), T((8,))], {**options, "depth_multiplier": 2}
    )


@pytest.mark.parametrize(("name", "inputs", "options", "outputs"), [
    ("RESHAPE", [T((0, 3)), T((2,), "INT32")], {}, [T((7, 7))]),
    ("FILL", [T((2,), "INT32"), T(())], {}, [T(())]),
    ("SLICE", [T((4, 5)), T((2,), "INT32"), T((2,), "INT32")], {}, [T(())]),
    ("PAD", [T((2, 3)), T((2, 2), "INT32")], {}, [T(())]),
])  # fmt: skip
def test_sizes_by_data_are_open(
    name: str, inputs: list[T], options: Options, outputs: list[T]
) -> None:
    """Run on zeros; what the interpreter then has must fit what the rule says, which must say -1 somewhere."""
    model = one_operator(name, inputs, outputs, options)
    derived, actual = inferred(model), [values.shape for values in runtime_values(model)]
    assert any(-1 in (shape or ()) for shape, _ in derived)
    assert all(
        shape and fits(shape, theirs) for (shape, _), theirs in zip(derived, actual, strict=True)
    )


def test_every_rule_is_for_an_operator_and_names_its_source() -> None:
    assert RULES.keys() <= set(ENUMS["BuiltinOperator"])
    described = {name: page_shapes.described(name) for name in RULES}
    assert [name for name, (what, source) in described.items() if what == source] == []
    assert [name for name, (_, source) in described.items() if ".cc" not in source] == []
    assert ATTENTION_RULES.keys() <= RULES.keys()


def test_the_page_lists_every_operator_once_with_a_reason_where_it_has_no_rule() -> None:
    assert page_shapes.why_not("CUSTOM") == "a kernel from the user"
    assert page_shapes.why_not("STABLEHLO_TANH") == "the runtime has no kernel for it"
    assert page_shapes.why_not("LSTM") == "rare in language models"
    page = page_shapes.table().replace("|", ",").replace("- ", ",").replace(":", ",")
    words = [word.strip() for word in page.split(",")]
    assert [name for name in ENUMS["BuiltinOperator"] if words.count(name) != 1] == []
