"""`edge-opt explain`: prints the verdict on every site."""

from edge_opt.cli import output
from edge_opt.cli.app import Explain
from edge_opt.cli.inspect import describe
from edge_opt.inspection import Explanation
from edge_opt.inspection import explain as explain_model
from edge_opt.ir.words import shortened
from edge_opt.passes import Status


def run(asked: "Explain") -> int:
    """Explain one model; nothing is run or written."""
    found = explain_model(asked.file)
    if asked.as_json:
        output.say_json({"file": str(asked.file), "sites": [explanation.to_dict() for explanation in found]})
        return 0
    if not found:
        output.say("No site: the model holds nothing that a pass could apply to.")
    for explanation in found:
        output.say(_line(explanation))
    return 0


def _line(explanation: Explanation) -> str:
    site = explanation.verdict
    if site.status is Status.CONVERTED:
        verdict = "would be converted"
    else:
        verdict = f"{'nothing to do' if site.settled else site.status}: {site.reason}"
    where = f"{site.signature}#{site.index} {site.pass_name}: {verdict}"
    form = "" if explanation.block is None else f"\n    {describe(explanation.block)}"
    return f"{where}{form}\n    at '{shortened(site.operator)}'"
