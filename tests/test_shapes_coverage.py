"""The coverage table: complete, sourced, and the documentation page is what it says."""

from pathlib import Path

from edge_opt.attention.rules import RULES
from edge_opt.schema.tables import ENUMS
from edge_opt.shapes import coverage, coverage_counts, coverage_page
from edge_opt.shapes.rules import RULES as SHAPE_RULES

PAGE = Path(__file__).parent.parent / "docs" / "shapes.md"


def test_every_operator_of_the_schema_has_a_row() -> None:
    assert sorted(row.operator for row in coverage()) == sorted(ENUMS["BuiltinOperator"])
    assert {row.operator: row.code for row in coverage()} == ENUMS["BuiltinOperator"]


def test_no_rule_is_for_an_operator_that_the_schema_does_not_have() -> None:
    assert SHAPE_RULES.keys() <= set(ENUMS["BuiltinOperator"])


def test_every_rule_names_its_source() -> None:
    assert [
        name
        for name, entry in SHAPE_RULES.items()
        if not entry.words[1].startswith(("TFLite, ", "StableHLO "))
    ] == []


def test_what_is_not_covered_says_why() -> None:
    reasons = {row.operator: row.source for row in coverage() if row.status == "not covered"}
    assert reasons["CUSTOM"] == "its kernel is the user's own"
    assert reasons["STABLEHLO_TANH"] == "the runtime has no kernel for it"
    assert reasons["LSTM"] == "no language model is known to hold it"
    assert len(set(reasons.values())) == 6


def test_every_operator_that_attention_is_followed_through_has_a_rule() -> None:
    """A new operator whose shape nobody derives is rolled back."""
    assert RULES.keys() <= SHAPE_RULES.keys()


def test_what_is_data_dependent() -> None:
    assert [row.operator for row in coverage() if row.status == "data-dependent"] == [
        "READ_VARIABLE",
        "WHERE",
    ]


def test_the_counts_add_up() -> None:
    assert sum(coverage_counts().values()) == len(coverage())


def test_the_documentation_page_is_generated() -> None:
    """Write it again with `edge-opt shapes --coverage > docs/shapes.md`."""
    assert PAGE.read_text() == coverage_page()
