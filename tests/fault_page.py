"""Prints docs/faults.md: which check stops which corruption."""

from faults import CHECKS, FAULTS


def page() -> str:
    """docs/faults.md."""
    lines = [
        "# The prover, lied to",
        "",
        "Each line is a way to corrupt a rewrite. A test applies it between building and checking. The third column is",
        "the check that stops it before anything is written. Then the test writes the same corrupted model without any",
        "check, and `edge-opt compare` must find different numbers or refuse the model (on the last type named). Some",
        "faults show only on fully masked rows: they need hostile inputs. Some change no number, so no run can find",
        "them. Some show only on extreme numbers inside the region: the region's own extreme inputs find them, and",
        "`compare`, which sets inputs of the model only, is `not asked`. The last column says which.",
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
