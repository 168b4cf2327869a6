"""What an input is, by its name, and that the inputs of one signature fit together."""

import hashlib
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
from proof_models import tensor

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import InputHint, InputPlan, Side, array_of, converted, plan, twins
from edge_opt.runtime.protocol import DeclinedError
from edge_opt.runtime.tensors import Role, SignatureInfo, TensorInfo, role_of
from edge_opt.verification.extremes import KINDS, extreme

Array = np.ndarray


def split_cache(rows: int = 16, cache: int = 64) -> SignatureInfo:
    """A prefill signature as today's exporter writes it."""
    inputs = (
        tensor("embeddings", 1, rows, 128),
        tensor("input_pos", rows, dtype="int32"),
        tensor("kv_cache_k_0", 1, 1, cache, 32),
        tensor("kv_cache_v_0", 1, 1, 32, cache),
        tensor("mask_global", 1, 1, rows, cache + rows),
        tensor("mask_local", 1, 1, rows, cache + rows),
        tensor("pos_emb_cos", 1, rows, 1, 32),
        tensor("pos_emb_sin", 1, rows, 1, 32),
    )
    return SignatureInfo("prefill", inputs, (tensor("logits", 1, rows, 300),))


def arrays(signature: SignatureInfo, **options: object) -> dict[str, Array]:
    return {made.info.name: array_of(made) for made in plan(signature, **options)}


def lone(info: TensorInfo, *, outputs: tuple[TensorInfo, ...] = (), **options: object) -> Array:
    return array_of(plan(SignatureInfo("s", (info,), outputs), **options)[0])


ROLES: dict[Role, str] = {
    "mask": "mask_global:float32 attention_mask:int32 valid_mask:bool",
    "position": "input_pos:int32 position_ids:int64 time_step:int32 cache_position:int64",
    "rotary": "pos_emb_local_sin:float32",
    "token": "tokens:int32 token_ids:int32 input_ids:int64",
    "cache": "kv_cache_k_7:float32 kv_slice_v_7:float16",
    "embedding": "embeddings:float32",
    "data": "token_type_ids:int32 tokens:float32 args_0:float32",
}


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role in ROLES for name in ROLES[role].split()]
)
def test_a_role_follows_from_name_and_type(role: Role, name: str) -> None:
    """The tensor's own name is asked where the signature's says nothing."""
    name, _, dtype = name.partition(":")
    assert role_of(tensor(name, 4, dtype=dtype)) == role
    assert role_of(replace(tensor(f"model/decoder/{name}", 4, dtype=dtype), name="args_0")) == role


def test_the_same_seed_gives_the_same_numbers_whatever_the_order() -> None:
    signature = split_cache()
    backwards = SignatureInfo(signature.name, signature.inputs[::-1], signature.outputs)
    first, second, other = (
        arrays(signature, seed=3),
        arrays(backwards, seed=3),
        arrays(signature, seed=4),
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["embeddings"], other["embeddings"])
    assert not np.array_equal(first["kv_cache_k_0"].ravel(), first["kv_cache_v_0"].ravel())


def test_the_generator_is_pinned_because_golden_files_rely_on_it() -> None:
    digest = hashlib.sha256()
    for name, made in sorted(arrays(split_cache(), seed=7).items()):
        digest.update(name.encode() + made.tobytes())
    assert noise.GENERATOR_VERSION == 1
    assert (
        lone(tensor("embeddings", 4), seed=7).tobytes().hex() == "d81f80bf1e4b0a3fff9c573e7e7491bf"
    )
    assert digest.hexdigest()[:16] == "7c69b7584fc10829"


def test_large_numbers_stay_in_the_range_of_a_quantized_counterpart() -> None:
    plain, coded = tensor("x", 1000), tensor("x", 1000, dtype="int8", scale=0.1)
    (made,) = plan(SignatureInfo("s", (plain,), ()), further=True)
    assert np.abs(array_of(made)).max() > 10_000
    one, other = twins(made, coded)
    assert np.abs(array_of(one) - array_of(other) * 0.1).max() <= 0.81, "clipped beyond 3 sigma"


@pytest.mark.parametrize(
    ("dtype", "why"), [("complex64", "complex"), ("bytes", "numpy lacks its type")]
)
def test_no_numbers_are_drawn_for_other_types(dtype: str, why: str) -> None:
    with pytest.raises(DeclinedError, match=why):
        lone(tensor("x", 4, dtype=dtype))


def test_cosine_and_sine_are_of_the_same_angles() -> None:
    made = arrays(split_cache())
    squares = (
        made["pos_emb_cos"].astype(np.float64) ** 2 + made["pos_emb_sin"].astype(np.float64) ** 2
    )
    assert np.allclose(squares, 1)
    assert len(np.unique(made["pos_emb_cos"])) > 400


def test_a_mask_over_cache_and_new_tokens_is_causal_from_the_position_on() -> None:
    made = arrays(split_cache(rows=16, cache=64))
    start = int(made["input_pos"][0])
    mask = made["mask_global"][0, 0]
    assert 0 < start <= 48
    assert set(np.unique(mask)) == {-100.0, 0.0}
    for row in range(16):
        visible = list(range(start)) + [64 + new for new in range(row + 1)]
        assert np.flatnonzero(mask[row] == 0).tolist() == visible


def test_a_mask_over_a_ring_tells_the_positions_that_its_columns_hold() -> None:
    rows, ring, start = 4, 16, 21
    masks = (
        tensor("mask_global", 1, 1, rows, 64 + rows),
        tensor("mask_local", 1, 1, rows, ring + rows),
    )
    planned = plan(SignatureInfo("prefill", masks, ()))
    made = {one.info.name: replace(one, start=start) for one in planned}
    window = made["mask_local"].window
    assert 1 < window < ring
    held = [start - ring + (column - start) % ring for column in range(ring)]
    assert sorted(held) == list(range(start - ring, start))
    for row, entries in enumerate(array_of(made["mask_local"])[0, 0]):
        places = np.array([*held, *range(start, start + rows)])
        seen = (start + row - window < places) & (places <= start + row)
        assert np.array_equal(entries == 0, seen)


def test_positions_and_the_cache_leave_room_for_the_new_tokens() -> None:
    cache, part = tensor("kv_cache_k_0", 1, 1, 64, 8), tensor("kv_slice_k_0", 1, 1, 16, 8)
    given = (
        tensor("input_pos", 16, dtype="int32"),
        cache,
        part,
        tensor("valid_mask", 1, 16, dtype="bool"),
    )
    for run in range(4):
        made = arrays(SignatureInfo("prefill_cache_update", given, ()), run=run, seed=run)
        first = int(made["input_pos"][0])
        assert made["input_pos"].tolist() == list(range(first, first + 16))
        assert 0 <= first <= 48
        assert first > 0
        assert made["valid_mask"].dtype == np.bool_
        assert made["valid_mask"][0, 0]


def test_token_ids_stay_below_the_vocabulary() -> None:
    made = lone(tensor("tokens", 1, 4000, dtype="int32"), outputs=(tensor("logits", 1, 1, 300),))
    assert made.dtype == np.int32
    assert (made.min(), made.max()) == (1, 299)
    few = tensor("tokens", 1, 2, dtype="int32")
    assert lone(few, outputs=(tensor("logits", 1, 1, 1),)).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("dtype", "shut", "opened"), [("bool", 0, 1), ("int32", 0, 1), ("float16", -100, 0)]
)
def test_a_mask_is_in_its_own_type_and_shape(dtype: str, shut: float, opened: float) -> None:
    made = lone(tensor("mask", 1, 1, 4, 4, dtype=dtype))
    assert made.dtype == np.dtype(dtype)
    assert (made[0, 0, 0, 3], made[0, 0, 3].tolist()) == (shut, [opened] * 4)
    for shape in ((), (5,), (1, 5), (5, 5), (1, 5, 5), (2, 3, 5, 5), (1, 1, 20, 5), (0, 4)):
        for run in range(2):
            assert lone(tensor("mask", *shape, dtype=dtype), run=run).shape == shape


@pytest.mark.parametrize(
    ("dtype", "scale", "zero"), [("int8", 0.02, -128), ("int16", 1e-3, 0), ("uint8", 0.5, 3)]
)
def test_a_quantized_input_fills_its_range(dtype: str, scale: float, zero: int) -> None:
    made = lone(tensor("x", 50_000, dtype=dtype, scale=scale, zero=zero)).astype(np.float64)
    limits = np.iinfo(dtype)
    width = limits.max - limits.min
    assert made.std() > width / 8
    assert np.mean((made == limits.min) | (made == limits.max)) < 0.02
    assert not np.array_equal(made[:100], made[1 << 15 :][:100]), "the next piece has other numbers"


@pytest.mark.parametrize("name", ["embeddings", "kv_cache_k", "pos_emb_cos", "mask"])
def test_a_float_input_and_its_quantized_counterpart_get_the_same_real_numbers(name: str) -> None:
    shape = (1, 1, 8, 8)
    plain, coded = tensor(name, *shape), tensor(name, *shape, dtype="int16", scale=0.01)
    (made,) = plan(SignatureInfo("s", (plain,), ()))
    one, other = twins(made, coded)
    assert np.abs(array_of(one) - array_of(other) * 0.01).max() <= 0.00501


@pytest.mark.parametrize(("dtype", "top"), [("int32", 1), ("int64", 1), ("uint8", 1), ("int8", 1)])
def test_integers_that_may_be_indices_stay_small(dtype: str, top: int) -> None:
    assert lone(tensor("x", 4000, dtype=dtype)).max() == top


def test_without_a_mask_positions_leave_room_in_the_cache() -> None:
    cache = tensor("kv_cache_k_0", 1, 2, 32, 64)
    signature = SignatureInfo("decode", (tensor("input_pos", 1, dtype="int32"), cache), ())
    positions = {int(arrays(signature, seed=seed)["input_pos"][0]) for seed in range(30)}
    assert positions <= set(range(31 // 4, 31 // 4 + 31 // 2 + 1))
    assert len(positions) > 31 // 4


def test_a_hint_decides_the_role_and_the_values_of_a_mask() -> None:
    signature = SignatureInfo(
        "region", (tensor("mask", 4, 4), tensor("add_7", 1, 4, 4, dtype="bool")), ()
    )
    hints = [InputHint(), InputHint("mask", masked=1, opened=0)]
    data, mask = (array_of(made) for made in plan(signature, hints=hints))
    assert len(np.unique(data)) == 16
    assert mask[0].sum(axis=1).tolist() == [3, 2, 1, 0]


def test_only_a_vector_of_flags_is_padding_and_three_axes_are_causal() -> None:
    padding = lone(tensor("mask", 1, 20, dtype="bool"), run=1)[0]
    assert padding.tolist() == [True] * 15 + [False] * 5
    assert lone(tensor("mask", 1, 20, dtype="bool"))[0].all()
    *cache, own = lone(tensor("mask", 1, 1, 20, dtype="bool"))[0, 0].tolist()
    assert own
    assert 0 < sum(cache) < 19
    assert cache == sorted(cache, reverse=True)
    assert not lone(tensor("mask", 1, 20))[0].all()


def test_a_second_run_has_padding_in_front_of_its_tokens() -> None:
    cache, tokens = tensor("kv_cache_k_0", 1, 32, 1, 32), tensor("tokens", 1, 1, dtype="int32")
    signature = SignatureInfo("decode", (tokens, tensor("mask", 1, 1, 1, 32), cache), ())
    starts = set[int]()
    for seed in range(20):
        planned = plan(signature, seed=seed, run=1)[1]
        mask, start = array_of(planned)[0, 0, 0], planned.start
        starts.add(start)
        assert np.flatnonzero(mask == 0).tolist() == [*range(min(start // 4 + 1, 8), start + 1)]
    assert len(starts) > 5


def test_a_mask_as_wide_as_a_head_still_begins_with_the_cache() -> None:
    """48 positions and 16 new tokens make 64 columns, and so many numbers has a head."""
    inputs = (tensor("mask", 1, 1, 16, 64), tensor("kv_cache_k_0", 1, 1, 48, 64))
    mask = array_of(replace(plan(SignatureInfo("prefill", inputs, ()))[0], start=5))[0, 0]
    assert np.flatnonzero(mask[2] == 0).tolist() == [0, 1, 2, 3, 4, 48, 49, 50]
    of_two_axes = array_of(
        replace(plan(SignatureInfo("s", (tensor("mask", 2, 6),), ()))[0], start=3)
    )
    assert [np.flatnonzero(row == 0).tolist() for row in of_two_axes] == [
        [0, 1, 2, 4],
        [0, 1, 2, 4, 5],
    ]


def test_real_numbers_stay_what_they_are_in_another_type() -> None:
    codes, real = tensor("x", 3, dtype="int8", scale=0.5, zero=10), tensor("x", 3)
    coarser = tensor("x", 3, dtype="int8", scale=1.0, zero=-1)
    array = np.array([10, 12, -4], np.int8)
    assert converted(array, codes, codes) is array
    assert converted(array, codes, real).tolist() == [0, 1, -7]
    assert converted(array, codes, coarser).tolist() == [-1, 0, -8]
    assert converted(np.array([0, 1, 99], np.float32), real, codes).tolist() == [10, 12, 127]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("info", [tensor("x", dtype="int8", scale=0.5), tensor("x")])
def test_extreme_inputs_keep_their_shape_and_type(shape: tuple[int, ...], info: TensorInfo) -> None:
    array = np.zeros(shape, info.dtype)
    for kind, side in product(KINDS, get_args(Side)):
        made = extreme(InputPlan(side=side, info=info), array, kind)
        assert (made.shape, made.dtype) == (shape, array.dtype)


def test_extreme_codes_fill_whole_columns_or_rows_and_reach_both_ends() -> None:
    info, ones = tensor("x", 8, 8, dtype="int8", scale=0.5), np.ones((8, 8), np.int8)
    found = {
        kind: extreme(InputPlan(side="other", info=info), ones, kind) for kind in ("masks", "tiny")
    }
    assert found["masks"].tolist() == found["tiny"].T.tolist() == [[127, -128, 1, 1] * 2] * 8
    graded = extreme(InputPlan(side="right", info=info), ones, "high")
    assert min(np.ptp(graded, axis=0).min(), np.ptp(graded, axis=1).min()) > 8, "along both axes"


@pytest.mark.parametrize(
    ("dtype", "kind", "side", "shares"),
    [
        ("int8", "masks", "added", {(-128, -125): 0.98, (0, 0): 0.02}),
        ("int8", "tiny", "added", {(124, 127): 1.0, (124, 124): 0.25}),
        ("int8", "high", "other", {(-128, -128): 0.25, (127, 127): 0.25, (1, 1): 0.5}),
        ("float32", "tiny", "added", {(0, 0): 0.5, (1, 1): 0.5}),
        ("float32", "nan right", "right", {(np.inf, np.inf): 1 / 16, (1, 1): 0.75}),
        ("float32", "masks", "added", {(-np.inf, -1e9): 0.33, (0, 0): 0.37}),
    ],
)
def test_extremes_are_this_large_a_share(
    dtype: str, kind: str, side: Side, shares: dict[tuple[float, float], float]
) -> None:
    info = tensor("x", 64, 64, dtype=dtype, **({} if dtype == "float32" else {"scale": 0.5}))
    made = extreme(InputPlan(side=side, info=info), np.ones((64, 64), dtype), kind).astype(float)
    for (least, most), share in shares.items():
        assert np.mean((made >= least) & (made <= most)) == pytest.approx(share, abs=0.03)
