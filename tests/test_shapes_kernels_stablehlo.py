"""StableHLO operators: those that the interpreter has a kernel for, against it."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import Graph, Options, Shape, T, check, const, derived_shapes, interpreter, model_bytes

from edge_opt.shapes import ShapeError


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(-2, 3), st.integers(-2, 3), st.integers(0, 2)),
        min_size=1,
        max_size=3,
    )
)
def test_pad(axes: list[tuple[int, int, int, int]]) -> None:
    shape, low, high, interior = (list(column) for column in zip(*axes, strict=True))
    options = {"edgePaddingLow": low, "edgePaddingHigh": high, "interiorPadding": interior}
    # Where one axis becomes empty, the interpreter makes all of them 0; the specification keeps the others.
    assume(all(n + a + b + (n - 1) * i > 0 for n, a, b, i in axes))
    check("STABLEHLO_PAD", [T(tuple(shape)), const(0.0, "FLOAT32")], options)


def body(name: str = "STABLEHLO_ADD") -> Graph:
    """A subgraph that combines two scalars."""
    graph = Graph("body")
    a, b = graph.tensor(T(()), is_input=True), graph.tensor(T(()), is_input=True)
    graph.operator(name, [a, b], [graph.tensor(T(()), is_output=True)])
    return graph


def with_body(name: str, inputs: list[T], options: dict[str, Any]) -> tuple[Shape | None, object]:
    """What the interpreter and the rule say of an operator that has a subgraph."""
    graph = Graph()
    slots = [graph.tensor(t, is_input=t.value is None) for t in inputs]
    graph.operator(name, slots, [graph.tensor(T(()), is_output=True)], options)
    model = model_bytes([graph, body()])
    derived = derived_shapes(model)
    try:
        runtime = interpreter(model)
        runtime.allocate_tensors()
    except (RuntimeError, ValueError):
        return None, derived
    return tuple(int(d) for d in runtime.get_output_details()[0]["shape"]), derived


WINDOW = st.tuples(
    *(st.integers(low, high) for low, high in ((1, 6), (1, 3), (1, 2), (1, 2), (1, 2), (0, 2), (0, 2)))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(WINDOW, min_size=1, max_size=3))
def test_reduce_window(axes: list[tuple[int, ...]]) -> None:
    shape, window, strides, base, dilation, low, high = (list(column) for column in zip(*axes, strict=True))
    options = {
        "windowDimensions": window, "windowStrides": strides, "baseDilations": base, "windowDilations": dilation,
        "padding": [number for pair in zip(low, high, strict=True) for number in pair], "bodySubgraphIndex": 1,
    }  # fmt: skip
    inputs = [T(tuple(shape)), const(0.0, "FLOAT32")]
    expected, derived = with_body("STABLEHLO_REDUCE_WINDOW", inputs, options)
    assert derived == [expected]


def test_scatter_keeps_the_shape_of_the_operand() -> None:
    options = {
        "updateWindowDims": [2, 3], "insertedWindowDims": [0], "scatterDimsToOperandDims": [1, 0], "indexVectorDim": 2,
        "updateComputationSubgraphIndex": 1,
    }  # fmt: skip
    inputs = [T((3, 4, 2)), T((2, 3, 2), "INT64"), T((2, 3, 2, 2))]
    expected, derived = with_body("STABLEHLO_SCATTER", inputs, options)
    assert derived == [expected] == [(3, 4, 2)]


def derive(name: str, shapes: list[Shape], options: Options = None, result: Shape = ()) -> Shape:
    graph = Graph()
    slots = [graph.tensor(T(shape), is_input=True) for shape in shapes]
    graph.operator(f"STABLEHLO_{name}", slots, [graph.tensor(T(result), is_output=True)], options)
    derived = derived_shapes(model_bytes([graph, body()]))
    if isinstance(derived, ShapeError):
        raise derived
    (shape,) = derived
    assert shape is not None
    return shape


def test_windows_without_strides_dilations_and_padding_move_by_1() -> None:
    window = {"windowDimensions": [2, 3], "bodySubgraphIndex": 1}
    options = window
    assert derive("REDUCE_WINDOW", [(4, 5), ()], options) == (3, 3)
    assert derive("REDUCE_WINDOW", [(4, 2), ()], options) == (3, 0)
    assert derive("REDUCE_WINDOW", [(0, 5), ()], options) == (0, 3)


@pytest.mark.parametrize("offsets", [[0, 0], [0, 4], [0]])
def test_gather_refuses_offsets_that_are_no_axes_of_the_result(offsets: list[int]) -> None:
    options = {"offsetDims": offsets, "collapsedSliceDims": [0], "indexVectorDim": 2, "sliceSizes": [1, 2, 2]}
    with pytest.raises(ShapeError, match=r"STABLEHLO_GATHER: its (offset_dims|slice)"):
        derive("GATHER", [(3, 4, 2), (2, 3, 2)], options)
