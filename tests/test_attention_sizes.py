"""What is told of an attention, in every order of its products and with every number of axes."""

import pytest

from edge_opt.attention.block import Block, SingleHead, find_blocks
from edge_opt.ir.text import parse

T, S, H = 3, 5, 4


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
    (match,) = find_blocks(parse(attention(lead, turned=turned).replace("MERGE", merge)).subgraphs[0])
    assert isinstance(match, Block)
    assert (match.heads, match.kv_heads, match.head_size) == (2, 2, H)
    assert (match.query_length, match.key_lengths) == (T, (S,))


@pytest.mark.parametrize("lead", ["1", "1,1"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_sizes_of_a_single_head(lead: str, turned: bool) -> None:
    text = attention(lead, turned=turned).replace("MERGE", "return %o")
    (match,) = find_blocks(parse(text).subgraphs[0])
    assert isinstance(match, SingleHead)
    assert (match.query_length, match.key_lengths, match.head_size) == (T, (S,), H)
