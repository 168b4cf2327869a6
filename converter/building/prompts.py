"""Reads calibration prompts, applies the chat template, counts tokens, and joins prompts if all are short.

Tokens are counted as in litert-torch's calibration, with its tokenizer, loaded only in stage processes.
"""

import importlib
import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt.base.errors import UsageError
from edge_opt.base.words import many
from edge_opt.building.sections import metadata_of

_TEXTS = ("text", "prompt", "inputs")
"""Keys of a prompt's text, as in litert-torch's calibration."""
_NEARLY = 7 / 8
"""Share of the longest fitting prompt that nearly fills a cache."""
_JOINT = "\n\n"
_CALIBRATION = "litert_torch.generative.export_hf.experimental"
_TOKENIZERS = {"spm_model_path": "SP_Tokenizer", "tokenizer_json_path": "tokenizer_json_path"}
"""Arguments of litert-torch's tokenizer, and the names of their files among a bundle's parts."""


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file, one JSON value per line; UsageError if it is empty or a line is not a prompt."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a byte order mark
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts {path} cannot be read: {reason}") from error
    if not text.strip():
        raise UsageError(f"prompts {path} is empty: give ten or more that are typical of real use")
    prompts = []
    # Not `splitlines`: JSON strings may contain Unicode line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
            json.dumps(prompt, ensure_ascii=False).encode()  # fails for lone surrogates
        except (ValueError, RecursionError):
            prompt = None
        if not text_of(prompt):
            raise UsageError(
                f'prompts {path}, line {number} is not a prompt: write JSON, "a prompt" or {{"prompt": "a prompt"}} or '
                f'{{"messages": [{{"role": "user", "content": "a prompt"}}]}}, one per line'
            )
        prompts.append(prompt)
    return prompts


def text_of(prompt: Any) -> str:
    """The user's text in a prompt, or an empty string."""
    return "\n".join(turn["content"] for turn in _turns(prompt) if turn.get("role") == "user")


def _turns(prompt: Any) -> list[dict[str, str]]:
    """The turns of a conversation; plain text is one user turn. Empty if one has other content than text."""
    if isinstance(prompt, dict):
        texts = [prompt[key] for key in _TEXTS if isinstance(prompt.get(key), str)]
        turns = prompt.get("messages")
        if not texts and isinstance(turns, list):
            return turns if all(map(_is_turn, turns)) else []
        prompt = texts[0] if texts else None
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def rendered(template: str, turns: list[Any], *, asks: bool = True, **tokens: str) -> str:
    """The text of a conversation, up to the model's next answer if it `asks` for one; raises what the template raises.

    `tokens` are the texts of special tokens by name, such as `bos_token`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [turns], chat_template=template, add_generation_prompt=asks, **tokens
    )
    return str(texts[0])


def check_lengths(lengths: Sequence[int], cache: int) -> None:
    """Raise UsageError if a prefill can never run on a filled cache, because its ranges could not be found."""
    if not lengths:
        raise UsageError(
            "the bundle has no entry point prefill_N: export it with litert-torch, for an NPU"
        )
    if 2 * max(lengths) > cache:
        raise UsageError(
            f"a cache of {cache} tokens has no room for two prefills of {max(lengths)}, so calibration cannot see one "
            f"on a filled cache: give cache={2 * max(lengths)} or more, or a shorter prefill=..."
        )


def plan_prompts(
    prompts: Sequence[Any],
    count: Callable[[Any], int],
    lengths: Sequence[int],
    cache: int,
    room: int = 0,
) -> tuple[list[Any], list[str]]:
    """Keep the prompts that fit into the cache, and add longer ones joined from the given prompts if needed.

    Returns the prompts, and notes on how they differ from the given ones.

    `count` gives a prompt's tokens, including the chat template's. The prompts must nearly fill the cache, with `room`
    for generated tokens, and must run a prefill of each length in `lengths` on a filled cache; UsageError if there is
    too little text.
    """
    kept: list[Any] = []
    sizes: list[int] = []
    for prompt in prompts:
        tokens = count(prompt)
        if _fits(tokens, lengths, cache):
            kept.append(prompt)
            sizes.append(tokens)
    longest = max(sizes, default=0)
    joined: list[str] = []
    notes: list[str] = []
    if len(kept) < len(prompts):
        skipped = many(len(prompts) - len(kept), "prompt")
        notes.append(f"Skipped {skipped} with more tokens than fit into a cache of {cache}")
    for least, most in _wanted_sizes(lengths, cache, room):
        if any(least <= tokens <= most for tokens in sizes):
            continue
        text = _joined(prompts, count, most)
        tokens = count(text)
        if tokens < least:
            raise UsageError(
                f"the prompts have too little text to calibrate a cache of {cache} tokens and prefills of "
                f"{', '.join(map(str, lengths))}: {many(tokens, 'token')} in all, {least - tokens} are missing; "
                f"give more or longer prompts, or a shorter cache=..."
            )
        kept.append(text)
        sizes.append(tokens)
        joined.append(str(tokens))
    if joined:
        notes.append(
            f"Joined from your prompts, of which the longest has {longest} tokens: {many(len(joined), 'prompt')} of "
            f"{' and '.join(joined)} tokens, so that a prefill runs on a filled cache"
        )
    return kept, notes


def _wanted_sizes(lengths: Sequence[int], cache: int, room: int) -> Iterator[tuple[int, int]]:
    """Least and most tokens of prompts that calibration needs: one fills the cache, others end with short prefills."""
    generated = max(1, min(room, cache // 8))
    sizes = range(cache - generated, 0, -1)
    longest = next(size for size in sizes if _fits(size, lengths, cache))
    yield math.ceil(_NEARLY * longest), longest
    for length in sorted(lengths)[:-1]:
        most = min(max(lengths) + length, longest)
        yield most - length // 2, most


def _fits(tokens: int, lengths: Sequence[int], cache: int) -> bool:
    """True if the cache has room for the prompt, one more token, and all prefills, which write whole lengths.

    All but the last prefill have the longest length, the last one the shortest that holds the rest.
    """
    before = max(tokens - 1, 0) // max(lengths) * max(lengths)
    last = min(length for length in lengths if length >= tokens - before)
    return 0 < tokens < cache and before + last <= cache


def _joined(prompts: Sequence[Any], count: Callable[[Any], int], most: int) -> str:
    """Join the prompts, each once, and cut the text to at most `most` tokens."""
    whole = _JOINT.join(dict.fromkeys(map(text_of, prompts)))
    # Counting a whole text may take long: most have some four characters a token.
    too_long = most
    while too_long < len(whole) and count(whole[:too_long]) <= most:
        too_long *= 2
    ends = range(1, min(too_long, len(whole)) + 1)
    characters = bisect_right(ends, most, key=lambda end: count(whole[:end]))
    return whole[:characters]


@dataclass(frozen=True, slots=True)
class Wording:
    """Formats prompts for calibration with the model's chat template; a base model has none and reads plain text.

    `vocabulary` is the number of tokens that a checkpoint knows, infinite for a bundle.
    """

    tokenizer: Any
    template: str | None
    vocabulary: float = math.inf

    def text(self, prompt: Any) -> str:
        """The prompt as the model reads it, up to its answer; UsageError if the template fails."""
        if self.template is None:
            return text_of(prompt)
        special = getattr(self.tokenizer.tx_tokenizer, "special_tokens_map", {})
        try:
            return rendered(self.template, _turns(prompt), **special)
        except Exception as error:  # a template may raise anything
            raise UsageError(
                f"the chat template refuses the prompt {text_of(prompt)!r:.60}: {error}"
            ) from error

    def count(self, prompt: Any) -> int:
        """The number of tokens of a prompt in calibration; UsageError if the checkpoint does not know one of them."""
        tokens = self.tokenizer.tokenize(self.text(prompt))
        last = max(tokens, default=0)
        if last >= self.vocabulary:
            raise UsageError(
                f"the tokenizer gives token {last} for the prompt {text_of(prompt)!r:.60}, and the checkpoint's "
                f"vocabulary has {self.vocabulary} tokens: resize its embeddings and train the new ones"
            )
        return len(tokens)


def wording_of(model: Path) -> Wording:
    """The wording for a bundle or a checkpoint; UsageError if a bundle has no tokenizer."""
    make = importlib.import_module(f"{_CALIBRATION}.calib.tokenizer").Tokenizer
    return _of_checkpoint(model, make) if model.is_dir() else _of_bundle(model, make)


def begin_as_litert_lm(bundle: Path) -> None:
    """Make litert-torch's calibration begin each text with the bundle's start token, or with none, as LiteRT-LM does.

    It would look for one of three names in the tokenizer. The first token of a text often has the largest activations:
    without the right one, their ranges are too small.
    """
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata

    metadata = metadata_of(bundle, "LlmMetadataProto", LlmMetadata)
    start = (metadata or LlmMetadata()).start_token

    def first(tokenizer: Any) -> Any:
        if not start.token_str:
            return next(iter(start.token_ids.ids), None)
        if tokenizer.spm is not None:
            return tokenizer.spm.PieceToId(start.token_str)
        return tokenizer.tx_tokenizer.convert_tokens_to_ids(start.token_str)

    importlib.import_module(f"{_CALIBRATION}.calib.tokenizer").Tokenizer.bos_id = property(first)


def _of_checkpoint(folder: Path, make: Any) -> Wording:
    from transformers import AutoConfig

    tokenizer = make(transformers_model_path=str(folder))
    template = tokenizer.tx_tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    described = AutoConfig.from_pretrained(folder).get_text_config()
    return Wording(tokenizer, template, getattr(described, "vocab_size", math.inf))


def _of_bundle(bundle: Path, make: Any) -> Wording:
    opener = importlib.import_module(f"{_CALIBRATION}.litertlm_bundle.litertlm_bundle")
    with tempfile.TemporaryDirectory() as folder:
        found = opener.unpack_litertlm(str(bundle), folder)
        files = {name: found[part] for name, part in _TOKENIZERS.items() if part in found}
        if not files:
            raise UsageError(
                f"{bundle} has no tokenizer, so it cannot read calibration prompts: export it again with one"
            )
        return Wording(make(**files), found.get("chat_template"))
