"""Each rule against the interpreter, on models of one operator: any shapes, and where the two may differ."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import (
    Graph,
    Options,
    Shape,
    T,
    check,
    const,
    derived_shapes,
    interpreter,
    model_bytes,
    one_operator,
    runtime_shapes,
)

from edge_opt.shapes import ShapeError

SMALL = st.lists(st.integers(0, 3), max_size=4).map(tuple)
examples = settings(max_examples=50, deadline=None)


@pytest.mark.parametrize(("left", "right"), [((2, 3), (2, 3)), ((2, 3), (1, 3))])
def test_atan2_does_not_broadcast(left: Shape, right: Shape) -> None:
    """The interpreter takes the first operand's shape without a look at the second: only equal ones are right."""
    check("ATAN2", [T(left), T(right)], accepted=True, stricter=left != right)


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
    check("BATCH_MATMUL", [T(x), T(y)], {"adjX": adj_x, "adjY": adj_y})


def test_fully_connected_refuses_elements_that_do_not_make_rows() -> None:
    """The interpreter rounds the number of rows down and drops the rest: the recorded shape would be a lie."""
    check(
        "FULLY_CONNECTED",
        [T((2, 5)), T((4, 3)), None],
        {},
        accepted=True,
        stricter=True,
    )


@examples
@given(SMALL, SMALL)
def test_any_two_shapes_add(left: Shape, right: Shape) -> None:
    check("ADD", [T(left), T(right)], {})


@examples
@given(SMALL, SMALL, SMALL)
def test_any_three_shapes_select(condition: Shape, x: Shape, y: Shape) -> None:
    """Of three single elements the interpreter leaves the recorded shape as it is, whatever it says."""
    assume(not all(set(shape) <= {1} for shape in (condition, x, y)))
    check("SELECT_V2", [T(condition, "BOOL"), T(x), T(y)])


@examples
@given(st.lists(st.integers(1, 3), max_size=5).map(tuple), st.data(), st.booleans(), st.booleans())
def test_any_two_shapes_multiply(x: Shape, data: st.DataObject, adj_x: bool, adj_y: bool) -> None:
    inner = 2 if len(x) < 2 else x[-2] if adj_x else x[-1]
    columns, batch = data.draw(st.integers(1, 3)), data.draw(st.lists(st.integers(1, 2), max_size=3))
    y = (*batch, columns, inner) if adj_y else (*batch, inner, columns)
    check("BATCH_MATMUL", [T(x), T(y)], {"adjX": adj_x, "adjY": adj_y})


@examples
@given(SMALL, st.lists(st.integers(-4, 4), max_size=3), st.booleans())
def test_any_axes_reduce(shape: Shape, axes: list[int], keep: bool) -> None:
    check("REDUCE_MAX", [T(shape), const(axes)], {"keepDims": keep})


FILLED = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("target", "shape"), [([3, 4], (2, 6)), ([-1, 2], (2, 6)), ([0], (1,)), ([0], (2,)), ([], (1,))]
)
def test_reshape_by_its_options(target: list[int], shape: Shape) -> None:
    """`[0]` in the options stands for a scalar."""
    check("RESHAPE", [T(shape)], {"newShape": target})


@examples
@given(SMALL, st.lists(st.integers(-1, 4), max_size=4))
def test_any_reshape(shape: Shape, target: list[int]) -> None:
    check("RESHAPE", [T(shape), const(target)], {})


def test_transpose_refuses_an_axis_named_twice() -> None:
    """The interpreter lets it pass and copies beyond the input."""
    check("TRANSPOSE", [T((2, 3)), const([0, 0])], {}, accepted=True, stricter=True)


@examples
@given(FILLED, st.randoms())
def test_any_transpose(shape: Shape, random: object) -> None:
    axes = list(range(len(shape)))
    random.shuffle(axes)  # type: ignore[attr-defined]
    check("TRANSPOSE", [T(shape), const(axes)], {}, accepted=True)


def test_concatenation_stacks_known_scalars() -> None:
    check(
        "CONCATENATION",
        [const(1), const(2)],
        {"axis": 0},
        "INT32",
        accepted=True,
        needs_values=True,
    )


@examples
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3),
    st.integers(-3, 3),
)
def test_any_concatenation(shapes: list[Shape], axis: int) -> None:
    check("CONCATENATION", [T(s) for s in shapes], {"axis": axis})


MASKS = st.sampled_from([0, 0, 0, 1, 2, 3, 4])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.lists(
        st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.sampled_from([1, 1, 2, -1, -2])),
        min_size=1,
        max_size=4,
    ),
    st.tuples(MASKS, MASKS, st.sampled_from([0, 0, 1, 2, 4]), MASKS, MASKS),
)
def test_any_strided_slice(shape: Shape, bounds: list[tuple[int, int, int]], masks: tuple[int, ...]) -> None:
    """Every mask and their mixtures. Only we refuse an index outside its axis and an ellipsis over no axis."""
    begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask = masks
    covered = [i for i in range(len(bounds)) if not (ellipsis_mask | new_axis_mask) >> i & 1]
    assume(len(covered) <= len(shape))
    assume(max(ellipsis_mask, new_axis_mask) < 1 << len(bounds))
    options = {
        "beginMask": begin_mask, "endMask": end_mask, "ellipsisMask": ellipsis_mask,
        "newAxisMask": new_axis_mask, "shrinkAxisMask": shrink_axis_mask,
    }  # fmt: skip
    inputs = [T(shape), *(const(list(column)) for column in zip(*bounds, strict=True))]
    check(
        "STRIDED_SLICE",
        inputs,
        options,
        stricter=bool(shrink_axis_mask or ellipsis_mask),
    )


@pytest.mark.parametrize(("index", "inside"), [(0, True), (3, True), (4, False), (-4, True), (-5, False)])
def test_a_shrunk_axis_is_read_at_an_index_that_it_has(index: int, inside: bool) -> None:
    bounds = [const([bound]) for bound in (index, index + 1, 1)]
    model = one_operator("STRIDED_SLICE", [T((4, 3)), *bounds], [T((3,))], {"shrinkAxisMask": 1})
    shapes = derived_shapes(model)
    assert shapes == [(3,)] if inside else isinstance(shapes, ShapeError)


SIZES = st.integers(1, 9)


@pytest.mark.parametrize("name", ["AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"])
@examples
@given(
    SIZES,
    SIZES,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
)
def test_pools(name: str, height: int, width: int, fh: int, fw: int, sh: int, sw: int, padding: int) -> None:
    options = {"padding": padding, "strideH": sh, "strideW": sw, "filterHeight": fh, "filterWidth": fw}
    # A window far larger than a VALID image leaves nothing; the interpreter then says 0 or refuses, we refuse.
    fits = padding == 0 or (fh <= height + sh and fw <= width + sw)
    check(name, [T((2, height, width, 3))], options, stricter=not fits)


@examples
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(1, 2))
def test_convolutions(height: int, fh: int, stride: int, dilation: int, padding: int, groups: int) -> None:
    options = {
        "padding": padding, "strideH": stride, "strideW": 1, "dilationHFactor": dilation, "dilationWFactor": 1,
    }  # fmt: skip
    inputs = [T((2, height, 5, 4)), T((6, fh, 2, 4 // groups)), T((6,))]
    check("CONV_2D", inputs, options)


@examples
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(1, 3))
def test_depthwise_convolutions(
    height: int, fh: int, stride: int, dilation: int, padding: int, m: int
) -> None:
    options = {
        "padding": padding, "strideH": stride, "strideW": 1, "dilationHFactor": dilation, "dilationWFactor": 1,
        "depthMultiplier": m,
    }  # fmt: skip
    inputs = [T((2, height, 5, 4)), T((1, fh, 2, 4 * m)), T((4 * m,))]
    check("DEPTHWISE_CONV_2D", inputs, options)


@examples
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1))
def test_convolutions_in_3d(depth: int, fd: int, stride: int, dilation: int, padding: int) -> None:
    options = {
        "padding": padding, "strideD": stride, "strideH": 1, "strideW": 2, "dilationDFactor": dilation,
        "dilationHFactor": 1, "dilationWFactor": 1,
    }  # fmt: skip
    inputs = [T((2, depth, 4, 5, 3)), T((fd, 2, 2, 3, 7)), T((7,))]
    fits = padding == 0 or (fd - 1) * dilation + 1 <= depth + stride
    check("CONV_3D", inputs, options, stricter=not fits)


def test_sparse_tensors() -> None:
    """The interpreter cannot allocate them here: it wants a table of sparsity."""
    assert derived_shapes(one_operator("DENSIFY", [const([[1.0, 0.0]], "FLOAT32")], [T(())])) == [(1, 2)]


def bounded(derived: object, actual: list[Shape] | None) -> bool:
    """Each derived shape has the actual rank, and -1 or the actual size in every axis."""
    assert isinstance(derived, list)
    assert actual is not None
    pairs = list(zip(derived, actual, strict=True))
    return all(len(d) == len(a) and all(x in (-1, y) for x, y in zip(d, a, strict=True)) for d, a in pairs)


@pytest.mark.parametrize(("name", "inputs", "options", "outputs"), [
    ("WHERE", [T((2, 3), "BOOL")], None, [T((), "INT64")]),
    ("RESHAPE", [T((0, 3)), T((2,), "INT32")], {}, [T((7, 7))]),
    ("TILE", [T((2, 3)), T((2,), "INT32")], {}, [T(())]),
    ("FILL", [T((2,), "INT32"), T(())], {}, [T(())]),
    ("SUM", [T((2, 3)), T((1,), "INT32")], {"keepDims": True}, [T(())]),
    ("TOPK_V2", [T((2, 3)), T((), "INT32")], None, [T(()), T((), "INT32")]),
    ("SLICE", [T((4, 5)), T((2,), "INT32"), T((2,), "INT32")], {}, [T(())]),
    ("TRANSPOSE", [T((1, 1)), T((2,), "INT32")], {}, [T(())]),
    ("EXPAND_DIMS", [T((2, 3)), T((), "INT32")], {}, [T(())]),
    ("SPLIT", [T((), "INT32"), T((2, 3))], {"numSplits": 2}, [T(()), T(())]),
    ("PAD", [T((2, 3)), T((2, 2), "INT32")], {}, [T(())]),
])  # fmt: skip
def test_sizes_that_only_the_data_knows_are_dynamic(
    name: str, inputs: list[T], options: Options, outputs: list[T]
) -> None:
    """Run on zeros; what the interpreter then has must fit what the rule says, which must say -1 somewhere."""
    model = one_operator(name, inputs, outputs, options)
    derived = derived_shapes(model)
    assert bounded(derived, runtime_shapes(model, run=True))
    assert any(-1 in shape for shape in derived)  # type: ignore[union-attr]


# StableHLO


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


def test_stablehlo_scatter_keeps_the_shape_of_the_operand() -> None:
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


@pytest.mark.parametrize("offsets", [[0, 0], [0, 4], [0]])
def test_stablehlo_gather_refuses_offsets_that_are_no_axes_of_the_result(offsets: list[int]) -> None:
    options = {"offsetDims": offsets, "collapsedSliceDims": [0], "indexVectorDim": 2, "sliceSizes": [1, 2, 2]}
    with pytest.raises(ShapeError, match=r"STABLEHLO_GATHER: its (offset_dims|slice)"):
        derive("GATHER", [(3, 4, 2), (2, 3, 2)], options)
