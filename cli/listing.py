"""`edge-opt passes` and `edge-opt targets`: what there is, read off the code."""

from edge_opt.cli import output
from edge_opt.cli.app import Passes, Targets
from edge_opt.passes import PASSES
from edge_opt.targets import load_target, target_names


def passes(_: Passes) -> int:
    """One line for each pass."""
    rows = [("pass", "proved to be", "what it does")]
    rows += [(name, str(chosen.demand), chosen.summary) for name, chosen in PASSES.items()]
    output.say(*output.table(rows, left=3))
    return 0


def targets(asked: Targets) -> int:
    """One line for each bundled target, or every fact of each."""
    known = [load_target(name) for name in target_names()]
    if asked.as_json:
        output.say_json({"targets": [target.to_dict() for target in known]})
        return 0
    rows = [("target", "form", "what it is")]
    rows += [(target.name, target.form, target.summary) for target in known]
    output.say(*output.table(rows, left=3))
    return 0
