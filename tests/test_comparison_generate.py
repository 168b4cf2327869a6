"""Two models generate text from one prompt, through prefill and decode: the tokens must be the same."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import generation_models as models
import numpy as np
import pytest
from bundles import bundle, model_part
from cli_runs import Captured, run
from generation_models import ROWS, export
from proof_models import tensor

from edge_opt import compare, load
from edge_opt.base.errors import UsageError
from edge_opt.comparison.findings import GenerationComparison
from edge_opt.comparison.generate import plan_loop
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.runtime.loop import Call, Loop
from edge_opt.runtime.loop import run as run_loop
from edge_opt.runtime.protocol import Arrays, RuntimeRefused
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split export with its helpers, one that computes something else, and unsplit ones."""
    return export(
        tmp_path_factory.mktemp("export"),
        embedder=models.embedder(),
        auxiliary=models.auxiliary(),
        model=models.split(),
        other=models.split(-1.0),
        unsplit=models.unsplit(),
    )


def generated(a: Any, b: Any, count: int = 8, **options: Any) -> GenerationComparison:
    return compare(a, b, generate=count, locate=False, **options).generation


def by_hand(prompt: list[int], count: int) -> list[int]:
    """The same model in a few lines of numpy, without any cache."""
    words, head, tokens = models.table(), models.table(1), list(prompt)
    for _ in range(count):
        seen = words[tokens]
        scores = seen[-1] @ seen.T
        weights = np.exp(scores - scores.max())
        mixed = weights / weights.sum() @ seen[:, ::-1]
        tokens.append(int((head @ mixed).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["model", "unsplit"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loop_generates_what_the_model_means(name: str, seed: int, folder: Path) -> None:
    path = folder / f"{name}.tflite"
    found = generated(path, path, count=11, seed=seed)
    (prompt,) = found.prompt
    assert len(prompt) == ROWS + 1
    assert [step[0] for step in found.a] == by_hand(list(prompt), 11)
    assert found.equal
    assert found.logits.bitwise
    content = path.read_bytes()
    if name == "unsplit":
        assert generated(content, load(content)).equal, "in memory"


def test_other_tokens_are_a_difference(folder: Path) -> None:
    report = compare(folder / "model.tflite", folder / "other.tflite", generate=8, atol=1e9)
    assert all(each.equal for each in report.signatures), (
        "only the tokens differ within this tolerance"
    )
    found = report.generation
    place = found.first_difference
    assert found.a[:place] == found.b[:place]
    assert not report.equal
    assert f"from step {place} of 8 on" in report.summary()


def test_missing_helpers_are_said_and_one_models_serve_the_other(
    folder: Path, tmp_path: Path
) -> None:
    path = export(tmp_path / "alone", model=models.split()) / "model.tflite"
    with pytest.raises(
        UsageError, match=r"no model computes input 'embeddings' \[1, 4, 8\] of the main"
    ):
        generated(path, path)
    assert generated(folder / "model.tflite", path).equal
    assert generated(path, folder / "model.tflite").equal
    wrong = models.embedder().replace("GATHER(", "EMBEDDING_LOOKUP(")
    whole = {"model": models.split(), "embedder": wrong, "auxiliary": models.auxiliary()}
    path = export(tmp_path / "wrong", **whole) / "model.tflite"
    with pytest.raises(RuntimeRefused, match="embedder model, signature"):
        generated(path, path)


def test_a_bundle_brings_its_own_helpers_and_the_command_generates(
    tmp_path: Path, capsys: Captured
) -> None:
    def generate(a: bytes, b: bytes, *more: str) -> Any:
        paths = tmp_path / "a.litertlm", tmp_path / "b.litertlm"
        for path, content in zip(paths, (a, b), strict=True):
            path.write_bytes(content)
        return run(capsys, "compare", *paths, "--generate", "8", *more)

    whole = models.packed(tmp_path).read_bytes()
    mains = (to_bytes(parse(models.split(scale))) for scale in (1.0, -1.0))
    bare, other = (bundle([model_part("prefill_decode", main)]) for main in mains)
    ran = generate(whole, bare)
    assert (ran.code, ran.err) == (0, "")
    assert "Generated: 8 generated tokens are the same, after a prompt of 5" in ran.out
    ran = generate(whole, other, "--json")
    said = ran.json["generation"]
    assert (ran.code, said["equal"], said["count"], len(said["a"]), len(said["b"])) == (
        1,
        False,
        8,
        8,
        8,
    )
    sentence = generate(bare, bare).failed_in_one_sentence(2)
    assert "put embedder.tflite and auxiliary.tflite of the same export beside it" in sentence


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "expected 1 to 100000"),
        (100_001, "expected 1"),
        (100_000, "do not fit into its cache of 16:"),
    ],
)
def test_too_little_or_too_much_to_generate_is_refused(count: int, said: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=said):
        generated(folder / "unsplit.tflite", folder / "unsplit.tflite", count=count)
    assert generated(folder / "unsplit.tflite", folder / "unsplit.tflite", count=1).count == 1


def tokens(length: int, batch: int = 1) -> TensorInfo:
    return tensor("tokens", batch, length, dtype="int32")


CACHE = tensor("kv_cache_k_0", 1, 16, 8)
LOGITS, EMBEDDINGS = tensor("logits", 1, 1, 50), tensor("embeddings", 1, 1, 64)
PREFILL = SignatureInfo("prefill_4", (tokens(4), CACHE), (CACHE,))
LONG = SignatureInfo("prefill_8", (tokens(8), CACHE), (CACHE,))
DECODE = SignatureInfo("decode", (tokens(1), tensor("mask", 1, 1, 1, 16), CACHE), (CACHE, LOGITS))
SPLIT = SignatureInfo(
    "decode",
    (EMBEDDINGS, tensor("mask", 1, 1, 1, 17), tensor("pos_emb_cos", 1, 1, 8), CACHE),
    (tensor("kv_slice_k_0", 1, 1, 8), LOGITS),
)
EMBEDDER = SignatureInfo("decode_embedder", (tokens(1),), (EMBEDDINGS,))
OTHER_EMBEDDER = SignatureInfo("prefill_embedder", (tokens(4),), (tensor("embeddings", 1, 4, 64),))
ROPE = SignatureInfo(
    "rope", (tensor("input_pos", 1, dtype="int32"),), (tensor("pos_emb_cos", 1, 1, 8),)
)
MASKS = SignatureInfo(
    "masks", (tensor("input_pos", 1, dtype="int32"),), (tensor("mask", 1, 1, 1, 17),)
)
UPDATE = SignatureInfo("update", (CACHE, tensor("kv_slice_k_0", 1, 1, 8)), (CACHE,))


def planned(
    *main: SignatureInfo,
    count: int = 3,
    seed: int = 0,
    prompt: Any = None,
    **others: list[SignatureInfo],
) -> Loop:
    return plan_loop("model.tflite", {"main": list(main), **others}, count, seed, prompt)


def called(loop: Loop) -> list[str]:
    return [f"{call.model} {call.signature.name}" for call in loop.decode]


def test_helpers_are_called_before_and_what_updates_the_caches_behind() -> None:
    verify = SignatureInfo("verify", (tokens(4),), (LOGITS,))
    prefill = SignatureInfo("prefill_4", (tokens(4), CACHE), (CACHE, LOGITS))
    assert called(planned(prefill, verify, DECODE)) == ["main decode"], "tokens in, caches out"
    other = SignatureInfo("other", (CACHE, tensor("kv_slice_v_0", 1, 1, 8)), (CACHE,))
    updates = [other, UPDATE, SignatureInfo("again", UPDATE.inputs, UPDATE.outputs)]
    helpers = {"embedder": [OTHER_EMBEDDER, EMBEDDER], "auxiliary": [ROPE, MASKS, *updates]}
    expected = ("embedder decode_embedder", "auxiliary rope", "main decode", "auxiliary update")
    assert tuple(called(planned(PREFILL, SPLIT, **helpers))) == expected, (
        "the loop makes masks itself"
    )


def test_a_per_layer_embedder_computes_the_input_with_its_prefix() -> None:
    per_layer = tensor("per_layer_embeddings", 1, 1, 2, 8)
    step = SignatureInfo("decode", (EMBEDDINGS, per_layer, CACHE), (CACHE, LOGITS))
    own = SignatureInfo("per_layer", (tokens(1),), (replace(per_layer, name="embeddings"),))
    loop = planned(PREFILL, step, embedder=[EMBEDDER], per_layer_embedder=[own])
    ran: dict[str, Arrays] = {}

    def invoke(call: Call, inputs: Arrays) -> Arrays:
        ran[call.model] = inputs
        filler = {"embedder": 1, "per_layer_embedder": 2}.get(call.model, 0)
        return {
            info.name: np.full(info.shape, filler, info.dtype) for info in call.signature.outputs
        }

    run_loop(loop, invoke)
    assert (ran["main"]["embeddings"] == 1).all()
    assert (ran["main"]["per_layer_embeddings"] == 2).all()
    with pytest.raises(UsageError, match="no model computes input 'embeddings'"):
        planned(PREFILL, step, per_layer_embedder=[own])


def test_the_last_prefill_of_a_prompt_has_room_for_all_of_its_rows() -> None:
    prefill = SignatureInfo("prefill_6", (tokens(6), CACHE), (CACHE,))
    assert planned(prefill, DECODE, count=1, prompt=(tuple(range(13)),)).rows == 6
    with pytest.raises(UsageError, match="18 tokens do not fit into its cache of 16"):
        planned(prefill, DECODE, count=1, prompt=(tuple(range(14)),))


OPEN = replace(tokens(1), declared=(1, -1))
LOOSE = SignatureInfo("decode", (OPEN, CACHE), (CACHE, LOGITS))
ODD = SignatureInfo("decode", (tokens(1), tensor("per_layer", 1, 3), CACHE), (CACHE, LOGITS))
ASKING = SignatureInfo("embedder", (tokens(1), tensor("x", 2)), (EMBEDDINGS,))
EMBEDDED = SignatureInfo("decode", (EMBEDDINGS, CACHE), (CACHE, LOGITS))


@pytest.mark.parametrize(
    ("main", "helpers", "said"),
    [
        ([PREFILL], {}, "no decode signature"),
        ([DECODE], {}, "no prefill signature"),
        ([PREFILL, SPLIT], {"auxiliary": [ROPE, MASKS, UPDATE]}, "input 'embeddings' [1, 1, 64] of the main model"),
        ([PREFILL, SPLIT], {"embedder": [OTHER_EMBEDDER]}, "input 'embeddings' [1, 1, 64] of the main model"),
        (
            [PREFILL, SPLIT], {"embedder": [EMBEDDER], "auxiliary": [ROPE, MASKS]},
            "no model updates its caches",
        ),
        ([PREFILL, LOOSE], {}, "input 'tokens' has a dynamic shape"),
        ([PREFILL, ODD], {}, "input 'per_layer' [1, 3] of the main model"),
        ([PREFILL, EMBEDDED], {"embedder": [ASKING]}, "input 'x' [2] of the embedder model"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_and_what_to_do(
    main: Any, helpers: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        planned(*main, **helpers)


@pytest.mark.parametrize("shape", [(), (1, 1, 1), (1, 3, 50), (2, 50), (0,), (1, 1, 0)])
def test_logits_that_are_not_one_row_a_prompt_are_refused(shape: tuple[int, ...]) -> None:
    decode = replace(DECODE, outputs=(CACHE, tensor("logits", *shape)))
    with pytest.raises(
        UsageError, match=r"signature 'decode': output 'logits' has shape \[.*\], expected \[batch"
    ):
        planned(PREFILL, decode)


def test_a_step_that_takes_another_number_of_tokens_is_refused() -> None:
    decode = replace(DECODE, inputs=(tokens(3), *DECODE.inputs[1:]))
    with pytest.raises(
        UsageError, match=r"'decode': input 'tokens' \[1, 3\] of .* must have 1 element"
    ):
        planned(PREFILL, decode)


def test_a_prompt_is_as_long_as_the_prefill_and_one_if_the_cache_has_room() -> None:
    loop = planned(PREFILL, LONG, DECODE)
    assert (loop.rows, loop.count, loop.logits) == (8, 3, LOGITS)
    assert [len(row) for row in loop.prompt] == [9]
    assert all(1 <= token < 50 for row in loop.prompt for token in row)
    assert len(planned(LONG, DECODE, count=12).prompt[0]) == 16 - 12 + 1
    assert planned(LONG, DECODE, seed=1).prompt != loop.prompt
    assert planned(LONG, DECODE, prompt=((1, 2),)).prompt == ((1, 2),)
    batch = SignatureInfo("decode", (tokens(1, 3), CACHE), (CACHE, tensor("logits", 3, 1, 50)))
    assert (
        len(planned(SignatureInfo("prefill", (tokens(4, 3), CACHE), (CACHE,)), batch).prompt) == 3
    )
