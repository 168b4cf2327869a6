"""Held-out text as it is scored, what a model says of it, and the figures that follow."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_opt.output.errors import UsageError
from edge_opt.output.record import Record

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


def score(source: str, said: Sequence[Said], agreed: int | None) -> ModelScore:
    """The figures of one model; `agreed` is how many generated tokens are the reference's, too; None for itself."""
    likelihoods = [value for one in said for value in one.likelihoods]
    generated = sum(len(one.generated) for one in said)
    share = 1.0 if agreed is None else agreed / generated if generated else None
    return ModelScore(source, len(likelihoods), _perplexity(likelihoods), share)


def other_tokens(at: int, theirs: int, ours: int) -> UsageError:
    """The error for a reference that makes other tokens of the prompt at this place, so many of a part of it."""
    return UsageError(
        f"the reference has another vocabulary than the bundle: it makes other tokens of held-out prompt {at + 1} "
        f"({theirs} of a part, the bundle {ours}); give the model that the bundle was made from"
    )


def _perplexity(likelihoods: Sequence[float]) -> float:
    """In tokens; infinite where a model gives a token no chance at all."""
    mean = -sum(likelihoods) / len(likelihoods)
    return math.inf if mean > _HIGHEST else math.exp(mean)
