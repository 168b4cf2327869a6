"""Pools, convolutions and recurrent cells: each rule against the interpreter, on models of one operator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes_referee import Shape, T, check, const

examples = settings(max_examples=100, deadline=None)
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
    check(name, [T((2, height, width, 3))], ("Pool2DOptions", options), stricter=not fits)


@pytest.mark.parametrize(("shape", "stride"), [((4, 4, 3), 1), ((1, 4, 4, 3), 0)])
def test_pools_refuse(shape: Shape, stride: int) -> None:
    options = {"strideH": stride, "strideW": 1, "filterHeight": 2, "filterWidth": 2}
    check("MAX_POOL_2D", [T(shape)], ("Pool2DOptions", options), accepted=False)


@examples
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(1, 2))
def test_convolutions(height: int, fh: int, stride: int, dilation: int, padding: int, groups: int) -> None:
    options = {
        "padding": padding, "strideH": stride, "strideW": 1, "dilationHFactor": dilation, "dilationWFactor": 1,
    }  # fmt: skip
    inputs = [T((2, height, 5, 4)), T((6, fh, 2, 4 // groups)), T((6,))]
    check("CONV_2D", inputs, ("Conv2DOptions", options))


@pytest.mark.parametrize(
    ("shape", "filters", "bias"),
    [
        ((2, 5, 5, 4), (6, 3, 3, 3), (6,)),
        ((2, 5, 5, 4), (6, 3, 3, 4), (5,)),
        ((2, 5, 5), (6, 3, 3, 4), (6,)),
        ((2, 5, 0, 4), (6, 3, 3, 4), (6,)),
        ((2, 5, 5, 4), (5, 3, 3, 2), (5,)),
    ],
)
def test_convolutions_refuse(shape: Shape, filters: Shape, bias: Shape) -> None:
    options = {"strideH": 1, "strideW": 1}
    check("CONV_2D", [T(shape), T(filters), T(bias)], ("Conv2DOptions", options), accepted=False)


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
    check("DEPTHWISE_CONV_2D", inputs, ("DepthwiseConv2DOptions", options))


@pytest.mark.parametrize(
    ("filters", "bias"), [((2, 3, 3, 4), (4,)), ((1, 3, 3, 6), (6,)), ((1, 3, 3, 4), (5,))]
)
def test_depthwise_convolutions_refuse(filters: Shape, bias: Shape) -> None:
    options = {"strideH": 1, "strideW": 1, "depthMultiplier": 1}
    inputs = [T((2, 5, 5, 4)), T(filters), T(bias)]
    check("DEPTHWISE_CONV_2D", inputs, ("DepthwiseConv2DOptions", options), accepted=False)


@examples
@given(SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 1))
def test_convolutions_in_3d(depth: int, fd: int, stride: int, dilation: int, padding: int) -> None:
    options = {
        "padding": padding, "strideD": stride, "strideH": 1, "strideW": 2, "dilationDFactor": dilation,
        "dilationHFactor": 1, "dilationWFactor": 1,
    }  # fmt: skip
    inputs = [T((2, depth, 4, 5, 3)), T((fd, 2, 2, 3, 7)), T((7,))]
    fits = padding == 0 or (fd - 1) * dilation + 1 <= depth + stride
    check("CONV_3D", inputs, ("Conv3DOptions", options), stricter=not fits)


@pytest.mark.parametrize(
    ("shape", "filters"), [((2, 4, 4, 5, 3), (1, 2, 2, 4, 7)), ((4, 4, 5, 3), (1, 2, 2, 3, 7))]
)
def test_convolutions_in_3d_refuse(shape: Shape, filters: Shape) -> None:
    options = {"strideD": 1, "strideH": 1, "strideW": 1}
    check("CONV_3D", [T(shape), T(filters)], ("Conv3DOptions", options), accepted=False)


@pytest.mark.parametrize(
    ("result", "filters", "shape", "bias", "accepted"),
    [
        ([1, 8, 8, 5], (5, 3, 3, 4), (1, 4, 4, 4), (5,), True),
        ([1, 8, 8, 5], (5, 3, 3, 4), (1, 4, 4, 4), None, True),
        ([1, 8, 8, 5], (5, 3, 3, 4), (1, 4, 4, 3), None, False),
        ([1, 8, 8, 5], (5, 3, 3, 4), (1, 4, 4, 4), (6,), False),
        ([1, 8, 8, 5], (5, 3, 4), (1, 4, 4, 4), None, False),
    ],
)
def test_transposed_convolutions(
    result: list[int], filters: Shape, shape: Shape, bias: Shape | None, accepted: bool
) -> None:
    options = ("TransposeConvOptions", {"strideH": 2, "strideW": 2})
    inputs = [const(result), T(filters), T(shape), *([] if bias is None else [T(bias)])]
    check("TRANSPOSE_CONV", inputs, options, accepted=accepted)


@pytest.mark.parametrize("field", ["strideH", "dilationHFactor"])
def test_strides_and_dilations_of_0_are_refused(field: str) -> None:
    options = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1, field: 0}
    inputs = [T((2, 5, 5, 4)), T((6, 3, 3, 4)), T((6,))]
    check("CONV_2D", inputs, ("Conv2DOptions", options), accepted=False)
