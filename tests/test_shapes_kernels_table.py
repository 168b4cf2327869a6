"""Each rule against the interpreter, on models of one operator: what both accept, with equal shapes, and both refuse.

A row is an operator, its inputs, its options (None: it has none), the types of its results, and whether the interpreter
accepts it. `check` then hides parts of the inputs and asks the rule again.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from shapes_referee import T, check, const

Row = tuple[str, list[T | None], dict[str, Any] | None, Sequence[T] | str, bool]
F, INT, B = "FLOAT32", "INT32", "BOOL"
SHAPES = [(), (5,), (2, 3), (1, 4, 0, 2), (2, 1, 3, 4, 5)]
PAIRS = [
    ((2, 3), (2, 3), True), ((2, 1, 3), (4, 1), True), ((), (2, 3), True), ((5,), (), True),
    ((0, 3), (1, 3), True), ((1,), (0,), True), ((2, 3), (2, 4), False), ((0,), (3,), False),
]  # fmt: skip
UNARY = (
    "ABS CEIL COS ELU EXP FLOOR HARD_SWISH LOG LOGISTIC LOG_SOFTMAX NEG RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND "
    "RSQRT SIGN SIN SQRT SQUARE TANH ZEROS_LIKE"
)

ELEMENTWISE: list[Row] = [
    *[(name, [T(s)], None, F, True) for name, s in product(UNARY.split(), SHAPES)],
    *[(name, [T(s)], {}, F, True) for name, s in product(("GELU", "LEAKY_RELU"), SHAPES)],
    *[("FAKE_QUANT", [T(s)], {"min": -1.0, "max": 1.0, "numBits": 8}, F, True) for s in SHAPES],
    *[("SOFTMAX", [T(s)], {"beta": 1.0}, F, s != ()) for s in SHAPES],
    *[("L2_NORMALIZATION", [T(s)], {}, F, s != ()) for s in SHAPES],
    ("CAST", [T((2, 3), INT)], None, F, True),
    ("QUANTIZE", [T((2, 3))], None, [T((), "INT8", scale=0.1)], True),
    ("DEQUANTIZE", [T((2, 3), "INT8", scale=0.1)], None, F, True),
    ("LOGICAL_NOT", [T((2, 3), B)], None, B, True),
    *[(name, [T((2, 3), "COMPLEX64")], None, F, True) for name in ("COMPLEX_ABS", "REAL", "IMAG")],
    ("BUCKETIZE", [T((2, 3))], {"boundaries": [0.0, 1.0]}, INT, True),
    *[(n, [T(x), T(y)], {}, F, ok) for n, (x, y, ok) in product(("ADD", "SUB", "MUL", "DIV"), PAIRS)],
    *[
        (name, [T(x, dtype), T(y, dtype)], None, result, ok)
        for names, dtype, result in [
            ("MAXIMUM MINIMUM POW SQUARED_DIFFERENCE", F, F),
            ("FLOOR_DIV FLOOR_MOD BITWISE_XOR RIGHT_SHIFT", INT, INT),
            ("EQUAL NOT_EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL", F, B),
            ("LOGICAL_AND LOGICAL_OR", B, B),
        ]
        for name, (x, y, ok) in product(names.split(), PAIRS)
    ],
    *[("PRELU", [T((1, 2, 3)), T(s)], None, F, ok) for s, ok in [
        ((3,), True), ((1, 1, 3), True), ((2, 3), True), ((4, 2, 3), False), ((4,), False),
    ]],
    *[("ADD_N", [T((2, 3)), T(s), T((2, 3))], None, F, s == (2, 3)) for s in [(2, 3), (1, 3), (3,)]],
    *[
        (f"STABLEHLO_{name}", [T(x), T(y)], None, F, ok)
        for name in ("ADD", "MULTIPLY", "MAXIMUM", "MINIMUM")
        for x, y, ok in [((2, 3), (2, 3), True), ((2, 3), (1, 3), False), ((3,), (2, 3), False)]
    ],
    ("STABLEHLO_AND", [T((2, 3), B), T((2, 3), B)], None, B, True),
    ("STABLEHLO_SHIFT_LEFT", [T((2, 3), INT), T((2, 3), INT)], None, INT, True),
]  # fmt: skip

ALONG_AXES: list[Row] = [
    *[
        (name, [T(shape, dtype), const(axes)], {"keepDims": keep}, dtype, ok)
        for names, dtype in [("MEAN SUM REDUCE_PROD REDUCE_MAX REDUCE_MIN", F), ("REDUCE_ANY REDUCE_ALL", B)]
        for name, keep in product(names.split(), (False, True))
        for shape, axes, ok in [
            ((2, 3, 4), [1], True), ((2, 3, 4), [0, -1], True), ((2, 3, 4), [0, 1, 2], True),
            ((2, 3, 4), [1, 1, -2], True), ((2, 3, 4), [], True), ((), [], True), ((2, 0), [0], True),
            ((2, 3, 4), [3], False), ((2, 3, 4), [-4], False),
        ]
    ],
    ("SUM", [T((2, 3)), const(1)], {"keepDims": False}, F, True),
    *[
        (name, [T(shape), const(axis)], {"outputType": 2}, INT, ok)
        for name in ("ARG_MAX", "ARG_MIN")
        for shape, axis, ok in [
            ((2, 3, 4), 1, True), ((2, 3, 4), -1, True), ((5,), 0, True), ((2, 3), 2, False), ((), 0, False),
        ]
    ],
    *[("CUMSUM", [T(shape), const(axis)], {}, F, shape != ()) for shape, axis in [((2, 3), 1), ((4,), 0), ((), 0)]],
    *[("TOPK_V2", [T(shape), const(k)], None, [T(()), T((), INT)], ok) for shape, k, ok in [
        ((2, 5), 3, True), ((5,), 5, True), ((2, 5), 0, True), ((2, 5), 6, False), ((2, 0), 1, False), ((), 1, False),
    ]],
    *[
        ("ONE_HOT", [T(shape, INT), const(depth), const(1.0, F), const(0.0, F)], {"axis": axis}, F, ok)
        for shape, depth, axis, ok in [
            ((2, 3), 4, -1, True), ((2, 3), 4, 0, True), ((2, 3), 4, 2, True), ((), 4, -1, True),
            ((2, 3), 0, 1, True), ((2, 3), 4, 3, False), ((2, 3), 4, -2, False), ((2, 3), -1, 0, False),
        ]
    ],
    *[
        (f"UNSORTED_SEGMENT_{kind}", [T(shape), const(ids), const(5)], {}, F, ok)
        for kind in ("SUM", "MAX", "MIN", "PROD")
        for shape, ids, ok in [
            ((3, 2), [0, 1, 0], True), ((2, 2, 4), [[0, 1], [1, 0]], True), ((3, 2), [0, 1], False),
        ]
    ],
]  # fmt: skip

FROM_NUMBERS: list[Row] = [
    ("SHAPE", [T((2, 3))], {"outType": 2}, INT, True),
    ("SHAPE", [T(())], {"outType": 2}, INT, True),
    ("RANK", [T((2, 3))], {}, INT, True),
    *[("FILL", [const(dims), const(1.0, F)], {}, F, ok) for dims, ok in [
        ([2, 3], True), ([], True), ([0, 3], True), ([2, -1], False),
    ]],
    *[("RANGE", [const(number, dtype) for number in numbers], {}, dtype, ok) for numbers, dtype, ok in [
        ((0, 5, 1), INT, True), ((0, 5, 2), INT, True), ((5, 0, -2), INT, True), ((3, 3, 1), INT, True),
        ((0.0, 1.0, 0.3), F, True), ((1.0, -1.0, -0.5), F, True), ((0, 5, -1), INT, False), ((5, 0, 1), INT, False),
        ((0, 5, 0), INT, False),
    ]],
    *[(name, [const([2, 3])], {}, F, True) for name in ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL")],
    *[("RFFT2D", [T(shape), const(sizes)], {}, "COMPLEX64", ok) for shape, sizes, ok in [
        ((2, 4, 8), [4, 8], True), ((4, 8), [8, 4], True), ((4, 8), [3, 8], False), ((8,), [4, 8], False),
        ((4, 8), [4], False), ((2, 2), [2, 2], True),
    ]],
    *[("WHERE", [const(value)], None, "INT64", True) for value in ([1, 0, 3], [[0, 0], [0, 5]], [0, 0])],
    ("VAR_HANDLE", [], {"sharedName": "v"}, "RESOURCE", True),
    ("ASSIGN_VARIABLE", [T((1,), "RESOURCE"), T((2, 3))], {}, [], True),
]  # fmt: skip

AXES: list[Row] = [
    *[("RESHAPE", [T(shape), const(target)], {}, F, ok) for shape, target, ok in [
        ((2, 6), [3, 4], True), ((2, 6), [-1, 4], True), ((2, 6), [-1], True), ((1,), [], True), ((), [1, 1], True),
        ((0, 3), [-1, 3], True), ((0, 3), [0, -1], True), ((2, 0, 3), [-1, 0], True), ((0,), [5, 0], True),
        ((2, 6), [5], False), ((2, 6), [-1, 5], False), ((2, 6), [-1, -1], False), ((2, 6), [-2, 6], False),
        ((2, 6), [0, -1], False), ((0,), [1], False),
    ]],
    # The options count where the operand is no vector of int32.
    *[("RESHAPE", [T((2, 6)), operand], {"newShape": [3, 4]}, F, True) for operand in [
        const([[4, 3]]), const([4, 3], "INT64"), const([4, 3]),
    ]],
    *[("EXPAND_DIMS", [T(shape), const(axis)], {}, F, ok) for shape, axis, ok in [
        ((2, 3), 0, True), ((2, 3), 2, True), ((2, 3), -1, True), ((2, 3), -3, True), ((), 0, True),
        ((2, 3), 3, False), ((2, 3), -4, False),
    ]],
    *[("SQUEEZE", [T(shape)], {"squeezeDims": axes}, F, ok) for shape, axes, ok in [
        ((1, 2, 1), [], True), ((1, 2, 1), [0], True), ((1, 2, 1), [-1, 0], True), ((1, 2, 1), [0, 0], True),
        ((1, 1), [], True), ((), [], True), ((1, 2, 1), [1], False), ((1, 2, 1), [3], False),
    ]],
    *[("TRANSPOSE", [T(shape), const(permutation)], {}, F, ok) for shape, permutation, ok in [
        ((2, 3, 4), [2, 0, 1], True), ((2, 3, 4), [-1, 0, 1], True), ((5,), [0], True), ((0, 2), [1, 0], True),
        ((2, 3, 4), [1, 0], False), ((2, 3), [0, 2], False),
    ]],
    *[("CONCATENATION", [T(shape) for shape in shapes], {"axis": axis}, F, ok) for shapes, axis, ok in [
        ([(2, 3), (2, 5)], 1, True), ([(2, 3), (4, 3), (1, 3)], 0, True), ([(2, 3), (2, 5)], -1, True),
        ([(2, 3)], 0, True), ([(0, 3), (2, 3)], 0, True), ([(2, 3), (2, 5)], 0, False), ([(2, 3), (2,)], 0, False),
        ([(2, 3), (2, 3)], 2, False), ([(2, 3), (2, 3)], -3, False), ([(), ()], 0, False),
    ]],
    *[("PACK", [T(s) for s in shapes], {"axis": axis, "valuesCount": len(shapes)}, F, ok) for shapes, axis, ok in [
        ([(2, 3), (2, 3)], 0, True), ([(2, 3), (2, 3)], 2, True), ([(2, 3), (2, 3)], -1, True), ([(), ()], 0, True),
        ([(2, 3), (2, 4)], 0, False), ([(2, 3), (2, 3)], 3, False), ([(2, 3), (2,)], 0, False),
    ]],
    *[("UNPACK", [T(shape)], {"axis": axis, "num": n}, [T(())] * n, ok) for shape, axis, n, ok in [
        ((2, 3), 0, 2, True), ((2, 3), 1, 3, True), ((2, 3), -1, 3, True), ((4,), 0, 4, True), ((2, 3), 0, 3, False),
        ((2, 3), 2, 2, False), ((2, 0), 0, 2, False),
    ]],
    *[("SPLIT", [const(axis), T(shape)], {"numSplits": n}, [T(())] * n, ok) for shape, axis, n, ok in [
        ((2, 6), 1, 3, True), ((2, 6), -2, 2, True), ((2, 6), 0, 1, True), ((2, 5), 1, 2, False),
        ((2, 6), 2, 2, False),
    ]],
    *[
        ("SPLIT_V", [T((2, 6)), const(sizes), const(axis)], {"numSplits": len(sizes)}, [T(())] * len(sizes), ok)
        for sizes, axis, ok in [
            ([2, 4], 1, True), ([2, -1], 1, True), ([-1, 6], -1, True), ([1, 2, 3], 1, True), ([2, 3], 1, False),
            ([-1, -1], 1, False), ([7, -1], 1, False), ([2, 4], 2, False),
        ]
    ],
    *[("TILE", [T(shape), const(times)], {}, F, ok) for shape, times, ok in [
        ((2, 3), [2, 1], True), ((2, 3), [0, 2], True), ((2, 3), [2], False), ((2, 3), [2, -1], False),
    ]],
    *[("BROADCAST_TO", [T(shape), const(target)], {}, F, ok) for shape, target, ok in [
        ((1, 3), [2, 3], True), ((3,), [2, 3], True), ((), [2, 3], True), ((1,), [0], True), ((2, 3), [2, 4], False),
        ((2, 3), [3], False), ((3,), [3, 1], False),
    ]],
    *[("BROADCAST_ARGS", [T((x,), INT), T((y,), INT)], None, INT, True) for x, y in [(3, 2), (1, 4), (2, 2)]],
    ("REVERSE_V2", [T((2, 3)), const([1])], {}, F, True),
    ("REVERSE_V2", [T((2, 3)), const([0, 1, 0])], {}, F, False),
    *[
        (name, [T(shape), const(paddings), *value], {}, F, ok)
        for name, value in [("PAD", []), ("PADV2", [const(0.0, F)])]
        for shape, paddings, ok in [
            ((2, 3), [[1, 0], [0, 2]], True), ((2, 3), [[0, 0], [0, 0]], True), ((2, 3), [[1, 0]], False),
            ((2, 3), [[1, 0], [0, -2]], False), ((2, 3), [1, 2], False),
        ]
    ],
    *[
        ("MIRROR_PAD", [T((2, 3)), const(paddings)], {"mode": mode}, F, accepted[mode])
        for mode in (0, 1)
        for paddings, accepted in [
            ([[1, 0], [2, 2]], (True, True)), ([[2, 0], [0, 0]], (False, True)), ([[0, 0], [0, 4]], (False, False)),
            ([[-1, 0], [0, 0]], (False, False)),
        ]
    ],
    *[("SPACE_TO_DEPTH", [T(shape)], {"blockSize": block}, F, ok) for shape, block, ok in [
        ((1, 4, 6, 3), 2, True), ((1, 4, 6, 3), 1, True), ((1, 4, 5, 3), 2, False), ((4, 6, 3), 2, False),
        ((1, 4, 6, 3), 0, False),
    ]],
    *[("DEPTH_TO_SPACE", [T(shape)], {"blockSize": block}, F, ok) for shape, block, ok in [
        ((1, 2, 3, 12), 2, True), ((1, 2, 3, 12), 1, True), ((1, 2, 3, 6), 2, False), ((1, 2, 3, 12), 0, False),
    ]],
    *[
        (name, [T(shape), const(size)], {}, F, ok)
        for name in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")
        for shape, size, ok in [
            ((1, 4, 6, 3), [8, 3], True), ((4, 6, 3), [8, 3], False), ((1, 4, 6, 3), [8], False),
        ]
    ],
]  # fmt: skip

PARTS: list[Row] = [
    *[
        ("SLICE", [T(shape), const(begin, dtype), const(size, dtype)], {}, F, ok)
        for dtype in (INT, "INT64")
        for shape, begin, size, ok in [
            ((4, 5), [1, 2], [2, 3], True), ((4, 5), [1, 2], [-1, -1], True), ((4, 5), [0, 0], [4, 5], True),
            ((4, 5), [4, 0], [0, 1], True), ((4, 5), [3, 0], [2, 1], False), ((4, 5), [0, 0], [-2, 1], False),
        ]
    ],
    ("SLICE", [T((4,)), const([-1]), const([2])], {}, F, False),
    *[
        ("STRIDED_SLICE", [T((5,)), const(begin), const(length), const(stride)], {"offset": True}, F, True)
        for begin, length, stride in [([1], [2], [1]), ([0], [4], [2]), ([-2], [2], [1])]
    ],
    *[
        ("GATHER", [T(shape), T(indices, INT)], {"axis": axis, "batchDims": batch}, F, ok)
        for shape, indices, axis, batch, ok in [
            ((4, 5), (3,), 0, 0, True), ((4, 5), (2, 3), 1, 0, True), ((4, 5), (), -1, 0, True),
            ((2, 4, 5), (2, 3), 1, 1, True), ((2, 4, 5), (2, 3), 2, 1, True), ((2, 4, 5), (2, 3), 1, -1, True),
            ((4, 5), (3,), 2, 0, False), ((2, 4, 5), (3, 3), 1, 1, False), ((2, 4), (2, 4), 0, 1, False),
        ]
    ],
    *[("GATHER_ND", [T(shape), T(indices, INT)], {}, F, ok) for shape, indices, ok in [
        ((4, 5), (3, 2), True), ((4, 5), (3, 1), True), ((4, 5), (2,), True), ((4, 5, 6), (7, 3, 2), True),
        ((4, 5), (3, 0), True), ((4, 5), (3, 3), False), ((), (1, 1), False),
    ]],
    *[("SCATTER_ND", [T(indices, INT), T(updates), const(shape)], {}, F, ok) for indices, updates, shape, ok in [
        ((4, 1), (4,), [8], True), ((2, 1), (2, 4, 4), [4, 4, 4], True), ((3, 2), (3,), [4, 5], True),
        ((4, 1), (3,), [8], False), ((2, 1), (2, 4), [4, 4, 4], False), ((2, 1), (2, 4, 3), [4, 4, 4], False),
    ]],
    *[
        ("DYNAMIC_UPDATE_SLICE", [T(shape), T(update), T(start, INT)], None, F, ok)
        for shape, update, start, ok in [
            ((4, 5), (2, 5), (2,), True), ((4, 5), (4, 5), (2,), True), ((4, 5), (5, 5), (2,), False),
            ((4, 5), (5,), (2,), False), ((4, 5), (2, 5), (1,), False), ((4, 5), (2, 5), (2, 1), False),
        ]
    ],
    *[("EMBEDDING_LOOKUP", [T(lookup, INT), T(table)], None, F, ok) for lookup, table, ok in [
        ((3,), (10, 4), True), ((3,), (10, 2, 4), True), ((3, 1), (10, 4), False), ((3,), (10,), False),
    ]],
    (
        "STABLEHLO_GATHER",
        [T((3, 4, 2)), T((2, 3, 2), "INT64")],
        {
            "offsetDims": [2, 3], "collapsedSliceDims": [0], "startIndexMap": [1, 0], "indexVectorDim": 2,
            "sliceSizes": [1, 2, 2],
        },
        [T((2, 3, 2, 2))],
        True,
    ),
]  # fmt: skip

_STRIDES = {"strideH": 1, "strideW": 1}
WEIGHTED: list[Row] = [
    *[
        ("FULLY_CONNECTED", [T(shape), T(weights), bias and T(bias)], {"keepNumDims": keep}, F, accepted[keep])
        for keep in (False, True)
        for shape, weights, bias, accepted in [
            ((2, 3), (4, 3), None, (True, True)), ((2, 5, 3), (4, 3), (4,), (True, True)),
            ((1, 2, 6), (4, 3), None, (True, False)), ((3,), (4, 3), (4,), (True, True)),
            ((2, 3), (4, 3), (5,), (False, False)), ((2, 3), (2, 4, 3), None, (False, False)),
            ((2, 0), (4, 0), None, (True, True)), ((0, 3), (4, 3), None, (True, True)),
            ((0, 6), (4, 3), None, (True, False)),
        ]
    ],
    *[
        ("MAX_POOL_2D", [T(shape)], {"strideH": s, "strideW": 1, "filterHeight": 2, "filterWidth": 2}, F, False)
        for shape, s in [((4, 4, 3), 1), ((1, 4, 4, 3), 0)]
    ],
    *[("CONV_2D", [T(shape), T(filters), T(bias)], _STRIDES, F, False) for shape, filters, bias in [
        ((2, 5, 5, 4), (6, 3, 3, 3), (6,)), ((2, 5, 5, 4), (6, 3, 3, 4), (5,)), ((2, 5, 5), (6, 3, 3, 4), (6,)),
        ((2, 5, 0, 4), (6, 3, 3, 4), (6,)), ((2, 5, 5, 4), (5, 3, 3, 2), (5,)),
    ]],
    *[
        (
            "CONV_2D", [T((2, 5, 5, 4)), T((6, 3, 3, 4)), T((6,))],
            {**_STRIDES, "dilationHFactor": 1, "dilationWFactor": 1, field: 0}, F, False,
        )
        for field in ("strideH", "dilationHFactor")
    ],
    *[
        ("DEPTHWISE_CONV_2D", [T((2, 5, 5, 4)), T(filters), T(bias)], {**_STRIDES, "depthMultiplier": 1}, F, False)
        for filters, bias in [((2, 3, 3, 4), (4,)), ((1, 3, 3, 6), (6,)), ((1, 3, 3, 4), (5,))]
    ],
    *[("CONV_3D", [T(shape), T(filters)], {**_STRIDES, "strideD": 1}, F, False) for shape, filters in [
        ((2, 4, 4, 5, 3), (1, 2, 2, 4, 7)), ((4, 4, 5, 3), (1, 2, 2, 3, 7)),
    ]],
    *[
        ("TRANSPOSE_CONV", [const([1, 8, 8, 5]), T(filters), T(shape), *bias], {"strideH": 2, "strideW": 2}, F, ok)
        for filters, shape, bias, ok in [
            ((5, 3, 3, 4), (1, 4, 4, 4), [T((5,))], True), ((5, 3, 3, 4), (1, 4, 4, 4), [], True),
            ((5, 3, 3, 4), (1, 4, 4, 3), [], False), ((5, 3, 3, 4), (1, 4, 4, 4), [T((6,))], False),
            ((5, 3, 4), (1, 4, 4, 4), [], False),
        ]
    ],
]  # fmt: skip

ROWS = [*ELEMENTWISE, *ALONG_AXES, *FROM_NUMBERS, *AXES, *PARTS, *WEIGHTED]


@pytest.mark.parametrize(
    ("name", "inputs", "options", "outputs", "accepted"), ROWS, ids=[f"{row[0]}-{row[4]}" for row in ROWS]
)
def test_rule_and_interpreter_agree(
    name: str,
    inputs: list[T | None],
    options: dict[str, Any] | None,
    outputs: Sequence[T] | str,
    accepted: bool,
) -> None:
    check(name, inputs, options, outputs, accepted=accepted)
