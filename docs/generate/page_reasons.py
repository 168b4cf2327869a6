"""The kinds of reasons for skipping something, from the code."""

from edge_opt.ir.refusal import MEANINGS


def table() -> str:
    """Every kind, what it means, and what to do."""
    rows = [f"| `{why}` | {meaning} | {remedy} |" for why, (meaning, remedy) in MEANINGS.items()]
    return "\n".join(["| why | meaning | what to do |", "|---|---|---|", *rows])
