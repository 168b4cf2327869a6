"""The reference page's graphs, before and after, as text that can be held against the page."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from attention_checks import assert_same_bits, convert, only_block, random_inputs
from pass_runs import run
from text_parser import parse

from edge_opt.ir import Model, load, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.passes import Status
from edge_opt.shapes import shape_report

TESTDATA = Path(__file__).parent.parent / "testdata"
GOLDEN = [
    ("reference_prefill", "split"),
    ("reference_prefill", "as-found"),
    ("reference_decode", "split"),
    ("reference_decode", "unpack"),
    ("reference_add", "unpack"),
    ("reference_add", "as-found"),
]


def reference(name: str) -> str:
    return (TESTDATA / f"{name}.txt").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not line.startswith("# "))


def kinds(model: Model) -> Counter[str]:
    return Counter(operator.name for operator in model.subgraphs[0].operators)


@pytest.mark.parametrize(("name", "form"), GOLDEN)
def test_the_reference_graphs_come_out_as_on_the_page(name: str, form: str) -> None:
    model = parse(reference(name))
    assert {report.status for report in convert(model, form)} == {Status.CONVERTED}
    assert to_text(model) == without_comments(reference(f"{name}_sha"))


@pytest.mark.parametrize("name", ["reference_prefill", "reference_decode", "reference_add"])
def test_the_page_and_its_original_compute_the_same_bits(name: str) -> None:
    before, after = (parse(reference(which)) for which in (name, f"{name}_sha"))
    for kernels in ("xnnpack", "reference"):
        assert_same_bits(to_bytes(before), to_bytes(after), random_inputs(before), kernels)


def test_a_head_of_the_prefill_graph_has_the_operators_of_the_page() -> None:
    model = parse(reference("reference_prefill_sha"))
    heads = 4
    assert kinds(model) == {
        "MUL": heads,
        "BATCH_MATMUL": 4 * heads,
        "CONCATENATION": heads + 1,
        "ADD": 2 * heads,
        "SOFTMAX": heads,
        "SLICE": 2 * heads,
        "SPLIT": 1,
        # Of the query and of the new values; of the query, the new keys and the joined heads.
        "TRANSPOSE": 2,
        "RESHAPE": 3,
    }


def test_a_head_of_the_unpacked_graph_has_the_operators_of_the_page() -> None:
    blocks, heads = 2, 4
    assert kinds(parse(reference("reference_add_sha"))) == {
        "UNPACK": 3 * blocks,
        "MUL": 2 * blocks * heads,
        "TRANSPOSE": blocks * heads,
        "BATCH_MATMUL": 2 * blocks * heads,
        "ADD": blocks * heads,
        "SOFTMAX": blocks * heads,
        "PACK": blocks,
    }


def test_one_scale_is_multiplied_into_each_head_and_the_unscaled_query_is_split() -> None:
    model = parse(reference("reference_prefill"))
    convert(model, "split")
    (split,) = [op for op in model.subgraphs[0].operators if op.name == "SPLIT"]
    assert split.input(1).shape == (1, 1, 512, 256)
    assert [op.name for op in split.outputs[0].consumers] == ["MUL"]


def test_what_a_head_can_read_without_a_reshape_costs_none() -> None:
    model = parse(reference("reference_select"))
    run(model, "mask_to_add")
    convert(model, "unpack")
    assert "RESHAPE" not in kinds(model)


SCALED = """
subgraph main (%q: float32[1,6,4,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {{
  %s: float32[1,6,4,5] = MUL(%q, float32(0.5))
  {also}
  %t: float32[1,4,6,5] = TRANSPOSE(%s, int32{{0, 2, 1, 3}})
  %l: float32[1,4,6,8] = BATCH_MATMUL(%t, %k) {{adj_y: true}}
  %p: float32[1,4,6,8] = SOFTMAX(%l) {{beta: 1.0}}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
  %u: float32[1,6,4,5] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
  %r: float32[1,6,20] = RESHAPE(%u, int32{{1, 6, 20}})
  return %r{returned}
}}
"""


@pytest.mark.parametrize(
    ("also", "returned"), [("", ", %s"), ("%n: float32[1,6,4,5] = NEG(%s)", ", %n"), ("", "")]
)
@pytest.mark.parametrize("form", ["split", "unpack"])
def test_a_scale_is_sunk_into_the_heads_only_if_nobody_else_reads_what_it_makes(
    also: str, returned: str, form: str
) -> None:
    model = parse(SCALED.format(also=also, returned=returned))
    assert [report.status for report in convert(model, form)] == [Status.CONVERTED]
    assert kinds(model)["MUL"] == (1 if returned else 4)


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
    assert [report.status for report in convert(model, "split")] == [Status.CONVERTED]
    assert kinds(model)["CUMSUM"] == 1


@pytest.mark.parametrize("form", ["split", "unpack", "split-above"])
def test_what_leads_to_queries_and_a_mask_of_every_head_may_be_as_long_as_it_likes(form: str) -> None:
    """A label is followed so far and no farther; where that ends, the heads are cut."""
    length = 400

    def chain(name: str, shape: str) -> str:
        names = [name, *(f"{name}{step}" for step in range(length))]
        return "\n".join(f"%{new}: float32[{shape}] = ABS(%{old})" for old, new in pairwise(names))

    model = parse(f"""
    subgraph main (%q: float32[1,2,3,4], %k: float32[1,2,5,4], %v: float32[1,2,5,4], %m: float32[1,2,3,5]) {{
      {chain("q", "1,2,3,4")}
      {chain("m", "1,2,3,5")}
      %l: float32[1,2,3,5] = BATCH_MATMUL(%q{length - 1}, %k) {{adj_y: true}}
      %s: float32[1,2,3,5] = ADD(%l, %m{length - 1})
      %p: float32[1,2,3,5] = SOFTMAX(%s) {{beta: 1.0}}
      %o: float32[1,2,3,4] = BATCH_MATMUL(%p, %v)
      %t: float32[1,3,2,4] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
      %r: float32[1,3,8] = RESHAPE(%t, int32{{1, 3, 8}})
      return %r
    }}""")
    assert [report.status for report in convert(model, form)] == [Status.CONVERTED]
    assert kinds(model)["SOFTMAX"] == 2


def test_what_takes_the_heads_apart_ends_the_block_also_where_only_one_of_them_is_read() -> None:
    model = parse("""
    subgraph main (%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {
      %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
      %a: float32[1,6,5], %b: float32[1,6,5], %c: float32[1,6,5], %d: float32[1,6,5] = UNPACK(%o) {num: 4, axis: 1}
      %r: float32[1,30] = RESHAPE(%a, int32{1, 30})
      return %r
    }""")
    block = only_block(model.subgraphs[0])
    assert (block.heads, block.output.name) == (4, "o")


def test_probabilities_that_others_read_are_joined_for_them_and_no_several_heads_stay() -> None:
    model = parse(SCALED.format(also="", returned=", %p"))
    assert [report.status for report in convert(model, "split")] == [Status.CONVERTED]
    counted = kinds(model)
    assert (counted["SOFTMAX"], counted["BATCH_MATMUL"], counted["MUL"]) == (4, 8, 4)
    joined = [op.outputs[0].name for op in model.subgraphs[0].operators if op.name == "CONCATENATION"]
    assert joined == ["r/heads", "p"]
    again = convert(model, "split")
    assert all(report.settled for report in again)


def test_a_gate_made_of_the_heads_alone_is_part_of_each_head() -> None:
    gate = "%o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v) %g: float32[1,4,6,5] = LOGISTIC(%o)"
    text = SCALED.replace("%o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)", gate)
    text = text.replace("TRANSPOSE(%o,", "TRANSPOSE(%m,").replace(
        "  %u:", "  %m: float32[1,4,6,5] = MUL(%g, %o)\n  %u:"
    )
    model = parse(text.format(also="", returned=""))
    assert [report.status for report in convert(model, "split")] == [Status.CONVERTED]
    assert kinds(model)["LOGISTIC"] == 4


def test_all_heads_count_where_only_some_stand_beside_the_head_size_at_first() -> None:
    model = parse(
        """
        subgraph main (%q: float32[1,2,2,1,5], %k: float32[1,2,1,8,5], %v: float32[1,2,1,8,5]) {
          %l: float32[1,2,2,1,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[1,2,2,1,8] = SOFTMAX(%l) {beta: 1.0}
          %o: float32[1,2,2,1,5] = BATCH_MATMUL(%p, %v)
          %some: float32[1,2,2,5] = RESHAPE(%o, int32{1, 2, 2, 5})
          %all: float32[1,1,4,5] = RESHAPE(%some, int32{1, 1, 4, 5})
          return %all
        }
        """
    )
    (report,) = convert(model, "split")
    assert (report.status, report.heads, report.kv_heads) == (Status.CONVERTED, 4, 2)


UNMERGED = """
subgraph main (%x: {query}, %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {{
  {leads}
  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %p: float32[1,4,6,8] = SOFTMAX(%l) {{beta: 1.0}}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
  %r: float32[1,6,5] = SUM(%o, int32{{1}})
  return %r
}}
"""
TRANSPOSED = "%q: float32[1,4,6,5] = TRANSPOSE({}, int32{{0, 2, 1, 3}})"


@pytest.mark.parametrize(
    ("query", "leads"),
    [
        ("float32[1,6,4,5]", TRANSPOSED.format("%x")),
        ("float32[6,1,4,5]", "%q: float32[1,4,6,5] = TRANSPOSE(%x, int32{1, 2, 0, 3})"),
        ("float32[6,20]", "%h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5}) " + TRANSPOSED.format("%h")),
    ],
)
def test_heads_that_nothing_merges_are_known_by_where_the_queries_have_them(query: str, leads: str) -> None:
    model = parse(UNMERGED.format(query=query, leads=leads))
    (report,) = convert(model, "split")
    assert (report.status, report.heads) == (Status.CONVERTED, 4)
    (join,) = [op for op in model.subgraphs[0].operators if op.name == "CONCATENATION"]
    assert join.outputs[0].name == "o"


@pytest.mark.parametrize(
    ("query", "leads"),
    [
        # Nothing stands beside anything.
        ("float32[1,4,6,5]", "%q: float32[1,4,6,5] = ABS(%x)"),
        # Heads beside the sequence: a batch of pictures is split as well.
        ("float32[1,4,30]", "%q: float32[1,4,6,5] = RESHAPE(%x, int32{1, 4, 6, 5})"),
    ],
)
def test_where_nothing_tells_of_heads_they_are_the_batch_axes_of_the_products(query: str, leads: str) -> None:
    model = parse(UNMERGED.format(query=query, leads=leads))
    (report,) = convert(model, "split")
    assert (report.status, report.heads) == (Status.CONVERTED, 4)


def test_the_models_own_batch_is_no_head() -> None:
    model = parse(
        """
        subgraph main (%x: float32[3,6,5], %y: float32[3,8,5]) {
          %q: float32[3,6,5] = FULLY_CONNECTED(%x, float32[5,5]{splat 0.5}, none) {keep_num_dims: true}
          %k: float32[3,8,5] = FULLY_CONNECTED(%y, float32[5,5]{splat 0.5}, none) {keep_num_dims: true}
          %l: float32[3,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %p: float32[3,6,8] = SOFTMAX(%l) {beta: 1.0}
          %o: float32[3,6,5] = BATCH_MATMUL(%p, %y)
          return %o
        }
        """
    )
    (report,) = convert(model, "split")
    assert (report.heads, report.reason) == (1, "already single-head")


@pytest.mark.parametrize("kind", ["STABLEHLO_TANH", "LOCAL_RESPONSE_NORMALIZATION"])
def test_an_operator_whose_shape_nobody_derives_stays_as_it_is(kind: str) -> None:
    """The runtime has no kernel for the first, and language models do not hold the second."""
    model = parse(f"""
    subgraph main (%x: float32[1,2,4,8], %k: float32[1,2,6,8], %v: float32[1,2,8,6]) {{
      %q: float32[1,2,4,8] = {kind}(%x)
      %l: float32[1,2,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[1,2,4,6] = SOFTMAX(%l) {{beta: 1.0}}
      %h: float32[1,2,4,8] = BATCH_MATMUL(%p, %v) {{adj_y: true}}
      %t: float32[1,4,2,8] = TRANSPOSE(%h, int32{{0, 2, 1, 3}})
      %m: float32[1,4,16] = RESHAPE(%t, int32{{1, 4, 16}}) {{new_shape: [1, 4, 16]}}
      %n: float32[1,4,16] = {kind}(%m)
      return %n
    }}""")
    assert [report.status for report in convert(model, "split")] == [Status.CONVERTED]
    text = to_text(model)
    assert f"%q: float32[1,2,4,8] = {kind}(%x)" in text
    assert f"%n: float32[1,4,16] = {kind}(%m)" in text
    report = shape_report(load(to_bytes(model)))
    assert report.disagreements == ()
    assert report.unknown == 2
