"""Makes a bundle's chat template give LiteRT-LM the text that transformers gives.

LiteRT-LM renders a template with other values than transformers:

    content of a message    "a text"                ->  [{"type": "text", "text": "a text"}], since LiteRT-LM 0.18
    bos_token, eos_token    the tokens' texts       ->  undefined
    start token             where bos_token stands  ->  before the rendered text

For a new turn it reads only the text behind that of the turns before. If that ends with a line break, which no model
generates behind its end token, the line break is lost.
"""

import json
from pathlib import Path
from string import Template

from edge_opt.building.prompts import rendered
from edge_opt.building.sections import metadata_of

# The empty texts keep jinja from removing white space at the template's ends.
_AROUND = Template("""\
{%- set texts = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is not string and message.content is iterable -%}
{%- set parts = message.content | selectattr('type', 'equalto', 'text') -%}
{%- set message = dict(message, content=parts | map(attribute='text') | join) -%}
{%- endif -%}
{%- set texts.messages = texts.messages + [message] -%}
{%- endfor -%}
{%- set messages = texts.messages -%}
{%- set bos_token = '' -%}
{%- set eos_token = $end -%}
{%- set whole -%}{{ '' }}$template{{ '' }}{%- endset -%}
{{- whole if add_generation_prompt else whole.rstrip('\\n') -}}
""")
_TURNS = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]


def mend_template(path: Path, checkpoint: Path) -> str:
    """Put statements around a bundle's template, and drop a start token that the template gives itself.

    A template that fails with these statements is left as it is, and the returned note says so; else it is empty. Stop
    tokens, which litert-torch writes in an order of chance, are sorted.
    """
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    notes: list[str] = []

    def mend(metadata: LlmMetadata) -> None:
        metadata.stop_tokens.sort(key=lambda token: token.SerializeToString())
        if not metadata.jinja_prompt_template:
            return
        template = mended(metadata.jinja_prompt_template, tokenizer.eos_token)
        try:
            text = rendered(template, _TURNS[:1])
        except Exception as error:  # a template may raise anything
            notes.append(f"Warning: the chat template is kept, and may fail in LiteRT-LM: {error}")
            return
        metadata.jinja_prompt_template = template
        if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
            metadata.ClearField("start_token")

    metadata_of(path, "LlmMetadataProto", LlmMetadata, edit=mend)
    return "".join(notes)


def mended(template: str, end: str | None) -> str:
    """The template between statements; `end` is the text of `eos_token`.

    The text of a conversation has to begin that of a longer one. `eos_token` is empty if it breaks that: Phi-3's
    template has it behind the last answer only.
    """
    own = template.removesuffix("\n")  # as jinja does
    for text in (end or "", ""):
        whole = _AROUND.substitute(end=json.dumps(text, ensure_ascii=False), template=own)
        if _goes_on(whole):
            break
    return whole


def _goes_on(template: str) -> bool:
    """True if the text of a conversation with another question begins with that of the one before."""
    try:
        before = rendered(template, _TURNS[:2], asks=False)
        return rendered(template, _TURNS).startswith(before)
    except Exception:  # a template may raise anything
        return False
