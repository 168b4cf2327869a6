"""What a comparison is going to call, and with which inputs: from signatures alone, nothing is run."""

from pathlib import Path
from typing import Any

import pytest

from edge_opt.base.errors import UsageError
from edge_opt.comparison import compare as comparing
from edge_opt.comparison.compare import choose
from edge_opt.comparison.generate import FilledCaches, _can_fill, _plan, _Planner
from edge_opt.runtime.inputs import Stored
from edge_opt.runtime.loop import Loop
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo


def tensor(
    name: str, *shape: int, dtype: str = "float32", declared: tuple[int, ...] | None = None
) -> TensorInfo:
    return TensorInfo(name, name, shape, declared or shape, dtype)


CACHE, PART = tensor("kv_cache_k_0", 1, 16, 8), tensor("kv_slice_k_0", 1, 4, 8)
LOGITS = tensor("logits", 1, 1, 50)


def tokens(length: int, batch: int = 1) -> TensorInfo:
    return tensor("tokens", batch, length, dtype="int32")


PREFILL = SignatureInfo("prefill_4", (tokens(4), CACHE), (CACHE,))
LONG = SignatureInfo("prefill_8", (tokens(8), CACHE), (CACHE,))
DECODE = SignatureInfo("decode", (tokens(1), CACHE), (CACHE, LOGITS))
SPLIT = SignatureInfo(
    "decode",
    (tensor("embeddings", 1, 1, 64), tensor("mask", 1, 1, 1, 17), tensor("pos_emb_cos", 1, 1, 8), CACHE),
    (tensor("kv_slice_k_0", 1, 1, 8), LOGITS),
)
EMBEDDER = SignatureInfo("decode_embedder", (tokens(1),), (tensor("embeddings", 1, 1, 64),))
OTHER_EMBEDDER = SignatureInfo("prefill_embedder", (tokens(4),), (tensor("embeddings", 1, 4, 64),))
ROPE = SignatureInfo("rope", (tensor("input_pos", 1, dtype="int32"),), (tensor("pos_emb_cos", 1, 1, 8),))
MASKS = SignatureInfo("masks", (tensor("input_pos", 1, dtype="int32"),), (tensor("mask", 1, 1, 1, 17),))
UPDATE = SignatureInfo("update", (CACHE, tensor("kv_slice_k_0", 1, 1, 8)), (CACHE,))


def planner(*main: SignatureInfo, **others: list[SignatureInfo]) -> _Planner:
    return _Planner("model.tflite", {"main": list(main), **others})


def called(made: _Planner, step: SignatureInfo) -> list[tuple[str, str]]:
    return [(call.model, call.signature.name) for call in made.calls(step)]


def test_a_decode_signature_has_caches_and_one_output_of_logits() -> None:
    verify = SignatureInfo("verify", (tokens(4),), (LOGITS,))
    two = SignatureInfo("two", (tokens(1), CACHE), (LOGITS, tensor("more_logits", 1, 1, 50)))
    prefill = SignatureInfo("prefill_4", (tokens(4), CACHE), (CACHE, LOGITS))
    made = planner(prefill, verify, two, DECODE)
    assert made.decode() is DECODE
    assert made.prefill(DECODE) is prefill
    assert planner(PREFILL, LONG).prefill(DECODE) is LONG
    with pytest.raises(UsageError, match=r"has no decode signature with caches .*, there is verify, two"):
        planner(verify, two).decode()
    with pytest.raises(
        UsageError, match="has no prefill signature with the caches of 'decode', there is verify"
    ):
        planner(verify).prefill(DECODE)


def test_helpers_are_called_before_and_what_updates_the_caches_behind() -> None:
    assert called(planner(PREFILL, DECODE), DECODE) == [("main", "decode")], "tokens in, caches out"
    made = planner(SPLIT, embedder=[OTHER_EMBEDDER, EMBEDDER], auxiliary=[ROPE, MASKS, UPDATE])
    assert called(made, SPLIT) == [
        ("embedder", "decode_embedder"), ("auxiliary", "masks"), ("auxiliary", "rope"), ("main", "decode"),
        ("auxiliary", "update"),
    ]  # fmt: skip


GIVE, BESIDE = "; give the one that was exported with it", ".tflite beside it: give one with"


@pytest.mark.parametrize(
    ("helpers", "said"),
    [
        (
            {"embedder": None},
            f"input 'embeddings' comes from the embedder model, and there is no embedder{BESIDE} --embedder",
        ),
        ({"embedder": [OTHER_EMBEDDER]}, f"the embedder model gives no 'embeddings' of 1x1x64{GIVE}"),
        (
            {"auxiliary": None},
            f"input 'mask' comes from the auxiliary model, and there is no auxiliary{BESIDE} --auxiliary",
        ),
        ({"auxiliary": [MASKS, UPDATE]}, f"the auxiliary model gives no 'pos_emb_cos' of 1x1x8{GIVE}"),
        ({"auxiliary": [ROPE, MASKS]}, "no signature of the auxiliary model updates its caches"),
    ],
)
def test_what_is_missing_is_said_and_what_to_give(helpers: dict[str, Any], said: str) -> None:
    given = {"embedder": [EMBEDDER], "auxiliary": [ROPE, MASKS, UPDATE], **helpers}
    made = planner(SPLIT, **{name: known for name, known in given.items() if known is not None})
    with pytest.raises(UsageError) as caught:
        made.calls(SPLIT)
    assert str(caught.value) == f"model.tflite, signature 'decode': {said}"


def test_caches_that_nothing_updates_are_said() -> None:
    step = SignatureInfo("decode", (tokens(1), CACHE), (tensor("kv_slice_k_0", 1, 1, 8), LOGITS))
    with pytest.raises(
        UsageError, match=r"its caches are updated by the auxiliary model, and there is no auxiliary"
    ):
        planner(step).calls(step)
    whole = SignatureInfo("update", (CACHE,), (CACHE,))
    with pytest.raises(UsageError, match=r"no signature of the auxiliary model updates its caches"):
        planner(step, auxiliary=[whole]).calls(step)


def test_inputs_that_nobody_knows_are_said() -> None:
    odd = SignatureInfo("decode", (tokens(1), tensor("per_layer", 1, 3), CACHE), (CACHE, LOGITS))
    with pytest.raises(
        UsageError, match="input 'per_layer' of 1x3 is not known here, expected tokens, positions"
    ):
        planner(odd).calls(odd)
    asking = SignatureInfo("embedder", (tokens(1), tensor("x", 2)), (tensor("embeddings", 1, 1, 64),))
    step = SignatureInfo("decode", (tensor("embeddings", 1, 1, 64), CACHE), (CACHE, LOGITS))
    with pytest.raises(UsageError, match="embedder model, signature 'embedder': input 'x' is not known here"):
        planner(step, embedder=[asking]).calls(step)
    calls = called(planner(step, embedder=[EMBEDDER]), step)
    assert calls == [("embedder", "decode_embedder"), ("main", "decode")]


def test_lengths_that_are_known_at_run_time_only_are_refused() -> None:
    open_tokens = tensor("tokens", 1, 1, dtype="int32", declared=(1, -1))
    loose = SignatureInfo("decode", (open_tokens, CACHE), (CACHE, LOGITS))
    with pytest.raises(UsageError, match="signature 'decode': input 'tokens' has a dynamic shape"):
        planner(loose).decode()


class Worker:
    """Knows the signatures of a model, and no more."""

    def __init__(self, *known: SignatureInfo) -> None:
        self.known = known

    def describe(self, _: Any) -> list[SignatureInfo]:
        return list(self.known)


def planned(*known: SignatureInfo, count: int = 3, seed: int = 0, prompt: Any = None) -> Loop:
    return _plan(Worker(*known), {"main": Path("model.tflite")}, "model.tflite", count, seed, prompt)  # type: ignore[arg-type]


LENGTHS = tensor("mask", 1, 1, 1, 16)


def test_a_prompt_is_as_long_as_the_prefill_and_one_if_the_cache_has_room() -> None:
    decode = SignatureInfo("decode", (tokens(1), LENGTHS, CACHE), (CACHE, LOGITS))
    loop = planned(PREFILL, LONG, decode)
    assert (loop.rows, loop.count, loop.logits) == (8, 3, "logits")
    assert [len(row) for row in loop.prompt] == [9]
    assert all(1 <= token < 50 for row in loop.prompt for token in row)
    assert len(planned(LONG, decode, count=12).prompt[0]) == 16 - 12 + 1
    assert len(planned(LONG, decode, count=15).prompt[0]) == 2
    with pytest.raises(
        UsageError, match=r"model.tflite: 16 tokens do not fit into a cache of 16: generate fewer"
    ):
        planned(LONG, decode, count=16)
    assert planned(LONG, decode, seed=1).prompt != loop.prompt
    assert planned(LONG, decode, prompt=((1, 2),)).prompt == ((1, 2),)


def test_every_row_of_a_batch_has_a_prompt() -> None:
    logits = tensor("logits", 3, 1, 50)
    decode = SignatureInfo("decode", (tokens(1, 3), CACHE), (CACHE, logits))
    assert len(planned(SignatureInfo("prefill", (tokens(4, 3), CACHE), (CACHE,)), decode).prompt) == 3
    flat = SignatureInfo("decode", (tokens(1), CACHE), (CACHE, tensor("logits", 1, 50)))
    assert len(planned(PREFILL, flat).prompt) == 1


# Caches


def caches(*known: SignatureInfo, seed: int = 0, **filled: Any) -> FilledCaches:
    described = {one.name: one for one in known}
    return FilledCaches(None, b"", described, seed, None, **filled)  # type: ignore[arg-type]


def test_a_prefill_fills_the_caches_that_it_gives_back() -> None:
    assert _can_fill(PREFILL)
    assert _can_fill(SignatureInfo("prefill", (tokens(4), CACHE), (PART,)))
    assert _can_fill(SignatureInfo("prefill", (tokens(4), CACHE), (tensor("kv_slice_k_0", 1, 16, 8),)))
    open_tokens = tensor("tokens", 1, 4, dtype="int32", declared=(1, -1))
    open_cache = tensor("kv_cache_k_0", 1, 16, 8, declared=(1, -1, 8))
    for signature in (
        SignatureInfo("no way out", (tokens(4), CACHE), ()),
        SignatureInfo("another shape", (tokens(4), CACHE), (tensor("kv_cache_k_0", 1, 4, 8),)),
        SignatureInfo("two axes", (tokens(4), CACHE), (tensor("kv_slice_k_0", 1, 4, 4),)),
        SignatureInfo("one token", (tokens(1), CACHE), (CACHE,)),
        SignatureInfo("any length", (open_tokens, CACHE), (CACHE,)),
        SignatureInfo("any size", (tokens(4), open_cache), (CACHE,)),
        SignatureInfo("empty", (tokens(4), tensor("kv_cache_k_0", 0, 8)), (tensor("kv_cache_k_0", 0, 8),)),
    ):
        assert not _can_fill(signature), signature.name


def test_signatures_are_served_by_the_longest_prefill_or_by_none() -> None:
    other = SignatureInfo("other", (tokens(1), tensor("kv_cache_v_0", 1, 16, 8)), (LOGITS,))
    plain = SignatureInfo("plain", (tokens(1),), (LOGITS,))
    served = caches(PREFILL, LONG, DECODE, other, plain).served(["prefill_4", "decode", "other", "plain"])
    assert served == ({"prefill_8": ["prefill_4", "decode"]}, ["other"])


@pytest.mark.parametrize(
    ("count", "starts"),
    [(0, []), (1, [0]), (4, [0]), (5, [0, 4]), (16, [0, 4, 8, 12]), (17, [0, 4, 8, 12, 12])],
)
def test_chunks_reach_as_far_as_is_needed_and_not_beyond_the_cache(count: int, starts: list[int]) -> None:
    prefill = SignatureInfo("prefill", (tokens(4), tensor("mask", 1, 1, 4, 16), CACHE), (CACHE,))
    chunks = caches(prefill)._chunks(prefill, count, 0)
    assert [chunk.start for chunk in chunks] == starts
    assert all({made.start for made in chunk.plans} == {chunk.start} for chunk in chunks)
    seeds = {made.seed for chunk in chunks for made in chunk.plans}
    assert len(seeds) == len(chunks)
    others = caches(prefill)._chunks(prefill, count, 1)
    assert seeds.isdisjoint({made.seed for chunk in others for made in chunk.plans})


def test_caches_are_read_no_further_than_they_are_filled(tmp_path: Path) -> None:
    decode = SignatureInfo("decode", (tensor("input_pos", 1, dtype="int32"), CACHE), (CACHE, LOGITS))
    stored = Stored(str(tmp_path), 0, CACHE)
    for seed in range(8):
        made = caches(decode, seed=seed, stored={("decode", 0, "kv_cache_k_0"): stored}, reach={"decode": 2})
        position, cache = made.plan("decode", 0)
        assert position.start <= 2
        assert (position.stored, cache.stored) == (None, stored)
        assert made.plan("decode", 1)[1].stored is None
    assert max(caches(decode, seed=seed).plan("decode", 0)[0].start for seed in range(8)) > 2


# Signatures


def test_signatures_are_chosen_by_name_and_at_least_one() -> None:
    names = ["prefill", "decode"]
    assert choose(names, None) == names
    assert choose(names, "decode") == ["decode"]
    assert choose(names, ["decode", "prefill", "decode"]) == ["decode", "prefill"]
    with pytest.raises(UsageError, match="no signature is chosen, there is prefill, decode"):
        choose(names, [])
    with pytest.raises(UsageError, match="decoder"):
        choose(names, ["decoder"])


def test_inputs_are_paired_by_name_or_by_place() -> None:
    x, y, z = tensor("x", 1), tensor("y", 2), tensor("z", 3)
    assert comparing._match([x, y], [y, z], by_place=False) == ([(y, y)], [(x, True), (z, False)])
    assert comparing._match([x, y], [y], by_place=True) == ([(x, y)], [(y, True)])
    assert comparing._match([x], [y, z], by_place=True) == ([(x, y)], [(z, False)])
