"""What is told of an attention, in every order of its products and with every number of axes."""

import math

import pytest
from attention_checks import only_block
from pass_runs import refusal
from text_parser import parse

from edge_opt.attention.block import Block, NotABlock, element_bytes, logits_bytes, row_tiles
from edge_opt.attention.find import find_blocks

T, S, H = 3, 5, 4


def test_a_number_takes_a_byte_at_least_and_a_float_two() -> None:
    sizes = {"float32": 2, "float16": 2, "int4": 1, "int8": 1, "int16": 2, "int32": 4, "bool": 1}
    given = ", ".join(f"%{name}: {name}[1]" for name in sizes)
    inputs = parse(f"subgraph main ({given}) {{ return %int8 }}").subgraphs[0].inputs
    assert {tensor.name: element_bytes(tensor) for tensor in inputs} == sizes


def attention(lead: str, *, turned: bool) -> str:
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
    match = only_block(parse(attention(lead, turned=turned).replace("MERGE", merge)).subgraphs[0])
    assert (match.heads, match.kv_heads, match.head_size) == (2, 2, H)
    assert (match.query_length, match.key_lengths) == (T, (S,))
    assert logits_bytes(match) == 2 * T * S


@pytest.mark.parametrize("lead", ["1", "1,1"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_sizes_of_a_single_head(lead: str, turned: bool) -> None:
    text = attention(lead, turned=turned).replace("MERGE", "return %o")
    match = only_block(parse(text).subgraphs[0])
    assert match.heads == 1
    assert (match.query_length, match.key_lengths, match.head_size) == (T, (S,), H)
    assert logits_bytes(match) == 2 * T * S


@pytest.mark.parametrize("given", ["merged", "apart", "beside the keys", "alone"])
@pytest.mark.parametrize("groups", ["1,1", "1,3", "1,3,5", "3"])
def test_heads_that_are_folded_into_rows_and_that_nothing_tells_are_not_taken_for_one(
    groups: str, given: str
) -> None:
    """`[1,K,(G)(T),H]`, of queries `[1,T,N*H]` or `[1,T,N,H]`."""
    kv_heads = math.prod(map(int, groups.split(",")))
    heads, rows = 2 * kv_heads, 2 * T
    made = {
        "merged": (f"1,{T},{heads * H}", f"RESHAPE(%x, int32{{1, {T}, {heads}, {H}}})"),
        "apart": (f"1,{T},{heads},{H}", f"RESHAPE(%x, int32{{1, {T}, {heads}, {H}}})"),
        "beside the keys": (f"1,{T},2,{heads},{H}", "UNPACK(%x) {num: 2, axis: 2}"),
        "alone": (f"{T},{heads},{H}", "PACK(%x) {values_count: 1, axis: 0}"),
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


def test_heads_of_a_result_that_is_flattened_to_one_axis() -> None:
    merge = f"""%t: float32[1,{T},2,{H}] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
      %r: float32[1,{T * 2 * H}] = RESHAPE(%t, int32{{1, {T * 2 * H}}})
      return %r"""
    match = only_block(parse(attention("1,2", turned=False).replace("MERGE", merge)).subgraphs[0])
    assert (match.heads, match.query_length, match.key_lengths) == (2, T, (S,))


@pytest.mark.parametrize(
    "repeat",
    [
        "TILE(%few, int32{1, 2, 1, 1})",
        f"BROADCAST_TO(%few, int32{{1, 2, {S}, {H}}})",
        "CONCATENATION(%few, %few) {axis: 1}",
        "MUL(%few, float32[1,2,1,1]{splat 1})",
        "CONCATENATION(%new, %old) {axis: 2}",
    ],
)
def test_keys_and_values_that_are_repeated_for_the_heads_are_counted_before(repeat: str) -> None:
    merge = f"{MERGES['1,2', False]}\n %r: float32[1,{T},{2 * H}] = RESHAPE(%t, int32{{1, {T}, {2 * H}}})\n return %r"
    text = attention("1,2", turned=False).replace("MERGE", merge)
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
    text = attention(lead, turned=False).replace("MERGE", merge).replace("SOFTMAX(%l)", "SOFTMAX(%m)")
    given, added = (
        f"%{name}: {dtype}[1,1,{T},{S}]" for name, dtype in (("open", "bool"), ("mask", "float32"))
    )
    text = text.replace("%q:", f"%one: float32[1], {given}, {added}, %q:", 1)
    steps = f"%s: {scores} = ADD(%one, %l)\n %c: {scores} = ADD(%s, %one)\n %m: {scores} = {masked}\n"
    match = only_block(parse(text.replace("      %p:", f"      {steps} %p:")).subgraphs[0])
    assert match.mask is not None
    assert match.mask.name == ("open" if "SELECT" in masked else "mask")


def test_heads_that_are_unpacked_are_those_of_the_product() -> None:
    merge = f"""%a: float32[1,{T},{H}], %b: float32[1,{T},{H}] = UNPACK(%o) {{num: 2, axis: 1}}
      %r: float32[1,{T},{2 * H}] = CONCATENATION(%a, %b) {{axis: 2}}
      return %r"""
    match = only_block(parse(attention("1,2", turned=False).replace("MERGE", merge)).subgraphs[0])
    assert (match.heads, match.output.name) == (2, "o")


def test_heads_that_the_next_attention_reads_as_they_are_have_its_places() -> None:
    text = f"""
    subgraph main (%q: float32[1,2,{T},{H}], %k: float32[1,2,{S},{H}], %v: float32[1,2,{S},{H}]) {{
      %l: float32[1,2,{T},{S}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[1,2,{T},{S}] = SOFTMAX(%l) {{beta: 1.0}}
      %first: float32[1,2,{T},{H}] = BATCH_MATMUL(%p, %v)
      %m: float32[1,2,{T},{S}] = BATCH_MATMUL(%first, %k) {{adj_y: true}}
      %r: float32[1,2,{T},{S}] = SOFTMAX(%m) {{beta: 1.0}}
      %o: float32[1,2,{T},{H}] = BATCH_MATMUL(%r, %v)
      {MERGES["1,2", False]}
      return %t
    }}"""
    found = list(find_blocks(parse(text).subgraphs[0]))
    assert [match.output.name for match in found if isinstance(match, Block)] == ["first", "t"]
    assert [match.heads for match in found if isinstance(match, Block)] == [2, 2]


def segments(lead: str, tail: str) -> Block:
    """An attention whose probabilities weigh the values in two parts, and `tail` what is done with the products."""
    text = f"""
    subgraph main (%q: float32[{lead},{T},{H}], %k: float32[{lead},10,{H}],
                   %v1: float32[{lead},4,{H}], %v2: float32[{lead},6,{H}]) {{
      %l: float32[{lead},{T},10] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p: float32[{lead},{T},10] = SOFTMAX(%l)
      %p1: float32[{lead},{T},4], %p2: float32[{lead},{T},6] = SPLIT_V(%p, int32{{4, 6}}, int32(3)) {{num_splits: 2}}
      %o1: float32[{lead},{T},{H}] = BATCH_MATMUL(%p1, %v1)
      %o2: float32[{lead},{T},{H}] = BATCH_MATMUL(%p2, %v2)
      {tail.replace("LEAD", lead)}
    }}"""
    return only_block(parse(text).subgraphs[0])


SUMMED = f"%s: float32[LEAD,{T},{H}] = ADD(%o1, %o2) return %s"
APART = "return %o1, %o2"
TURNED_AND_SUMMED = f"""%t1: float32[LEAD,{H},{T}] = TRANSPOSE(%o1, int32{{0, 1, 3, 2}})
      %t2: float32[LEAD,{H},{T}] = TRANSPOSE(%o2, int32{{0, 1, 3, 2}})
      %s: float32[LEAD,{H},{T}] = ADD(%t1, %t2) return %s"""


@pytest.mark.parametrize(
    ("lead", "tail"), [(lead, tail) for lead in ("1,1", "1,2") for tail in (SUMMED, TURNED_AND_SUMMED)]
)
def test_rows_of_every_head_are_tiles_of_their_own(lead: str, tail: str) -> None:
    match = segments(lead, tail)
    heads = 2 if lead == "1,2" else 1
    tiled = row_tiles(match, T)
    assert isinstance(tiled, Block)
    assert (tiled.pieces, tiled.tiles, tiled.query_length, tiled.key_lengths) == (heads * T, T, 1, (10,))
    assert (tiled.output.name, tiled.others, tiled.heads_are_rows) == ("s", (), False)


@pytest.mark.parametrize(
    ("lead", "tail", "count", "reason"),
    [
        ("1,2", APART, T, "the probabilities weigh several values that are never summed, at SOFTMAX"),
        ("1,1", SUMMED, 2, "no axis of the result is the queries' sequence, at SOFTMAX, tensor 's'"),
    ],
)
def test_what_cannot_be_cut_into_rows_says_why(lead: str, tail: str, count: int, reason: str) -> None:
    assert refusal(row_tiles, segments(lead, tail), count) == reason
