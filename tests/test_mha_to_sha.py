"""The reference page's graphs, before and after, as text; the forms that heads are cut in, and tiles of their rows."""

import re
from dataclasses import replace
from functools import cache

import pytest
from attention_checks import assert_same_bits, attention_text, convert, masked_text, of_one_head
from pass_runs import TESTDATA, count, statuses, tiles
from syrupy.assertion import SnapshotAssertion

from edge_opt.conversion import convert as convert_model
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.targets import Target, load_target

GOLDEN = [
    ("reference_prefill", "split"),
    ("reference_prefill", "as-found"),
    ("reference_decode", "split"),
    ("reference_decode", "unpack"),
    ("reference_add", "unpack"),
    ("reference_add", "as-found"),
]
MODELS = ["demo_gemma3.tflite", "demo_gemma3_a16w8.tflite"]


def reference(name: str) -> str:
    return (TESTDATA / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "form"), GOLDEN)
def test_the_reference_graphs_come_out_as_on_the_page(name: str, form: str) -> None:
    model = parse(reference(name))
    before = to_bytes(model)
    assert {*statuses(convert(model, form))} == {"converted"}
    drawn = re.sub("^# .*\n", "", reference(f"{name}_sha"), flags=re.MULTILINE)
    assert to_text(model) == drawn
    assert_same_bits(before, parse(drawn))


SCALED = attention_text(
    scores="""  %s: float32[1,4,6,5] = MUL(%q, float32(0.5))
  %l: float32[1,4,6,8] = BATCH_MATMUL(%s, %k) {adj_y: true}"""
)


@pytest.mark.parametrize("read", ["", "returned", "by an operator"])
@pytest.mark.parametrize("form", ["split", "unpack"])
def test_a_scale_is_sunk_into_the_heads_only_if_nobody_else_reads_what_it_makes(
    read: str, form: str
) -> None:
    text = SCALED.replace("return %r", "return %r, %s") if read == "returned" else SCALED
    if read == "by an operator":
        text = text.replace("  return %r", "  %n: float32[1,4,6,5] = NEG(%s)\n  return %r, %n")
    model = parse(text)
    assert statuses(convert(model, form)) == ["converted"]
    assert count(model, "MUL") == (1 if read else 4)


TOKENS_FIRST = """
subgraph main (%q: float32[1,6,4,5], %k: float32[1,1,8,5], %v: float32[1,1,8,5]) {
  %r: float32[1,1,24,5] = RESHAPE(%q, int32{1, 1, 24, 5})
  %s: float32[1,1,24,5] = MUL(%r, float32(0.5))
  %l: float32[1,1,24,8] = BATCH_MATMUL(%s, %k) {adj_y: true}
  %p: float32[1,1,24,8] = SOFTMAX(%l) {beta: 1.0}
  %h: float32[1,1,24,5] = BATCH_MATMUL(%p, %v)
  %o: float32[1,6,20] = RESHAPE(%h, int32{1, 6, 20})
  return %o
}
"""


@pytest.mark.parametrize("form", ["split", "unpack"])
def test_a_scale_below_the_cut_is_made_per_head(form: str) -> None:
    """Rows are tokens, then heads: only above the RESHAPE have heads an axis."""
    model = parse(TOKENS_FIRST)
    before = to_bytes(model)
    assert statuses(convert(model, form)) == ["converted"]
    assert count(model, "MUL") == 4
    assert_same_bits(before, model)


APART = """
subgraph main (%q: float32[1,6,4,5], %k: float32[4,8,5], %v: float32[4,8,5]) {
  %s: float32[1,6,4,5] = MUL(%q, float32[ONES]{splat 0.5})
  %t: float32[1,4,6,5] = TRANSPOSE(%s, int32{0, 2, 1, 3})
  %n: float32[4,6,5] = RESHAPE(%t, int32{4, 6, 5})
  %l: float32[4,6,8] = BATCH_MATMUL(%n, %k) {adj_y: true}
  %p: float32[4,6,8] = SOFTMAX(%l) {beta: 1.0}
  %h: float32[4,6,5] = BATCH_MATMUL(%p, %v)
  %b: float32[1,4,6,5] = RESHAPE(%h, int32{1, 4, 6, 5})
  %u: float32[1,6,4,5] = TRANSPOSE(%b, int32{0, 2, 1, 3})
  %o: float32[1,6,4,5] = ABS(%u)
  return %o
}
"""


@pytest.mark.parametrize("form", ["split", "unpack", "split-above"])
@pytest.mark.parametrize("shape", ["", "1", "1,1", "1,1,1", "1,1,1,1"])
def test_a_scale_of_any_rank_is_sunk_into_heads_with_fewer_axes(shape: str, form: str) -> None:
    model = parse(APART.replace("ONES", shape))
    before = to_bytes(model)
    assert [report.reason for report in convert(model, form)] == [""]
    assert count(model, "MUL") == 4
    assert_same_bits(before, model)


TWO_AXES_OF_HEADS = """
subgraph main (%q: float32[1,6,4,5], %k: float32[1,2,1,8,5], %v: float32[1,2,1,8,5]) {
  %n: float32[1,6,2,2,5] = RESHAPE(%q, int32{1, 6, 2, 2, 5})
  %t: float32[1,2,2,5,6] = TRANSPOSE(%n, int32{0, 2, 3, 4, 1})
  %l: float32[1,2,2,6,8] = BATCH_MATMUL(%t, %k) {adj_x: true, adj_y: true}
  %p: float32[1,2,2,6,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,2,2,6,5] = BATCH_MATMUL(%p, %v)
  %u: float32[1,6,2,2,5] = TRANSPOSE(%o, int32{0, 3, 1, 2, 4})
  %r: float32[1,6,20] = RESHAPE(%u, int32{1, 6, 20})
  return %r
}
"""


def test_heads_on_two_axes_are_cut_where_an_operator_without_a_rule_makes_them() -> None:
    text = TWO_AXES_OF_HEADS.replace("BATCH_MATMUL(%t,", "BATCH_MATMUL(%c,")
    model = parse(text.replace("  %l:", "  %c: float32[1,2,2,5,6] = CUMSUM(%t, int32(4))\n  %l:"))
    assert statuses(convert(model, "split")) == ["converted"]
    assert count(model, "CUMSUM") == 1


@pytest.mark.parametrize("form", ["split", "unpack", "split-above"])
@pytest.mark.parametrize("length", [50, 400])
def test_a_label_is_followed_so_far_and_no_farther(form: str, length: int) -> None:
    """Queries are cut where that ends; heads that do not reach the logits are left with a reason."""
    steps = [f"  %{{0}}{step + 1}: float32[{{1}}] = ABS(%{{0}}{step})" for step in range(length)]
    chain = "\n".join(steps).format
    above = f"  %q0: float32[1,4,6,5] = ABS(%q)\n{chain('q', '1,4,6,5')}\n"
    scores = f"{above}  %l: float32[1,4,6,8] = BATCH_MATMUL(%q{length}, %k) {{adj_y: true}}"
    model = parse(attention_text(scores=scores))
    assert statuses(convert(model, form)) == ["converted"]
    between = f"  %p0: float32[1,4,6,8] = ABS(%p)\n{chain('p', '1,4,6,8')}\n"
    model = parse(attention_text(then=f"{between}  %w: float32[1,4,6,8] = ABS(%p{length})"))
    expected = "skipped" if length == 400 else "converted"
    assert set(statuses(convert(model, form))) == {expected}


@cache
def demo(name: str, form: str) -> Model:
    result = convert_model(
        TESTDATA / name, dry_run=True, target=replace(load_target("generic"), form=form)
    )
    assert len(result.converted) == 5
    assert all(site.proof is not None for site in result.converted)
    return result.model


def sources_of_splits(model: Model) -> set[str]:
    """What makes the tensors that are split into heads."""
    found = set()
    for _, graph in model.entry_points():
        for operator in graph.operators:
            if operator.name in ("SPLIT", "UNPACK"):
                producer = operator.input(len(operator.inputs) - 1).producer
                found.add("input" if producer is None else producer.name)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_split_below_rope_by_default_and_at_their_projection_on_request(
    name: str,
) -> None:
    """RoPE ends in an ADD; above it stand the query's norm, a composite, and the query's projection."""
    assert sources_of_splits(demo(name, "split")) <= {"ADD", "RESHAPE"}
    assert sources_of_splits(demo(name, "split-above")) == {"FULLY_CONNECTED"}


def test_small_heads_are_cut_below_their_norm_where_the_target_wants_it() -> None:
    """The heads of this model have H = 16."""
    target = replace(load_target("generic"), form="split-above")
    for least, cut_at in ((17, "STABLEHLO_COMPOSITE"), (16, "FULLY_CONNECTED")):
        wanted = replace(target, norm_per_head_from=least)
        result = convert_model(TESTDATA / MODELS[0], dry_run=True, target=wanted)
        assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
        assert sources_of_splits(result.model) == {cut_at}


@pytest.mark.parametrize(("on_chip", "pieces"), [(1000, 4), (20, 8)])
def test_logits_that_do_not_fit_on_the_chip_are_cut_as_for_a_long_context(
    on_chip: int, pieces: int
) -> None:
    """One head's logits are `[6, 8]`; three rows are cut off each if the target says so for long ones."""
    target = Target(
        "chip", "", on_chip_bytes=on_chip, long_context={"form": "split", "rows_per_tile": 3}
    )
    result = convert_model(parse(attention_text()), target=target)
    assert statuses(result.sites) == ["converted"]
    assert count(result.model, "SOFTMAX") == pieces


def test_every_head_is_cut_and_the_mask_only_once() -> None:
    result = convert_model(parse(masked_text()), target=tiles(3))
    graph = result.model.subgraphs[0]
    assert [(site.pass_name, site.status) for site in result.sites] == [("mha_to_sha", "converted")]
    assert all(site.proof is not None and site.proof.bitwise for site in result.sites)
    shapes = [operator.output.shape for operator in graph if operator.name == "SOFTMAX"]
    assert shapes == [(1, 1, 3, 8)] * 8
    cuts_of_the_mask = [
        op for op in graph.operators if op.name == "SPLIT" and op.inputs[1] in graph.inputs
    ]
    assert [op.input(1).name for op in cuts_of_the_mask].count("mask") == 1


def test_an_attention_of_one_head_is_cut_by_rows_alone(snapshot: SnapshotAssertion) -> None:
    result = convert_model(parse(of_one_head(masked_text())), target=tiles(3))
    (site,) = result.converted
    assert (site.pass_name, site.heads, site.kv_heads) == ("mha_to_sha", 1, 1)
    assert site.proof.bitwise
    assert to_text(result.model) == snapshot
