"""Shapes and values of every operator that folds, against what the interpreter computes."""

import os
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
import shapes_referee
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import Options, Shape, T, const, inferred, one_operator

from edge_opt.shapes import ShapeError
from edge_opt.shapes.folding import FOLDERS

EXAMPLES = int(os.environ.get("EDGE_OPT_EXAMPLES", "20"))
"""For each operator. Some thousands are worth a run after a rule or a folder changed."""


# Calls of every operator that folds. They need not be valid: the interpreter says whether they are.

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Call(NamedTuple):
    """One operator: its constant inputs, options, and types of results."""

    name: str
    inputs: list[T]
    options: Options = None
    outputs: tuple[str, ...] = ("INT32",)


SIZES = st.integers(0, 3)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
FILLED = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
NUMBERS = st.one_of(st.integers(-9, 9), st.sampled_from([2**31 - 1, -(2**31), 2**30, 46341]))
INTS = st.sampled_from(["INT32", "INT64"])


def tensor(draw: Draw, shape: Shape, dtype: str, numbers: st.SearchStrategy[int] = NUMBERS) -> T:
    """A constant of that shape."""
    chosen = st.booleans() if dtype == "BOOL" else numbers
    values = draw(st.lists(chosen, min_size=prod(shape), max_size=prod(shape)))
    return const(np.array(values).reshape(shape), dtype)


def vector(draw: Draw, count: int, low: int = -4, high: int = 4) -> T:
    """A constant vector of small numbers."""
    return const(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))


def like(draw: Draw, shape: Shape) -> Shape:
    """A shape that mostly broadcasts to this one."""
    sizes = [draw(st.sampled_from([size, size, 1])) for size in shape]
    return tuple(sizes[draw(st.integers(0, len(sizes))) :])


def elementwise(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), "BOOL" if name.startswith("LOGICAL") else draw(INTS)
    count = 1 if name in ("ABS", "NEG", "LOGICAL_NOT") else 2
    inputs = [tensor(draw, like(draw, shape) if count == 2 else shape, dtype) for _ in range(count)]
    if name in ("FLOOR_DIV", "FLOOR_MOD"):  # of the least number by -1 the kernel dies
        inputs[1] = tensor(draw, inputs[1].shape, dtype, st.integers(2, 9))
    compares = name in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
    activation = {"fused_activation_function": draw(st.sampled_from([0, 0, 0, 1]))}
    options = activation if name in ("ADD", "SUB", "MUL") else None
    return Call(name, inputs, options, ("BOOL" if compares else dtype,))


def select(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), draw(INTS)
    condition = draw(st.sampled_from([shape, shape[:1], (), like(draw, shape)]))
    choices = [shape if name == "SELECT" else like(draw, shape) for _ in range(2)]
    inputs = [tensor(draw, condition, "BOOL"), *(tensor(draw, choice, dtype) for choice in choices)]
    return Call(name, inputs, None, (dtype,))


def reduction(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), draw(INTS)
    axes = vector(draw, draw(SIZES), -len(shape), max(len(shape) - 1, 0))
    return Call(
        name, [tensor(draw, shape, dtype), axes], {"keep_dims": draw(st.booleans())}, (dtype,)
    )


def segments(draw: Draw, name: str) -> Call:
    count, depth = draw(st.integers(1, 4)), draw(SHAPES)
    ids = vector(draw, count, 0, 2)
    return Call(name, [tensor(draw, (count, *depth), "INT32"), ids, const(3)], {})


def of_shape(draw: Draw, name: str) -> Call:
    source, dtype = (
        tensor(draw, draw(SHAPES), draw(st.sampled_from(["INT32", "FLOAT32"]))),
        draw(INTS),
    )
    return Call(name, [source], {"out_type": 2 if dtype == "INT32" else 4}, (dtype,))


def cast(draw: Draw, name: str) -> Call:
    types = st.sampled_from(["INT32", "INT64", "BOOL", "FLOAT32", "INT8", "UINT8"])
    source, target = draw(types), draw(types)
    numbers = st.integers(0, 127) if source in ("INT8", "UINT8") else NUMBERS
    return Call(name, [tensor(draw, draw(SHAPES), source, numbers)], None, (target,))


def arranged(draw: Draw, name: str) -> Call:
    """Operators of one tensor and, but for SQUEEZE, one vector."""
    shape = draw(SHAPES)
    rank, source = len(shape), tensor(draw, shape, "INT32")
    if name == "SQUEEZE":
        return Call(
            name, [source], {"squeeze_dims": draw(st.lists(st.integers(-3, 2), max_size=2))}
        )
    if name == "EXPAND_DIMS":
        return Call(name, [source, const(draw(st.integers(-rank - 2, rank + 1)))], {})
    targets = [(*shape[:axis], -1, *shape[axis + 1 :]) for axis in range(rank)]
    known = st.sampled_from([(-1,), (prod(shape),), shape[::-1], *targets])
    target = draw(known | st.lists(st.integers(-1, 3)))
    return Call(name, [source, const(np.array(target, np.int32))], {})


def joined(draw: Draw, name: str) -> Call:
    shape, count = draw(SHAPES), draw(st.integers(1, 3))
    axis = draw(st.integers(-len(shape) - 1, len(shape)))
    shapes = [shape] * count
    if name == "CONCATENATION" and -len(shape) <= axis < len(shape):
        sizes = [draw(SIZES) for _ in range(count)]
        shapes = [
            (*shape[: axis % len(shape)], size, *shape[axis % len(shape) + 1 :]) for size in sizes
        ]
    options = {"axis": axis} | ({"values_count": count} if name == "PACK" else {})
    return Call(name, [tensor(draw, each, "INT32") for each in shapes], options)


def unpacked(draw: Draw, name: str) -> Call:
    shape = draw(FILLED)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return Call(
        name,
        [tensor(draw, shape, "INT32")],
        {"axis": axis, "num": shape[axis]},
        ("INT32",) * shape[axis],
    )


def sliced(draw: Draw, name: str) -> Call:
    shape = draw(SHAPES)
    begins = [draw(st.integers(0, size)) for size in shape]
    pairs = zip(shape, begins, strict=True)
    sizes = [draw(st.integers(-1, size - begin)) for size, begin in pairs]
    dtype = draw(INTS)
    bounds = [const(np.array(numbers, np.int32), dtype) for numbers in (begins, sizes)]
    return Call(name, [tensor(draw, shape, "INT32"), *bounds], {})


def strided(draw: Draw, name: str) -> Call:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    count = draw(st.integers(0, len(shape) + 1))
    strides = const(draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=count, max_size=count)))
    inputs = [tensor(draw, shape, "INT32"), vector(draw, count), vector(draw, count), strides]
    masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    bits = st.sampled_from([0, 0, *range(1 << count)])
    options = {name: draw(bits) for name in masks} | {
        "offset": draw(st.sampled_from([False, False, True]))
    }
    return Call(name, inputs, options)


def gathered(draw: Draw, name: str) -> Call:
    shape = draw(FILLED)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    indices = tensor(draw, draw(SHAPES), draw(INTS), st.integers(0, shape[axis] - 1))
    options = {"axis": axis, "batch_dims": draw(st.sampled_from([0, 0, 0, 1]))}
    return Call(name, [tensor(draw, shape, "INT32"), indices], options)


def filled(draw: Draw, name: str) -> Call:
    dtype = draw(st.sampled_from(["INT32", "INT64", "BOOL"]))
    return Call(
        name, [const(np.array(draw(SHAPES), np.int32)), tensor(draw, (), dtype)], {}, (dtype,)
    )


def ranged(draw: Draw, name: str) -> Call:
    dtype, numbers = draw(INTS), [draw(st.integers(-9, 9)) for _ in range(3)]
    return Call(name, [const(number, dtype) for number in numbers], {}, (dtype,))


_MAKERS: dict[str, Callable[[Draw, str], Call]] = {
    "CAST": cast, "FILL": filled, "GATHER": gathered, "RANGE": ranged, "REDUCE_PROD": reduction, "SHAPE": of_shape,
    "SLICE": sliced, "STRIDED_SLICE": strided, "UNSORTED_SEGMENT_PROD": segments,
    **dict.fromkeys(("SELECT", "SELECT_V2"), select),
    **dict.fromkeys(("CONCATENATION", "PACK"), joined),
    "UNPACK": unpacked,
    **dict.fromkeys(("EXPAND_DIMS", "RESHAPE", "SQUEEZE"), arranged),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FOLDERS))
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_shapes_and_values_are_those_that_the_interpreter_computes(
    name: str, data: st.DataObject
) -> None:
    """Whatever is hidden of the shapes, what is still inferred fits."""
    call = _MAKERS.get(name, elementwise)(data.draw, name)
    # Of three single elements SELECT leaves the recorded shape as it is.
    assume(
        not (name.startswith("SELECT") and all(tensor.value.size == 1 for tensor in call.inputs))
    )
    model = one_operator(name, call.inputs, [T((), dtype) for dtype in call.outputs], call.options)
    facts = inferred(model)
    # The runtime reads outside the tensor where a shrunk axis or an offset says so, and may die of it.
    if name == "STRIDED_SLICE" and (isinstance(facts, ShapeError) or facts[0].shape is None):
        return
    try:
        values = shapes_referee.runtime_values(model)
    except (RuntimeError, ValueError):
        return
    assert isinstance(facts, list), facts
    for (shape, ours), theirs in zip(facts, values, strict=True):
        # Of a shape with a stretched size nothing is inferred where there are no elements.
        assert shape == theirs.shape or (name == "RESHAPE" and 0 in theirs.shape)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    if (
        name != "CONCATENATION" or call.inputs[0].shape
    ):  # scalars are joined where they are known only
        shapes_referee.check_dynamic(model, [value.shape for value in values])


def folded_values(model: bytes) -> list[Any]:
    facts = inferred(model)
    return [fact.value for fact in facts]


def test_entries_behind_the_first_are_gathered() -> None:
    call = "GATHER", [const([5, 6, 7]), const([1, 2])], [T((), "INT32")], {"axis": 0}
    assert folded_values(one_operator(*call))[0].tolist() == [6, 7]


MATRIX = [[3, -4, 5], [0, 7, -9]]
BIG = const([2**30])
UNKNOWN: dict[str, tuple[str, list[T], Options]] = {
    "a division by zero": ("FLOOR_DIV", [const([1, 2]), const([0, 0])], None),
    "what leaves its type": ("MUL", [BIG, const([4])], {}),
    "what leaves 64 bits": ("MUL", [const([2**40], "INT64")] * 2, {}),
    "codes without a scale": ("MUL", [const([3], "INT8")] * 2, {}),
    "a fused activation": ("ADD", [const([-3]), const([1])], {"fused_activation_function": 1}),
    "large results": ("FILL", [const([1000, 1000]), const(0)], {}),
    "real numbers": ("CAST", [const([1.5], "FLOAT32")], None),
    "complex numbers": ("CAST", [const([1j, 2], "COMPLEX64")], None),
    "codes of quantized tensors": ("ADD", [T((1,), "INT8", np.array([3], np.int8), 0.5)] * 2, {}),
    "an offset": (
        "STRIDED_SLICE",
        [const(MATRIX), const([0]), *[const([1])] * 2],
        {"offset": True},
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_values_that_are_not_followed(case: str) -> None:
    name, inputs, options = UNKNOWN[case]
    dtype = inputs[0].dtype if inputs[0].dtype.startswith("INT") else "INT32"
    result = T((), dtype, scale=inputs[0].scale)
    assert folded_values(one_operator(name, inputs, [result], options)) == [None]


@pytest.mark.parametrize(("name", "inputs", "options", "complaint"), [
    ("RANGE", [const(number, "FLOAT32") for number in (np.nan, 1.0, 1.0)], {}, "from nan to 1.0"),
    ("RANGE", [const(number, "FLOAT32") for number in (0.0, np.inf, 1.0)], {}, "from 0.0 to inf"),
    ("STRIDED_SLICE", [const(MATRIX), const([2]), const([3]), const([1])], {"shrink_axis_mask": 1}, "not 2"),
])  # fmt: skip
def test_reads_beyond_an_end_are_refused(
    name: str, inputs: list[T], options: Options, complaint: str
) -> None:
    refused = inferred(one_operator(name, inputs, [T((), inputs[0].dtype)], options))
    assert isinstance(refused, ShapeError)
    assert complaint in str(refused)


def test_an_error_of_ours_in_a_folder_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("of ours")

    monkeypatch.setitem(FOLDERS, "NEG", broken)
    with pytest.raises(KeyError, match="of ours"):
        folded_values(one_operator("NEG", [const([1])], [T((), "INT32")]))
