"""Chat templates: LiteRT-LM gives them other values than transformers, and the same text has to come out."""

from pathlib import Path
from typing import Any

import pytest
from pretend_stages import FLOAT, write

pytest.importorskip("transformers", reason="transformers is not installed (extra build)")

from edge_opt.building.chat_template import mend_template, mended
from edge_opt.building.prompts import rendered
from edge_opt.schema.litertlm import read_bundle

CHATML = """{% for turn in messages %}<|{{ turn.role }}|>{{ turn['content'] }}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
JOINED = """{{ bos_token }}{% for turn in messages %}{{ '[' + turn['content'] + ']' + eos_token }}\
{% endfor %}
"""
LAST = """{% for turn in messages %}{{ '[' + turn['content'] + ']' }}{% endfor %}\
{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"""
REFUSES = "{{ raise_exception('no') }}"
TURNS = [("user", " one\n"), ("assistant", "two"), ("user", "three")]
LLM_METADATA = 5


def as_texts(count: int) -> Any:
    return [{"role": role, "content": text} for role, text in TURNS[:count]]


def as_parts(count: int) -> Any:
    """As LiteRT-LM gives them."""
    return [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in TURNS[:count]
    ]


@pytest.mark.parametrize("template", [CHATML, JOINED, f"\n {CHATML}", f"{JOINED}\n"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_text_is_that_of_transformers_but_for_the_start_token(
    template: str, count: int
) -> None:
    wanted = rendered(template, as_texts(count), bos_token="<s>", eos_token="</s>")
    ours = mended(template, "</s>")
    assert [rendered(ours, turns(count)) for turns in (as_texts, as_parts)] == [
        wanted.removeprefix("<s>")
    ] * 2


@pytest.mark.parametrize("template", [CHATML, JOINED, LAST])
def test_a_turn_begins_with_all_that_follows_the_models_end_token(template: str) -> None:
    ours = mended(template, "</s>")
    before = rendered(ours, as_parts(2), asks=False)
    whole = rendered(ours, as_parts(3))
    assert whole.startswith(before)
    assert before.endswith(("<end>", "</s>", "]"))
    assert whole == rendered(template, as_texts(3), bos_token="", eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "begin"),
    [(JOINED, "<s>"), (f"<s>{CHATML}", ""), (CHATML, "<s>"), ("", "<s>"), (REFUSES, "<s>")],
)
def test_the_start_token_of_a_conversation_comes_once(
    tmp_path: Path, template: str, begin: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    proto = pytest.importorskip("litert_lm_builder.runtime.proto.llm_metadata_pb2")
    words = tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    given = proto.LlmMetadata(jinja_prompt_template=template)
    given.start_token.token_str = "<s>"
    for stop in ("</s>", "<end>", "</a>"):
        given.stop_tokens.add().token_str = stop
    section = (LLM_METADATA, {}, given.SerializeToString())
    path = write(tmp_path / "m.litertlm", FLOAT, section)
    note = mend_template(path, tmp_path)
    assert ("the chat template is kept, and may fail in LiteRT-LM: no" in note) == (
        template == REFUSES
    )
    content = read_bundle(path).content(0)
    found = proto.LlmMetadata.FromString(content.read(0, content.size))
    assert found.start_token.token_str == begin
    assert [token.token_str for token in found.stop_tokens] == ["</a>", "</s>", "<end>"]
    assert (found.jinja_prompt_template == template) == (template in ("", REFUSES))
