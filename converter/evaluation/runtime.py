"""Scores text with a bundle in LiteRT-LM: its executor for NPUs, which runs on CPU kernels where it is given no NPU.

LiteRT-LM gives the likelihoods of a text, and the tokens that it generates; not which token would have been most likely
in place of each one of the text. So agreement is measured on what is generated.

Loaded in a process of its own, as `checkpoint` is.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from edge_opt.evaluation.findings import GENERATED, Generated, Part, Said, other_tokens
from edge_opt.output.errors import UsageError

Step = Callable[[int, int], None]


def score(
    path: str,
    parts: Sequence[Part],
    *,
    checkpoint: str | None,
    skip_long: bool,
    judged: Mapping[str, Sequence[Generated]],
    step: Step,
) -> tuple[list[Said], dict[str, int]]:
    """What a bundle says of each prompt, and with how many of the tokens that others generated it agrees.

    Args:
        path: the bundle.
        parts: the prompts, as `findings.cut` cuts them.
        checkpoint: folder of the reference, whose tokenizer must give the same tokens; None where that is a bundle.
        skip_long: give nothing for a prompt that is longer than the cache, instead of the error.
        judged: what others generated, by name, prompt by prompt.
        step: called with (done, total).

    Raises:
        UsageError: a prompt is longer than the cache, or the reference's tokens are others.
    """
    runtime = _Runtime(path)
    if checkpoint is not None:
        _check_tokens(parts, runtime.encode, checkpoint)
    fitting = [runtime.fits(*part) for part in parts]
    if not (all(fitting) or (skip_long and any(fitting))):
        at = fitting.index(False)
        length = sum(len(runtime.encode(part)) for part in parts[at])
        raise UsageError(
            f"held-out prompt {at + 1} has {length} tokens, and the bundle's cache holds {runtime.room}, which must "
            f"leave room for {GENERATED} more: give a shorter one"
        )
    said, agreed = [], dict.fromkeys(judged, 0)
    for at, part in enumerate(parts):
        step(at, len(parts))
        said.append(runtime.say(*part) if fitting[at] else Said())
        for name, generated in judged.items():
            agreed[name] += runtime.agreeing(part[0], generated[at])
    step(len(parts), len(parts))
    return said, agreed


class _Runtime:
    """A bundle, opened."""

    def __init__(self, path: str) -> None:
        lm = importlib.import_module("litert_lm")
        self._engine: Any = lm.Engine(path, backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
        self._begin: int | None = self._engine.bos_token_id
        self.room: int = lm.ModelInfo(path).max_context_tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the one that every prompt begins with."""
        return list(self._engine.tokenize(text))

    def fits(self, before: str, scored: str) -> bool:
        """Whether the cache holds a prompt, and what is generated after its first part."""
        read, told = len(self.encode(before)) + 1, len(self.encode(scored))
        return read + max(told, GENERATED) < self.room

    def say(self, before: str, scored: str) -> Said:
        """Likelihoods of `scored` after `before`, and what the bundle would have said there."""
        with self._engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([before])
            likelihoods = session.run_text_scoring([scored]).token_scores[0]
        begin = [] if self._begin is None else [self._begin]
        ids = [*begin, *self.encode(before)], self.encode(scored)
        return Said(*ids, likelihoods, self.generate([before], GENERATED))

    def generate(self, told: Sequence[str], count: int) -> Generated:
        """The most likely tokens after a text, as text and id; fewer than `count` where the model ends."""
        with self._engine.create_session(apply_prompt_template=False, max_output_tokens=count) as session:
            session.run_prefill([*told])
            pieces = [one.texts[0] for one in session.run_decode_async()]
        # Pieces of which the tokenizer makes other tokens (half a character, say) have no id here.
        while len(ids := self.encode("".join(pieces))) != len(pieces):
            pieces.pop()
        return list(zip(pieces, ids, strict=True))

    def agreeing(self, before: str, generated: Generated) -> int:
        """How many tokens of another model are most likely here, too, each after the other model's tokens before it."""
        agreed = at = 0
        while at < len(generated):
            told = "".join(piece for piece, _ in generated[:at])
            own = self.generate([before, told] if told else [before], len(generated) - at)
            pairs = zip(own, generated[at:], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
            agreed += same
            at += same + 1
        return agreed


def _check_tokens(parts: Sequence[Part], encode: Callable[[str], list[int]], checkpoint: str) -> None:
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(checkpoint)
    for at, part in enumerate(parts):
        for text in part:
            theirs, ours = tokenizer(text, add_special_tokens=False)["input_ids"], encode(text)
            if theirs != ours:
                raise other_tokens(at, len(theirs), len(ours))
