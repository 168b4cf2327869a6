"""What is found of an attention: its heads and sizes; and what stays as it is, with the reason."""

import math

import pytest
from attention_checks import heads_found, only_block
from pass_runs import refusal
from text_parser import parse

from edge_opt.attention.block import Block, NotABlock, logits_bytes, row_tiles
from edge_opt.attention.find import find_blocks, find_mask
from edge_opt.conversion import SitesLeftError, convert
from edge_opt.conversion.result import entry_points
from edge_opt.ir import Buffer, Constants, Metadata, Model
from edge_opt.ir.text import to_text
from edge_opt.passes import Context, Site, Status, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha, attention_left
from edge_opt.schema.data import Data
from edge_opt.targets import Target

GENERIC = Target("generic", "")
T, S, H = 3, 5, 4

# Sizes


def products(lead: str, *, turned: bool) -> str:
    """Products of `[lead,T,H]` queries with S keys; `turned`: the value product is `V^T P^T`, `[lead,H,T]`."""
    rows, values = (f"{H},{T}", f"{H},{S}") if turned else (f"{T},{H}", f"{S},{H}")
    product = "BATCH_MATMUL(%v, %p) {adj_y: true}" if turned else "BATCH_MATMUL(%p, %v)"
    return f"""
    subgraph main (%q: float32[{lead},{T},{H}], %k: float32[{lead},{S},{H}], %v: float32[{lead},{values}]) {{
      %l: float32[{lead},{T},{S}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},{T},{S}] = SOFTMAX(%l) {{beta: 1.0}}
      %o: float32[{lead},{rows}] = {product}
      MERGE
    }}"""


MERGES = {
    ("2", False): f"%t: float32[{T},2,{H}] = TRANSPOSE(%o, int32{{1, 0, 2}})",
    ("2", True): f"%t: float32[{T},2,{H}] = TRANSPOSE(%o, int32{{2, 0, 1}})",
    ("1,2", False): f"%t: float32[1,{T},2,{H}] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})",
    ("1,2", True): f"%t: float32[1,{T},2,{H}] = TRANSPOSE(%o, int32{{0, 3, 1, 2}})",
}


@pytest.mark.parametrize(("lead", "turned"), list(MERGES))
def test_the_sizes_of_a_block_of_heads(lead: str, turned: bool) -> None:
    merge = (
        f"{MERGES[lead, turned]}\n %r: float32[{T},{2 * H}] = RESHAPE(%t, int32{{{T}, {2 * H}}})\n return %r"
    )
    match = only_block(parse(products(lead, turned=turned).replace("MERGE", merge)).subgraphs[0])
    assert (match.heads, match.kv_heads, match.head_size) == (2, 2, H)
    assert (match.query_length, match.key_lengths) == (T, (S,))
    assert logits_bytes(match) == 2 * T * S


@pytest.mark.parametrize("given", ["merged", "beside the keys"])
@pytest.mark.parametrize("groups", ["1,1", "1,3", "1,3,5", "3"])
def test_heads_that_are_folded_into_rows_and_that_nothing_tells_are_not_taken_for_one(
    groups: str, given: str
) -> None:
    """`[1,K,(G)(T),H]`, of queries `[1,T,N*H]`."""
    kv_heads = math.prod(map(int, groups.split(",")))
    heads, rows = 2 * kv_heads, 2 * T
    made = {
        "merged": (f"1,{T},{heads * H}", f"RESHAPE(%x, int32{{1, {T}, {heads}, {H}}})"),
        "beside the keys": (f"1,{T},2,{heads},{H}", "UNPACK(%x) {num: 2, axis: 2}"),
    }
    more = f", %u: float32[1,{T},{heads},{H}]" if given == "beside the keys" else ""
    text = f"""
    subgraph main (%x: float32[{made[given][0]}], %k: float32[{groups},{S},{H}], %v: float32[{groups},{S},{H}]) {{
      %n: float32[1,{T},{heads},{H}]{more} = {made[given][1]}
      %t: float32[1,{heads},{T},{H}] = TRANSPOSE(%n, int32{{0, 2, 1, 3}})
      %q: float32[{groups},{rows},{H}] = RESHAPE(%t, int32{{{groups}, {rows}, {H}}})
      %l: float32[{groups},{rows},{S}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{groups},{rows},{S}] = SOFTMAX(%l) {{beta: 1.0}}
      %o: float32[{groups},{rows},{H}] = BATCH_MATMUL(%p, %v)
      return %o
    }}"""
    (match,) = find_blocks(parse(text).subgraphs[0])
    assert isinstance(match, NotABlock)
    assert match.is_attention
    assert match.reason.condition.startswith("rows of the value product are taken apart")


@pytest.mark.parametrize(
    "repeat",
    [
        "TILE(%few, int32{1, 2, 1, 1})",
        f"BROADCAST_TO(%few, int32{{1, 2, {S}, {H}}})",
        "CONCATENATION(%few, %few) {axis: 1}",
        "CONCATENATION(%new, %old) {axis: 2}",
    ],
)
def test_keys_and_values_that_are_repeated_for_the_heads_are_counted_before(repeat: str) -> None:
    merge = f"{MERGES['1,2', False]}\n %r: float32[1,{T},{2 * H}] = RESHAPE(%t, int32{{1, {T}, {2 * H}}})\n return %r"
    text = products("1,2", turned=False).replace("MERGE", merge)
    text = text.replace(f"%v: float32[1,2,{S},{H}])", f"%few: float32[1,1,{S},{H}])")
    parts = f"""%first: float32[1,1,2,{H}], %rest: float32[1,1,{S - 2},{H}] =
        SPLIT_V(%few, int32{{2, {S - 2}}}, int32(2)) {{num_splits: 2}}
      %new: float32[1,2,2,{H}] = TILE(%first, int32{{1, 2, 1, 1}})
      %old: float32[1,2,{S - 2},{H}] = CONCATENATION(%rest, %rest) {{axis: 1}}"""
    made = parts if "%new" in repeat else ""
    text = text.replace("      %l:", f"      {made}\n      %v: float32[1,2,{S},{H}] = {repeat}\n      %l:")
    match = only_block(parse(text).subgraphs[0])
    assert (match.heads, match.kv_heads) == (2, 1)


@pytest.mark.parametrize("lead", ["1,1", "1,2"])
@pytest.mark.parametrize(
    "masked", ["ADD(%c, %mask)", "ADD(%mask, %c)", "SELECT_V2(%open, %c, float32(-100.0))"]
)
def test_the_mask_is_what_is_added_to_scores_or_selects_them_and_no_factor(lead: str, masked: str) -> None:
    scores = f"float32[{lead},{T},{S}]"
    merge = "return %o" if lead == "1,1" else MERGES["1,2", False] + "\n return %t"
    text = products(lead, turned=False).replace("MERGE", merge).replace("SOFTMAX(%l)", "SOFTMAX(%m)")
    given, added = (
        f"%{name}: {dtype}[1,1,{T},{S}]" for name, dtype in (("open", "bool"), ("mask", "float32"))
    )
    text = text.replace("%q:", f"%one: float32[1], {given}, {added}, %q:", 1)
    steps = f"%s: {scores} = ADD(%one, %l)\n %c: {scores} = ADD(%s, %one)\n %m: {scores} = {masked}\n"
    match = only_block(parse(text.replace("      %p:", f"      {steps} %p:")).subgraphs[0])
    mask = find_mask(match.softmax)
    assert mask is not None
    assert mask.name == ("open" if "SELECT" in masked else "mask")


def segments(lead: str) -> Block:
    """An attention whose probabilities weigh the values in two parts, which are summed."""
    text = f"""
    subgraph main (%q: float32[{lead},{T},{H}], %k: float32[{lead},10,{H}],
                   %v1: float32[{lead},4,{H}], %v2: float32[{lead},6,{H}]) {{
      %l: float32[{lead},{T},10] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},{T},10] = SOFTMAX(%l)
      %p1: float32[{lead},{T},4], %p2: float32[{lead},{T},6] = SPLIT_V(%p, int32{{4, 6}}, int32(3)) {{num_splits: 2}}
      %o1: float32[{lead},{T},{H}] = BATCH_MATMUL(%p1, %v1)
      %o2: float32[{lead},{T},{H}] = BATCH_MATMUL(%p2, %v2)
      %s: float32[{lead},{T},{H}] = ADD(%o1, %o2)
      return %s
    }}"""
    return only_block(parse(text).subgraphs[0])


@pytest.mark.parametrize("lead", ["1,1", "1,2"])
def test_rows_of_every_head_are_tiles_of_their_own(lead: str) -> None:
    match = segments(lead)
    heads = 2 if lead == "1,2" else 1
    tiled = row_tiles(match, T)
    assert isinstance(tiled, Block)
    assert (tiled.pieces, tiled.tiles, tiled.query_length, tiled.key_lengths) == (heads * T, T, 1, (10,))
    assert tiled.output.name == "s"


def test_rows_that_do_not_divide_are_not_cut() -> None:
    reason = "no axis of the result is the queries' sequence, at SOFTMAX, tensor 's'"
    assert refusal(row_tiles, segments("1,1"), 2) == reason


# Heads that only the mask or the SOFTMAX shows

GROUPED = """
subgraph main (%q: float32[1,1,32,5], %k: float32[1,1,16,5], %v: float32[1,1,16,5], %m: float32[MASK]) {
  %l: float32[1,1,32,16] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %h: float32[1,4,8,16] = RESHAPE(%l, int32{1, 4, 8, 16})
  %s: float32[1,4,8,16] = ADDED
  %p: float32[1,4,8,16] = SOFTMAX(%s) {beta: 1.0}
  %w: float32[1,1,32,16] = RESHAPE(%p, int32{1, 1, 32, 16})
  %o: float32[1,1,32,5] = BATCH_MATMUL(%w, %v)
  return %o
}"""


@pytest.mark.parametrize("mask", ["1,1,8,16", "1,4,1,16", "1,1,1,16", "16", "1,32,1,16"])
def test_what_may_be_heads_or_tokens_is_not_counted_as_done(mask: str) -> None:
    """A SOFTMAX `[1,T,N,S]` is masked by `[1,T,1,S]`; tokens may be a batch of rows."""
    text = GROUPED.replace("MASK", mask).replace("ADDED", "ADD(%h, %m)")
    if "32" in mask:
        text = text.replace("1,4,8,16", "1,32,1,16").replace("1, 4, 8, 16", "1, 32, 1, 16")
    (match,) = find_blocks(parse(text).subgraphs[0])
    assert isinstance(match, NotABlock)
    assert match.is_attention


def test_two_softmaxes_that_weigh_the_same_values_are_one_attention() -> None:
    text = changed(
        "(%p, %v) -> (%w, %v)",
        "  %o: -> %l2: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true} "
        "%p2: float32[1,4,6,8] = SOFTMAX(%l2) %w: float32[1,4,6,8] = SUB(%p, %p2)\n  %o:",
    )
    assert heads_found(parse(text).subgraphs[0]) == [4]
    one = text.replace("[1,4,", "[1,1,").replace("[1,6,4,5]", "[1,6,1,5]").replace("20", "5")
    assert heads_found(parse(one).subgraphs[0]) == [1]


# What stays


def refused(model: Model, target: Target = GENERIC) -> Site:
    """The report of the only site, which must have left the graph alone."""
    before = to_text(model)
    graph = model.subgraphs[0]
    (report,) = run_pass(MhaToSha(), Context(model, graph, "main", target, Constants(model)))
    assert report.status is not Status.CONVERTED
    assert to_text(model) == before
    return report


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


def changed(*edits: str, text: str = PLAIN) -> str:
    """Four heads of size 5, six queries, eight keys, with changes `old -> new`."""
    for edit in edits:
        old, new = edit.split(" -> ", 1)
        assert old in text
        text = text.replace(old, new)
    return text


BATCH = changed("[1,4, -> [4,", "  %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})\n -> ",
                "float32[1,6,20] = RESHAPE(%o, int32{1, 6, 20}) -> float32[4,6] = MEAN(%o, int32{-1})",
                text=PLAIN.replace("RESHAPE(%t", "RESHAPE(%o"))  # fmt: skip
EXAMPLES = {
    "an outermost axis that may be the batch": (BATCH, "already single-head", True),
    "a softmax over classes": (
        "subgraph main (%x: float32[2,10]) { %p: float32[2,10] = SOFTMAX(%x) return %p }",
        "no value product behind this SOFTMAX: not attention",
        True,
    ),
    "a router that mixes experts": (
        """subgraph main (%x: float32[1,4,16], %experts: float32[1,3,16]) {
          %g: float32[1,4,3] = FULLY_CONNECTED(%x, float32[3,16]{splat 0.5}, none) {keep_num_dims: true}
          %p: float32[1,4,3] = SOFTMAX(%g)
          %o: float32[1,4,16] = BATCH_MATMUL(%p, %experts)
          return %o
        }""",
        "no product of queries and keys leads to this SOFTMAX: not attention, at FULLY_CONNECTED",
        True,
    ),
    "probabilities that an operator takes which nobody can look into": (
        changed("BATCH_MATMUL(%p, -> CUSTOM 'product' (%p,"),
        "the probabilities go into an operator that nothing is known of, at CUSTOM",
    ),
    "logits made by an operator that nobody can look into": (
        changed("BATCH_MATMUL(%q, %k) {adj_y: true} -> CUSTOM 'scores' (%q, %k)"),
        "the scores are not followed through this operator, at CUSTOM",
    ),
    "logits of which one part cannot be followed": (
        changed("  %p: -> %l2: float32[1,4,6,8] = STRIDED_SLICE(%l3, int32{0, 0, 0, 0}, int32{1, 4, 6, 16}, "
                "int32{1, 1, 1, 2}) %sum: float32[1,4,6,8] = ADD(%l, %l2)\n  %p:", "(%l) -> (%sum)",
                "  %l: -> %l3: float32[1,4,6,16] = BATCH_MATMUL(%q, %k3) {adj_y: true}\n  %l:",
                "%v: float32[1,4,8,5] -> %v: float32[1,4,8,5], %k3: float32[1,4,16,5]"),
        "only plain ranges of a STRIDED_SLICE are followed, at STRIDED_SLICE",
    ),
    "heads that share their logits": (
        changed("%q: float32[1,4, -> %q: float32[1,1,", "%k: float32[1,4, -> %k: float32[1,1,",
                "float32[1,4,6,8] -> float32[1,1,6,8]"),
        "no product of queries and keys carries the heads, at RESHAPE",
    ),
    "heads that share their logits in groups": (
        changed("%q: float32[1,4, -> %q: float32[1,2,1,", "%k: float32[1,4, -> %k: float32[1,2,1,",
                "%v: float32[1,4, -> %v: float32[1,2,2,", "float32[1,4,6,8] -> float32[1,2,1,6,8]",
                "%o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v) -> %o5: float32[1,2,2,6,5] = BATCH_MATMUL(%p, %v) "
                "%o: float32[1,4,6,5] = RESHAPE(%o5, int32{1, 4, 6, 5})"),
        "not every head reaches the logits (expected 4, found 2), at BATCH_MATMUL",
    ),
    "values that are never summed": (
        changed("%v: float32[1,4,8,5] -> %v: float32[1,4,8,5], %w: float32[1,4,8,3]", "return %r -> return %r, %z",
                "  %t: -> %z: float32[1,4,6,3] = BATCH_MATMUL(%p, %w)\n  %t:"),
        "the probabilities weigh several values that are never summed, at SOFTMAX",
    ),
    "a length that is known at run time only": (
        changed("[1,4,6, -> [1,4,?,", "[1,6, -> [1,?,", "{1, 6, 20} -> {1, -1, 20}"),
        "lengths are known only at run time: give --shape q=1,4,?,5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_left_says_why(example: str) -> None:
    graph, reason, *settled = EXAMPLES[example]
    report = refused(parse(graph))
    assert (report.status, report.reason, report.settled) == (Status.SKIPPED, reason, bool(settled))


@pytest.mark.parametrize(
    ("lead", "rows", "keys", "end"),
    [("1,1", 4, 8, ""), ("1", 12, 12, "%r: float32[1,3,4,5] = RESHAPE(%o, int32{1, 3, 4, 5})")],
    ids=["rows that nothing merges", "rows and columns of an image"],
)
def test_rows_that_may_be_heads_or_not_stay(lead: str, rows: int, keys: int, end: str) -> None:
    model = parse(f"""
    subgraph main (%q: float32[{lead},{rows},5], %k: float32[{lead},{keys},5], %v: float32[{lead},{keys},5]) {{
      %l: float32[{lead},{rows},{keys}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},{rows},{keys}] = SOFTMAX(%l)
      %o: float32[{lead},{rows},5] = BATCH_MATMUL(%p, %v)
      {end}
      return {"%r" if end else "%o"}
    }}""")
    assert heads_found(model.subgraphs[0]) == [1]


def test_a_recorded_shape_that_is_a_lie_is_not_believed() -> None:
    model = parse(PLAIN)
    tensor = next(t for t in model.subgraphs[0].tensors if t.name == "o")
    tensor.shape = (1, 4, 5, 6)
    assert refused(model).reason == (
        "the probabilities go into an operator that nothing is known of, at BATCH_MATMUL (axis 2 is 6, recorded as 5 "
        "of 'o')"
    )
    model = parse(PLAIN)
    tensor = next(t for t in model.subgraphs[0].tensors if t.name == "p")
    tensor.shape = (1, 4, 6, 9)
    reason = refused(model).reason
    assert reason == ("the recorded shapes do not fit, at SOFTMAX (axis 3 is 8, recorded as 9 of 'p')")


def test_operators_that_the_file_orders_by_index_stay() -> None:
    model = parse(PLAIN)
    model.metadata.append(Metadata("model_control_dependencies", Buffer(Data(b"x"))))
    assert "model_control_dependencies" in refused(model).reason


# Nobody is told that there is none

IN_A_BRANCH = (
    "subgraph main (%c: bool[], " + GIVEN + ") {\n"
    f"  {RESULT} = IF(%c, %q, %k, %v) {{then_subgraph_index: 1, else_subgraph_index: 2}}\n  return %r\n}}\n"
    "subgraph then (" + GIVEN + ") {" + ATTENTION + "\n"
    "subgraph else (" + GIVEN + ") {\n  %r: float32[1,6,20] = RESHAPE(%q, int32{1, 6, 20})\n  return %r\n}"
)
NOT_UNDERSTOOD = PLAIN.replace("BATCH_MATMUL(%p,", "BATCH_MATMUL(%c,").replace(
    "  %o:", "  %c: float32[1,4,6,8] = CUMSUM(%p, int32(3))\n  %o:"
)
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
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_attention_that_stays_is_a_site_with_a_reason_and_fails_require_all(case: str) -> None:
    text, options, reason = LEFT[case]
    result = convert(parse(text), verify="none", **options)
    assert [(site.status, site.settled, site.reason) for site in result.sites] == [("skipped", False, reason)]
    assert not result.converted
    with pytest.raises(SitesLeftError, match="1 of 1 sites were not converted"):
        convert(parse(text), verify="none", require_all=True, **options)


def test_sites_of_attention_that_stays_are_counted_on() -> None:
    both = IN_A_BRANCH[: IN_A_BRANCH.index("subgraph else")] + "subgraph else (" + GIVEN + ") {" + ATTENTION
    model = parse(both)
    done = [
        Site(None, pass_name="mask_to_add", signature="main", index=0, status=Status.CONVERTED),
        Site(None, pass_name="mha_to_sha", signature="main", index=0, status=Status.CONVERTED),
    ]
    left = attention_left(model, model.subgraphs[0], "main", done, split=True)
    assert [site.index for site in left] == [1, 2]


GATE = """
subgraph main (%x: float32[6,16], %e: float32[6,4,16]) {
  %l: float32[6,4] = FULLY_CONNECTED(%x, float32[4,16]{splat 0.5}, none)
  %p: float32[6,4] = SOFTMAX(%l) {beta: 1.0}
  %p3: float32[6,4,1] = RESHAPE(%p, int32{6, 4, 1})
  %w: float32[6,4,16] = MUL(%p3, %e)
  %r: float32[6,16] = SUM(%w, int32{1})
  return %r
}"""


@pytest.mark.parametrize("text", [GATE, CLASSES], ids=["a gate", "classes"])
def test_learned_scores_are_no_attention(text: str) -> None:
    result = convert(parse(text), verify="none", require_all=True)
    assert result.summary().startswith("The model has no attention")


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
