"""Every way of writing attention is found, split by head, and computes the same bits afterwards."""

import os
from typing import Any

import pytest
from attention_checks import assert_same_bits, convert, heads_found
from attention_graphs import Case, build, cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.ir import load, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.passes import Status

EXAMPLES = int(os.environ.get("EDGE_OPT_ATTENTION_GRAPHS", "0"))
"""How many graphs to try, drawn anew each time; 0 tries a fixed moderate number of fixed ones."""

graphs = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
)


def check(case: Case, form: str, *, reference: bool) -> None:
    """Convert one graph in one form: blocks are found with the sizes that they were built with, and split."""
    original = build(case)
    expected = case.heads, case.kv_heads, case.head_size, case.length, case.segments
    matches = [match for match in find_blocks(original.subgraphs[0]) if isinstance(match, Block)]
    found = [(m.heads, m.kv_heads, m.head_size, m.query_length, m.key_lengths) for m in matches]
    assert found == [expected] * case.blocks
    before = to_bytes(original)
    model = load(before)
    reports = convert(model, form)
    assert [report.status for report in reports] == [Status.CONVERTED] * case.blocks, reports
    most = case.batch * case.length * max(sum(case.segments), case.head_size)
    heads = [op for op in model.subgraphs[0].operators if op.name in ("BATCH_MATMUL", "ADD", "SOFTMAX")]
    assert all(operator.output.elements <= most for operator in heads), "one head each"
    assert [operator.name for operator in heads].count("SOFTMAX") == case.heads * case.blocks
    assert set(heads_found(model.subgraphs[0])) == {1}
    assert_same_bits(before, model, ("xnnpack", "reference") if reference else ("xnnpack",))
    once = to_text(model)
    again = convert(model, form)
    assert all(report.status is Status.SKIPPED and report.settled for report in again), again
    assert to_text(model) == once


@pytest.mark.parametrize("form", ["split", "unpack", "split-above"])
@graphs
@given(cases(), st.sampled_from((False, False, False, True)))
def test_every_block_is_found_and_split_into_heads_that_compute_the_same_bits(
    form: str, case: Case, reference: bool
) -> None:
    check(case, form, reference=reference)


@settings(graphs, max_examples=EXAMPLES or 20)
@given(st.sampled_from(("split", "unpack")), cases(length=4), st.sampled_from((1, 2)), st.booleans())
def test_heads_cut_into_rows_compute_the_same_bits(form: str, case: Case, rows: int, later: bool) -> None:
    before = to_bytes(build(case))
    model = load(before)
    reports = convert(model, form, rows_per_tile=rows, later=later)
    sites = (case.heads if later else 1) * case.blocks
    assert [report.status for report in reports] == [Status.CONVERTED] * sites, reports
    # Rows of a head that are flattened to `[T*H]` may as well be heads.
    if not case.escapes & {"logits", "probabilities"} and not case.tail.startswith("flat"):
        matches: list[Any] = list(find_blocks(model.subgraphs[0]))
        assert all(isinstance(match, Block) for match in matches), matches
        assert {(match.heads, match.query_length) for match in matches} == {(1, rows)}
    assert_same_bits(before, model, ("xnnpack",))
