"""A bundle in LiteRT-LM: its executor for NPUs, which runs on CPU kernels where it is given no NPU.

LiteRT-LM gives the likelihoods of a text, and the tokens that it generates; not which token would have been most likely
in place of each one of the text. So agreement is measured on what is generated. Loaded in a process of its own.
"""

import importlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from edge_opt.evaluation.findings import GENERATED, Generated, Part, Said, other_tokens
from edge_opt.output.errors import UsageError


class Runtime:
    """A bundle, opened; `room` is the length of its cache in tokens."""

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
