"""The loop that generates: which numbers each call gets, and what goes from one call into the next. No model is run."""

from typing import Any

import numpy as np
import pytest
from proof_models import tensor

from edge_opt.runtime import tensors
from edge_opt.runtime.loop import Call, Loop, basic_input, is_basic, run
from edge_opt.runtime.tensors import (
    SignatureInfo,
    TensorInfo,
    growing_axis,
    longest_prefill,
    new_tokens,
)

Arrays = dict[str, Any]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (tensor("tokens", 1, 2, dtype="int32"), [[7, 8]]),
        (tensor("tokens", 2, dtype="int64"), [7, 8]),
        (tensor("input_pos", 4, dtype="int32"), [3, 4, 5, 6]),
        (tensor("input_pos", 2, 3, dtype="int32"), [[3, 4, 5]] * 2),
        (tensor("input_pos", dtype="int32"), 3),
        # offset, filled length twice, length of the update
        (tensor("param_tensor", 1, 1, 7, dtype="int32"), [[[3, 5, 5, 2, 0, 0, 0]]]),
        (tensor("valid_mask", 1, 4, dtype="bool"), [[True, True, False, False]]),
        # LiteRT-LM's number in float, and its codes in int16 and int8, whatever the scale.
        (tensor("mask", 1, 1, 2, 6), [[[[0] * 4 + [-1e9] * 2, [0] * 5 + [-1e9]]]]),
        (tensor("mask", 1, 1, 1, 5, dtype="int16", scale=0.8), [[[[0] * 4 + [-32767]]]]),
        (tensor("mask", 1, 1, 1, 5, dtype="bool"), [[[[True] * 4 + [False]]]]),
        (tensor("mask", 1, 1, 1, 5, dtype="int8", scale=1.0, zero=100), [[[[127] * 4 + [-128]]]]),
        (tensor("kv_cache_k_0", 1, 2, dtype="int8", scale=0.5, zero=-3), [[-3, -3]]),
        (tensor("kv_cache_k_0", 1, 2), [[0, 0]]),
    ],
)
def test_what_the_loop_gives_by_itself(info: TensorInfo, expected: Any) -> None:
    made = basic_input(info, np.array([[7, 8]]), start=3, valid=2, past={}, window=0)
    assert (made.dtype, made.shape, made.tolist()) == (np.dtype(info.dtype), info.shape, expected)
    assert is_basic(info)
    assert not is_basic(tensor("kv_slice_k_0", 1, 2))
    assert not is_basic(tensor("embeddings", 1, 2))
    assert not is_basic(tensor("param_tensor", 6, dtype="int32"))


@pytest.mark.parametrize(
    ("name", "start", "window", "visible"),
    [
        ("whole", 3, 0, [0, 1, 2, 8]),
        ("whole", 6, 3, [0, 1, 2, 3, 4, 5, 8]),
        ("local", 6, 0, [0, 1, 2, 3, 4, 5, 8]),
        ("local", 6, 3, [4, 5, 8]),
        ("ring", 3, 0, [0, 1, 2, 4]),
        # Positions 4, 5, 2 and 3 are in it, and a row sees four, itself among them.
        ("ring", 6, 0, [0, 1, 3, 4]),
        ("ring", 6, 3, [0, 1, 4]),
    ],
)
def test_a_mask_shows_what_was_read_so_far_or_a_window(
    name: str, start: int, window: int, visible: list[int]
) -> None:
    past = {"mask_whole": 8, "mask_local": 8, "mask_ring": 4}
    info = tensor(f"mask_{name}", 1, 1, 1, past[f"mask_{name}"] + 1)
    made = basic_input(info, np.array([[7]]), start=start, valid=1, past=past, window=window)
    assert np.flatnonzero(made[0, 0, 0] == 0).tolist() == visible


WORDS = 10
TOKENS, DECODED = tensor("tokens", 2, 4, dtype="int32"), tensor("tokens", 2, 1, dtype="int32")
POSITIONS, POSITION = tensor("input_pos", 4, dtype="int32"), tensor("input_pos", 1, dtype="int32")
SEEN, LOGITS = tensor("kv_cache_k_0", 2, 1), tensor("logits", 2, 1, WORDS)
PREFILL = Call("main", SignatureInfo("prefill", (TOKENS, POSITIONS, SEEN), (SEEN,)))
DECODE = Call("main", SignatureInfo("decode", (DECODED, POSITION, SEEN), (SEEN, LOGITS)))


def test_tokens_are_generated_one_after_the_other_from_what_the_calls_before_gave() -> None:
    """A model that says the sum of all tokens it has seen, which its cache holds."""
    calls: list[tuple[str, list[int], Any]] = []

    def invoke(call: Call, inputs: Arrays) -> Arrays:
        calls.append((call.signature.name, inputs["input_pos"].tolist(), inputs["tokens"].tolist()))
        total = inputs["kv_cache_k_0"] + inputs["tokens"].sum(axis=1, keepdims=True).astype(
            np.float32
        )
        logits = np.zeros((2, 1, WORDS), np.float32)
        logits[[0, 1], 0, total[:, 0].astype(int) % WORDS] = 1
        return {"kv_cache_k_0": total, "logits": logits}

    loop = Loop((PREFILL,), (DECODE,), 4, ((1, 2, 3), (4, 5, 6)), 3, LOGITS)
    logits = run(loop, invoke)
    assert calls[0] == ("prefill", [0, 1, 2, 3], [[1, 2, 0, 0], [4, 5, 0, 0]])
    assert [call[1] for call in calls[1:]] == [[2], [3], [4]]
    assert [call[2] for call in calls[1:]] == [[[3], [6]], [[6], [5]], [[2], [0]]]
    assert logits.shape == (3, 2, WORDS)
    assert logits.argmax(axis=-1).tolist() == [[6, 5], [2, 0], [4, 0]]


@pytest.mark.parametrize(
    ("cache", "part", "axis"),
    [((1, 6, 2), (1, 4, 2), 1), ((1, 2, 6), (1, 2, 1), 2), ((1, 6, 2), (1, 6, 2), None), ((1, 6, 2), (1, 4, 1), None),
     ((1, 6, 2), (4, 2), None)],
)  # fmt: skip
def test_a_cache_grows_along_the_one_axis_that_differs(
    cache: Any, part: Any, axis: int | None
) -> None:
    assert growing_axis(tensor("cache", *cache), tensor("part", *part)) == axis


@pytest.mark.parametrize(
    ("inputs", "outputs", "length"),
    [
        ("cache mask", "part", 6),
        ("cache mask", "", 9),
        ("cache pos words", "", 2),
        ("pos words", "", 0),
    ],
)
def test_a_cache_is_as_long_as_its_growing_axis_or_the_mask(
    inputs: str, outputs: str, length: int
) -> None:
    known = {
        "cache": tensor("kv_cache_k_0", 1, 6, 2),
        "part": tensor("kv_slice_k_0", 1, 4, 2),
        "mask": tensor("mask", 1, 1, 4, 9),
        "pos": tensor("input_pos", 12, dtype="int32"),
        "words": tensor("embeddings", 1, 4, 64),
    }
    given, made = (tuple(known[name] for name in names.split()) for names in (inputs, outputs))
    assert tensors.cache_length(SignatureInfo("s", given, made)) == length


def test_the_longest_prefill_with_the_readers_caches_is_taken() -> None:
    cache, other = tensor("kv_cache_k_0", 1, 6, 2), tensor("kv_cache_k_0", 1, 8, 2)

    def signature(name: str, length: int, held: TensorInfo = cache) -> SignatureInfo:
        return SignatureInfo(name, (tensor("tokens", 1, length, dtype="int32"), held), ())

    known = [
        signature("prefill_4", 4),
        signature("prefill_8", 8),
        signature("prefill_16", 16, other),
    ]
    known.append(signature("verify_32", 32))
    reader = signature("decode", 1)
    assert longest_prefill(known, reader) is known[1]
    assert longest_prefill(known[2:], reader) is None
    assert [new_tokens(each) for each in known] == [4, 8, 16, 32]
    assert new_tokens(SignatureInfo("s", (tensor("embeddings", 1, 5, 64),), ())) == 5
    assert new_tokens(SignatureInfo("s", (tensor("input_pos", 3, dtype="int32"),), ())) == 3
    assert new_tokens(SignatureInfo("s", (tensor("x", 3),), ())) == 1
