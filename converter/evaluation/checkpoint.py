"""A checkpoint as transformers runs it in float32. Loaded in a process of its own."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge_opt.evaluation.findings import Generated, Said


class Checkpoint:
    """The checkpoint of a Hugging Face folder; it scores the very tokens that a bundle scored."""

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
