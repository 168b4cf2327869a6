"""What is found of an attention: its heads and sizes; and what is skipped, with the reason."""

import math
from dataclasses import replace

import fuzz
import pytest
from attention_checks import (
    GIVEN,
    TWO_SOFTMAXES,
    assert_same_bits,
    attention_text,
    masked_text,
    of_one_head,
    only_block,
)
from pass_runs import changed, refusal, run, sites_of, statuses

from edge_opt.attention.around import find_mask
from edge_opt.attention.block import Block, NotABlock, row_tiles
from edge_opt.attention.find import find_blocks
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import HeadLayouts
from edge_opt.attention.pairs import products_among
from edge_opt.conversion import SitesSkippedError, convert
from edge_opt.conversion.result import entry_point_table
from edge_opt.ir import Constants, Model, Subgraph, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.ir.text import to_text
from edge_opt.passes import Context, Status
from edge_opt.passes.mha_to_sha import left_over
from edge_opt.targets import load_target

PLAIN = attention_text()
T, H = 3, 4


@pytest.mark.parametrize("groups", ["1,1", "1,2", "2"])
def test_heads_that_are_folded_into_rows_and_not_merged_are_not_taken_for_one(groups: str) -> None:
    """`[1,K,(G)(T),H]`, of queries `[1,T,N*H]`."""
    rows = 24 // math.prod(map(int, groups.split(",")))
    text = changed(
        attention_text(tail="", returned="%o"),
        "%q: float32[1,4,6,5] -> %x: float32[1,6,20]",
        f"%k: float32[1,4,8,5], %v: float32[1,4,8,5] -> %k: float32[{groups},8,5], %v: float32[{groups},8,5]",
        f"float32[1,4,6,8] -> float32[{groups},{rows},8]",
        f"float32[1,4,6,5] -> float32[{groups},{rows},5]",
        f"""  %l: ->   %n: float32[1,6,4,5] = RESHAPE(%x, int32{{1, 6, 4, 5}})
  %h: float32[1,4,6,5] = TRANSPOSE(%n, int32{{0, 2, 1, 3}})
  %q: float32[{groups},{rows},5] = RESHAPE(%h, int32{{{groups}, {rows}, 5}})
  %l:""",
    )
    (match,) = find_blocks(parse(text).subgraphs[0])
    assert match.is_attention
    assert match.reason.why == "heads"


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    "masked", ["ADD(%c, %mask)", "ADD(%mask, %c)", "SELECT_V2(%open, %c, float32(-9))"]
)
def test_the_mask_is_what_is_added_to_scores_or_selects_them_and_no_factor(
    heads: int, masked: str
) -> None:
    scores = "float32[1,4,6,8]"
    steps = f"  %s: {scores} = ADD(%one, %l)\n  %c: {scores} = ADD(%s, %one)\n  %m: {scores} = {masked}\n"
    softmax = f"{steps}  %p: {scores} = SOFTMAX(%m) {{beta: 1.0}}"
    inputs = ", %one: float32[1], %open: bool[1,1,6,8], %mask: float32[1,1,6,8]"
    text = attention_text(softmax=softmax, inputs=inputs)
    mask = find_mask(
        only_block(parse(text if heads == 4 else of_one_head(text)).subgraphs[0]).softmax
    )
    assert mask.name == ("open" if "SELECT" in masked else "mask")


@pytest.mark.parametrize("lead", ["2,1", "1,4"])
def test_a_single_key_may_lie_on_either_axis_of_a_product(lead: str) -> None:
    """`[.., T, S]` with T = S = 1: transposed or not are the same numbers, and one head has no TRANSPOSE left."""
    text = f"""
    subgraph main (%q: float32[{lead},1,{H}], %k: float32[{lead},1,{H}], %v: float32[{lead},{H},1]) {{
      %l: float32[{lead},1,1] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},1,1] = SOFTMAX(%l) {{beta: 1.0}}
      %o: float32[{lead},1,{H}] = BATCH_MATMUL(%p, %v) {{adj_x: true, adj_y: true}}
      return %o
    }}"""
    assert only_block(parse(text).subgraphs[0]).head_size == H


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


@pytest.mark.parametrize(("lead", "heads"), [("1,1", 1), ("1,2", 2), ("3,2", 2)])
def test_rows_of_every_head_are_tiles_of_their_own(lead: str, heads: int) -> None:
    """A batch that is as large as the sequence stays whole."""
    match = segments(lead)
    tiled = row_tiles(match, T)
    assert isinstance(tiled, Block)
    assert (tiled.merged.pieces, tiled.tiles, tiled.query_length, tiled.key_lengths) == (
        heads * T,
        T,
        1,
        (10,),
    )
    assert tiled.merged.tensor.name == "s"
    assert not any(factor.stride for factor in tiled.merged.factored[0])


def test_rows_that_do_not_divide_are_not_cut() -> None:
    assert refusal(row_tiles, segments("1,1"), 2).why == "heads"


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


MASKED_BY_TOKENS = GROUPED.replace("MASK", "1,1,8,16").replace("ADDED", "ADD(%h, %m)")
ONLY_MASKED_BY_HEADS = MASKED_BY_TOKENS.replace(
    "%p: float32[1,4,8,16] = SOFTMAX(%s) {beta: 1.0}", "%t: float32[1,4,8,16] = NEG(%s)"
).replace(
    "%w: float32[1,1,32,16] = RESHAPE(%p, int32{1, 1, 32, 16})",
    "%u: float32[1,1,32,16] = RESHAPE(%t, int32{1, 1, 32, 16})\n  %w: float32[1,1,32,16] = SOFTMAX(%u)",
)


def unmasked(
    lead: str, rows: int, keys: int, *, projected: bool = False, end: str = ""
) -> Subgraph:
    """Heads of size 5; the queries may come from a projection, and the result may end in another shape."""
    query, shape = f"{lead},{rows},5", f"float32[{lead},{rows},{keys}]"
    return parse(f"""
    subgraph main ({"%x: float32[1,1,40]" if projected else f"%q: float32[{query}]"},
                   %k: float32[{lead},{keys},5], %v: float32[{lead},{keys},5]) {{
      {f"%q: float32[{query}] = RESHAPE(%x, int32{{{query}}})" if projected else ""}
      %l: {shape} = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: {shape} = SOFTMAX(%l)
      %o: float32[{query}] = BATCH_MATMUL(%p, %v)
      {f"%r: float32[{end}] = RESHAPE(%o, int32{{{end}}})" if end else ""}
      return {"%r" if end else "%o"}
    }}""").subgraphs[0]


@pytest.mark.parametrize(
    ("graph", "named"),
    [
        (parse(ONLY_MASKED_BY_HEADS).subgraphs[0], "several heads"),
        (unmasked("1,1", 8, 16, projected=True), "several heads"),
        (unmasked("1,2", 4, 16, projected=True), "several heads"),
        (unmasked("1", 16, 16, end="1,80"), "the sequence"),
        (unmasked("1,4", 16, 16, end="1,320"), "the sequence"),
    ],
    ids=[
        "heads in the mask",
        "heads in the queries",
        "groups in the queries",
        "flattened",
        "flattened heads",
    ],
)
def test_rows_that_only_other_tensors_show_as_heads_or_sequence(
    graph: Subgraph, named: str
) -> None:
    """Grouped heads of one token without a projection behind them; or all tokens, flattened for a classifier."""
    (match,) = find_blocks(graph)
    assert match.is_attention
    assert match.reason.why == "heads"
    assert named in match.reason.text


def test_queries_that_are_the_block_before_show_nothing() -> None:
    """Two blocks of two groups for one token, without projections between them."""
    given = ", ".join(f"%{name}{place}: float32[1,2,8,5]" for name in "kv" for place in (1, 2))
    blocks = "".join(
        f"""
          %g{at}: float32[1,2,2,5] = RESHAPE(%x{at - 1}, int32{{1, 2, 2, 5}})
          %l{at}: float32[1,2,2,8] = BATCH_MATMUL(%g{at}, %k{at}) {{adj_y: true}}
          %p{at}: float32[1,2,2,8] = SOFTMAX(%l{at}) {{beta: 1.0}}
          %o{at}: float32[1,2,2,5] = BATCH_MATMUL(%p{at}, %v{at})
          %x{at}: float32[1,20] = RESHAPE(%o{at}, int32{{1, 20}})"""
        for at in (1, 2)
    )
    model = parse(f"subgraph main (%x0: float32[1,20], {given}) {{{blocks}\n  return %x2\n}}")
    assert [match.heads for match in find_blocks(model.subgraphs[0])] == [4, 4]


def test_a_sequence_outside_the_heads_is_flattened_with_them_and_no_part_of_them() -> None:
    """`[1,(4),6,5] -> [1,6,(4),5] -> [1,6*4*5]`, before a classifier: 4 heads, not 24."""
    assert (
        only_block(
            parse(
                changed(
                    PLAIN, "%r: float32[1,6,20] -> %r: float32[1,120]", "{1, 6, 20} -> {1, 120}"
                )
            ).subgraphs[0]
        ).heads
        == 4
    )


@pytest.mark.parametrize(
    ("lead", "rows", "keys", "end"),
    [("1,1", 4, 8, ""), ("1", 12, 12, "1,3,4,5")],
    ids=["rows that nothing merges", "rows and columns of an image"],
)
def test_rows_that_may_be_heads_or_not_stay(lead: str, rows: int, keys: int, end: str) -> None:
    assert only_block(unmasked(lead, rows, keys, end=end)).heads == 1


CUMULATED = attention_text(then="  %w: float32[1,4,6,8] = CUMSUM(%p, int32(3))")
FOLDED = (
    attention_text(
        softmax="  %m: float32[1,4,6,8] = CONCATENATION(%few, %few, %few, %few) {axis: 2}\n"
        "  %s: float32[1,4,6,8] = ADD(%l, %m)\n  %p: float32[1,4,6,8] = SOFTMAX(%s) {beta: 1.0}",
        inputs=", %few: float32[1,1,6,8]",
        tail="",
        returned="%o",
    )
    .replace("[1,4,6,", "[1,1,24,")
    .replace("[1,4,8,", "[1,1,8,")
)
BATCH = attention_text(tail="  %r: float32[4,6] = MEAN(%o, int32{-1})").replace("[1,4,", "[4,")
BRANCHES = f"""
subgraph main (%c: bool[], {GIVEN}) {{
  %r: float32[1,6,20] = CALLING
  return %r
}}"""
IN_A_BRANCH = (
    BRANCHES.replace(
        "CALLING", "IF(%c, %q, %k, %v) {then_subgraph_index: 1, else_subgraph_index: 1}"
    )
    + PLAIN
)
IN_A_COMPOSITE = (
    BRANCHES.replace(
        "CALLING", "STABLEHLO_COMPOSITE(%q, %k, %v) {name: 'b', decomposition_subgraph_index: 1}"
    )
    + PLAIN
)
IN_A_COMPOSITE_OF_A_COMPOSITE = "".join(
    [
        BRANCHES.replace(
            "CALLING",
            "STABLEHLO_COMPOSITE(%q, %k, %v) {name: 'a', decomposition_subgraph_index: 1}",
        ),
        IN_A_COMPOSITE.replace("main (%c: bool[], ", "outer (", 1).replace("index: 1", "index: 2"),
    ]
)
TURNED = """  %lt: float32[1,6,8,4] = TRANSPOSE(%x, int32{0, 2, 3, 1})
  %lm: float32[1,6,8,4] = FULLY_CONNECTED(%lt, float32[4,4]{splat 0.5}, none) {keep_num_dims: true}
  %w: float32[1,4,6,8] = TRANSPOSE(%lm, int32{0, 3, 1, 2})"""
BY_A_PRODUCT = """  %lt: float32[1,4,48] = RESHAPE(%x, int32{1, 4, 48})
  %lm: float32[1,4,48] = BATCH_MATMUL(float32[1,4,4]{splat 0.5}, %lt)
  %w: float32[1,4,6,8] = RESHAPE(%lm, int32{1, 4, 6, 8})"""


def mixed_scores(mixing: str, weights: str = "SOFTMAX(%m) {beta: 1.0}") -> str:
    """Talking heads: each head's scores become a mixture of all heads' scores."""
    own = mixing.replace("%x", "%l").replace("%w", "%m")
    return attention_text(softmax=f"{own}\n  %p: float32[1,4,6,8] = {weights}")


SUMMED_SCORES = """  %q5: float32[1,4,6,1,5] = RESHAPE(%q, int32{1, 4, 6, 1, 5})
  %k5: float32[1,4,1,8,5] = RESHAPE(%k, int32{1, 4, 1, 8, 5})
  %qk: float32[1,4,6,8,5] = MUL(%q5, %k5)
  %l: float32[1,4,6,8] = SUM(%qk, int32{4})"""
SUMMED_VALUES = """  %p5: float32[1,4,6,8,1] = RESHAPE(%p, int32{1, 4, 6, 8, 1})
  %v5: float32[1,4,1,8,5] = RESHAPE(%v, int32{1, 4, 1, 8, 5})
  %pv: float32[1,4,6,8,5] = MUL(%p5, %v5)
  %o: float32[1,4,6,5] = SUM(%pv, int32{3})"""
SIGMOID = "  %p: float32[1,4,6,8] = LOGISTIC(%l)"
LATENT = """
subgraph main (%q: float32[4,1,5], %c: float32[1,8,6]) {
  %a: float32[4,1,6] = BATCH_MATMUL(%q, float32[4,5,6]{splat 0.5})
  %r: float32[1,4,6] = RESHAPE(%a, int32{1, 4, 6})
  %l: float32[1,4,8] = BATCH_MATMUL(%r, %c) {adj_y: true}
  %p: float32[1,4,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,4,6] = BATCH_MATMUL(%p, %c)
  %u: float32[4,1,6] = RESHAPE(%o, int32{4, 1, 6})
  %s: float32[4,1,3] = BATCH_MATMUL(%u, float32[4,6,3]{splat 0.25})
  return %s
}"""
LATENT_OUT = changed(
    LATENT,
    """
  %u: float32[4,1,6] = RESHAPE(%o, int32{4, 1, 6})
  %s: float32[4,1,3] = BATCH_MATMUL(%u, float32[4,6,3]{splat 0.25})
  return %s -> \n  return %o""",
)
IN_BETWEEN = {
    "a scale": "%m: float32[1,4,6,8,5] = MUL(%qk, float32(0.5))",
    "a type": "%m: float16[1,4,6,8,5] = CAST(%qk)",
}
DECODE_BY_SUMS = """
subgraph main (%q: float32[1,4,1,8], %k: float32[1,4,3,8], %v: float32[1,4,3,8]) {
  %r: float32[1,4,3,8] = REPEAT
  %m: float32[1,4,3,8] = MUL(%r, %k)
  %l: float32[1,4,3] = SUM(%m, int32{3})
  %p: float32[1,4,3] = SOFTMAX(%l) {beta: 1.0}
  %c: float32[1,4,3,1] = RESHAPE(%p, int32{1, 4, 3, 1})
  %w: float32[1,4,3,8] = MUL(%c, %v)
  %t: float32[1,4,8,3] = TRANSPOSE(%w, int32{0, 1, 3, 2})
  %o: float32[1,4,8] = SUM(%t, int32{3})
  return %o
}"""
FOLDED_ROWS = """
subgraph main (%x: float32[1,6,20], %k: float32[1,1,8,5], %v: float32[1,1,8,5]) {
  %h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5})
  %t: float32[1,4,6,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
  %q: float32[1,1,24,5] = RESHAPE(%t, int32{1, 1, 24, 5})
  %l: float32[1,1,24,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,1,24,8] = MUL(%l, float32(0.5))
  %o: float32[1,1,24,5] = BATCH_MATMUL(%p, %v)
  return %o
}"""
QUERIES_OF_EACH_HEAD = """
subgraph main (%x: float32[1,1,6,5], %k: float32[1,1,8,5], %v: float32[1,1,8,5]) {
  %h: float32[1,4,6,5] = MUL(%x, float32[1,4,1,5]{splat 0.5})
  %q: float32[1,1,24,5] = RESHAPE(%h, int32{1, 1, 24, 5})
  %l: float32[1,1,24,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,1,24,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,1,24,5] = BATCH_MATMUL(%p, %v)
  return %o
}"""
HEADS_OF_SCALES = """
subgraph main (%q: float32[2,4,6,5], %k: float32[2,4,8,5], %v: int8[2,4,8,5] q([0.1, 0.2], [0, 0], axis 0)) {
  %l: float32[2,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[2,4,6,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[2,4,6,5] = BATCH_MATMUL(%p, %v)
  return %o
}"""
TWO_MAPS_IN_ROWS = """
subgraph main (%x: float32[1,6,10], %k: float32[1,1,8,5], %v: float32[1,1,8,10]) {
  %h: float32[1,6,2,5] = RESHAPE(%x, int32{1, 6, 2, 5})
  %t: float32[1,2,6,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
  %q: float32[1,1,12,5] = RESHAPE(%t, int32{1, 1, 12, 5})
  %l: float32[1,1,12,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,1,12,8] = SOFTMAX(%l) {beta: 1.0}
  %a: float32[1,1,6,8] = SLICE(%p, int32{0, 0, 0, 0}, int32{1, 1, 6, 8})
  %b: float32[1,1,6,8] = SLICE(%p, int32{0, 0, 6, 0}, int32{1, 1, 6, 8})
  %w: float32[1,1,6,8] = SUB(%a, %b)
  %o: float32[1,1,6,10] = BATCH_MATMUL(%w, %v)
  return %o
}"""
FROM_STATE = """
subgraph main (%x: float32[1,1,20], %state: float32[1,4,5,5]) {
  %q: float32[1,1,20] = FULLY_CONNECTED(%x, float32[20,20]{splat 0.5}, none) {keep_num_dims: true}
  %h: float32[1,4,1,5] = RESHAPE(%q, int32{1, 4, 1, 5})
  %o: float32[1,4,1,5] = BATCH_MATMUL(%h, %state)
  return %o
}"""
GIVEN_STATE = """
subgraph main (%h: float32[1,4,1,5], %state: float32[1,4,5,5]) {
  %o: float32[1,4,1,5] = BATCH_MATMUL(%h, %state)
  return %o
}"""
TOKENS_BEFORE_HEADS = """
subgraph main (%x: float32[1,6,20], %c: float32[1,8,7]) {
  %h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5})
  %t: float32[1,4,6,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
  %a: float32[1,4,6,7] = BATCH_MATMUL(%t, float32[1,4,5,7]{splat 0.5})
  %u: float32[1,6,4,7] = TRANSPOSE(%a, int32{0, 2, 1, 3})
  %r: float32[1,24,7] = RESHAPE(%u, int32{1, 24, 7})
  %l: float32[1,24,8] = BATCH_MATMUL(%r, %c) {adj_y: true}
  %p: float32[1,24,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,24,7] = BATCH_MATMUL(%p, %c)
  %w: float32[1,6,4,7] = RESHAPE(%o, int32{1, 6, 4, 7})
  %z: float32[1,4,6,7] = TRANSPOSE(%w, int32{0, 2, 1, 3})
  return %z
}"""
GROUPS_BEFORE_HEADS = """
subgraph main (%x: float32[1,6,20], %k: float32[1,2,8,5], %v: float32[1,2,8,5]) {
  %h: float32[1,6,2,2,5] = RESHAPE(%x, int32{1, 6, 2, 2, 5})
  %t: float32[1,2,2,6,5] = TRANSPOSE(%h, int32{0, 3, 2, 1, 4})
  %q: float32[1,2,12,5] = RESHAPE(%t, int32{1, 2, 12, 5})
  %l: float32[1,2,12,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,2,12,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,2,12,5] = BATCH_MATMUL(%p, %v)
  %w: float32[1,2,2,6,5] = RESHAPE(%o, int32{1, 2, 2, 6, 5})
  %z: float32[1,6,2,2,5] = TRANSPOSE(%w, int32{0, 3, 2, 1, 4})
  return %z
}"""
SUMMED_HEADS = """
subgraph main (%x: float32[1,6,20], %k: float32[1,4,8,5], %v: float32[1,1,8,5]) {
  %h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5})
  %q: float32[1,4,6,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %s: float32[1,1,6,8] = SUM(%l, int32{1}) {keep_dims: true}
  %p: float32[1,1,6,8] = SOFTMAX(%s) {beta: 1.0}
  %o: float32[1,1,6,5] = BATCH_MATMUL(%p, %v)
  return %o
}"""
COLUMNS_OF_HEADS = """
subgraph main (%x: float32[1,6,20], %k: float32[1,8,5], %v: float32[1,8,5]) {
  %q: float32[1,24,5] = RESHAPE(%x, int32{1, 24, 5})
  %l: float32[1,8,24] = BATCH_MATMUL(%k, %q) {adj_y: true}
  %p: float32[1,8,24] = MUL(%l, float32(0.5))
  %o: float32[1,24,5] = BATCH_MATMUL(%p, %v) {adj_x: true}
  return %o
}"""
POOLED = """
subgraph main (%x: float32[1,6,20]) {
  %s: float32[1,6,4] = FULLY_CONNECTED(%x, float32[4,20]{splat 0.5}, none) {keep_num_dims: true}
  %t: float32[1,4,6] = TRANSPOSE(%s, int32{0, 2, 1})
  %p: float32[1,4,6] = SOFTMAX(%t) {beta: 1.0}
  %w: float32[1,4,1,6] = RESHAPE(%p, int32{1, 4, 1, 6})
  %h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5})
  %v: float32[1,4,6,5] = TRANSPOSE(%h, int32{0, 2, 1, 3})
  %o: float32[1,4,1,5] = BATCH_MATMUL(%w, %v)
  return %o
}"""
BY_CONVOLUTION = """
subgraph main (%q: float32[1,6,1,20], %k: float32[32,1,1,5], %v: float32[1,4,8,5]) {
  %c: float32[1,6,1,32] = CONV_2D(%q, %k, float32[32]{splat 0.0}) {padding: 1, stride_w: 1, stride_h: 1}
  %r: float32[1,6,4,8] = RESHAPE(%c, int32{1, 6, 4, 8})
  %l: float32[1,4,6,8] = TRANSPOSE(%r, int32{0, 2, 1, 3})
  %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
  return %o
}"""
SKIPPED = {
    **{
        f"scores written as MUL and SUM, with {what} in between": (
            attention_text(scores=changed(SUMMED_SCORES, f"  %l: ->   {line}\n  %l:", "SUM(%qk -> SUM(%m")),
            "pattern", "at SUM",
        )
        for what, line in IN_BETWEEN.items()
    },
    "values with several scales": (
        HEADS_OF_SCALES,
        "quantization", "several scales",
    ),
    "convolutions with computed weights": (
        """subgraph main (%q: float32[1,6,1,5], %k: float32[8,1,1,5], %v: float32[5,1,1,8]) {
          %l: float32[1,6,1,8] = CONV_2D(%q, %k, float32[8]{splat 0.0}) {padding: 1, stride_w: 1, stride_h: 1}
          %p: float32[1,6,1,8] = LOGISTIC(%l)
          %o: float32[1,6,1,5] = CONV_2D(%p, %v, float32[5]{splat 0.0}) {padding: 1, stride_w: 1, stride_h: 1}
          return %o
        }""",
        "pattern", "at CONV_2D",
    ),
    "a distance of queries and keys": (
        attention_text(scores=changed(SUMMED_SCORES, "MUL -> SQUARED_DIFFERENCE")), "pattern", "at SUM",
    ),
    "queries that are repeated for the keys": (
        changed(DECODE_BY_SUMS, "REPEAT -> CONCATENATION(%q, %q, %q) {axis: 2}"), "pattern", "at SUM",
    ),
    "queries that are multiplied by ones for the keys": (
        changed(DECODE_BY_SUMS, "REPEAT -> MUL(%q, float32[1,4,3,8]{splat 1.0})"), "pattern", "at SUM",
    ),
    "linear attention of heads that lie in rows": (FOLDED_ROWS, "pattern", "linear attention"),
    "rows that are a query for each head": (QUERIES_OF_EACH_HEAD, "heads", "tensor 'h'"),
    "scores of a convolution with computed weights": (BY_CONVOLUTION, "operator", "CONV_2D"),
    "a branch of IF": (IN_A_BRANCH, "pattern", "in a graph that it calls"),
    "a branch of IF without a SOFTMAX": (
        BRANCHES.replace("CALLING", "IF(%c, %q, %k, %v) {then_subgraph_index: 1, else_subgraph_index: 1}")
        + attention_text(softmax=SIGMOID),
        "pattern", "in a graph that it calls",
    ),
    "a branch of IF that weighs values": (
        """subgraph main (%c: bool[], %q: float32[1,1,6,5], %k: float32[1,1,8,5], %v: float32[1,4,8,5]) {
          %l: float32[1,1,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
          %r: float32[1,4,6,5] = IF(%c, %l, %v) {then_subgraph_index: 1, else_subgraph_index: 1}
          return %r
        }
        subgraph weigh (%l: float32[1,1,6,8], %v: float32[1,4,8,5]) {
          %p: float32[1,1,6,8] = LOGISTIC(%l)
          %r: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
          return %r
        }""",
        "pattern", "in a graph that it calls",
    ),
    "talking heads before the SOFTMAX": (
        mixed_scores(TURNED), "heads", "FULLY_CONNECTED",
    ),
    "talking heads behind the SOFTMAX": (
        attention_text(then=TURNED.replace("%x", "%p")),
        "operator", "FULLY_CONNECTED",
    ),
    "talking heads by a product behind the SOFTMAX": (
        attention_text(then=BY_A_PRODUCT.replace("%x", "%p")),
        "operator", "BATCH_MATMUL",
    ),
    "talking heads without a SOFTMAX": (
        mixed_scores(TURNED, "LOGISTIC(%m)"),
        "heads", "FULLY_CONNECTED",
    ),
    "talking heads in the rows of one token": (
        changed(LATENT, "SOFTMAX(%l) -> SOFTMAX(%m)", "  %p: ->   %t: float32[1,8,4] = TRANSPOSE(%l, int32{0, 2, 1})\n"
                "  %f: float32[1,8,4] = FULLY_CONNECTED(%t, float32[4,4]{splat 0.5}, none) {keep_num_dims: true}\n"
                "  %m: float32[1,4,8] = TRANSPOSE(%f, int32{0, 2, 1})\n  %p:"),
        "heads", "FULLY_CONNECTED",
    ),
    "scores written as MUL and SUM": (
        attention_text(scores=SUMMED_SCORES), "pattern", "at SUM",
    ),
    "both products written as MUL and SUM": (
        attention_text(scores=SUMMED_SCORES, values=SUMMED_VALUES),
        "pattern", "at SUM",
    ),
    "an operator without a rule between two products": (
        attention_text(softmax="  %s: float32[1,4,6,8] = CUMSUM(%l, int32(3))\n" + SIGMOID.replace("%l", "%s")),
        "operator", "CUMSUM",
    ),
    "linear attention": (
        attention_text(scores="  %s: float32[1,4,5,5] = BATCH_MATMUL(%k, %v) {adj_x: true}", softmax="",
                       values="  %o: float32[1,4,6,5] = BATCH_MATMUL(%q, %s)"),
        "pattern", "linear attention",
    ),
    "rows whose queries have their own matrices": (
        LATENT_OUT, "heads", "tensor 'a'",
    ),
    "an operator behind the SOFTMAX that is not followed": (
        CUMULATED, "operator", "CUMSUM",
    ),
    "probabilities that an operator takes which nobody can look into": (
        changed(PLAIN, "BATCH_MATMUL(%p, -> CUSTOM 'product' (%p,"),
        "operator", "CUSTOM",
    ),
    "rows that may be heads, because a mask is repeated for them": (
        FOLDED, "heads", "tensor 'm'",
    ),
    "logits made by an operator that nobody can look into": (
        changed(PLAIN, "BATCH_MATMUL(%q, %k) {adj_y: true} -> CUSTOM 'scores' (%q, %k)"),
        "operator", "CUSTOM",
    ),
    "logits of which one part cannot be followed": (
        changed(PLAIN, "  %p: -> %l2: float32[1,4,6,8] = STRIDED_SLICE(%l3, int32{0, 0, 0, 0}, int32{1, 4, 6, 16}, "
                "int32{1, 1, 1, 2}) %sum: float32[1,4,6,8] = ADD(%l, %l2)\n  %p:", "(%l) -> (%sum)",
                "  %l: -> %l3: float32[1,4,6,16] = BATCH_MATMUL(%q, %k3) {adj_y: true}\n  %l:",
                "%v: float32[1,4,8,5] -> %v: float32[1,4,8,5], %k3: float32[1,4,16,5]"),
        "operator", "STRIDED_SLICE",
    ),
    "heads that share their logits": (
        changed(PLAIN, "%q: float32[1,4, -> %q: float32[1,1,", "%k: float32[1,4, -> %k: float32[1,1,",
                "float32[1,4,6,8] -> float32[1,1,6,8]"),
        "heads", "RESHAPE",
    ),
    "heads that share their logits in groups": (
        changed(PLAIN, "%q: float32[1,4, -> %q: float32[1,2,1,", "%k: float32[1,4, -> %k: float32[1,2,1,",
                "%v: float32[1,4, -> %v: float32[1,2,2,", "float32[1,4,6,8] -> float32[1,2,1,6,8]",
                "%o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v) -> %o5: float32[1,2,2,6,5] = BATCH_MATMUL(%p, %v) "
                "%o: float32[1,4,6,5] = RESHAPE(%o5, int32{1, 4, 6, 5})"),
        "heads", "expected 4, found 2",
    ),
    "two maps for each head, as in differential attention": (
        changed(PLAIN, "%q: float32[1,4, -> %q: float32[1,8,", "%k: float32[1,4, -> %k: float32[1,8,",
                "float32[1,4,6,8] -> float32[1,8,6,8]", "BATCH_MATMUL(%p, %v) -> BATCH_MATMUL(%w, %v)",
                "  %o: ->   %pairs: float32[1,4,2,6,8] = RESHAPE(%p, int32{1, 4, 2, 6, 8})\n"
                "  %a: float32[1,4,1,6,8] = SLICE(%pairs, int32{0, 0, 0, 0, 0}, int32{1, 4, 1, 6, 8})\n"
                "  %b: float32[1,4,1,6,8] = SLICE(%pairs, int32{0, 0, 1, 0, 0}, int32{1, 4, 1, 6, 8})\n"
                "  %d: float32[1,4,1,6,8] = SUB(%a, %b)\n"
                "  %w: float32[1,4,6,8] = RESHAPE(%d, int32{1, 4, 6, 8})\n  %o:"),
        "heads", "more rows than the value product",
    ),
    "two maps for each head whose rows are joined": (
        changed(PLAIN, "%q: float32[1,4, -> %q: float32[1,4,2,", "%k: float32[1,4, -> %k: float32[1,4,2,",
                "%l: float32[1,4,6,8] -> %pairs: float32[1,4,2,6,8]",
                "  %p: float32[1,4,6,8] ->   %l: float32[1,4,12,8] = RESHAPE(%pairs, int32{1, 4, 12, 8})\n"
                "  %p: float32[1,4,12,8]", "BATCH_MATMUL(%p, %v) -> BATCH_MATMUL(%w, %v)",
                "  %o: ->   %a: float32[1,4,6,8] = SLICE(%p, int32{0, 0, 0, 0}, int32{1, 4, 6, 8})\n"
                "  %b: float32[1,4,6,8] = SLICE(%p, int32{0, 0, 6, 0}, int32{1, 4, 6, 8})\n"
                "  %w: float32[1,4,6,8] = SUB(%a, %b)\n  %o:"),
        "heads", "more rows than the value product",
    ),
    "two maps in rows of one head": (TWO_MAPS_IN_ROWS, "heads", "more rows than the value product"),
    "tokens that lie outside the heads in the rows": (
        TOKENS_BEFORE_HEADS, "heads", "would still hold several",
    ),
    "groups of heads that lie outside the heads of keys": (
        GROUPS_BEFORE_HEADS, "heads", "would still hold several",
    ),
    "scores that are summed over heads": (SUMMED_HEADS, "heads", "would still hold several"),
    "linear attention of heads that lie in columns": (
        COLUMNS_OF_HEADS, "pattern", "linear attention",
    ),
    "queries of several heads that read a state": (FROM_STATE, "pattern", "in no attention"),
    "a state and queries of several heads that the graph is given": (
        GIVEN_STATE, "pattern", "in no attention",
    ),
    "values of several heads that a projection weighs": (POOLED, "pattern", "in no attention"),
    "constant keys with a scale for each head": (
        changed(PLAIN, "%k: float32[1,4,8,5], -> ", "(%q, %k) {adj_y: true} -> (%q, int8[1,4,5,8]{splat 2} q(["
                + ", ".join(["0.5"] * 4) + "], [" + ", ".join("0" * 4) + "], axis 1))"),
        "quantization", "several scales",
    ),
    "constant keys with scales that their product does not read": (
        changed(PLAIN, "%k: float32[1,4,8,5], -> ", "(%q, %k) {adj_y: true} -> (%q, int8[1,4,5,8]{splat 2} q(["
                + ", ".join(["0.5"] * 5) + "], [" + ", ".join("0" * 5) + "], axis 2))"),
        "quantization", "BATCH_MATMUL",
    ),
    "values that are never summed": (
        changed(PLAIN, "%v: float32[1,4,8,5] -> %v: float32[1,4,8,5], %w: float32[1,4,8,3]",
                "return %r -> return %r, %z", "  %t: -> %z: float32[1,4,6,3] = BATCH_MATMUL(%p, %w)\n  %t:"),
        "pattern", "several values",
    ),
    "a length that is known at run time only": (
        changed(PLAIN, "[1,4,6, -> [1,4,?,", "[1,6, -> [1,?,", "{1, 6, 20} -> {1, -1, 20}"),
        "open-lengths", "q=1,4,?,5",
    ),
}  # fmt: skip
"""A graph, the kind of the reason, and what it names."""


@pytest.mark.parametrize(("text", "why", "named"), SKIPPED.values(), ids=SKIPPED)
def test_skipped_attention_is_a_site_with_a_reason_and_fails_require_all(
    text: str, why: str, named: str
) -> None:
    model = parse(text)
    before = to_text(model)
    with pytest.raises(SitesSkippedError) as caught:
        convert(model, verify="none", require_all=True)
    (site,) = caught.value.result.sites
    assert (site.status, site.why) == ("skipped", why)
    assert named in site.reason
    assert to_text(model) == before


GATE = """
subgraph main (%x: float32[6,16], %e: float32[6,4,16]) {
  %l: float32[6,4] = FULLY_CONNECTED(%x, float32[4,16]{splat 0.5}, none)
  %p: float32[6,4] = SOFTMAX(%l) {beta: 1.0}
  %p3: float32[6,4,1] = RESHAPE(%p, int32{6, 4, 1})
  %w: float32[6,4,16] = MUL(%p3, %e)
  %r: float32[6,16] = SUM(%w, int32{1})
  return %r
}"""
SETTLED = {
    "two softmaxes of one head": (of_one_head(TWO_SOFTMAXES), "single-head"),
    "one head with a mask joined of two": (
        of_one_head(
            masked_text(
                "%both",
                scores="""  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %half: float32[1,4,3,8] = SLICE(%mask, int32{0, 0, 0, 0}, int32{1, 1, 3, 8})
  %other: float32[1,4,3,8] = NEG(%half)
  %both: float32[1,4,6,8] = CONCATENATION(%half, %other) {axis: 2}""",
            )
        ),
        "single-head",
    ),
    "an outermost axis that may be the batch": (BATCH, "single-head"),
    "a softmax over classes": (
        "subgraph main (%x: float32[2,10]) { %p: float32[2,10] = SOFTMAX(%x) return %p }",
        "not-attention",
    ),
    "a router that mixes experts": (
        """subgraph main (%x: float32[1,4,16], %experts: float32[1,3,16]) {
          %g: float32[1,4,3] = FULLY_CONNECTED(%x, float32[3,16]{splat 0.5}, none) {keep_num_dims: true}
          %p: float32[1,4,3] = SOFTMAX(%g)
          %o: float32[1,4,16] = BATCH_MATMUL(%p, %experts)
          return %o
        }""",
        "not-attention",
    ),
    "a router that weighs the experts of each token": (
        """subgraph main (%x: float32[1,4,16], %open: float32[1,4], %experts: float32[1,4,3,16]) {
          %g: float32[1,4,3] = FULLY_CONNECTED(%x, float32[3,16]{splat 0.5}, none) {keep_num_dims: true}
          %p: float32[1,4,3] = SOFTMAX(%g)
          %w: float32[1,4,1,3] = RESHAPE(%p, int32{1, 4, 1, 3})
          %token: float32[1,4,1,1] = RESHAPE(%open, int32{1, 4, 1, 1})
          %m: float32[1,4,1,3] = MUL(%w, %token)
          %o: float32[1,4,1,16] = BATCH_MATMUL(%m, %experts)
          return %o
        }""",
        "not-attention",
    ),
    "a gate": (GATE, "not-attention"),
    "one head without a SOFTMAX": (of_one_head(attention_text(softmax=SIGMOID)), "single-head"),
}


@pytest.mark.parametrize(("text", "why"), SETTLED.values(), ids=SETTLED)
def test_a_softmax_without_several_heads_needs_no_conversion(text: str, why: str) -> None:
    (site,) = sites_of(text, require_all=True)
    assert (site.status, site.why) == ("nothing to do", why)


HEADS_OUTSIDE = """
subgraph main (%x: float32[1,6,20]) {
  %h: float32[1,6,4,5] = RESHAPE(%x, int32{1, 6, 4, 5})
  %q: float32[4,1,6,5] = TRANSPOSE(%h, int32{2, 0, 1, 3})
  %l: float32[4,1,6,6] = BATCH_MATMUL(%q, %q) {adj_y: true}
  %p: float32[4,1,6,6] = SOFTMAX(%l) {beta: 1.0}
  %a: float32[4,1,6,5] = BATCH_MATMUL(%p, %q)
TAIL
  return %o
}"""
TAILS = {
    "summed": "  %o: float32[1,6,5] = MEAN(%a, int32{0})",
    "turned": "  %o: float32[1,4,6,5] = TRANSPOSE(%a, int32{1, 0, 2, 3})",
    "as they are": "  %o: float32[4,1,6,5] = ABS(%a)",
}
OWN_WEIGHTS = """
subgraph main (%q: float32[4,1,6,5], %k: float32[4,1,8,5], %v: float32[4,1,8,5]) {
  %l: float32[4,1,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[4,1,6,8] = SOFTMAX(%l) {beta: 1.0}
  %a: float32[4,1,6,5] = BATCH_MATMUL(%p, %v)
  %b: float32[4,1,6,7] = BATCH_MATMUL(%a, float32[4,1,5,7]{splat 0.5})
  %o: float32[1,6,7] = SUM(%b, int32{0})
  return %o
}"""
TWO_MERGES = """
subgraph main (%x: float32[1,6,20]) {
  %h: float32[1,6,2,2,5] = RESHAPE(%x, int32{1, 6, 2, 2, 5})
  %q: float32[1,2,2,6,5] = TRANSPOSE(%h, int32{0, 2, 3, 1, 4})
  %l: float32[1,2,2,6,6] = BATCH_MATMUL(%q, %q) {adj_y: true}
  %p: float32[1,2,2,6,6] = SOFTMAX(%l) {beta: 1.0}
  %a: float32[1,2,2,6,5] = BATCH_MATMUL(%p, %q)
  %t: float32[1,2,6,2,5] = TRANSPOSE(%a, int32{0, 1, 3, 2, 4})
  %r: float32[1,2,6,10] = RESHAPE(%t, int32{1, 2, 6, 10})
  %o: float32[1,6,20] = LAST
  return %o
}"""
FOUND = {
    "rows divided behind the value product": attention_text(
        softmax="""  %p: float32[1,4,6,8] = RELU(%l)
  %n: float32[1,4,6,1] = SUM(%p, int32{3}) {keep_dims: true}""",
        values="  %z: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)\n  %o: float32[1,4,6,5] = DIV(%z, %n)",
    ),
    "scores of relative rows, in a product with a matrix for each row of an image": attention_text(
        scores="""  %m: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %image: float32[4,3,2,5] = RESHAPE(%q, int32{4, 3, 2, 5})
  %places: float32[4,3,2,8] = BATCH_MATMUL(%image, float32[3,5,8]{splat 0.1})
  %n: float32[1,4,6,8] = RESHAPE(%places, int32{1, 4, 6, 8})
  %l: float32[1,4,6,8] = ADD(%m, %n)""",
    ),
    "heads between the rows of the SOFTMAX": attention_text(
        softmax="""  %a: float32[1,6,4,8] = TRANSPOSE(%l, int32{0, 2, 1, 3})
  %b: float32[1,6,4,8] = SOFTMAX(%a)
  %p: float32[1,4,6,8] = TRANSPOSE(%b, int32{0, 2, 1, 3})""",
        scores="  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}",
    ),
    "a latent that all heads read": LATENT,
    **{f"heads outside the batch, {way}": HEADS_OUTSIDE.replace("TAIL", tail) for way, tail in TAILS.items()},
    "heads with weights of their own": OWN_WEIGHTS,
    "scores that are added to queries": changed(
        attention_text(
            scores="""  %m: float32[1,4,6,5] = BATCH_MATMUL(%q, %k)
  %l: float32[1,4,6,5] = ADD(%m, %q)""",
            softmax=SIGMOID,
        ),
        "[1,4,8,5] -> [1,4,5,5]",
        "%p: float32[1,4,6,8] -> %p: float32[1,4,6,5]",
    ),
    "groups that are merged before the heads of keys": changed(
        TWO_MERGES,
        """  %o: float32[1,6,20] -> %u: float32[1,6,2,10] = TRANSPOSE(%r, int32{0, 2, 1, 3})
  %o: float32[1,6,20]""",
        "LAST -> RESHAPE(%u, int32{1, 6, 20})",
    ),
    "groups that are merged, and heads of keys that are summed": changed(
        TWO_MERGES,
        """  %o: float32[1,6,20] -> %u: float32[1,2,6,20] = BATCH_MATMUL(%r, float32[1,2,10,20]{splat 0.5})
  %o: float32[1,6,20]""",
        "LAST -> SUM(%u, int32{1})",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_attention_is_found_by_its_products(case: str) -> None:
    model = parse(FOUND[case])
    before = to_bytes(model)
    (site,) = convert(model, verify="none", require_all=True).sites
    assert (site.status, site.heads) == ("converted", 4)
    assert_same_bits(before, model)


NOT_COUNTED = {
    "an adapter": """
    subgraph main (%x: float32[1,6,16], %a: float32[4,16], %b: float32[16,4]) {
      %l: float32[1,6,4] = FULLY_CONNECTED(%x, %a, none) {keep_num_dims: true}
      %s: float32[1,6,4] = MUL(%l, float32(0.5))
      %o: float32[1,6,16] = FULLY_CONNECTED(%s, %b, none) {keep_num_dims: true}
      return %o
    }""",
    "a residual stream that is mixed token by token": """
    subgraph main (%x: float32[14,72,4], %a: float32[14,4,4], %b: float32[14,4,4]) {
      %p: float32[14,72,4] = BATCH_MATMUL(%x, %a)
      %s: float32[14,72,4] = ADD(%p, %x)
      %r: float32[14,72,4] = BATCH_MATMUL(%s, %b)
      return %r
    }""",
    "weights that are dequantized": """
    subgraph main (%x: float32[2,6,16]) {
      %w: float32[2,16,16] = DEQUANTIZE(float16[2,16,16]{splat 0.5})
      %l: float32[2,6,16] = BATCH_MATMUL(%x, %w)
      %a: float32[2,6,16] = RELU(%l)
      %o: float32[2,6,16] = BATCH_MATMUL(%a, %w)
      return %o
    }""",
    "layers with a projection between their products": """
    subgraph main (%q: float32[4,6,8], %k: float32[4,6,8]) {
      %a: float32[4,6,6] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %f: float32[4,6,8] = FULLY_CONNECTED(%a, float32[8,6]{splat 0.5}, none) {keep_num_dims: true}
      %r: float32[4,6,8] = RELU(%f)
      %b: float32[4,6,6] = BATCH_MATMUL(%r, %k) {adj_y: true}
      return %b
    }""",
    "a channel gate": """
    subgraph main (%x: float32[1,6,6,16], %g: float32[1,1,1,16]) {
      %y: float32[1,6,6,16] = MUL(%x, %g)
      %z: float32[1,16] = SUM(%y, int32{1, 2})
      %r: float32[1,1,1,16] = RESHAPE(%z, int32{1, 1, 1, 16})
      %u: float32[1,6,6,16] = MUL(%x, %r)
      %v: float32[1,16] = SUM(%u, int32{1, 2})
      return %v
    }""",
}


@pytest.mark.parametrize("case", NOT_COUNTED)
def test_products_that_are_no_attention_are_not_counted(case: str) -> None:
    assert sites_of(NOT_COUNTED[case]) == []


def test_a_product_that_writes_keys_into_a_cache_at_one_position_is_not_counted() -> None:
    scores = """  %n: float32[1,4,8,5] = BATCH_MATMUL(%at, %new)
  %c: float32[1,4,8,5] = ADD(%k, %n)
  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %c) {adj_y: true}"""
    text = attention_text(scores=scores, inputs=", %at: float32[1,4,8,1], %new: float32[1,4,1,5]")
    (site,) = sites_of(text, require_all=True)
    assert site.status == "converted"


def test_a_product_that_mixes_heads_of_one_token_is_not_taken_for_queries_and_keys() -> None:
    mixing = "  %m: float32[1,4,8] = BATCH_MATMUL(float32[1,4,4]{splat 0.5}, %l)\n  %p:"
    text = changed(LATENT, "  %p: -> " + mixing, "SOFTMAX(%l) -> SOFTMAX(%m)")
    *_, site = convert(parse(text), verify="none").skipped
    assert site.why == "heads"
    assert "BATCH_MATMUL" in site.reason


ALL_PAIRS = "float32[1,4,6,8,5]"
SUMMED_OTHERWISE = {
    "differences": ("SUB(%q, %k)", f"  %z: {ALL_PAIRS} = SQUARE(%x)", "SUM(%z, int32{4})"),
    "masked": ("MUL(%q, %k)", f"  %z: {ALL_PAIRS} = MUL(%x, %m)", "SUM(%z, int32{4})"),
    "in parts": (
        "MUL(%q, %k)",
        "  %z: float32[1,4,6,8,3] = SLICE(%x, int32{0, 0, 0, 0, 2}, int32{1, 4, 6, 8, 3})",
        "SUM(%z, int32{4})",
    ),
    "with ones": ("MUL(%q, %k)", "", "BATCH_MATMUL(%x, float32[5,1]{splat 1.0})"),
}


@pytest.mark.parametrize(
    ("combined", "between", "summed"), SUMMED_OTHERWISE.values(), ids=SUMMED_OTHERWISE
)
def test_all_pairs_of_rows_and_columns_make_a_product_however_they_are_summed(
    combined: str, between: str, summed: str
) -> None:
    end = "float32[1,4,6,8,1]" if summed.startswith("BATCH") else "float32[1,4,6,8]"
    graph = parse(f"""
    subgraph main (%q: float32[1,4,6,1,5], %k: float32[1,4,1,8,5], %m: float32[1,1,6,8,1]) {{
      %x: {ALL_PAIRS} = {combined}
    {between}
      %l: {end} = {summed}
      return %l
    }}""").subgraphs[0]
    (product,) = products_among(graph.operators)
    assert product.may_hold_heads
    assert product.matrix == (frozenset({2}), frozenset({3}))


def three(line: str) -> str:
    """The line for each of three heads, 0 to 2, and a PACK of the results."""
    lines = [line.replace("#", str(head)) for head in range(3)]
    packed = "  %N: float32[3,1,4,5] = PACK(%N0, %N1, %N2) {axis: 0, values_count: 3}"
    return "\n".join([*lines, packed])


_PROJECTION = (
    "float32[1,4,5] = FULLY_CONNECTED(%x, float32[5,8]{seed S#}, none) {keep_num_dims: true}"
)
_CHANNELS = (
    "float32[1,4,15] = FULLY_CONNECTED(%x, float32[15,8]{seed S}, none) {keep_num_dims: true}"
)
OUTERMOST = {
    "weights of their own": three(f"  %N#: {_PROJECTION}"),
    "weights of their own and a bias": three(
        f"  %Nr#: {_PROJECTION}\n  %N#: float32[1,4,5] = ADD(float32[5]{{splat 0.5}}, %Nr#)"
    ),
    "weights of their own and a norm": three(
        f"  %Nr#: {_PROJECTION}\n  %N#: float32[1,4,5] = L2_NORMALIZATION(%Nr#)"
    ),
    "a matrix for each": "  %N: float32[3,1,4,5] = BATCH_MATMUL(%x, float32[3,1,8,5]{seed S})",
    "channels": f"""  %Nc: {_CHANNELS}
  %Nh: float32[1,4,3,5] = RESHAPE(%Nc, int32{{1, 4, 3, 5}})
  %N: float32[3,1,4,5] = TRANSPOSE(%Nh, int32{{2, 0, 1, 3}})""",
    "channels that are unpacked": f"""  %Nc: {_CHANNELS}
  %Nh: float32[1,4,3,5] = RESHAPE(%Nc, int32{{1, 4, 3, 5}})
  %Ns0: float32[1,4,5], %Ns1: float32[1,4,5], %Ns2: float32[1,4,5] = UNPACK(%Nh) {{num: 3, axis: 2}}
"""
    + three("  %N#: float32[1,4,5] = ABS(%Ns#)"),
    "channels that are cut": f"""  %Nc: {_CHANNELS}
  %Ns0: float32[1,4,5], %Ns1: float32[1,4,5], %Ns2: float32[1,4,5] = SPLIT(int32(2), %Nc) {{num_splits: 3}}
"""
    + three("  %N#: float32[1,4,5] = ABS(%Ns#)"),
}  # fmt: skip
SHARED = """  %Nr: float32[1,4,5] = FULLY_CONNECTED(%x, float32[5,8]{seed S}, none) {keep_num_dims: true}
  %N: float32[1,1,4,5] = RESHAPE(%Nr, int32{1, 1, 4, 5})"""


def outermost(queries: str, keys: str, values: str, *, constants: str = "") -> str:
    """Attention `[3,1,4,5]` with queries, keys and values that are made in these ways."""
    ways = (("q", queries), ("k", keys), ("v", values))
    made = "\n".join(
        way.replace("%N", f"%{name}").replace("seed S", f"seed {place}")
        for place, (name, way) in enumerate(ways, 1)
    )
    return f"""
subgraph main (%x: float32[1,4,8], %x0: float32[1,4,8], %x1: float32[1,4,8], %x2: float32[1,4,8]) {{
{constants}{made}
  %l: float32[3,1,4,4] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %p: float32[3,1,4,4] = SOFTMAX(%l) {{beta: 1.0}}
  %o: float32[3,1,4,5] = BATCH_MATMUL(%p, %v)
  return %o
}}"""


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("way", OUTERMOST)
def test_the_outermost_axis_holds_heads_if_they_have_weights_or_channels_of_their_own(
    way: str, kv_heads: int
) -> None:
    queries = OUTERMOST[way]
    others = queries if kv_heads == 3 else SHARED
    (site,) = sites_of(outermost(queries, others, others), require_all=True)
    assert (site.status, site.heads, site.kv_heads) == ("converted", 3, kv_heads)


@pytest.mark.parametrize("way", OUTERMOST)
def test_heads_on_the_outermost_axis_are_counted_without_a_softmax(way: str) -> None:
    text = outermost(*[OUTERMOST[way]] * 3)
    linear = changed(text, "SOFTMAX(%l) {beta: 1.0} -> MUL(%l, float32(0.5))")
    (site,) = sites_of(linear, require_all=True)
    assert (site.status, site.heads) == ("converted", 3)


@pytest.mark.parametrize("returned", ["%t", "%r"])
@pytest.mark.parametrize("axis", [0, 1])
def test_heads_beside_the_head_size_are_not_all_if_another_batch_axis_holds_heads(
    axis: int, returned: str
) -> None:
    """Three groups of two heads, each group with projections of its own."""
    line = """  %Np#: float32[1,4,4] = FULLY_CONNECTED(%x, float32[4,8]{seed S#}, none) {keep_num_dims: true}
  %Nr#: float32[1,4,2,2] = RESHAPE(%Np#, int32{1, 4, 2, 2})
  %N#: float32[1,2,4,2] = TRANSPOSE(%Nr#, int32{0, 2, 1, 3})"""
    text = outermost(*[three(line)] * 3).replace("{axis: 0", f"{{axis: {axis}")
    lead = "3,1" if axis == 0 else "1,3"
    for before in ("[3,1,4,5]", "[3,1,4,4]"):
        text = text.replace(before, f"[{lead},2,4,{before[7:]}")
    text = text.replace(f"[{lead},2,4,5]", f"[{lead},2,4,2]")
    tail = f"""  %t: float32[{lead},4,2,2] = TRANSPOSE(%o, int32{{0, 1, 3, 2, 4}})
  %r: float32[{lead},4,4] = RESHAPE(%t, int32{{{lead}, 4, 4}})
  return {returned}"""
    (site,) = sites_of(text.replace("  return %o", tail), require_all=True)
    assert (site.status, site.heads, site.kv_heads) == ("converted", 6, 6)


def test_the_outermost_axis_is_a_batch_if_its_steps_have_the_same_weights() -> None:
    line = "  %N#: float32[1,4,5] = FULLY_CONNECTED(%x#, %w, none) {keep_num_dims: true}"
    text = outermost(*[three(line)] * 3, constants="  constant %w = float32[5,8]{seed 1}\n")
    (site,) = sites_of(text)
    assert (site.status, site.heads) == ("nothing to do", 1)


def test_the_outermost_axis_is_a_batch_if_an_input_has_a_number_for_each_step() -> None:
    """`[B]`: the length of each sequence."""
    text = changed(
        BATCH,
        "%k: -> %lengths: float32[4], %k:",
        "SOFTMAX(%l) -> SOFTMAX(%m)",
        "  %p: ->   %n: float32[4,1,1] = RESHAPE(%lengths, int32{4, 1, 1})\n  %m: float32[4,6,8] = ADD(%l, %n)\n  %p:",
    )
    (site,) = sites_of(text)
    assert (site.status, site.heads) == ("nothing to do", 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_windows_that_are_cut_from_the_sequence_are_not_heads(axis: int) -> None:
    """Three windows of two tokens with two heads, which lie apart before the windows are cut."""
    line = "  %N#: float32[1,2,2,5] = SLICE(%Nt, int32{0, 0, B, 0}, int32{1, 2, 2, 5})"
    cuts = three(line)
    for window in range(3):
        cuts = cuts.replace("B", str(2 * window), 1)
    way = f"""  %Np: float32[1,6,10] = FULLY_CONNECTED(%x, float32[10,8]{{seed S}}, none) {{keep_num_dims: true}}
  %Nh: float32[1,6,2,5] = RESHAPE(%Np, int32{{1, 6, 2, 5}})
  %Nt: float32[1,2,6,5] = TRANSPOSE(%Nh, int32{{0, 2, 1, 3}})
{cuts}"""
    text = outermost(way, way, way).replace("%x: float32[1,4,8]", "%x: float32[1,6,8]")
    text = text.replace("{axis: 0", f"{{axis: {axis}")
    lead = "3,1" if axis == 0 else "1,3"
    text = text.replace("[3,1,4,4]", f"[{lead},2,2,2]").replace("[3,1,4,5]", f"[{lead},2,2,5]")
    tail = f"""  %t: float32[{lead},2,2,5] = TRANSPOSE(%o, int32{{0, 1, 3, 2, 4}})
  %r: float32[{lead},2,10] = RESHAPE(%t, int32{{{lead}, 2, 10}})
  return %r"""
    (site,) = sites_of(text.replace("  return %o", tail))
    assert (site.status, site.heads) == ("converted", 2)


def test_parts_of_the_sequence_with_weights_of_their_own_are_not_heads() -> None:
    """Two streams, as text and image in a diffusion transformer, with a batch of two."""
    line = "  %N#: float32[2,1,4,5] = FULLY_CONNECTED(%x#, float32[5,8]{seed S#}, none) {keep_num_dims: true}"
    lines = "\n".join(
        line.replace("%N", f"%{name}").replace("S#", f"{place}#").replace("#", str(stream))
        for place, name in enumerate("qkv", 1)
        for stream in range(2)
    )
    joined = "\n".join(
        f"  %{name}: float32[2,1,8,5] = CONCATENATION(%{name}0, %{name}1) {{axis: 2}}"
        for name in "qkv"
    )
    (site,) = sites_of(f"""
subgraph main (%x0: float32[2,1,4,8], %x1: float32[2,1,4,8]) {{
{lines}
{joined}
  %l: float32[2,1,8,8] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %p: float32[2,1,8,8] = SOFTMAX(%l) {{beta: 1.0}}
  %o: float32[2,1,8,5] = BATCH_MATMUL(%p, %v)
  return %o
}}""")
    assert (site.status, site.heads) == ("nothing to do", 1)


@pytest.mark.parametrize("text", [IN_A_COMPOSITE, IN_A_COMPOSITE_OF_A_COMPOSITE])
def test_composites_with_attention_are_opened_however_deep(text: str) -> None:
    model = parse(text)
    assert {site.status for site in convert(model, verify="none", require_all=True).sites} == {
        "converted"
    }
    assert all(operator.name != "STABLEHLO_COMPOSITE" for operator in model.subgraphs[0].operators)


def test_a_constant_bias_does_not_make_a_product_of_activations_one_with_weights() -> None:
    text = """
subgraph main (%q: float32[24,5], %k: float32[8,5], %v: float32[5,8]) {
  %o: float32[24,5] = STABLEHLO_COMPOSITE(%q, %k, %v, float32[8]{splat 0.5}) {decomposition_subgraph_index: 1}
  return %o
}
subgraph body (%q: float32[24,5], %k: float32[8,5], %v: float32[5,8], %b: float32[8]) {
  %l: float32[24,8] = FULLY_CONNECTED(%q, %k, %b)
  %p: float32[24,8] = SOFTMAX(%l) {beta: 1.0}
  %o: float32[24,5] = FULLY_CONNECTED(%p, %v, none)
  return %o
}"""
    (site,) = convert(parse(text), verify="none", skip="inline_composites").sites
    assert (site.status, site.why) == ("skipped", "pattern")


FOLDED_INTO_ROWS = """
subgraph main (%x: float32[1,6,20], %k: float32[8,5], %v: float32[8,5]) {
  %q: float32[24,5] = RESHAPE(%x, int32{24, 5})
  %l: float32[24,8] = FULLY_CONNECTED(%q, %k, none)
  %p: float32[24,8] = SOFTMAX(%l) {beta: 1.0}
  %vt: float32[5,8] = TRANSPOSE(%v, int32{1, 0})
  %o: float32[24,5] = FULLY_CONNECTED(%p, %vt, none)
  %r: float32[1,6,20] = RESHAPE(%o, int32{1, 6, 20})
  return %r
}"""


@pytest.mark.parametrize("weights", ["SOFTMAX(%l) {beta: 1.0}", "LOGISTIC(%l)"])
def test_heads_in_rows_of_computed_fully_connected_weights_are_split_and_the_rounding_is_told(
    weights: str,
) -> None:
    """XNNPACK sums a row of a FULLY_CONNECTED in an order that depends on the number of rows."""
    result = convert(parse(changed(FOLDED_INTO_ROWS, f"SOFTMAX(%l) {{beta: 1.0}} -> {weights}")))
    (site,) = result.sites
    assert (site.status, site.heads, site.kv_heads) == ("converted", 4, 1)
    assert "XNNPACK rounds a FULLY_CONNECTED by its number of rows" in site.note
    assert str(site.proof.check) == "relative 1e-06"
    products = [op for op in result.model.subgraphs[0].operators if op.name == "FULLY_CONNECTED"]
    assert [op.outputs[0].elements for op in products] == [6 * 8, 6 * 5] * 4


TWO_BLOCKS = attention_text(
    tail="""  %l2: float32[1,4,6,8] = BATCH_MATMUL(%o, %k) {adj_y: true}
  %p2: float32[1,4,6,8] = SOFTMAX(%l2) {beta: 1.0}
  %o2: float32[1,4,6,5] = BATCH_MATMUL(%p2, %v)
""",
    returned="%o2",
)


def test_a_converted_graph_is_searched_again_for_heads_that_no_site_reports() -> None:
    model = parse(PLAIN + PLAIN.replace("main", "other"))
    done, left = model.subgraphs
    sites = run(model, "mha_to_sha")
    assert statuses(sites) == ["converted"]
    context = Context(model, done, "main", load_target("generic"), Constants(model))
    site = replace(sites[0], signature="main")
    assert list(left_over(context, [site], done.operators)) == []
    context.subgraph = left
    (found,) = left_over(context, [site], left.operators)
    assert (found.status, found.why) == ("skipped", "heads")
    kept = replace(site, anchor=found.anchor, status=Status.SETTLED)
    assert list(left_over(context, [site, kept], left.operators)) == []
    renamed = replace(site, pass_name="own")
    assert [one.pass_name for one in left_over(context, [renamed], left.operators)] == ["own"]
    context.subgraph = parse(TWO_BLOCKS).subgraphs[0]
    may_hold_heads = left_over(context, [site], context.subgraph.operators)
    assert [one.index for one in may_hold_heads] == [1, 2]


def test_products_far_behind_each_other_are_a_pair_all_the_same() -> None:
    steps = [f"  %s{at + 1}: float32[1,4,6,8] = ABS(%s{at})" for at in range(1100)]
    softmax = "\n".join(
        ["  %s0: float32[1,4,6,8] = ABS(%l)", *steps, "  %p: float32[1,4,6,8] = LOGISTIC(%s1100)"]
    )
    site, values = sites_of(attention_text(softmax=softmax))
    assert (site.status, site.why) == ("skipped", "operator")
    assert "at ABS" in site.reason
    assert values.status == "skipped"


def test_what_follows_a_softmax_of_no_attention_is_converted() -> None:
    text = attention_text(inputs=", %x: float32[2,9]", returned="%r, %c")
    text = changed(text, "  %l: ->   %c: float32[2,9] = SOFTMAX(%x)\n  %l:")
    result = convert(parse(text), verify="none")
    assert [site.status for site in result.sites] == ["nothing to do", "converted"]
    assert "nothing to do" not in result.summary()


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [("o", (1, 4, 5, 6), "operator"), ("p", (1, 4, 6, 9), "invalid-model")],
)
def test_a_wrong_recorded_shape_is_not_believed(
    name: str, shape: tuple[int, ...], why: str
) -> None:
    graph = parse(PLAIN).subgraphs[0]
    next(tensor for tensor in graph.tensors if tensor.name == name).shape = shape
    (match,) = find_blocks(graph)
    assert match.reason.why == why


def test_a_product_of_what_is_recorded_as_a_scalar_is_skipped() -> None:
    model = parse("""
    subgraph main (%a: float32[1,6,4,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]) {
      %q: float32[] = TRANSPOSE(%a, int32{0, 2, 1, 3})
      %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)
      %r: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      return %r
    }""")
    sites = convert(model, verify="none").sites
    assert {site.status for site in sites} == {"skipped"}
    assert not any(site.is_bug for site in sites)


def test_a_block_behind_a_wrong_recorded_shape_is_skipped_which_no_region_would_show() -> None:
    """LiteRT makes `[1,4,6,5]` of the two factors; cut by the recorded `[1,2,12,5]`, the file would not run."""
    model = parse("""
    subgraph main (%a: float32[1,4,6,5], %b: float32[1,4,6,5], %k: float32[1,1,8,5], %v: float32[1,1,8,5]) {
      %q: float32[1,2,12,5] = MUL(%a, %b)
      %l: float32[1,2,12,8] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,2,12,8] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[1,2,12,5] = BATCH_MATMUL(%p, %v)
      %t: float32[1,12,2,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %r: float32[1,12,10] = RESHAPE(%t, int32{1, 12, 10})
      return %r
    }""")
    (site,) = convert(model, verify="none").sites
    assert (site.status, site.why) == ("skipped", "invalid-model")


def test_signatures_that_share_a_subgraph_are_converted_together_and_told_so() -> None:
    names = "(q=%q, k=%k, v=%v) -> (r=%r)"
    text = f"signature first = #0 {names}\nsignature second = #0 {names}\n{PLAIN}"
    result = convert(parse(text), verify="none", signatures="second")
    assert [site.signature for site in result.sites] == ["second"]
    assert [site.signature for site in sites_of(text)] == ["first"]
    found = [
        (each.name, each.blocks_converted, each.blocks, each.shares) for each in result.signatures
    ]
    assert found == [("first", 1, 1, ("second",)), ("second", 1, 1, ("first",))]
    assert [row[0] for row in entry_point_table(result)][1:] == [
        "first (also second)",
        "second (also first)",
    ]


def chained(blocks: int, lead: str) -> Model:
    """Blocks one after the other, each on the result of the one before, with nothing that tells heads between."""
    body = "".join(
        f"""
          %l{at}: float32[{lead},8,8] = BATCH_MATMUL(%x{at}, %x{at}) {{adj_y: true}}
          %p{at}: float32[{lead},8,8] = SOFTMAX(%l{at}) {{beta: 1.0}}
          %x{at + 1}: float32[{lead},8,5] = BATCH_MATMUL(%p{at}, %x{at})"""
        for at in range(blocks)
    )
    return parse(f"subgraph main (%x0: float32[{lead},8,5]) {{ {body} return %x{blocks} }}")


@pytest.mark.parametrize("lead", ["1,4", "4", "2,2", "1,1"])
def test_the_search_does_not_grow_with_the_blocks_before(
    lead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, counts, above = list[Labelled](), [], HeadLayouts.above
    monkeypatch.setattr(HeadLayouts, "above", lambda self, of: looked.append(of) or above(self, of))
    for blocks in (80, 160):
        looked.clear()
        found = [
            isinstance(match, Block) for match in find_blocks(chained(blocks, lead).subgraphs[0])
        ]
        assert found == [True] * blocks
        counts.append(len(looked))
    assert counts[1] <= 2.5 * counts[0]


def test_attention_that_feeds_attention_hundreds_of_times_takes_no_stack() -> None:
    with fuzz.time_limit(10):
        assert len(run(chained(400, "1,4"), "mha_to_sha")) == 400
