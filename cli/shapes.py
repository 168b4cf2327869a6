"""`edge-opt shapes`: prints where derived shapes disagree with a file, and which operators have a rule."""

from pathlib import Path

from edge_opt.cli import output
from edge_opt.conversion.container import open_container
from edge_opt.shapes import coverage, coverage_counts, coverage_page, derive


def run(file: Path, *, as_json: bool) -> int:
    """Derive every shape again (of a bundle: its prefill/decode model); 1 where one disagrees."""
    report = derive(open_container(file).parts[0].model)
    if as_json:
        output.say_json({"file": str(file), **report.to_dict()})
    else:
        for disagreement in report.disagreements:
            output.say(str(disagreement))
        count = len(report.disagreements)
        output.say(
            f"{report.derived} of {output.many(report.tensors, 'tensor')} derived, "
            f"{output.many(count, 'disagreement') if count else 'all as the file says'}"
        )
    return 1 if report.disagreements else 0


def run_coverage(*, as_json: bool) -> int:
    """The table of rules, as the documentation has it."""
    if as_json:
        rows = [row._asdict() for row in coverage()]
        output.say_json({"operators": rows, "counts": coverage_counts()})
    else:
        output.say(coverage_page().rstrip())
    return 0
