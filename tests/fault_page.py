"""Prints docs/faults.md: which check stops which corruption."""

from faults import CHECKS, FAULTS


def page() -> str:
    """docs/faults.md."""
    lines = [
        "# The prover, lied to",
        "",
        "Each line is a way to corrupt a rewrite that a test applies between building and checking it. The third",
        "column is the check that stops it before anything is written. Then the same corrupted model is written",
        "without any check, and `edge-opt compare` must tell it from the original: it finds different numbers, or",
        "refuses the model (tests run this on the last type named). Realistic masks leave every query a key and hide",
        "the others altogether, so what only shows elsewhere needs hostile inputs; and what changes no number cannot",
        "be found by running, which the last column says. What shows only where numbers inside the region are extreme",
        "is found by the region's own extreme inputs; `compare`, which sees inputs of the model, is not asked.",
        "",
        "This page is generated: `python tests/fault_page.py > docs/faults.md`.",
        "",
        *(f"- **{check}**: {what}." for check, what in CHECKS.items()),
        "",
    ]
    for pass_name in dict.fromkeys(each.pass_name for each in FAULTS):
        own = [each for each in FAULTS if each.pass_name == pass_name]
        lines += [f"## {pass_name}", "", "| corruption | on | stopped by | compare |", "|---|---|---|---|"]
        for each in own:
            where = ", ".join(graph.removeprefix("attention ") for graph in each.graphs)
            lines.append(f"| {each.name} | {where} | {each.caught} | {each.compare} |")
        lines.append("")
    lines.append(
        f"{len(FAULTS)} corruptions, {sum(len(each.graphs) for each in FAULTS)} with their element types."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
