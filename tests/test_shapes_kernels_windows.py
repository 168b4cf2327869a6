"""Pools, convolutions and recurrent cells: each rule against the interpreter, on models of one operator."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("result", "shape", "accepted"),
    [
        ([1, 4, 8, 8, 5], (1, 2, 4, 4, 3), True),
        ([2, 4, 8, 8, 5], (1, 2, 4, 4, 3), False),
        ([1, 4, 8, 8, 6], (1, 2, 4, 4, 3), False),
        ([1, 4, 9, 8, 5], (1, 2, 4, 4, 3), False),
        ([1, 4, 8, 8, 5], (1, 2, 4, 4, 2), False),
    ],
)
def test_transposed_convolutions_in_3d(result: list[int], shape: Shape, accepted: bool) -> None:
    options = ("Conv3DOptions", {"strideD": 2, "strideH": 2, "strideW": 2})
    check("CONV_3D_TRANSPOSE", [const(result), T((2, 2, 2, 5, 3)), T(shape)], options, accepted=accepted)


@pytest.mark.parametrize(("bias", "accepted"), [((5,), True), (None, True), ((6,), False)])
def test_the_bias_of_transposed_convolutions_in_3d(bias: Shape | None, accepted: bool) -> None:
    options = ("Conv3DOptions", {"strideD": 2, "strideH": 2, "strideW": 2})
    inputs = [
        const([1, 4, 8, 8, 5]),
        T((2, 2, 2, 5, 3)),
        T((1, 2, 4, 4, 3)),
        None if bias is None else T(bias),
    ]
    check("CONV_3D_TRANSPOSE", inputs, options, accepted=accepted)


@pytest.mark.parametrize("field", ["strideH", "dilationHFactor"])
def test_strides_and_dilations_of_0_are_refused(field: str) -> None:
    options = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1, field: 0}
    inputs = [T((2, 5, 5, 4)), T((6, 3, 3, 4)), T((6,))]
    check("CONV_2D", inputs, ("Conv2DOptions", options), accepted=False)


def state(*shape: int) -> T:
    return T(shape, variable=True)


@pytest.mark.parametrize("projected", [False, True])
def test_lstm(projected: bool) -> None:
    """Batch 2, input 3, cells 4, output 5 (by projection) or 4."""
    out = 5 if projected else 4
    gates = [T((4, 3))] * 4 + [T((4, out))] * 4
    tail = [T((5, 4)), T((5,))] if projected else [None, None]
    inputs = [T((2, 3)), *gates, None, None, None, *[T((4,))] * 4, *tail, state(2, out), state(2, 4)]
    check("LSTM", inputs, ("LSTMOptions", {"fusedActivationFunction": 4}), accepted=True)


def test_basic_lstm() -> None:
    inputs = [T((2, 3)), T((2, 4)), T((16, 7)), T((16,)), T((2, 4))]
    options = ("LSTMOptions", {"kernelType": 1, "fusedActivationFunction": 4})
    check("LSTM", inputs, options, [T(())] * 4, accepted=True)
    check("LSTM", [*inputs[:2], T((16, 8)), *inputs[3:]], options, [T(())] * 4, accepted=False)


@pytest.mark.parametrize("time_major", [False, True])
def test_sequence_lstm(time_major: bool) -> None:
    batch = 6 if time_major else 5
    gates = [T((4, 3))] * 4 + [T((4, 4))] * 4
    tail = [None, None, state(batch, 4), state(batch, 4)]
    inputs = [T((5, 6, 3)), *gates, None, None, None, *[T((4,))] * 4, *tail]
    options = {"timeMajor": time_major, "fusedActivationFunction": 4}
    check(
        "UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, ("UnidirectionalSequenceLSTMOptions", options), accepted=True
    )


@pytest.mark.parametrize("merge", [False, True])
def test_bidirectional_sequence_lstm(merge: bool) -> None:
    one_way = [*[T((4, 3))] * 4, *[T((4, 4))] * 4, None, None, None, *[T((4,))] * 4, None, None]
    states = [state(5, 4)] * 4
    inputs = [T((5, 6, 3)), *one_way, *one_way, *states, *[None] * 9]
    options = {"mergeOutputs": merge, "timeMajor": False, "fusedActivationFunction": 4}
    outputs = [T(())] * (1 if merge else 2)
    check(
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        inputs,
        ("BidirectionalSequenceLSTMOptions", options),
        outputs,
        accepted=True,
    )


@pytest.mark.parametrize(("weights", "accepted"), [((4, 3), True), ((4, 2), False), ((5, 3), False)])
def test_rnn(weights: Shape, accepted: bool) -> None:
    inputs = [T((2, 3)), T(weights), T((4, 4)), T((4,)), state(2, 4)]
    check("RNN", inputs, ("RNNOptions", {"fusedActivationFunction": 1}), accepted=accepted)


@pytest.mark.parametrize("time_major", [False, True])
def test_sequence_rnn(time_major: bool) -> None:
    inputs = [T((5, 6, 3)), T((4, 3)), T((4, 4)), T((4,)), state(6 if time_major else 5, 4)]
    options = ("SequenceRNNOptions", {"timeMajor": time_major, "fusedActivationFunction": 1})
    check("UNIDIRECTIONAL_SEQUENCE_RNN", inputs, options, accepted=True)


@pytest.mark.parametrize("merge", [False, True])
def test_bidirectional_sequence_rnn(merge: bool) -> None:
    one_way = [T((4, 3)), T((4, 4)), T((4,)), state(5, 4)]
    inputs = [T((5, 6, 3)), *one_way, *one_way, None, None, None]
    options = {"mergeOutputs": merge, "timeMajor": False, "fusedActivationFunction": 1}
    outputs = [T(())] * (1 if merge else 2)
    check(
        "BIDIRECTIONAL_SEQUENCE_RNN",
        inputs,
        ("BidirectionalSequenceRNNOptions", options),
        outputs,
        accepted=True,
    )


@pytest.mark.parametrize(("rank", "accepted"), [(1, True), (2, True), (3, False)])
def test_svdf(rank: int, accepted: bool) -> None:
    inputs = [T((2, 3)), T((8, 3)), T((8, 10)), None, state(2, 80)]
    check("SVDF", inputs, ("SVDFOptions", {"rank": rank}), accepted=accepted)
