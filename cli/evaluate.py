"""`edge-opt evaluate`: print how much worse than their reference bundles are on held-out text."""

from collections.abc import Mapping, Sequence
from typing import Any

from edge_opt.build.evaluating import evaluate
from edge_opt.cli import output
from edge_opt.cli.app import Evaluate


def run(asked: Evaluate) -> int:
    """Evaluate; 1 where a bundle is worse than the limit."""
    with output.bar(wanted=not asked.quiet) as progress:
        found = evaluate(asked.reference, asked.bundles, asked.prompts, progress=progress)
    if asked.as_json:
        output.say_json(found.to_dict())
    elif not asked.quiet:
        output.say(*lines(found.to_dict()))
    limit = asked.max_perplexity_ratio
    if limit is None or found.within(limit):
        return 0
    output.complain(f"a bundle's perplexity is more than {limit:g} times the reference's")
    return 1


def lines(found: Mapping[str, Any], more: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """An `Evaluation` as plain values: a row for each model, then the text that it was scored on.

    `more` has further cells by a model's name, the heads under "".
    """
    further = more or {}
    head = ("", "perplexity", "of the reference's", "top-1 agreement", *further.get("", ()))
    reference = found["models"][0]["perplexity"]
    rows = [
        (
            model["source"],
            "no number" if model["perplexity"] is None else f"{model['perplexity']:.2f}",
            _ratio(model["perplexity"], reference),
            "-" if model["top1_agreement"] is None else f"{100 * model['top1_agreement']:.1f} %",
            *further.get(model["source"], ["-"] * len(further.get("", ()))),
        )
        for model in found["models"]
    ]
    scored = f"On {found['models'][0]['tokens']} tokens of {found['prompts']} held-out prompts"
    skipped = f"; {found['skipped']} more are longer than the cache" if found["skipped"] else ""
    return [*output.table([head, *rows]), "", f"{scored}{skipped}."]


def _ratio(perplexity: float | None, reference: float | None) -> str:
    return "-" if perplexity is None or reference is None else f"{perplexity / reference:.3f}"
