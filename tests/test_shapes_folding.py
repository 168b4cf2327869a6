"""Shapes and values of every operator that folds, against what the interpreter computes; then unknown elements."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_calls import FOLDING, Call, calls
from shapes_referee import (
    Options,
    T,
    check_dynamic,
    const,
    inferred,
    one_operator,
    only_operator,
    runtime_values,
    stored_facts,
)  # fmt: skip

from edge_opt.ir import DType, Model, Tensor
from edge_opt.shapes import Fact, ShapeError, folding, infer_operator

EXAMPLES = int(os.environ.get("EDGE_OPT_EXAMPLES", "20"))
"""For each operator. Some thousands are worth a run after a rule or a folder changed."""


def model_of(call: Call) -> bytes:
    return one_operator(call.name, call.inputs, [T((), dtype) for dtype in call.outputs], call.options)


@pytest.mark.parametrize("name", FOLDING)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_shapes_and_values_are_those_that_the_interpreter_computes(name: str, data: st.DataObject) -> None:
    """Whatever is hidden of the shapes and elements, what is still inferred fits."""
    call = data.draw(calls(name))
    # Of three single elements SELECT leaves the recorded shape as it is; TRANSPOSE of a scalar reads garbage.
    assume(not (name.startswith("SELECT") and all(tensor.value.size == 1 for tensor in call.inputs)))
    assume(name != "TRANSPOSE" or call.inputs[0].shape != ())
    model = model_of(call)
    facts = inferred(model)
    # The runtime reads outside the tensor where a shrunk axis or an offset says so, and may die of it.
    if name == "STRIDED_SLICE" and (isinstance(facts, ShapeError) or facts[0].shape is None):
        return
    try:
        values = runtime_values(model)
    except (RuntimeError, ValueError):
        return
    assert isinstance(facts, list), facts
    for (shape, ours), theirs in zip(facts, values, strict=True):
        # Of a shape with a stretched size nothing is inferred where there are no elements.
        assert shape == theirs.shape or (name == "RESHAPE" and 0 in theirs.shape)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    if name != "CONCATENATION" or call.inputs[0].shape:  # scalars are joined where they are known only
        check_dynamic(model, [value.shape for value in values])
        check_hidden_elements(model, facts, data)


def check_hidden_elements(model: bytes, folded: list[Fact], data: st.DataObject) -> None:
    """Assert that elements that are known in spite of hidden ones are what they are when all are known."""
    operator = only_operator(model)
    facts = stored_facts(operator)
    for place, (shape, value) in enumerate(facts):
        assert value is not None
        part = value.astype(object)
        for index in np.ndindex(value.shape):
            part[index] = None if data.draw(st.booleans()) else part[index]
        if value.dtype.kind in "iub" and None in part.ravel().tolist():
            known = [*facts[:place], Fact(shape, part), *facts[place + 1 :]]
            for (_, ours), (_, whole) in zip(infer_operator(operator, known), folded, strict=True):
                if ours is not None and whole is not None:
                    assert all(a in (None, b) for a, b in zip(ours.ravel(), whole.ravel(), strict=True))


def folded_values(model: bytes) -> list[Any]:
    facts = inferred(model)
    assert isinstance(facts, list)
    return [fact.value for fact in facts]


MATRIX = [[3, -4, 5], [0, 7, -9]]
ROWS = [[1, 2], [3, 4]]
KNOWN: dict[str, tuple[list[T], Options, list[Any]]] = {
    "SELECT": (
        [const([True, False], "BOOL"), const(ROWS), const([[10, 20], [30, 40]])],
        None,
        [[1, 2], [30, 40]],
    ),
    "SHAPE": ([const(MATRIX)], {"out_type": 2}, [2, 3]),
    "STRIDED_SLICE": (
        [const(MATRIX), const([1]), const([-1]), const([1])],
        {"shrink_axis_mask": 1},
        [0, 7, -9],
    ),
    "RANGE": ([const(9), const(1), const(-3)], {}, [9, 6, 3]),
    "DIV": ([const([7, -7]), const([2, 2])], {}, [3, -3]),
    "FLOOR_DIV": ([const([7, -7]), const([2, 2])], None, [3, -4]),
    "REDUCE_PROD": ([const(MATRIX), const([1])], {}, [-60, 0]),
    "CAST": ([const([3, 0], "INT64")], None, [3, 0]),
    "UNSORTED_SEGMENT_PROD": ([const([3, 4, 5]), const([1, 0, 1]), const(2)], {}, [4, 15]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_that_are_known(name: str) -> None:
    inputs, options, expected = KNOWN[name]
    model = one_operator(name, inputs, [T((), "INT32")], options)
    assert [folded_values(model)[0].tolist(), runtime_values(model)[0].tolist()] == [expected, expected]


BIG = const([2**30])
UNKNOWN: dict[str, tuple[str, list[T], Options]] = {
    "a division by zero": ("FLOOR_DIV", [const([1, 2]), const([0, 0])], None),
    "what leaves its type": ("MUL", [BIG, const([4])], {}),
    "what leaves 64 bits": ("MUL", [const([2**40], "INT64")] * 2, {}),
    "a fused activation": ("ADD", [const([-3]), const([1])], {"fused_activation_function": 1}),
    "large results": ("FILL", [const([1000, 1000]), const(0)], {}),
    "real numbers": ("CAST", [const([1.5], "FLOAT32")], None),
    "complex numbers": ("CAST", [const([1j, 2], "COMPLEX64")], None),
    "codes of quantized tensors": ("ADD", [T((1,), "INT8", np.array([3], np.int8), 0.5)] * 2, {}),
    "a slice with an offset": (
        "STRIDED_SLICE",
        [const(MATRIX), const([0]), const([1]), const([1])],
        {"offset": True},
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_values_that_are_not_followed(case: str) -> None:
    name, inputs, options = UNKNOWN[case]
    dtype = inputs[0].dtype if inputs[0].dtype.startswith("INT") else "INT32"
    result = T((), dtype, scale=inputs[0].scale)
    assert folded_values(one_operator(name, inputs, [result], options)) == [None]


@pytest.mark.parametrize("numbers", [(np.nan, 1.0, 1.0), (0.0, np.inf, 1.0)])
def test_a_range_without_an_end_is_refused(numbers: tuple[float, ...]) -> None:
    model = one_operator("RANGE", [const(number, "FLOAT32") for number in numbers], [T((), "FLOAT32")], {})
    assert isinstance(inferred(model), ShapeError)


def test_an_error_of_ours_in_a_folder_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("of ours")

    monkeypatch.setitem(folding.FOLDERS, "NEG", broken)
    with pytest.raises(KeyError, match="of ours"):
        folded_values(one_operator("NEG", [const([1])], [T((), "INT32")]))


def folded(name: str, *values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """The elements of the result; all None where nothing is known."""
    arrays = list(map(np.array, values))
    inputs = [Tensor(str(place), array.shape, DType.INT32) for place, array in enumerate(arrays)]
    operator = Model().new_operator(name, inputs, [Tensor("result", shape, DType.INT32)])
    ((_, result),) = infer_operator(operator, [Fact(array.shape, array) for array in arrays])
    return [None] * shape[0] if result is None else result.tolist()


@pytest.mark.parametrize(("name", "values", "expected"), [
    ("MUL", ([None], [0]), [0]), ("MUL", ([None], [2]), [None]), ("ADD", ([None], [0]), [None]),
    ("EQUAL", ([None], [None]), [None]), ("UNSORTED_SEGMENT_PROD", ([3, None, 4], [0, 1, 1], [2]), [3, None]),
    ("SELECT_V2", ([True, False, None, None], [6, 2, 3, 5], [7, None, 3, 6]), [6, None, 3, None]),
])  # fmt: skip
def test_unknown_elements(name: str, values: tuple[list[Any], ...], expected: list[Any]) -> None:
    assert folded(name, *values, shape=(len(expected),)) == expected
