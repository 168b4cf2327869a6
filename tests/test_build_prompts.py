"""Prompts to calibrate with: read, counted, and joined into long ones where no prefill would run on a filled cache."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pretend_stages import FLOAT, write

from edge_opt.base.errors import UsageError
from edge_opt.build.prompts import Plan, check_lengths, plan, read_prompts, text_of, wording_of

AROUND = 3
SHORT = [" ".join(f"{line}.{word}" for word in range(20)) for line in range(30)]


def count(prompt: Any) -> int:
    """A word is a token, and a template puts some around them."""
    return len(text_of(prompt).split()) + AROUND


def planned(prompts: list[Any], *lengths: int, cache: int, room: int = 0) -> Plan:
    found = plan(prompts, count, lengths, cache, room)
    assert found.tokens == [count(prompt) for prompt in found.prompts]
    return found


def words(number: int) -> str:
    return " ".join(map(str, range(number - AROUND)))


def test_short_prompts_are_joined_into_one_that_fills_the_cache_and_it_is_said() -> None:
    found = planned(SHORT, 16, cache=128)
    assert found.prompts[:-1] == SHORT
    assert found.tokens[-1] == 127
    assert found.prompts[-1].startswith("\n\n".join(SHORT[:5]))
    (note,) = found.notes
    assert note.startswith(
        "Joined from your prompts, of which the longest has 23 tokens: 1 prompt of 127 tokens"
    )


def test_prompts_that_reach_everything_stay_as_they_are() -> None:
    prompts = [*SHORT[:2], {"prompt": words(120)}]
    assert planned(prompts, 16, cache=128) == Plan(prompts, [23, 23, 120])


def test_room_is_left_for_the_tokens_that_calibration_generates() -> None:
    assert planned(SHORT, 16, cache=128, room=8).tokens[-1] == 120
    assert planned(SHORT, 16, cache=128, room=1000).tokens[-1] == 112, "an eighth of the cache at most"


def test_every_length_of_the_prefill_runs_on_a_filled_cache() -> None:
    """A prompt's last prefill is the shortest that takes the rest: 127 = 3 x 32 + 31 never runs the one of 16."""
    found = planned(SHORT, 16, 32, cache=128)
    assert found.tokens[len(SHORT) :] == [127, 48]
    assert "2 prompts of 127 and 48 tokens" in found.notes[0]
    assert planned([*SHORT, words(48)], 16, 32, cache=128).tokens[len(SHORT) :] == [48, 127]
    few = planned([*SHORT, words(128 + 4)], 128, 32, cache=256)
    assert few.tokens[len(SHORT) :] == [132, 255, 160], "a few tokens on a filled cache are not enough"


def test_no_prompt_is_joined_that_the_last_prefill_has_no_room_for() -> None:
    """Calibration ends with an error where a padded prefill goes beyond the cache: 7 x 16 = 112 is the last end."""
    assert planned(SHORT, 16, cache=120).tokens[-1] == 112
    found = planned([*SHORT, words(115)], 16, cache=120)
    assert 115 not in found.tokens
    assert "Skipped 1 prompt with more tokens than fit into a cache of 120" in found.notes
    assert planned([words(500), words(300)], 16, cache=128).tokens == [127]


@pytest.mark.parametrize(
    ("prompts", "lengths", "words"),
    [
        ([SHORT[0]] * 30, [16], "23 tokens in all, 89 are missing"),
        (SHORT[:2], [16, 32], "128 tokens and prefills of 16, 32: 43 tokens in all, 69 are missing"),
    ],
)
def test_too_little_text_is_refused_and_what_is_given_twice_counts_once(
    prompts: list[str], lengths: list[int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan(prompts, count, lengths, 128)


@pytest.mark.parametrize("cache", [31, 16])
def test_a_cache_without_room_for_two_prefills_is_refused(cache: int) -> None:
    with pytest.raises(
        UsageError, match=r"no room for two prefills of 16.*cache=32 or more, or a shorter prefill"
    ):
        check_lengths([8, 16], cache)
    check_lengths([8, 16], 32)


TURNS = """{% for turn in messages %}{{ raise_exception('no system') if turn.role == 'system' }}\
<turn>{{ turn.content }}</turn>{% endfor %}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "text", "tokens"), [(None, "one two", 3), (TURNS, "<turn>one two</turn>", 5)]
)
def test_prompts_go_through_the_chat_template_and_a_base_model_reads_plain_text(
    tmp_path: Path, template: str | None, text: str, tokens: int
) -> None:
    pytest.importorskip("litert_torch", reason="litert_torch is not installed (extra build)")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["<unk>", "<bos>", "one", "two", "<turn>", "</turn>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"additional_special_tokens": ["<turn>", "</turn>"], "unk_token": "<unk>", "bos_token": "<bos>"}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)
    whole.save_pretrained(tmp_path)
    wording = wording_of(tmp_path)
    turns = {"messages": [{"role": "user", "content": "one two"}]}
    assert [wording.text(prompt) for prompt in ("one two", turns)] == [text] * 2
    assert [wording.count(prompt) for prompt in ("one two", {"text": ""})] == [tokens, tokens - 2]
    turns["messages"].insert(0, {"role": "system", "content": "be kind"})
    refused = pytest.raises(UsageError, match="the chat template refuses the prompt 'one two': no system")
    with refused if template else nullcontext():
        assert wording.text(turns) == text
    with pytest.raises(UsageError, match=r"float\.litertlm has no tokenizer"):
        wording_of(write(tmp_path / "float.litertlm", FLOAT))


def test_the_text_of_a_prompt_is_what_the_user_says_and_a_separator_of_unicode_ends_none(
    tmp_path: Path,
) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}]
    assert text_of({"messages": [*turns, {"role": "user", "content": "two"}]}) == "one\ntwo"
    assert {text_of(prompt) for prompt in ("one", {"inputs": "one"}, {"text": "one", "prompt": "two"})} == {
        "one"
    }
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one\u2028two"\r\n\n"three"\n', encoding="utf-8")
    assert read_prompts(path) == ["one\u2028two", "three"]
