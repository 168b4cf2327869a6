"""Attention that stays is told of, wherever it is and whatever it looks like: nobody is told that there is none."""

from pathlib import Path

import pytest
from cli_runs import run, written
from text_parser import parse

from edge_opt.attention.block import Block, NotABlock
from edge_opt.attention.find import find_blocks
from edge_opt.attention.surroundings import between_products
from edge_opt.conversion import SitesLeftError, convert
from edge_opt.conversion.result import entry_points
from edge_opt.passes import SiteReport, Status
from edge_opt.passes.mha_to_sha import attention_left

ATTENTION = """
  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
  %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
  %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})
  return %r
}"""
GIVEN = "%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]"
RESULT = "%r: float32[1,6,20]"
PLAIN = "subgraph main (" + GIVEN + ") {" + ATTENTION
IN_A_BRANCH = (
    "subgraph main (%c: bool[], " + GIVEN + ") {\n"
    f"  {RESULT} = IF(%c, %q, %k, %v) {{then_subgraph_index: 1, else_subgraph_index: 2}}\n  return %r\n}}\n"
    "subgraph then (" + GIVEN + ") {" + ATTENTION + "\n"
    "subgraph else (" + GIVEN + ") {\n  %r: float32[1,6,20] = RESHAPE(%q, int32{1, 6, 20})\n  return %r\n}"
)
NOT_UNDERSTOOD = PLAIN.replace("BATCH_MATMUL(%p,", "BATCH_MATMUL(%c,").replace(
    "  %o:", "  %c: float32[1,4,6,8] = CUMSUM(%p, int32(3))\n  %o:"
)
PROJECTED_SCORES = PLAIN.replace("SOFTMAX(%l)", "SOFTMAX(%m)").replace(
    "  %p:",
    """  %lt: float32[1,6,8,4] = TRANSPOSE(%l, int32{0, 2, 3, 1})
  %lm: float32[1,6,8,4] = FULLY_CONNECTED(%lt, float32[4,4]{splat 0.5}, none) {keep_num_dims: true}
  %m: float32[1,4,6,8] = TRANSPOSE(%lm, int32{0, 3, 1, 2})
  %p:""",
)
TALKING = PROJECTED_SCORES.replace("BATCH_MATMUL(%p,", "BATCH_MATMUL(%w,").replace(
    "  %o:",
    """  %pt: float32[1,6,8,4] = TRANSPOSE(%p, int32{0, 2, 3, 1})
  %pm: float32[1,6,8,4] = FULLY_CONNECTED(%pt, float32[4,4]{splat 0.5}, none) {keep_num_dims: true}
  %w: float32[1,4,6,8] = TRANSPOSE(%pm, int32{0, 3, 1, 2})
  %o:""",
)
LINEAR = """
subgraph main (%q: float32[1,4,6,5], %k: float32[1,4,6,5], %v: float32[1,4,6,5]) {
  %s: float32[1,4,5,5] = BATCH_MATMUL(%k, %v) {adj_x: true}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%q, %s)
  return %o
}"""
CLASSES = """
subgraph main (%x: float32[1,9,9,16]) {
  %y: float32[1,9,9,7] = CONV_2D(%x, float32[7,1,1,16]{splat 0.5}, float32[7]{splat 0.0})
  %p: float32[1,9,9,7] = SOFTMAX(%y) {beta: 1.0}
  return %p
}"""
LEFT = {
    "the pass was left out": (PLAIN, {"skip": ["mha_to_sha"]}, "the pass mha_to_sha was left out"),
    "a branch of IF": (
        IN_A_BRANCH, {}, "inside a graph that IF calls: only what a signature runs itself is rewritten",
    ),
    "an operator behind the SOFTMAX that is not followed": (
        NOT_UNDERSTOOD, {}, "the probabilities are not followed through this operator, at CUMSUM",
    ),
    "scores that a projection mixes over the heads": (
        PROJECTED_SCORES, {}, "the scores are not followed through this operator, at FULLY_CONNECTED",
    ),
    "linear attention": (
        LINEAR,
        {},
        "linear attention: nothing lies between this product and the next, at BATCH_MATMUL",
    ),
    "talking heads": (
        TALKING, {}, "the probabilities are not followed through this operator, at FULLY_CONNECTED",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_attention_that_stays_is_a_site_with_a_reason_and_fails_require_all(case: str) -> None:
    text, options, reason = LEFT[case]
    result = convert(parse(text), verify="none", **options)
    assert [(site.status, site.settled, site.reason) for site in result.sites] == [("skipped", False, reason)]
    assert not result.converted
    with pytest.raises(SitesLeftError, match="1 of 1 sites were not converted"):
        convert(parse(text), verify="none", require_all=True, **options)


@pytest.mark.parametrize("case", LEFT)
def test_nobody_is_told_that_there_is_no_attention(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, options, reason = LEFT[case]
    file, chosen = written(tmp_path, text), [f"--{name}={value[0]}" for name, value in options.items()]
    said = run(capsys, "convert", file, "--dry-run", "--verify", "none", *chosen)
    assert said.code == 0
    assert "no attention" not in said.out
    assert reason.split(",")[0] in " ".join(said.out.split())
    assert run(capsys, "convert", file, "--dry-run", "--require-all", *chosen).code == 1


def test_sites_of_attention_that_stays_are_counted_on() -> None:
    both = IN_A_BRANCH[: IN_A_BRANCH.index("subgraph else")] + "subgraph else (" + GIVEN + ") {" + ATTENTION
    model = parse(both)
    done = [
        SiteReport("mask_to_add", "main", 0, Status.CONVERTED),
        SiteReport("mha_to_sha", "main", 0, Status.CONVERTED),
    ]
    left = attention_left(model, model.subgraphs[0], "main", done, split=True)
    assert [site.index for site in left] == [1, 2]


def test_what_stands_behind_a_composite_that_is_a_site_itself_is_looked_into() -> None:
    """Attention in that composite is told of there."""
    composite = (
        "  %z: float32[1,4,6,5] = STABLEHLO_COMPOSITE(%q) {name: 'n', decomposition_subgraph_index: 3}\n"
    )
    body = "\nsubgraph body (" + GIVEN + ") {" + ATTENTION
    text = (
        IN_A_BRANCH.replace(") {\n  %r", f") {{\n{composite}  %r", 1).replace("IF(%c, %q", "IF(%c, %z") + body
    )
    model = parse(text)
    site = SiteReport("inline_composites", "main", 0, Status.SKIPPED, operator="z")
    (left,) = attention_left(model, model.subgraphs[0], "main", [site], split=True)
    assert (left.heads, left.index) == (4, 0)
    assert left.reason.startswith("inside a graph that IF calls")


def test_inspect_tells_of_attention_in_a_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, IN_A_BRANCH)
    assert "1 multi-head" in run(capsys, "inspect", file).out
    said = " ".join(run(capsys, "inspect", file).out.split())
    assert "multi-head: N=4 K=4 H=5 T=6, 8 keys, no mask" in said
    assert "inside a graph that IF calls" in said


def test_scores_that_the_heads_are_not_followed_to_are_told_of() -> None:
    text = PLAIN.replace("SOFTMAX(%l)", "SOFTMAX(%s)").replace(
        "  %p:",
        """  %g: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %c: float32[1,4,6,8] = CUMSUM(%g, int32(3))
  %s: float32[1,4,6,8] = ADD(%l, %c)
  %p:""",
    )
    (site,) = convert(parse(text), verify="none").sites
    assert site.status == "converted"
    assert site.note == "the heads are not followed up to scores that are added: 'g' still holds several"
    (plain,) = convert(parse(PLAIN), verify="none").sites
    assert not plain.note


@pytest.mark.parametrize("turned", [False, True])
def test_weights_that_no_softmax_makes_are_told_of_on_either_side_of_their_product(turned: bool) -> None:
    product = (
        "float32[1,4,5,6] = BATCH_MATMUL(%v, %w) {adj_x: true, adj_y: true}"
        if turned
        else "float32[1,4,6,5] = BATCH_MATMUL(%w, %v)"
    )
    text = f"""
subgraph main ({GIVEN}) {{
  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %w: float32[1,4,6,8] = RELU(%l)
  %o: {product}
  return %o
}}"""
    found = list(find_blocks(parse(text).subgraphs[0]))
    assert [match.softmax.name for match in found] == ["RELU"]
    assert isinstance(found[0], Block)
    assert found[0].heads == 4


def test_products_of_one_matrix_each_are_no_linear_attention_of_several_heads() -> None:
    one_head = LINEAR.replace("[1,4,", "[1,1,")
    assert [type(match) for match in find_blocks(parse(LINEAR).subgraphs[0])] == [NotABlock]
    assert list(find_blocks(parse(one_head).subgraphs[0])) == []


MIXED_STREAMS = """
subgraph main (%x: float32[14,72,4], %a: float32[14,4,4], %b: float32[14,4,4]) {
  %p: float32[14,72,4] = BATCH_MATMUL(%x, %a)
  %s: float32[14,72,4] = ADD(%p, %x)
  %r: float32[14,72,4] = BATCH_MATMUL(%s, %b)
  return %r
}
"""


def test_products_that_are_added_to_what_they_were_made_of_are_no_scores() -> None:
    """Streams of hidden states that are mixed token by token: `x + x A`."""
    (graph,) = parse(MIXED_STREAMS).subgraphs
    assert list(find_blocks(graph)) == []
    (other,) = parse(MIXED_STREAMS.replace("ADD(%p, %x)", "MUL(%p, %x)")).subgraphs
    assert len(list(find_blocks(other))) == 1


def test_a_softmax_over_classes_is_no_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "convert", written(tmp_path, CLASSES), "--dry-run", "--require-all")
    assert said.code == 0
    assert "The model holds no attention" in said.out


def test_the_products_of_one_softmax_are_not_those_of_another_behind_it() -> None:
    text = (
        PLAIN[: PLAIN.index("  %o:")]
        + """
  %c: float32[1,4,6,8] = CUMSUM(%p, int32(3))
  %s: float32[1,4,6,8] = SOFTMAX(%c) {beta: 1.0}
  return %s
}"""
    )
    first, second = (op for op in parse(text).subgraphs[0].operators if op.name == "SOFTMAX")
    assert between_products(first)
    assert not between_products(second)


SUMMED = """
  %q5: float32[1,4,6,1,5] = RESHAPE(%q, int32{1, 4, 6, 1, 5})
  %k5: float32[1,4,1,8,5] = RESHAPE(%k, int32{1, 4, 1, 8, 5})
  %qk: float32[1,4,6,8,5] = MUL(%q5, %k5)
  %l: float32[1,4,6,8] = SUM(%qk, int32{4})
  %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}
  %p5: float32[1,4,6,8,1] = RESHAPE(%p, int32{1, 4, 6, 8, 1})
  %v5: float32[1,4,1,8,5] = RESHAPE(%v, int32{1, 4, 1, 8, 5})
  %pv: float32[1,4,6,8,5] = MUL(%p5, %v5)
  %r: float32[1,4,6,5] = SUM(%pv, int32{3})
  return %r
}"""
SUM_RESULT = "%r: float32[1,4,6,5]"
IN_A_COMPOSITE = (
    "subgraph main (" + GIVEN + ") {\n"
    f"  {SUM_RESULT} = STABLEHLO_COMPOSITE(%q, %k, %v) {{name: 'n', decomposition_subgraph_index: 1}}\n"
    "  return %r\n}\n"
    "subgraph body (" + GIVEN + ") {" + SUMMED
)
UNCALLED = "subgraph main (%x: float32[4]) {\n  %y: float32[4] = ABS(%x)\n  return %y\n}\n" + PLAIN.replace(
    "main", "other"
)
GATE = """
subgraph main (%x: float32[6,16], %e: float32[6,4,16]) {
  %l: float32[6,4] = FULLY_CONNECTED(%x, float32[4,16]{splat 0.5}, none)
  %p: float32[6,4] = SOFTMAX(%l) {beta: 1.0}
  %p3: float32[6,4,1] = RESHAPE(%p, int32{6, 4, 1})
  %w: float32[6,4,16] = MUL(%p3, %e)
  %r: float32[6,16] = SUM(%w, int32{1})
  return %r
}"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("subgraph main (" + GIVEN + ") {" + SUMMED, "weigh values by MUL and a sum"),
        (IN_A_COMPOSITE, "inside the composite 'n'"),
        (UNCALLED, "in subgraph 1, which no signature and no operator calls"),
    ],
    ids=["sums", "sums in a composite", "uncalled"],
)
def test_attention_by_other_operators_and_where_nobody_calls_it_is_left_with_a_reason(
    text: str, reason: str
) -> None:
    with pytest.raises(SitesLeftError, match=reason):
        convert(parse(text), verify="none", require_all=True)


def test_a_gate_that_weighs_experts_by_learned_scores_is_no_attention() -> None:
    assert (
        convert(parse(GATE), verify="none", require_all=True)
        .summary()
        .startswith("The model holds no attention")
    )


def test_signatures_that_share_a_subgraph_are_converted_together_and_told_so() -> None:
    names = "(q=%q, k=%k, v=%v) -> (r=%r)"
    text = f"signature first = #0 {names}\nsignature second = #0 {names}\n{PLAIN}"
    result = convert(parse(text), verify="none", signatures="second")
    assert [site.signature for site in result.sites] == ["second"]
    found = [(each.name, each.blocks_converted, each.blocks, each.shares) for each in result.signatures]
    assert found == [("first", 1, 1, ("second",)), ("second", 1, 1, ("first",))]
    assert [row[0] for row in entry_points(result)] == [
        "signature",
        "first (also second)",
        "second (also first)",
    ]
