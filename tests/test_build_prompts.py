"""Prompts to calibrate with: read, counted, and joined into long ones where no prefill would run on a filled cache."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pretend_stages import FLOAT, write

from edge_opt.base.errors import UsageError
from edge_opt.building.prompts import (
    begin_as_litert_lm,
    check_lengths,
    plan_prompts,
    read_prompts,
    text_of,
    wording_of,
)

AROUND = 3
LLM_METADATA = 5
SHORT = [" ".join(f"{line}.{word}" for word in range(20)) for line in range(30)]
TURNS = """{% for turn in messages %}{{ raise_exception('no system') if turn.role == 'system' }}\
<turn>{{ turn.content }}</turn>{% endfor %}"""


def count(prompt: Any) -> int:
    """A word is a token, and a template puts some around them."""
    return len(text_of(prompt).split()) + AROUND


def words(number: int) -> str:
    return " ".join(map(str, range(number - AROUND)))


@pytest.mark.parametrize(
    ("more", "lengths", "cache", "room", "joined"),
    [
        ([], [16], 128, 0, [127]),
        ([{"prompt": words(120)}], [16], 128, 0, []),
        # Room is left for the tokens that calibration generates, an eighth of the cache at most.
        ([], [16], 128, 8, [120]),
        ([], [16], 128, 1000, [112]),
        # A prompt's last prefill is the shortest that takes the rest: 127 = 3 x 32 + 31 never runs the one of 16.
        ([], [16, 32], 128, 0, [127, 48]),
        ([words(48)], [16, 32], 128, 0, [127]),
        ([words(128 + 4)], [128, 32], 256, 0, [255, 160]),  # a few tokens on a filled cache are not enough
        # Calibration ends with an error where a padded prefill goes beyond the cache: 7 x 16 = 112 is the last end.
        ([], [16], 120, 0, [112]),
    ],
)  # fmt: skip
def test_prompts_are_joined_so_that_every_prefill_runs_on_a_filled_cache(
    more: list[Any], lengths: list[int], cache: int, room: int, joined: list[int]
) -> None:
    given = [*SHORT, *more]
    prompts, notes = plan_prompts(given, count, lengths, cache, room)
    assert prompts[: len(given)] == given
    assert [*map(count, prompts[len(given) :])] == joined
    assert not joined or prompts[len(given)].startswith("\n\n".join(SHORT[:2]))
    numbers = " and ".join(map(str, joined))
    said = f"prompt{'s' * (len(joined) > 1)} of {numbers} tokens"
    assert [said in note for note in notes] == [True] * bool(joined)


def test_a_prompt_that_does_not_fit_is_skipped_and_joined_ones_are_long_enough() -> None:
    prompts, notes = plan_prompts([*SHORT, words(115)], count, [16], 120)
    assert words(115) not in prompts
    assert "Skipped 1 prompt with more tokens than fit into a cache of 120" in notes
    for given in ([words(500), words(300)], [f"{at:050}" for at in range(200)]):
        assert count(plan_prompts(given, count, [16], 128)[0][-1]) == 127


@pytest.mark.parametrize(
    ("prompts", "lengths", "words"),
    [
        ([SHORT[0]] * 30, [16], "23 tokens in all, 89 are missing"),
        (
            SHORT[:2],
            [16, 32],
            "128 tokens and prefills of 16, 32: 43 tokens in all, 69 are missing",
        ),
    ],
)
def test_too_little_text_is_refused(prompts: list[str], lengths: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_prompts(prompts, count, lengths, 128)


@pytest.mark.parametrize("cache", [31, 16])
def test_a_cache_without_room_for_two_prefills_is_refused(cache: int) -> None:
    with pytest.raises(
        UsageError, match=r"no room for two prefills of 16.*cache=32 or more, or a shorter"
    ):
        check_lengths([8, 16], cache)
    check_lengths([8, 16], 32)


@pytest.mark.parametrize(
    "line",
    [
        "two",
        '{"question": "?"}',
        '{"prompt": ["?"]}',
        '{"messages": ["?"]}',
        '{"messages": [{"role": "system", "content": "three"}]}',
        '{"messages": [{"role": "system", "content": [{"text": "?"}]}, {"role": "user", "content": "four"}]}',
        '{"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": null}]}',
        "[" * 2_000,
        '"half an emoji: \\ud83d"',
    ],
)
def test_a_line_that_is_not_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"one"\n\n{{"text": "two"}}\n{line}\n')
    with pytest.raises(UsageError, match='line 4 is not a prompt: write JSON, "a prompt" or'):
        read_prompts(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turns", "text", "size"), [(None, "one two", 3), (TURNS, "<turn>one two</turn>", 5)]
)
def test_prompts_go_through_the_chat_template_and_a_base_model_reads_plain_text(
    tmp_path: Path, turns: str | None, text: str, size: int
) -> None:
    pytest.importorskip("litert_torch", reason="litert_torch is not installed (extra build)")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {
        word: index
        for index, word in enumerate(["<unk>", "<bos>", "one", "two", "<turn>", "</turn>"])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {
        "additional_special_tokens": ["<turn>", "</turn>"],
        "unk_token": "<unk>",
        "bos_token": "<bos>",
    }
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=turns, **special
    )
    whole.save_pretrained(tmp_path)
    transformers.LlamaConfig(vocab_size=6).save_pretrained(tmp_path)
    wording = wording_of(tmp_path)
    asked = {"messages": [{"role": "user", "content": "one two"}]}
    assert [wording.text(prompt) for prompt in ("one two", asked)] == [text] * 2
    assert [wording.count(prompt) for prompt in ("one two", {"text": ""})] == [size, size - 2]
    asked["messages"].insert(0, {"role": "system", "content": "be kind"})
    refused = pytest.raises(
        UsageError, match="the chat template refuses the prompt 'one two': no system"
    )
    with refused if turns else nullcontext():
        assert wording.text(asked) == text
    with pytest.raises(
        UsageError, match=r"gives token [35] for the prompt 'one two', and the .* has 3"
    ):
        replace(wording, vocabulary=3).count("one two")
    with pytest.raises(UsageError, match=r"float\.litertlm has no tokenizer"):
        wording_of(write(tmp_path / "float.litertlm", FLOAT))


@pytest.mark.slow
@pytest.mark.parametrize(("start", "first"), [("<begin>", [2]), (3, [3]), (None, [])])
def test_calibration_begins_texts_with_the_bundles_start_token_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str | int | None, first: list[int]
) -> None:
    """`<bos>` is in the vocabulary, too: litert-torch alone would begin with it."""
    pytest.importorskip("litert_torch")
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata
    from litert_torch.generative.export_hf.experimental.calib.tokenizer import Tokenizer
    from tokenizers import Tokenizer as Made
    from tokenizers.models import WordLevel

    words = {"<unk>": 0, "<bos>": 1, "<begin>": 2, "<other>": 3, "one": 4}
    Made(WordLevel(words, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    metadata = LlmMetadata()
    if isinstance(start, str):
        metadata.start_token.token_str = start
    elif start is not None:
        metadata.start_token.token_ids.ids.append(start)
    section = (LLM_METADATA, {}, metadata.SerializeToString())
    monkeypatch.setattr(Tokenizer, "bos_id", Tokenizer.bos_id)
    begin_as_litert_lm(write(tmp_path / "float.litertlm", FLOAT, section))
    tokenizer = Tokenizer(tokenizer_json_path=str(tmp_path / "tokenizer.json"))
    assert tokenizer.tokenize("one").tolist() == [*first, 4]


def test_the_text_of_a_prompt_is_what_the_user_says_with_unicode_separators(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}]
    assert text_of({"messages": [*turns, {"role": "user", "content": "two"}]}) == "one\ntwo"
    alike = "one", {"inputs": "one"}, {"text": "one", "prompt": "two"}
    assert [text_of(prompt) for prompt in alike] == ["one"] * 3
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one\u2028two"\r\n\n"three"\n', encoding="utf-8")
    assert read_prompts(path) == ["one\u2028two", "three"]


def test_prompts_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n"two"\n', encoding="utf-8-sig")
    assert read_prompts(path) == ["one", "two"]
