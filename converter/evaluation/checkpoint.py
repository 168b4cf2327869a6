"""Scores text with a checkpoint, as transformers runs it in float32. Loaded in a process of its own."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge_opt.evaluation.findings import Generated, Said


def score(
    folder: str,
    said: Sequence[Said],
    *,
    judged: Mapping[str, Sequence[Generated]],
    step: Callable[[int, int], None],
) -> tuple[list[Said], dict[str, int]]:
    """Likelihoods of the very tokens that a bundle scored, and with how many generated tokens the checkpoint agrees.

    Args:
        folder: the checkpoint.
        said: what a bundle said of each prompt, for its tokens.
        judged: what bundles generated, by name, prompt by prompt.
        step: called with (done, total).
    """
    model = _Model(folder)
    own, agreed = [], dict.fromkeys(judged, 0)
    for at, one in enumerate(said):
        step(at, len(said))
        own.append(replace(one, likelihoods=model.likelihoods(one.before, one.scored), generated=[]))
        for name, generated in judged.items():
            agreed[name] += model.agreeing(one.before, [token for _, token in generated[at]])
    step(len(said), len(said))
    return own, agreed


class _Model:
    """A checkpoint, loaded."""

    def __init__(self, folder: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        loaded = importlib.import_module("transformers").AutoModelForCausalLM
        self._model: Any = loaded.from_pretrained(folder, dtype=self._torch.float32).eval()

    def likelihoods(self, before: Sequence[int], scored: Sequence[int]) -> list[float]:
        """The log-likelihood of each token of `scored` after all before it."""
        if not scored:
            return []
        rows = self._rows(before, scored).log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, scored, strict=True)]

    def agreeing(self, before: Sequence[int], generated: Sequence[int]) -> int:
        """How many tokens are the most likely ones, each after all before it."""
        if not generated:
            return 0
        most_likely = self._rows(before, generated).argmax(-1).tolist()
        return sum(own == token for own, token in zip(most_likely, generated, strict=True))

    def _rows(self, before: Sequence[int], told: Sequence[int]) -> Any:
        """Logits `[len(told), vocabulary]` for each token that was told."""
        tokens = self._torch.tensor([[*before, *told]])
        with self._torch.no_grad():
            logits = self._model(input_ids=tokens, logits_to_keep=len(told) + 1).logits
        return logits[0, :-1].float()
