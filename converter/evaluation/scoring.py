"""Scores held-out text with one model, and says what that needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from edge_opt.evaluation.checkpoint import Checkpoint
from edge_opt.evaluation.findings import Generated, Part, Said
from edge_opt.evaluation.runtime import Runtime
from edge_opt.output.errors import UsageError

_RUNTIME = "litert-lm-api"


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


def check_runtimes(*, checkpoint: bool) -> dict[str, str]:
    """The version of what runs bundles; UsageError where that is missing, or what runs a checkpoint."""
    try:
        versions = {_RUNTIME: version(_RUNTIME)}
    except PackageNotFoundError:
        raise UsageError(
            "bundles are evaluated in LiteRT-LM, which is not installed: pip install '.[lm]' in a checkout of edge-opt "
            "(a build goes on without it with evaluate=False)"
        ) from None
    missing = [name for name in ("torch", "transformers") if checkpoint and find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a checkpoint runs in transformers, and {' and '.join(missing)} is not installed: pip install "
            f"'.[build]' in a checkout of edge-opt, or give a float bundle as the reference"
        )
    return versions
