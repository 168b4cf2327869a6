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


class CoverageRow(NamedTuple):
    """One operator of the schema."""

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
        return CoverageRow(name, code, "not covered", "")
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
    table = ["| operator | code | status | source of the rule |", "| --- | --- | --- | --- |", *lines]
    return f"{_PAGE}{len(lines)} operators: {counts}.\n\n" + "\n".join(table) + "\n"
