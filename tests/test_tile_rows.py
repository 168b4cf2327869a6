"""tile_rows: a head is cut into blocks of query rows, the mask once for all heads and layers."""

from collections import Counter
from pathlib import Path

import pytest
from text_parser import parse

from edge_opt.base.errors import UsageError
from edge_opt.conversion import convert
from edge_opt.ir import Model, Subgraph
from edge_opt.ir.text import to_text
from edge_opt.passes import Status

TESTDATA = Path(__file__).parent.parent / "testdata"


def two_heads(rows: int, keys: int) -> Model:
    return parse(f"""
    subgraph main (%q: float32[1,2,{rows},4], %k: float32[1,2,{keys},4], %v: float32[1,2,{keys},4],
                   %mask: float32[1,1,{rows},{keys}]) {{
      %logits: float32[1,2,{rows},{keys}] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %masked: float32[1,2,{rows},{keys}] = ADD(%logits, %mask)
      %p: float32[1,2,{rows},{keys}] = SOFTMAX(%masked) {{beta: 1.0}}
      %heads: float32[1,2,{rows},4] = BATCH_MATMUL(%p, %v)
      %t: float32[1,{rows},2,4] = TRANSPOSE(%heads, int32{{0, 2, 1, 3}})
      %out: float32[1,{rows},8] = RESHAPE(%t, int32{{1, {rows}, 8}}) {{new_shape: [1, {rows}, 8]}}
      return %out
    }}""")


def kinds(graph: Subgraph) -> Counter[str]:
    return Counter(operator.name for operator in graph.operators)


def softmax_shapes(graph: Subgraph) -> set[tuple[int, ...]]:
    return {operator.outputs[0].shape for operator in graph.operators if operator.name == "SOFTMAX"}


def test_rows_are_off_unless_asked_for() -> None:
    result = convert(two_heads(8, 16))
    assert {site.pass_name for site in result.sites} == {"mha_to_sha"}


def test_every_head_is_cut_and_the_mask_only_once() -> None:
    result = convert(two_heads(8, 16), rows_per_tile=4)
    assert result.model is not None
    graph = result.model.subgraphs[0]
    assert [(site.pass_name, site.status) for site in result.sites] == [("mha_to_sha", Status.CONVERTED)]
    assert all(site.proof is not None and site.proof.bitwise for site in result.sites)
    assert softmax_shapes(graph) == {(1, 1, 4, 16)}
    assert kinds(graph)["SOFTMAX"] == 4
    cuts_of_the_mask = [op for op in graph.operators if op.name == "SPLIT" and op.inputs[1] in graph.inputs]
    assert [op.input(1).name for op in cuts_of_the_mask].count("mask") == 1


def test_rows_that_do_not_divide_take_the_next_smaller_tile() -> None:
    result = convert(two_heads(12, 16), rows_per_tile=5, verify="none")
    assert result.model is not None
    assert softmax_shapes(result.model.subgraphs[0]) == {(1, 1, 4, 16)}


def test_the_mask_is_cut_once_for_all_layers_of_a_model() -> None:
    result = convert(TESTDATA / "demo_gemma3.tflite", dry_run=True, rows_per_tile=4)
    assert result.model is not None
    graph = result.model.signatures[0].subgraph
    masks = [op.input(1).name for op in graph.operators if op.name == "SPLIT" and "mask" in op.input(1).name]
    assert len(masks) == len(set(masks)) > 0
    assert all(site.proof is not None and site.proof.bitwise for site in result.converted)


def test_a_tile_has_at_least_one_row() -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        convert(two_heads(8, 16), rows_per_tile=0)


ONE_HEAD = """
subgraph main (%q: float32[1,1,4,2], %k: float32[1,1,3,2], %v: float32[1,1,3,2], %mask: float32[1,1,4,3]) {
  %logits: float32[1,1,4,3] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %masked: float32[1,1,4,3] = ADD(%logits, %mask)
  %p: float32[1,1,4,3] = SOFTMAX(%masked) {beta: 1.0}
  %out: float32[1,1,4,2] = BATCH_MATMUL(%p, %v)
  return %out
}
"""
TWO_TILES = """
subgraph main (%q: float32[1,1,4,2], %k: float32[1,1,3,2], %v: float32[1,1,3,2], %mask: float32[1,1,4,3]) {
  %q/piece_0: float32[1,1,2,2], %q/piece_1: float32[1,1,2,2] = SPLIT(int32(2), %q) {num_splits: 2}
  %logits/piece_0: float32[1,1,2,3] = BATCH_MATMUL(%q/piece_0, %k) {adj_y: true}
  %mask/piece_0: float32[1,1,2,3], %mask/piece_1: float32[1,1,2,3] = SPLIT(int32(2), %mask) {num_splits: 2}
  %masked/piece_0: float32[1,1,2,3] = ADD(%logits/piece_0, %mask/piece_0)
  %p/piece_0: float32[1,1,2,3] = SOFTMAX(%masked/piece_0) {beta: 1.0}
  %out/piece_0: float32[1,1,2,2] = BATCH_MATMUL(%p/piece_0, %v)
  %logits/piece_1: float32[1,1,2,3] = BATCH_MATMUL(%q/piece_1, %k) {adj_y: true}
  %masked/piece_1: float32[1,1,2,3] = ADD(%logits/piece_1, %mask/piece_1)
  %p/piece_1: float32[1,1,2,3] = SOFTMAX(%masked/piece_1) {beta: 1.0}
  %out/piece_1: float32[1,1,2,2] = BATCH_MATMUL(%p/piece_1, %v)
  %out: float32[1,1,4,2] = CONCATENATION(%out/piece_0, %out/piece_1) {axis: 2}
  return %out
}
"""


def test_an_attention_of_one_head_is_cut_by_rows_alone() -> None:
    result = convert(parse(ONE_HEAD), rows_per_tile=2)
    (site,) = result.converted
    assert (site.pass_name, site.heads, site.kv_heads) == ("tile_rows", 1, 1)
    assert site.proof is not None
    assert site.proof.bitwise
    assert result.model is not None
    assert to_text(result.model) == TWO_TILES.lstrip()
