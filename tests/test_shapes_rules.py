"""The table of shape rules: complete, sourced, and every operator without a rule has a reason."""

import page_shapes

from edge_opt.attention.rules import RULES as ATTENTION_RULES
from edge_opt.schema.table import ENUMS
from edge_opt.shapes.rules import RULES


def test_no_rule_is_for_an_operator_that_the_schema_does_not_have() -> None:
    assert RULES.keys() <= set(ENUMS["BuiltinOperator"])


def test_every_rule_names_its_source() -> None:
    assert [n for n, entry in RULES.items() if ".cc" not in entry.source or not entry.sentence] == []


def test_an_operator_without_a_rule_has_a_reason() -> None:
    assert page_shapes.why_not("CUSTOM") == "its kernel is the user's own"
    assert page_shapes.why_not("STABLEHLO_TANH") == "the runtime has no kernel for it"
    assert page_shapes.why_not("LSTM") == "rare in language models"


def test_every_operator_that_attention_is_followed_through_has_a_rule() -> None:
    """A new operator whose shape cannot be inferred is reverted."""
    assert ATTENTION_RULES.keys() <= RULES.keys()


def test_the_page_lists_every_operator_once() -> None:
    page = page_shapes.table().replace("|", ",").replace("- ", ",").replace(":", ",")
    words = [word.strip() for word in page.split(",")]
    assert [name for name in ENUMS["BuiltinOperator"] if words.count(name) != 1] == []
