"""Scores held-out text with one model, which is loaded in a process of its own.

LiteRT-LM gives the likelihoods of a text, and the tokens that it generates; not which token would have been most likely
in place of each one of the text. So agreement is measured on what is generated.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record

Part = tuple[str, str]
"""A prompt in two parts: what is read, and what is scored."""
Generated = list[tuple[str, int]]
"""Tokens, as text and id."""

GENERATED = 16
"""Tokens that a bundle generates after the first part of each prompt."""
_MOST_SCORED = 512
"""Characters of a prompt that are scored: each token of them is one decode step."""
_HIGHEST = 700.0
"""Nats whose exponential is still a number."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says of one prompt: ids of the tokens `before` and `scored`, and the log-likelihood of the latter.

    `generated` are the tokens that it finds most likely after `before`, one after the other.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)
    generated: Generated = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model: over how many held-out tokens its perplexity is.

    `top1_agreement` is the share of the tokens that the model generates greedily, which the reference, too, finds most
    likely at that place; of the reference it is 1, and None where nothing was generated.
    """

    source: str
    tokens: int
    perplexity: float
    top1_agreement: float | None

    @classmethod
    def of(cls, source: str, said: Sequence[Said], agreed: int | None) -> "ModelScore":
        """The figures of one model; `agreed` is how many generated tokens are the reference's, too; None for itself."""
        likelihoods = [value for one in said for value in one.likelihoods]
        mean = -sum(likelihoods) / len(likelihoods)
        perplexity = math.inf if mean > _HIGHEST else math.exp(mean)
        generated = sum(len(one.generated) for one in said)
        share = 1.0 if agreed is None else agreed / generated if generated else None
        return cls(source, len(likelihoods), perplexity, share)


@dataclass(frozen=True, slots=True)
class Evaluation(Record):
    """The reference, then the bundles in the order in which they were given.

    `prompts` is how many were scored, `skipped` how many were longer than the cache.
    """

    models: list[ModelScore]
    prompts: int
    skipped: int = 0

    def within(self, limit: float) -> bool:
        """Whether every bundle's perplexity is at most `limit` times the reference's; a model of NaN is not."""
        reference, *bundles = (model.perplexity for model in self.models)
        return all(perplexity <= limit * reference for perplexity in bundles)


def cut(text: str) -> Part | None:
    """The part of a prompt that is read, and the part that is scored; None where it is too short for both.

    The second half is scored, of a long one its end, from a space on: so tokenizers make the same of both parts as of
    the whole.
    """
    text = text.strip()
    earliest = max(len(text) // 2, len(text) - _MOST_SCORED)
    space = re.search(r"\s", text[earliest:])
    at = earliest + space.start() if space else earliest
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else None


def other_tokens(at: int, theirs: int, ours: int) -> UsageError:
    """The error for a reference that makes other tokens of the prompt at this place, so many of a part of it."""
    return UsageError(
        f"the reference has another vocabulary than the bundle: it makes other tokens of held-out prompt {at + 1} "
        f"({theirs} of a part, the bundle {ours}); give the model that the bundle was made from"
    )


def score(
    model: str,
    step: Callable[[int, int], None],
    *,
    parts: Sequence[Part],
    skip_long: bool,
    tokenizer: str | None = None,
    said: Sequence[Mapping[str, Any]] | None = None,
    judged: Mapping[str, Sequence[Generated]] | None = None,
) -> dict[str, Any]:
    """What a model says of each prompt (`said`), and with how many generated tokens of others it agrees (`agreed`).

    Args:
        model: a bundle, or the folder of a checkpoint.
        step: called with (done, total).
        parts: the prompts, as `findings.cut` cuts them.
        skip_long: give nothing for a prompt that is longer than a bundle's cache, instead of the error.
        tokenizer: of a bundle, the folder of the reference, whose tokenizer must give the same tokens.
        said: for a checkpoint, what a bundle said of the prompts: their tokens.
        judged: what others generated, by name, prompt by prompt.

    Raises:
        UsageError: a prompt is longer than the cache, or the reference's tokens are others.
    """
    scorer: Any
    texts: Sequence[Any]
    if said is not None:
        scorer, texts = Checkpoint(model), [Said(**one) for one in said]
    else:
        scorer = Runtime(model)
        if tokenizer is not None:
            scorer.check_tokens(parts, tokenizer)
        texts = scorer.fitting(parts, skip_long=skip_long)
    scored, agreed = [], dict.fromkeys(judged or {}, 0)
    for at, text in enumerate(texts):
        step(at, len(texts))
        scored.append(asdict(scorer.say(text)))
        for name, generated in (judged or {}).items():
            agreed[name] += scorer.agreeing(text, generated[at])
    step(len(texts), len(texts))
    return {"said": scored, "agreed": agreed}


class Runtime:
    """A bundle in LiteRT-LM's executor for NPUs, which runs on CPU kernels where it is given no NPU.

    `room` is the length of its cache in tokens.
    """

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        self._engine: Any = lm.Engine(path, backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._begin: int | None = self._engine.bos_token_id
        self.room: int = lm.ModelInfo(path).max_context_tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the one that every prompt begins with."""
        return list(self._engine.tokenize(text))

    def fitting(self, parts: Sequence[Part], *, skip_long: bool) -> list[Part | None]:
        """The prompts; None for one that is longer than the cache, which is a UsageError without `skip_long`."""
        fits = [self._fits(*part) for part in parts]
        if not (all(fits) or (skip_long and any(fits))):
            at = fits.index(False)
            length = sum(len(self.encode(text)) for text in parts[at])
            raise UsageError(
                f"held-out prompt {at + 1} has {length} tokens, and the bundle's cache holds {self.room}, which must "
                f"leave room for {GENERATED} more: give a shorter one"
            )
        return [part if fit else None for part, fit in zip(parts, fits, strict=True)]

    def check_tokens(self, parts: Sequence[Part], checkpoint: str) -> None:
        """UsageError where the tokenizer of this folder makes other tokens of a prompt."""
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(checkpoint)
        for at, part in enumerate(parts):
            for text in part:
                theirs, ours = tokenizer(text, add_special_tokens=False)["input_ids"], self.encode(text)
                if theirs != ours:
                    raise other_tokens(at, len(theirs), len(ours))

    def say(self, part: Part | None) -> Said:
        """Likelihoods of the second part after the first, and what the bundle generates there; nothing for None."""
        if part is None:
            return Said()
        before, scored = part
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([before])
            likelihoods = session.run_text_scoring([scored]).token_scores[0]
        begin = [] if self._begin is None else [self._begin]
        ids = [*begin, *self.encode(before)], self.encode(scored)
        return Said(*ids, likelihoods, self.generate([before], GENERATED))

    def generate(self, texts: Sequence[str], count: int) -> Generated:
        """The most likely tokens after the texts, as text and id; fewer than `count` where the model ends."""
        with self._engine.create_session(apply_prompt_template=False, max_output_tokens=count) as session:
            session.run_prefill([*texts])
            pieces = [one.texts[0] for one in session.run_decode_async()]
        # Pieces of which the tokenizer makes other tokens (half a character, say) have no id here.
        while len(ids := self.encode("".join(pieces))) != len(pieces):
            pieces.pop()
        return list(zip(pieces, ids, strict=True))

    def agreeing(self, part: Part | None, generated: Generated) -> int:
        """How many tokens of another model are most likely here, too, each after the other model's tokens before it."""
        agreed = at = 0
        while part is not None and at < len(generated):
            before = "".join(piece for piece, _ in generated[:at])
            own = self.generate([part[0], before] if before else [part[0]], len(generated) - at)
            pairs = zip(own, generated[at:], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
            agreed += same
            at += same + 1
        return agreed

    def _fits(self, before: str, scored: str) -> bool:
        """Whether the cache holds a prompt, and what is generated after its first part."""
        read, rest = len(self.encode(before)) + 1, len(self.encode(scored))
        return read + max(rest, GENERATED) < self.room


class Checkpoint:
    """The checkpoint of a Hugging Face folder, in float32; it scores the very tokens that a bundle scored."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        loaded = importlib.import_module("transformers").AutoModelForCausalLM
        self._model: Any = loaded.from_pretrained(folder, dtype=self._torch.float32).eval()

    def say(self, text: Said) -> Said:
        """The log-likelihood of each token of `text.scored` after all before it."""
        if not text.scored:
            return replace(text, likelihoods=[], generated=[])
        rows = self._logits(text.before, text.scored).log_softmax(-1)
        likelihoods = [float(row[token]) for row, token in zip(rows, text.scored, strict=True)]
        return replace(text, likelihoods=likelihoods, generated=[])

    def agreeing(self, text: Said, generated: Generated) -> int:
        """How many generated tokens are the most likely ones, each after all before it."""
        tokens = [token for _, token in generated]
        if not tokens:
            return 0
        most_likely = self._logits(text.before, tokens).argmax(-1).tolist()
        return sum(own == token for own, token in zip(most_likely, tokens, strict=True))

    def _logits(self, before: Sequence[int], tokens: Sequence[int]) -> Any:
        """Float logits `[len(tokens), vocabulary]`: what is expected in the place of each of the tokens."""
        ids = self._torch.tensor([[*before, *tokens]])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1].float()
