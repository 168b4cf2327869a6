"""`edge-opt evaluate`: print how much worse than their reference bundles are on held-out text."""

from edge_opt.build.evaluating import evaluate
from edge_opt.cli import output
from edge_opt.cli.app import Evaluate
from edge_opt.evaluation.findings import Evaluation


def run(asked: Evaluate) -> int:
    """Evaluate; 1 where a bundle is worse than the limit."""
    with output.bar(wanted=not asked.quiet) as progress:
        found = evaluate(asked.reference, asked.bundles, asked.prompts, progress=progress)
    if asked.as_json:
        output.say_json(found.to_dict())
    elif not asked.quiet:
        output.say(table(found))
    limit = asked.max_perplexity_ratio
    if limit is None or found.within(limit):
        return 0
    output.complain(f"a bundle's perplexity is more than {limit:g} times the reference's")
    return 1


def table(found: Evaluation) -> str:
    """A row for each model, and the text that it was scored on."""
    head = ("", "perplexity", "of the reference's", "top-1 agreement")
    reference = found.models[0].perplexity
    rows = [
        (
            model.source,
            f"{model.perplexity:.2f}",
            f"{model.perplexity / reference:.3f}",
            "-" if model.top1_agreement is None else f"{100 * model.top1_agreement:.1f} %",
        )
        for model in found.models
    ]
    note = f"On {found.models[0].tokens} tokens of {found.prompts} held-out prompts"
    skipped = f"; {found.skipped} more are longer than the cache" if found.skipped else ""
    return f"{output.table([head, *rows])}\n\n{note}{skipped}."
