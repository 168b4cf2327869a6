"""Types and quantization of results: what the kernels fix, and what the interpreter accepts although it is wrong."""

from typing import Any

import pytest
from shapes_referee import Options, T, const, one_operator, runtime_shapes

from edge_opt import ir
from edge_opt.shapes import Disagreement, infer_shapes

Inputs = list[T | None]


def found(name: str, inputs: Inputs, outputs: list[T], options: Options = None) -> list[Disagreement]:
    return infer_shapes(one_operator(name, inputs, outputs, options))


def accepted(name: str, inputs: Inputs, outputs: list[T], options: Options = None) -> bool:
    return runtime_shapes(one_operator(name, inputs, outputs, options)) is not None


X, INT8 = T((2, 3)), T((2, 3), "INT8", scale=0.5)
ZERO, ONE = const(0.0, "FLOAT32"), const(1.0, "FLOAT32")


@pytest.mark.parametrize(("name", "inputs", "shape", "recorded", "right", "options"), [
    ("RELU", [X], (2, 3), "INT32", "FLOAT32", None),
    ("EQUAL", [X, X], (2, 3), "FLOAT32", "BOOL", None),
    ("SHAPE", [X], (2,), "FLOAT32", "INT64", {"out_type": 4}),
    ("ARG_MAX", [X, const(0)], (3,), "INT32", "INT64", {"output_type": 4}),
    ("DEQUANTIZE", [INT8], (2, 3), "FLOAT16", "FLOAT32", None),
    ("SELECT_V2", [T((2, 3), "BOOL"), X, X], (2, 3), "INT32", "FLOAT32", None),
    ("BATCH_MATMUL", [T((3, 3)), T((3, 3))], (3, 3), "INT32", "FLOAT32", {}),
    ("WHERE", [T((2, 3), "BOOL")], (1, 2), "INT32", "INT64", None),
    ("RANGE", [ZERO, const(2.0, "FLOAT32"), ONE], (2,), "INT32", "FLOAT32", {}),
    ("PADV2", [X, const([[0, 0], [0, 0]]), ZERO], (2, 3), "INT32", "FLOAT32", {}),
    ("FILL", [const([2]), ZERO], (2,), "INT32", "FLOAT32", {}),
    ("SCATTER_ND", [const([[0]]), T((1,)), const([2])], (2,), "INT32", "FLOAT32", {}),
    ("ONE_HOT", [const([0, 1]), const(2), ONE, ZERO], (2, 2), "INT32", "FLOAT32", {"axis": -1}),
])  # fmt: skip
def test_a_result_of_another_type_than_the_kernel_writes_is_found(
    name: str, inputs: Inputs, shape: tuple[int, ...], recorded: str, right: str, options: Options
) -> None:
    (wrong,) = found(name, inputs, [T(shape, recorded)], options)
    assert (wrong.recorded, wrong.inferred) == (recorded, right)
    assert found(name, inputs, [T(shape, right)], options) == []


def test_the_types_of_several_results() -> None:
    assert found("TOPK_V2", [X, const(1)], [T((2, 1)), T((2, 1), "INT32")]) == []
    (wrong,) = found("TOPK_V2", [X, const(1)], [T((2, 1), "INT8"), T((2, 1), "INT32")])
    assert (wrong.tensor, wrong.inferred) == ("t2", "FLOAT32")
    (wrong,) = found("SPLIT", [const(0), X], [T((1, 3)), T((1, 3), "INT32")], {"num_splits": 2})
    assert (wrong.tensor, wrong.inferred) == ("t3", "FLOAT32")


def test_operands_of_different_types_are_found() -> None:
    inputs: Inputs = [T((2, 3)), T((2, 3), "INT32")]
    assert not accepted("ADD", inputs, [X], {})
    (wrong,) = found("ADD", inputs, [X], {})
    assert wrong.reason == "tensor 't0' is FLOAT32, tensor 't1' is INT32: expected one type"


def test_products_may_be_wider_than_their_operands_but_not_narrower() -> None:
    """The interpreter accepts int16 operands with an int8 result, and computes garbage."""
    a, wide, narrow = (T((3, 3), dtype, scale=0.5) for dtype in ("INT8", "INT16", "INT8"))
    assert found("BATCH_MATMUL", [a, a], [T((3, 3), "INT32", scale=0.125)], {}) == []
    assert accepted("BATCH_MATMUL", [wide, wide], [narrow], {})
    (wrong,) = found("BATCH_MATMUL", [wide, wide], [narrow], {})
    assert (wrong.recorded, wrong.inferred) == ("INT8", "INT16")


@pytest.mark.parametrize(("name", "options", "shape"), [
    ("CONCATENATION", {"axis": 0}, (4, 3)), ("PACK", {"values_count": 2}, (2, 2, 3)),
])  # fmt: skip
def test_joined_tensors_of_two_scales_are_found(name: str, options: Options, shape: tuple[int, ...]) -> None:
    result, other = T(shape, "INT8", scale=0.5), T((2, 3), "INT8", scale=0.25)
    assert found(name, [INT8, INT8], [result], options) == []
    assert not accepted(name, [INT8, other], [result], options)
    (wrong,) = found(name, [INT8, other], [result], options)
    assert (wrong.recorded, wrong.inferred) == ("scale 0.5, zero point 0", "scale 0.25, zero point 0")


@pytest.mark.parametrize(("name", "others", "shape"), [
    ("BROADCAST_TO", [const([2, 3])], (2, 3)), ("RESHAPE", [const([3, 2])], (3, 2)),
    ("SLICE", [const([0, 0]), const([2, 3])], (2, 3)), ("GATHER", [const([0, 1])], (2, 3)),
    ("PAD", [const([[0, 0], [0, 0]])], (2, 3)),
])  # fmt: skip
def test_copies_keep_their_quantization(name: str, others: Inputs, shape: tuple[int, ...]) -> None:
    source = T((2, 3), "INT8", scale=0.5, zero_point=3)
    assert found(name, [source, *others], [T(shape, "INT8", scale=0.5, zero_point=3)], {}) == []
    for scale, zero_point in ((0.25, 3), (0.5, 4), (None, 0)):
        result = T(shape, "INT8", scale=scale, zero_point=zero_point)
        (wrong,) = found(name, [source, *others], [result], {})
        assert wrong.inferred == "scale 0.5, zero point 3"
        assert wrong.reason == f"{name} copies the stored numbers of 't0'"


def test_what_is_free_or_has_no_parameters_is_not_compared() -> None:
    other = T((2, 3), "INT8", scale=0.25, zero_point=7)
    assert found("ADD", [INT8, INT8], [other], {}) == []
    assert found("QUANTIZE", [INT8], [other]) == []
    assert found("RESHAPE", [T((2, 3), "INT8"), const([3, 2])], [T((3, 2), "INT8")], {}) == []


def test_scales_that_differ_in_the_last_place_are_the_same() -> None:
    rounded = T((3, 2), "INT8", scale=0.5 * (1 + 5e-7))
    assert found("RESHAPE", [INT8, const([3, 2])], [rounded], {}) == []


def test_a_model_is_given_by_its_path(tmp_path: Any) -> None:
    path = tmp_path / "x.tflite"
    path.write_bytes(one_operator("RELU", [X], [T((2, 3), "INT32")]))
    assert infer_shapes(path) == infer_shapes(str(path)) == infer_shapes(ir.load(path)) != []
