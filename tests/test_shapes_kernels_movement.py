"""Operators that reshape, arrange, slice and pad: each rule against the interpreter, on models of one operator."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes_referee import Shape, T, check, const

SMALL = st.lists(st.integers(0, 3), max_size=4).map(tuple)
FILLED = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
examples = settings(max_examples=150, deadline=None)


@pytest.mark.parametrize(
    ("shape", "target", "accepted"),
    [
        ((2, 6), [3, 4], True),
        ((2, 6), [-1, 4], True),
        ((2, 6), [-1], True),
        ((1,), [], True),
        ((), [1, 1], True),
        ((0, 3), [-1, 3], True),
        ((0, 3), [0, -1], True),
        ((2, 0, 3), [-1, 0], True),
        ((0,), [5, 0], True),
        ((2, 6), [5], False),
        ((2, 6), [-1, 5], False),
        ((2, 6), [-1, -1], False),
        ((2, 6), [-2, 6], False),
        ((2, 6), [0, -1], False),
        ((0,), [1], False),
    ],
)
def test_reshape(shape: Shape, target: list[int], accepted: bool) -> None:
    check("RESHAPE", [T(shape), const(target)], ("ReshapeOptions", {}), accepted=accepted)


@pytest.mark.parametrize(
    ("target", "shape"), [([3, 4], (2, 6)), ([-1, 2], (2, 6)), ([0], (1,)), ([0], (2,)), ([], (1,))]
)
def test_reshape_by_its_options(target: list[int], shape: Shape) -> None:
    """`[0]` in the options stands for a scalar."""
    check("RESHAPE", [T(shape)], ("ReshapeOptions", {"newShape": target}))


def test_reshape_by_its_options_where_the_operand_is_no_vector_of_int32() -> None:
    options = ("ReshapeOptions", {"newShape": [3, 4]})
    check("RESHAPE", [T((2, 6)), const([[4, 3]])], options, accepted=True)
    check("RESHAPE", [T((2, 6)), const([4, 3], "INT64")], options, accepted=True)
    check("RESHAPE", [T((2, 6)), const([4, 3])], options, accepted=True)


@examples
@given(SMALL, st.lists(st.integers(-1, 4), max_size=4))
def test_any_reshape(shape: Shape, target: list[int]) -> None:
    check("RESHAPE", [T(shape), const(target)], ("ReshapeOptions", {}))


@pytest.mark.parametrize(("shape", "axis", "accepted"), [
    ((2, 3), 0, True), ((2, 3), 2, True), ((2, 3), -1, True), ((2, 3), -3, True), ((), 0, True),
    ((2, 3), 3, False), ((2, 3), -4, False),
])  # fmt: skip
def test_expand_dims(shape: Shape, axis: int, accepted: bool) -> None:
    check("EXPAND_DIMS", [T(shape), const(axis)], ("ExpandDimsOptions", {}), accepted=accepted)


@pytest.mark.parametrize(("shape", "axes", "accepted"), [
    ((1, 2, 1), [], True), ((1, 2, 1), [0], True), ((1, 2, 1), [-1, 0], True), ((1, 2, 1), [0, 0], True),
    ((1, 1), [], True), ((), [], True), ((1, 2, 1), [1], False), ((1, 2, 1), [3], False),
])  # fmt: skip
def test_squeeze(shape: Shape, axes: list[int], accepted: bool) -> None:
    check("SQUEEZE", [T(shape)], ("SqueezeOptions", {"squeezeDims": axes}), accepted=accepted)


@pytest.mark.parametrize(("source", "result", "shape", "accepted"), [
    ("FLOAT32", "INT32", (2, 3), True), ("FLOAT32", "UINT8", (2, 3), True), ("INT32", "INT16", (2,), True),
    ("INT16", "INT32", (2, 2), True), ("INT8", "FLOAT32", (3, 4), True), ("INT16", "INT32", (2, 3), False),
])  # fmt: skip
def test_bitcast(source: str, result: str, shape: Shape, accepted: bool) -> None:
    check("BITCAST", [T(shape, source)], None, result, accepted=accepted)


@pytest.mark.parametrize(("shape", "permutation", "accepted"), [
    ((2, 3, 4), [2, 0, 1], True), ((2, 3, 4), [-1, 0, 1], True), ((5,), [0], True), ((0, 2), [1, 0], True),
    ((2, 3, 4), [1, 0], False), ((2, 3), [0, 2], False),
])  # fmt: skip
def test_transpose(shape: Shape, permutation: list[int], accepted: bool) -> None:
    check("TRANSPOSE", [T(shape), const(permutation)], ("TransposeOptions", {}), accepted=accepted)


def test_transpose_refuses_an_axis_named_twice() -> None:
    """The interpreter lets it pass and copies beyond the input."""
    check("TRANSPOSE", [T((2, 3)), const([0, 0])], ("TransposeOptions", {}), accepted=True, stricter=True)


@examples
@given(FILLED, st.randoms())
def test_any_transpose(shape: Shape, random: object) -> None:
    axes = list(range(len(shape)))
    random.shuffle(axes)  # type: ignore[attr-defined]
    check("TRANSPOSE", [T(shape), const(axes)], ("TransposeOptions", {}), accepted=True)


@pytest.mark.parametrize(("shapes", "axis", "accepted"), [
    ([(2, 3), (2, 5)], 1, True), ([(2, 3), (4, 3), (1, 3)], 0, True), ([(2, 3), (2, 5)], -1, True),
    ([(2, 3)], 0, True), ([(0, 3), (2, 3)], 0, True), ([(2, 3), (2, 5)], 0, False), ([(2, 3), (2,)], 0, False),
    ([(2, 3), (2, 3)], 2, False), ([(2, 3), (2, 3)], -3, False), ([(), ()], 0, False),
])  # fmt: skip
def test_concatenation(shapes: list[Shape], axis: int, accepted: bool) -> None:
    check(
        "CONCATENATION", [T(s) for s in shapes], ("ConcatenationOptions", {"axis": axis}), accepted=accepted
    )


def test_concatenation_stacks_known_scalars() -> None:
    check(
        "CONCATENATION",
        [const(1), const(2)],
        ("ConcatenationOptions", {"axis": 0}),
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
    check("CONCATENATION", [T(s) for s in shapes], ("ConcatenationOptions", {"axis": axis}))


@pytest.mark.parametrize(("shapes", "axis", "accepted"), [
    ([(2, 3), (2, 3)], 0, True), ([(2, 3), (2, 3)], 2, True), ([(2, 3), (2, 3)], -1, True), ([(), ()], 0, True),
    ([(2, 3), (2, 4)], 0, False), ([(2, 3), (2, 3)], 3, False), ([(2, 3), (2,)], 0, False),
])  # fmt: skip
def test_pack(shapes: list[Shape], axis: int, accepted: bool) -> None:
    options = ("PackOptions", {"axis": axis, "valuesCount": len(shapes)})
    check("PACK", [T(shape) for shape in shapes], options, accepted=accepted)


@pytest.mark.parametrize(("shape", "axis", "count", "accepted"), [
    ((2, 3), 0, 2, True), ((2, 3), 1, 3, True), ((2, 3), -1, 3, True), ((4,), 0, 4, True), ((2, 3), 0, 3, False),
    ((2, 3), 2, 2, False), ((2, 0), 0, 2, False),
])  # fmt: skip
def test_unpack(shape: Shape, axis: int, count: int, accepted: bool) -> None:
    options = ("UnpackOptions", {"axis": axis, "num": count})
    check("UNPACK", [T(shape)], options, [T(())] * count, accepted=accepted)


@pytest.mark.parametrize(("shape", "axis", "count", "accepted"), [
    ((2, 6), 1, 3, True), ((2, 6), -2, 2, True), ((2, 6), 0, 1, True), ((2, 5), 1, 2, False), ((2, 6), 2, 2, False),
])  # fmt: skip
def test_split(shape: Shape, axis: int, count: int, accepted: bool) -> None:
    options = ("SplitOptions", {"numSplits": count})
    check("SPLIT", [const(axis), T(shape)], options, [T(())] * count, accepted=accepted)


@pytest.mark.parametrize(("sizes", "axis", "accepted"), [
    ([2, 4], 1, True), ([2, -1], 1, True), ([-1, 6], -1, True), ([1, 2, 3], 1, True), ([2, 3], 1, False),
    ([-1, -1], 1, False), ([7, -1], 1, False), ([2, 4], 2, False),
])  # fmt: skip
def test_split_v(sizes: list[int], axis: int, accepted: bool) -> None:
    options = ("SplitVOptions", {"numSplits": len(sizes)})
    outputs = [T(())] * len(sizes)
    check("SPLIT_V", [T((2, 6)), const(sizes), const(axis)], options, outputs, accepted=accepted)


@pytest.mark.parametrize(("shape", "times", "accepted"), [
    ((2, 3), [2, 1], True), ((2, 3), [0, 2], True), ((2, 3), [2], False), ((2, 3), [2, -1], False),
])  # fmt: skip
def test_tile(shape: Shape, times: list[int], accepted: bool) -> None:
    check("TILE", [T(shape), const(times)], ("TileOptions", {}), accepted=accepted)


@pytest.mark.parametrize(("shape", "target", "accepted"), [
    ((1, 3), [2, 3], True), ((3,), [2, 3], True), ((), [2, 3], True), ((1,), [0], True), ((2, 3), [2, 4], False),
    ((2, 3), [3], False), ((3,), [3, 1], False),
])  # fmt: skip
def test_broadcast_to(shape: Shape, target: list[int], accepted: bool) -> None:
    check("BROADCAST_TO", [T(shape), const(target)], ("BroadcastToOptions", {}), accepted=accepted)


@pytest.mark.parametrize(("left", "right"), [(3, 2), (1, 4), (2, 2)])
def test_broadcast_args(left: int, right: int) -> None:
    check("BROADCAST_ARGS", [T((left,), "INT32"), T((right,), "INT32")], None, "INT32", accepted=True)


def test_reversals_keep_the_shape() -> None:
    check("REVERSE_V2", [T((2, 3)), const([1])], ("ReverseV2Options", {}), accepted=True)
    check("REVERSE_V2", [T((2, 3)), const([0, 1, 0])], ("ReverseV2Options", {}), accepted=False)


@pytest.mark.parametrize("dtype", ["INT32", "INT64"])
@pytest.mark.parametrize(("shape", "begin", "size", "accepted"), [
    ((4, 5), [1, 2], [2, 3], True), ((4, 5), [1, 2], [-1, -1], True), ((4, 5), [0, 0], [4, 5], True),
    ((4, 5), [4, 0], [0, 1], True), ((4, 5), [3, 0], [2, 1], False), ((4, 5), [0, 0], [-2, 1], False),
])  # fmt: skip
def test_slice(shape: Shape, begin: list[int], size: list[int], accepted: bool, dtype: str) -> None:
    inputs = [T(shape), const(begin, dtype), const(size, dtype)]
    check("SLICE", inputs, ("SliceOptions", {}), accepted=accepted)


def test_slice_refuses_a_begin_before_the_start() -> None:
    check("SLICE", [T((4,)), const([-1]), const([2])], ("SliceOptions", {}), accepted=False)


MASKS = st.sampled_from([0, 0, 0, 1, 2, 3, 4])


@settings(max_examples=250, deadline=None)
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
        ("StridedSliceOptions", options),
        stricter=bool(shrink_axis_mask or ellipsis_mask),
    )


@pytest.mark.parametrize(("begin", "length", "stride"), [([1], [2], [1]), ([0], [4], [2]), ([-2], [2], [1])])
def test_strided_slice_with_offset(begin: list[int], length: list[int], stride: list[int]) -> None:
    options = ("StridedSliceOptions", {"offset": True})
    check("STRIDED_SLICE", [T((5,)), const(begin), const(length), const(stride)], options, accepted=True)


@pytest.mark.parametrize(("shape", "indices", "axis", "batch", "accepted"), [
    ((4, 5), (3,), 0, 0, True), ((4, 5), (2, 3), 1, 0, True), ((4, 5), (), -1, 0, True),
    ((2, 4, 5), (2, 3), 1, 1, True), ((2, 4, 5), (2, 3), 2, 1, True), ((2, 4, 5), (2, 3), 1, -1, True),
    ((4, 5), (3,), 2, 0, False), ((2, 4, 5), (3, 3), 1, 1, False), ((2, 4), (2, 4), 0, 1, False),
])  # fmt: skip
def test_gather(shape: Shape, indices: Shape, axis: int, batch: int, accepted: bool) -> None:
    options = ("GatherOptions", {"axis": axis, "batchDims": batch})
    check("GATHER", [T(shape), T(indices, "INT32")], options, accepted=accepted)


@pytest.mark.parametrize(("shape", "indices", "accepted"), [
    ((4, 5), (3, 2), True), ((4, 5), (3, 1), True), ((4, 5), (2,), True), ((4, 5, 6), (7, 3, 2), True),
    ((4, 5), (3, 0), True), ((4, 5), (3, 3), False), ((), (1, 1), False),
])  # fmt: skip
def test_gather_nd(shape: Shape, indices: Shape, accepted: bool) -> None:
    check("GATHER_ND", [T(shape), T(indices, "INT32")], ("GatherNdOptions", {}), accepted=accepted)


@pytest.mark.parametrize(("shape", "update", "start", "accepted"), [
    ((4, 5), (2, 5), (2,), True), ((4, 5), (4, 5), (2,), True), ((4, 5), (5, 5), (2,), False),
    ((4, 5), (5,), (2,), False), ((4, 5), (2, 5), (1,), False), ((4, 5), (2, 5), (2, 1), False),
])  # fmt: skip
def test_dynamic_update_slice(shape: Shape, update: Shape, start: Shape, accepted: bool) -> None:
    check("DYNAMIC_UPDATE_SLICE", [T(shape), T(update), T(start, "INT32")], None, accepted=accepted)


@pytest.mark.parametrize(("lookup", "table", "accepted"), [
    ((3,), (10, 4), True), ((3,), (10, 2, 4), True), ((3, 1), (10, 4), False), ((3,), (10,), False),
])  # fmt: skip
def test_embedding_lookup(lookup: Shape, table: Shape, accepted: bool) -> None:
    check("EMBEDDING_LOOKUP", [T(lookup, "INT32"), T(table)], None, accepted=accepted)


@pytest.mark.parametrize(("shape", "paddings", "accepted"), [
    ((2, 3), [[1, 0], [0, 2]], True), ((2, 3), [[0, 0], [0, 0]], True), ((2, 3), [[1, 0]], False),
    ((2, 3), [[1, 0], [0, -2]], False), ((2, 3), [1, 2], False),
])  # fmt: skip
def test_pad(shape: Shape, paddings: list[list[int]], accepted: bool) -> None:
    check("PAD", [T(shape), const(paddings)], ("PadOptions", {}), accepted=accepted)
    value = const(0.0, "FLOAT32")
    check("PADV2", [T(shape), const(paddings), value], ("PadV2Options", {}), accepted=accepted)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("paddings", "accepted"), [
    ([[1, 0], [2, 2]], (True, True)), ([[2, 0], [0, 0]], (False, True)), ([[0, 0], [0, 4]], (False, False)),
    ([[-1, 0], [0, 0]], (False, False)),
])  # fmt: skip
def test_mirror_pad(mode: int, paddings: list[list[int]], accepted: tuple[bool, bool]) -> None:
    options = ("MirrorPadOptions", {"mode": mode})
    check("MIRROR_PAD", [T((2, 3)), const(paddings)], options, accepted=accepted[mode])


@pytest.mark.parametrize(("shape", "block", "accepted"), [
    ((1, 4, 6, 3), 2, True), ((1, 4, 6, 3), 1, True), ((1, 4, 5, 3), 2, False), ((4, 6, 3), 2, False),
    ((1, 4, 6, 3), 0, False),
])  # fmt: skip
def test_space_to_depth(shape: Shape, block: int, accepted: bool) -> None:
    check("SPACE_TO_DEPTH", [T(shape)], ("SpaceToDepthOptions", {"blockSize": block}), accepted=accepted)


@pytest.mark.parametrize(("shape", "block", "accepted"), [
    ((1, 2, 3, 12), 2, True), ((1, 2, 3, 12), 1, True), ((1, 2, 3, 6), 2, False), ((1, 2, 3, 12), 0, False),
])  # fmt: skip
def test_depth_to_space(shape: Shape, block: int, accepted: bool) -> None:
    check("DEPTH_TO_SPACE", [T(shape)], ("DepthToSpaceOptions", {"blockSize": block}), accepted=accepted)


@pytest.mark.parametrize(("name", "table"), [
    ("RESIZE_BILINEAR", "ResizeBilinearOptions"), ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions"),
])  # fmt: skip
@pytest.mark.parametrize(("shape", "size", "accepted"), [
    ((1, 4, 6, 3), [8, 3], True), ((4, 6, 3), [8, 3], False), ((1, 4, 6, 3), [8], False),
])  # fmt: skip
def test_resize(name: str, table: str, shape: Shape, size: list[int], accepted: bool) -> None:
    check(name, [T(shape), const(size)], (table, {}), accepted=accepted)
