"""`edge-opt shapes`: prints where derived shapes disagree with a file."""

from edge_opt.cli import output
from edge_opt.cli.app import Shapes
from edge_opt.conversion.container import open_container
from edge_opt.output.words import many
from edge_opt.shapes import derive


def run(asked: Shapes) -> int:
    """Derive every shape again (of a bundle: its prefill/decode model); 1 where one disagrees."""
    report = derive(open_container(asked.file).parts[0].model)
    if asked.as_json:
        output.say_json({"file": str(asked.file), **report.to_dict()})
    else:
        count = len(report.disagreements)
        verdict = many(count, "disagreement") if count else "all as the file says"
        counts = f"{report.derived} of {many(report.tensors, 'tensor')} derived"
        output.say(*map(str, report.disagreements), f"{counts}, {verdict}")
    return 1 if report.disagreements else 0
