"""Which operators have a rule: the table behind `edge-opt shapes --coverage` and docs/shapes.md."""

from typing import Literal, NamedTuple, get_args

from edge_opt.ir.graph import BUILTIN_OPERATORS
from edge_opt.shapes.rules import RULES

Status = Literal["rule", "data-dependent", "not covered"]

_PAGE = """# Shape rules

`edge-opt shapes FILE` derives every tensor of a model again, from its graph inputs and constants, and lists where the
file says another thing. This page is written by `edge-opt shapes --coverage`, from the rules themselves: the shapes of
the results follow from the shapes of the inputs, the options, and the values of operands that are constant or can be
computed from constants and known shapes. A size that is not known is dynamic (-1).

"""

_WHY_NOT = {
    "CONCAT_EMBEDDINGS": "no kernel defines it",
    "CUSTOM": "its kernel is the user's own",
    "DELEGATE": "made by the runtime, never stored",
    "PLACEHOLDER_FOR_GREATER_OP_CODES": "a marker of the file format, no operator",
    "STABLEHLO_CUSTOM_CALL": "its kernel is the user's own",
}


class CoverageRow(NamedTuple):
    """One operator of the schema; `source` says where its rule comes from, or why there is none."""

    operator: str
    code: int
    status: Status
    source: str


def coverage() -> list[CoverageRow]:
    """A row for every builtin operator of the schema, by name."""
    return [_row(name, code) for name, code in sorted(BUILTIN_OPERATORS.items())]


def _row(name: str, code: int) -> CoverageRow:
    entry = RULES.get(name)
    if entry is None:
        stablehlo = name.startswith("STABLEHLO_")
        known = "the runtime has no kernel for it" if stablehlo else "no language model is known to hold it"
        return CoverageRow(name, code, "not covered", _WHY_NOT.get(name, known))
    return CoverageRow(name, code, "data-dependent" if entry.data_dependent else "rule", entry.words[1])


def coverage_counts() -> dict[Status, int]:
    """How many operators have each status."""
    found = [row.status for row in coverage()]
    return {status: found.count(status) for status in get_args(Status)}


def coverage_page() -> str:
    """The documentation page, Markdown."""
    derived: dict[tuple[str, str], list[str]] = {}
    missing: dict[str, list[str]] = {}
    for row in coverage():
        entry = RULES.get(row.operator)
        named = missing.setdefault(row.source, []) if entry is None else derived.setdefault(entry.words, [])
        named.append(row.operator)
    lines = [f"| {', '.join(names)} | {' | '.join(words)} |" for words, names in derived.items()]
    reasons = [f"- {', '.join(names)}: {why}." for why, names in missing.items()]
    counts = ", ".join(f"{count} {status}" for status, count in coverage_counts().items())
    table = ["| operators | what is derived | source of the rule |", "| --- | --- | --- |", *lines]
    rest = "Of other operators nothing is derived, and readers of their results use the recorded shapes:"
    return (
        f"{_PAGE}{len(coverage())} operators: {counts}.\n\n"
        + "\n".join([*table, "", rest, "", *reasons])
        + "\n"
    )
