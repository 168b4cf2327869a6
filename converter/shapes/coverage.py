"""Which operators have a rule: the table behind `edge-opt shapes --coverage` and docs/shapes.md."""

from __future__ import annotations

from typing import Literal, NamedTuple

from edge_opt.ir.graph import BUILTIN_OPERATORS
from edge_opt.shapes import registry
from edge_opt.shapes.rules import LOADED

assert LOADED

Status = Literal["rule", "data-dependent", "not covered"]

_PAGE = """# Shape rules

`edge-opt shapes FILE` derives every tensor of a model again, from its graph inputs and constants, and lists where the
file says another thing. This page lists, for every builtin operator of the schema, where its rule comes from. It is
written by `edge-opt shapes --coverage`, from the rules themselves.

- **rule**: the shapes of the results follow from the shapes of the inputs, the options, and the values of operands
  that are constant or can be computed from constants and known shapes. A size that is not known is dynamic (-1).
- **data-dependent**: a result's size follows from the data; -1 is derived for it, or nothing where not even the rank
  is known.
- **not covered**: nothing is derived; readers of the results use the recorded shapes.

"""


_WHY_NOT = {
    "CONCAT_EMBEDDINGS": "no kernel defines it",
    "CUSTOM": "its kernel is the user's own",
    "DELEGATE": "made by the runtime, never stored",
    "PLACEHOLDER_FOR_GREATER_OP_CODES": "a marker of the file format, no operator",
    "STABLEHLO_CUSTOM_CALL": "its callee is the user's own",
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
    entry = registry.find(name)
    if entry is None:
        return CoverageRow(name, code, "not covered", _WHY_NOT.get(name, "no rule yet"))
    return CoverageRow(name, code, "data-dependent" if entry.data_dependent else "rule", entry.source)


def coverage_counts() -> dict[Status, int]:
    """How many operators have each status."""
    counts: dict[Status, int] = {"rule": 0, "data-dependent": 0, "not covered": 0}
    for row in coverage():
        counts[row.status] += 1
    return counts


def coverage_page() -> str:
    """The documentation page, Markdown."""
    counts = ", ".join(f"{count} {status}" for status, count in coverage_counts().items())
    lines = [f"| {row.operator} | {row.code} | {row.status} | {row.source} |" for row in coverage()]
    table = [
        "| operator | code | status | source of the rule, or why there is none |",
        "| --- | --- | --- | --- |",
        *lines,
    ]
    return f"{_PAGE}{len(lines)} operators: {counts}.\n\n" + "\n".join(table) + "\n"
