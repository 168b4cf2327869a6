"""Every way of writing attention is found, split by head, and computes the same bits afterwards."""

import math
import os
from typing import Any

import pytest
from attention_checks import TWO_SOFTMAXES, assert_same_bits, attention_text, convert
from attention_graphs import Case, build, cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pass_runs import statuses

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.ir import Model, load, to_bytes
from edge_opt.ir.parse import parse

FORMS = ("split", "unpack", "split-above")
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
    assert statuses(reports) == ["converted"] * case.blocks, reports
    most = case.batch * case.length * max(sum(case.segments), case.head_size)
    heads = [
        op for op in model.subgraphs[0].operators if op.name in ("BATCH_MATMUL", "ADD", "SOFTMAX")
    ]
    assert all(operator.output.elements <= most for operator in heads), "one head each"
    softmaxes = case.heads * case.blocks if case.weights == "softmax" else 0
    assert [operator.name for operator in heads].count("SOFTMAX") == softmaxes
    assert {getattr(match, "heads", 0) for match in find_blocks(model.subgraphs[0])} == {1}
    assert_same_bits(before, model, ("xnnpack", "reference") if reference else ("xnnpack",))
    once = to_bytes(model)
    again = convert(model, form)
    assert all(report.status == "nothing to do" for report in again), again
    assert to_bytes(model) == once


@pytest.mark.parametrize("form", FORMS)
@graphs
@given(cases(written="BATCH_MATMUL", mixing="none"), st.sampled_from((False, False, False, True)))
def test_every_block_is_found_and_split_into_heads_that_compute_the_same_bits(
    form: str, case: Case, reference: bool
) -> None:
    check(case, form, reference=reference)


@settings(graphs, max_examples=EXAMPLES or 20)
@given(
    st.sampled_from(("split", "unpack")),
    cases(length=4, written="BATCH_MATMUL", mixing="none"),
    st.sampled_from((1, 2)),
    st.booleans(),
)
def test_heads_cut_into_rows_compute_the_same_bits(
    form: str, case: Case, rows: int, later: bool
) -> None:
    before = to_bytes(build(case))
    model = load(before)
    reports = convert(model, form, rows_per_tile=rows, later=later)
    sites = (case.heads if later else 1) * case.blocks
    assert statuses(reports) == ["converted"] * sites, reports
    # Rows of a head that are flattened to `[T*H]` may as well be heads.
    if not case.escapes & {"logits", "probabilities"} and not case.tail.startswith("flat"):
        matches: list[Any] = list(find_blocks(model.subgraphs[0]))
        assert all(isinstance(match, Block) for match in matches), matches
        assert {(match.heads, match.query_length) for match in matches} == {(1, rows)}
    assert_same_bits(before, model, ("xnnpack",))


# How exporters other than litert-torch write attention. Each graph is what onnx2tf, Keras or TensorFlow wrote of a real
# model, cut down to the block.

GUARDED = """%nan: bool[1,4,6,8] = NOT_EQUAL(%p, %p)
             %w: float32[1,4,6,8] = SELECT_V2(%nan, float32(0.0), %p)"""
CASES = {
    "a guard against NaN": attention_text(then=GUARDED),
    "probabilities times a mask, then clipped": attention_text(
        then="""%s: float32[1,4,6,8] = MUL(%p, %m)
                %w: float32[1,4,6,8] = MINIMUM(%s, float32(0.5))""",
        inputs=", %m: float32[6,8]",
    ),
    "probabilities whose mean over the heads is returned": attention_text(
        then="%mean: float32[1,6,8] = MEAN(%p, int32{1})", returned="%mean, %r"
    ),
    "heads that are summed": attention_text(tail="%r: float32[1,6,5] = SUM(%o, int32{1})"),
    "heads that a product contracts": attention_text(
        tail="""%t: float32[1,6,5,4] = TRANSPOSE(%o, int32{0, 2, 3, 1})
                %r: float32[1,6,5,1] = BATCH_MATMUL(%t, float32[1,6,4,1]{splat 0.5})"""
    ),
    "the difference of two softmaxes": TWO_SOFTMAXES,
    "the exponential of a LOG_SOFTMAX": attention_text(
        softmax="""%s: float32[1,4,6,8] = LOG_SOFTMAX(%l)
                   %p: float32[1,4,6,8] = EXP(%s)"""
    ),
    "scores by relative position, shifted by padding": attention_text(
        softmax="""%g: float32[1,4,6,8] = BATCH_MATMUL(%q, %at) {adj_y: true}
                   %w9: float32[1,4,6,9] = PAD(%g, int32[4,2]{0, 0, 0, 0, 0, 0, 1, 0})
                   %turned: float32[1,4,9,6] = RESHAPE(%w9, int32{1, 4, 9, 6})
                   %cut: float32[1,4,8,6] = SLICE(%turned, int32{0, 0, 1, 0}, int32{1, 4, 8, 6})
                   %g2: float32[1,4,6,8] = RESHAPE(%cut, int32{1, 4, 6, 8})
                   %s: float32[1,4,6,8] = ADD(%l, %g2)
                   %p: float32[1,4,6,8] = SOFTMAX(%s) {beta: 1.0}""",
        inputs=", %at: float32[1,4,8,5]",
    ),
    "a computed number added to what the values give": attention_text(
        scores="""%qg: float32[1,2,12,5] = RESHAPE(%q, int32{1, 2, 12, 5})
                  %kg: float32[1,2,8,5] = SLICE(%k, int32{0, 0, 0, 0}, int32{1, 2, 8, 5})
                  %l: float32[1,2,12,8] = BATCH_MATMUL(%qg, %kg) {adj_y: true}""",
        softmax="%p: float32[1,2,12,8] = SOFTMAX(%l) {beta: 1.0}",
        values="""%n: float32[] = CAST(%number)
                  %z: float32[1,2,12,5] = BATCH_MATMUL(%p, %kg)
                  %z1: float32[1,2,12,5] = ADD(%z, %n)
                  %o: float32[1,4,6,5] = RESHAPE(%z1, int32{1, 4, 6, 5})""",
        inputs=", %number: int32[]",
    ),
    "heads by cat(chunk)": """
        subgraph main (%x: float32[1,6,10], %y: float32[1,8,10]) {
          %q1: float32[1,6,5], %q2: float32[1,6,5] = SPLIT(int32(2), %x) {num_splits: 2}
          %q: float32[2,6,5] = CONCATENATION(%q1, %q2) {axis: 0}
          %k1: float32[1,8,5], %k2: float32[1,8,5] = SPLIT(int32(2), %y) {num_splits: 2}
          %k: float32[2,8,5] = CONCATENATION(%k1, %k2) {axis: 0}
          %l: float32[2,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[2,6,8] = SOFTMAX(%l) {beta: 1.0}
          %o: float32[2,6,5] = BATCH_MATMUL(%p, %k)
          %o1: float32[1,6,5], %o2: float32[1,6,5] = SPLIT(int32(0), %o) {num_splits: 2}
          %r: float32[1,6,10] = CONCATENATION(%o1, %o2) {axis: 2}
          return %r
        }""",
    "weights that make the heads as a batch": """
        subgraph main (%x: float32[1,6,7]) {
          %q: float32[4,6,5] = BATCH_MATMUL(%x, float32[4,7,5]{splat 0.3})
          %k: float32[4,6,5] = BATCH_MATMUL(%x, float32[4,7,5]{splat 0.2})
          %l: float32[4,6,6] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[4,6,6] = SOFTMAX(%l) {beta: 1.0}
          %o: float32[4,6,5] = BATCH_MATMUL(%p, %k)
          %r: float32[6,5] = SUM(%o, int32{0})
          return %r
        }""",
}


def several_heads(model: Model) -> list[str]:
    """Products of two activations and softmaxes that hold more than one row matrix."""
    rows = [
        operator
        for operator in model.subgraphs[0].operators
        if operator.name in ("SOFTMAX", "LOG_SOFTMAX")
        or (
            operator.name in ("BATCH_MATMUL", "FULLY_CONNECTED")
            and not operator.input(1).is_constant
        )
    ]
    return [op.name for op in rows if math.prod(op.outputs[0].shape[:-2]) > 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_block_is_split_to_the_same_bits_and_nothing_of_it_stays(
    case: str, form: str
) -> None:
    model = parse(CASES[case])
    before = to_bytes(model)
    assert several_heads(model)
    reports = convert(model, form)
    heads = 2 if "chunk" in case else 4
    assert [(report.status, report.heads) for report in reports] == [("converted", heads)], reports
    assert not several_heads(model)
    assert_same_bits(before, model)
    assert all(report.status == "nothing to do" for report in convert(model, form))
