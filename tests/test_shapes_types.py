"""Types and quantization of results: what the kernels fix, and what the interpreter says to the contrary."""

from typing import Any

import pytest
from shapes_referee import Options, T, const, one_operator, runtime_shapes

from edge_opt import ir
from edge_opt.shapes import Disagreement, infer_shapes


def found(name: str, inputs: list[T | None], outputs: list[T], options: Options = None) -> list[Disagreement]:
    return infer_shapes(ir.load(one_operator(name, inputs, outputs, options)))


def accepted(name: str, inputs: list[T | None], outputs: list[T], options: Options = None) -> bool:
    return runtime_shapes(one_operator(name, inputs, outputs, options)) is not None


X = T((2, 3))


@pytest.mark.parametrize(("name", "inputs", "output", "derived", "options"), [
    ("RELU", [X], "INT32", "FLOAT32", None),
    ("TRANSPOSE", [X, const([0, 1])], "INT8", "FLOAT32", {}),
    ("EQUAL", [X, X], "FLOAT32", "BOOL", None),
    ("SHAPE", [X], "FLOAT32", "INT64", {"outType": 4}),
    ("ARG_MAX", [X, const(0)], "INT32", "INT64", {"outputType": 4}),
    ("DEQUANTIZE", [T((2, 3), "INT8", scale=0.5)], "FLOAT16", "FLOAT32", None),
    ("SELECT_V2", [T((2, 3), "BOOL"), X, X], "INT32", "FLOAT32", None),
    ("BATCH_MATMUL", [T((3, 3)), T((3, 3))], "INT32", "FLOAT32", {}),
    ("WHERE", [T((2, 3), "BOOL")], "INT32", "INT64", None),
])  # fmt: skip
def test_a_result_of_another_type_than_the_kernel_writes_is_found(
    name: str, inputs: list[T | None], output: str, derived: str, options: Options
) -> None:
    shape = {"EQUAL": (2, 3), "SHAPE": (2,), "ARG_MAX": (3,), "BATCH_MATMUL": (3, 3), "WHERE": (1, 2)}.get(
        name, (2, 3)
    )
    (wrong,) = found(name, inputs, [T(shape, output)], options)
    assert (wrong.recorded, wrong.derived) == (output, derived)
    assert found(name, inputs, [T(shape, derived)], options) == []


@pytest.mark.parametrize(("name", "inputs", "shape", "options"), [
    ("TRANSPOSE_CONV", [const([1, 4, 4, 5]), T((5, 3, 3, 4)), T((1, 2, 2, 4))], (1, 4, 4, 5),
     {"strideH": 2, "strideW": 2}),
    ("RANGE", [const(0.0, "FLOAT32"), const(2.0, "FLOAT32"), const(1.0, "FLOAT32")], (2,), {}),
    ("PADV2", [X, const([[0, 0], [0, 0]]), const(0.0, "FLOAT32")], (2, 3), {}),
    ("FILL", [const([2]), const(0.0, "FLOAT32")], (2,), {}),
    ("SCATTER_ND", [const([[0]]), T((1,)), const([2])], (2,), {}),
    ("ONE_HOT", [const([0, 1]), const(2), const(1.0, "FLOAT32"), const(0.0, "FLOAT32")], (2, 2),
     {"axis": -1}),
])  # fmt: skip
def test_the_type_comes_from_the_operand_that_holds_the_values(
    name: str, inputs: list[T | None], shape: tuple[int, ...], options: Options
) -> None:
    assert found(name, inputs, [T(shape)], options) == []
    (wrong,) = found(name, inputs, [T(shape, "INT32")], options)
    assert (wrong.recorded, wrong.derived) == ("INT32", "FLOAT32")


def test_the_types_of_several_results() -> None:
    shapes = [T((2, 1)), T((2, 1), "INT32")]
    assert found("TOPK_V2", [X, const(1)], shapes) == []
    (wrong,) = found("TOPK_V2", [X, const(1)], [T((2, 1), "INT8"), T((2, 1), "INT32")])
    assert (wrong.tensor, wrong.derived) == ("t2", "FLOAT32")
    (wrong,) = found("SPLIT", [const(0), X], [T((1, 3)), T((1, 3), "INT32")], {"numSplits": 2})
    assert (wrong.tensor, wrong.derived) == ("t3", "FLOAT32")


def test_operands_of_different_types_are_found() -> None:
    inputs: list[T | None] = [T((2, 3)), T((2, 3), "INT32")]
    assert not accepted("ADD", inputs, [T((2, 3))], {})
    (wrong,) = found("ADD", inputs, [T((2, 3))], {})
    assert wrong.reason == "tensor 't0' is FLOAT32, tensor 't1' is INT32: expected one type"


def test_products_may_be_wider_than_their_operands_but_not_narrower() -> None:
    """The interpreter accepts int16 operands with an int8 result, and computes garbage."""
    options = {}
    a, b = T((3, 3), "INT8", scale=0.5), T((3, 3), "INT8", scale=0.25)
    assert found("BATCH_MATMUL", [a, b], [T((3, 3), "INT32", scale=0.125)], options) == []
    wide = T((3, 3), "INT16", scale=0.5)
    narrow = T((3, 3), "INT8", scale=0.5)
    assert accepted("BATCH_MATMUL", [wide, wide], [narrow], options)
    (wrong,) = found("BATCH_MATMUL", [wide, wide], [narrow], options)
    assert (wrong.recorded, wrong.derived) == ("INT8", "INT16")


FIXED: list[tuple[str, str, float, int]] = [
    ("SOFTMAX", "INT8", 1 / 256, -128),
    ("SOFTMAX", "INT16", 1 / 32768, 0),
    ("LOGISTIC", "INT8", 1 / 256, -128),
    ("LOGISTIC", "INT16", 1 / 32768, 0),
    ("TANH", "INT16", 1 / 32768, 0),
    ("LOG_SOFTMAX", "INT8", 16 / 256, 127),
    ("L2_NORMALIZATION", "INT8", 1 / 128, 0),
    ("LOG_SOFTMAX", "UINT8", 16 / 256, 255),
    ("LOGISTIC", "UINT8", 1 / 256, 0),
    ("L2_NORMALIZATION", "UINT8", 1 / 128, 128),
]
OPTIONS: dict[str, Any] = {"SOFTMAX": {"beta": 1.0}, "L2_NORMALIZATION": {}}


@pytest.mark.parametrize(("name", "dtype", "scale", "zero_point"), FIXED)
def test_results_with_fixed_quantization(name: str, dtype: str, scale: float, zero_point: int) -> None:
    """The kernel's own parameters pass both; twice the scale neither."""
    source: list[T | None] = [T((2, 3), dtype, scale=0.5)]
    right, wrong = (T((2, 3), dtype, scale=factor * scale, zero_point=zero_point) for factor in (1, 2))
    assert accepted(name, source, [right], OPTIONS.get(name))
    assert found(name, source, [right], OPTIONS.get(name)) == []
    assert not accepted(name, source, [wrong], OPTIONS.get(name))
    (disagreement,) = found(name, source, [wrong], OPTIONS.get(name))
    assert disagreement.derived == f"scale {scale:.9g}, zero point {zero_point}"
    assert disagreement.reason == f"{name} always writes {dtype} with these"


COPYING: list[tuple[str, list[T | None], Options]] = [
    ("BROADCAST_TO", [const([2, 3])], {}),
    ("RESHAPE", [const([3, 2])], {}),
    ("TRANSPOSE", [const([1, 0])], {}),
    ("SLICE", [const([0, 0]), const([2, 3])], {}),
    ("STRIDED_SLICE", [const([0]), const([2]), const([1])], {}),
    ("EXPAND_DIMS", [const(0)], {}),
    ("TILE", [const([1, 1])], {}),
    ("GATHER", [const([0, 1])], {}),
    ("PAD", [const([[0, 0], [0, 0]])], {}),
]


@pytest.mark.parametrize(("name", "others", "options"), COPYING, ids=[row[0] for row in COPYING])
def test_operators_that_copy_stored_numbers_keep_their_quantization(
    name: str, others: list[T | None], options: Options
) -> None:
    shape = {"RESHAPE": (3, 2), "TRANSPOSE": (3, 2), "EXPAND_DIMS": (1, 2, 3)}.get(name, (2, 3))
    source = T((2, 3), "INT8", scale=0.5, zero_point=3)
    assert found(name, [source, *others], [T(shape, "INT8", scale=0.5, zero_point=3)], options) == []
    for scale, zero_point in ((0.25, 3), (0.5, 4), (None, 0)):
        (wrong,) = found(
            name, [source, *others], [T(shape, "INT8", scale=scale, zero_point=zero_point)], options
        )
        assert wrong.derived == "scale 0.5, zero point 3"
        assert wrong.reason == f"{name} copies the stored numbers of tensor 't0'"


@pytest.mark.parametrize("name", ["CONCATENATION", "PACK"])
def test_operators_that_join_demand_one_quantization(name: str) -> None:
    table = {"CONCATENATION": {"axis": 0}, "PACK": {"valuesCount": 2}}[name]
    result = T((4, 3) if name == "CONCATENATION" else (2, 2, 3), "INT8", scale=0.5)
    like, unlike = T((2, 3), "INT8", scale=0.5), T((2, 3), "INT8", scale=0.25)
    assert accepted(name, [like, like], [result], table)
    assert found(name, [like, like], [result], table) == []
    assert not accepted(name, [like, unlike], [result], table)
    assert len(found(name, [like, unlike], [result], table)) == 1


SYMMETRIC: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...], Options]] = {
    "ADD": ([(2, 3), (2, 3)], (2, 3), {}),
    "SUB": ([(2, 3), (2, 3)], (2, 3), {}),
    "BATCH_MATMUL": ([(3, 3), (3, 3)], (3, 3), {}),
    "RELU": ([(2, 3)], (2, 3), None),
    "EXP": ([(2, 3)], (2, 3), None),
    "LEAKY_RELU": ([(2, 3)], (2, 3), {}),
    "CONCATENATION": ([(2, 3)], (2, 3), {"axis": 0}),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_int16_results_with_a_zero_point_other_than_0(name: str) -> None:
    shapes, result, options = SYMMETRIC[name]
    inputs: list[T | None] = [T(shape, "INT16", scale=0.5) for shape in shapes]
    right, wrong = (T(result, "INT16", scale=0.5, zero_point=zero_point) for zero_point in (0, 3))
    assert accepted(name, inputs, [right], options)
    assert found(name, inputs, [right], options) == []
    assert not accepted(name, inputs, [wrong], options)
    (disagreement,) = found(name, inputs, [wrong], options)
    assert (disagreement.recorded, disagreement.derived) == (
        "scale 0.5, zero point 3",
        "scale 0.5, zero point 0",
    )


def test_requantizing_operators_are_free_in_their_quantization() -> None:
    a, b = T((2, 3), "INT8", scale=0.5), T((2, 3), "INT8", scale=0.25, zero_point=7)
    assert found("ADD", [a, a], [b], {}) == []
    assert found("QUANTIZE", [a], [b]) == []


def test_integers_without_parameters_are_no_quantized_tensors() -> None:
    assert found("RESHAPE", [T((2, 3), "INT8"), const([3, 2])], [T((3, 2), "INT8")], {}) == []
