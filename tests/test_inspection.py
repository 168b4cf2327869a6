"""What `inspect` and `explain` say of a model, as library calls and on the command line."""

from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, run, written
from text_parser import parse

from edge_opt import convert, load
from edge_opt.inspection import example_rewrite, explain, inspect
from edge_opt.ir import to_bytes

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
def test_inspect_lists_every_attention_block(model: Path, capsys: Captured) -> None:
    said = run(capsys, "inspect", model, "--json").json
    blocks = said["attention"]
    assert [block["signature"] for block in blocks] == ["prefill_8"] * 2 + ["decode"] * 3
    assert [block["mask"] for block in blocks] == [
        f"mask_{kind}" for kind in ("local", "global") * 2 + ("local",)
    ]
    for block in blocks:
        rows = 8 if block["signature"] == "prefill_8" else 1
        assert block["form"] == "multi-head"
        assert (block["heads"], block["kv_heads"], block["head_size"]) == (4, 1, 16)
        assert (block["query_length"], block["key_lengths"]) == (rows, [32, rows])


def test_after_the_conversion_every_block_is_single_head() -> None:
    model = load(DEMO)
    convert(model)
    blocks = inspect(model).attention
    assert len(blocks) == 4 * 5
    assert {(block.form, block.heads, block.head_size) for block in blocks} == {("single-head", 1, 16)}
    assert {block.mask for block in blocks} == {"mask_local", "mask_global"}


def test_inspect_gives_sizes_operators_arguments_and_dtypes(capsys: Captured) -> None:
    said = run(capsys, "inspect", QUANTIZED, "--json").json
    assert said["size"] == QUANTIZED.stat().st_size
    # Under 256 KiB of weights this quantizer stores them inside.
    assert said["flatbuffer_size"] == said["size"]
    assert set(said["weights"]) == {"INT8", "INT16", "INT32", "FLOAT32"}
    assert next(iter(said["weights"])) == "INT8"
    prefill, decode = said["signatures"]
    assert (prefill["name"], decode["name"]) == ("prefill_8", "decode")
    assert prefill["operators"] == sum(prefill["operator_counts"].values()) == 150
    assert prefill["operator_counts"]["SOFTMAX"] == 2
    assert {"name": "embeddings", "shape": [1, 8, 64], "dtype": "FLOAT32"} in prefill["inputs"]
    assert {"name": "kv_cache_k_0", "shape": [1, 1, 32, 16], "dtype": "INT16"} in prefill["inputs"]
    assert {"name": "logits", "shape": [1, 1, 64], "dtype": "INT16"} in decode["outputs"]


def test_inspect_counts_shared_weights_and_prints_equal_blocks_once(capsys: Captured) -> None:
    assert inspect(DEMO).weights == {"FLOAT32": 323_924, "INT32": 428}
    ran = run(capsys, "inspect", DEMO)
    assert ran.code == 0
    assert "  2 x multi-head: N=4 K=1 H=16 T=1, 32 + 1 keys, mask mask_local" in ran.out.splitlines()


def test_a_softmax_that_is_no_attention_is_not_listed(tmp_path: Path, capsys: Captured) -> None:
    model = written(tmp_path, NO_ATTENTION)
    assert example_rewrite(load(model), "main") is None, "and there is no rewrite to show"
    said = run(capsys, "inspect", model, "--json").json
    assert said["attention"] == []
    assert said["signatures"][0]["attention_unmatched"] == 0


def test_explain_gives_every_softmax_a_verdict(tmp_path: Path, capsys: Captured) -> None:
    said = run(capsys, "explain", DEMO, "--json").json
    assert [site["status"] for site in said["sites"]] == ["converted"] * 5
    assert said["sites"][0]["attention"]["query_length"] == 8
    (site,) = run(capsys, "explain", written(tmp_path, NO_ATTENTION), "--json").json["sites"]
    assert (site["status"], site["settled"], site["attention"]) == ("skipped", True, None)
    assert "not attention" in site["reason"]
    ran = run(capsys, "explain", DEMO)
    assert "prefill_8#0 mha_to_sha: would be converted" in ran.out


def test_looking_at_a_file_or_model_does_not_change_it() -> None:
    before = DEMO.read_bytes()
    assert len(explain(DEMO)) == 5
    assert DEMO.read_bytes() == before
    model = load(DEMO)
    known = to_bytes(model)
    inspect(model)
    example_rewrite(model, "decode")
    assert to_bytes(model) == known


def test_the_text_of_a_rewrite_folds_heads_that_are_alike() -> None:
    shown = example_rewrite(load(DEMO), "prefill_8")
    assert shown is not None
    before, after = (shown.lines(version) for version in (shown.before, shown.after))
    assert sum("BATCH_MATMUL" in line for line in before) == 4
    assert any("CONCATENATION(%mask_local, %mask_local, %mask_local, %mask_local)" in line for line in before)
    assert sum("BATCH_MATMUL" in line for line in after) == 4
    assert "... 3 more like these 11 ..." in after


def test_explain_says_what_a_conversion_for_that_target_would_do(capsys: Captured) -> None:
    for target, decode in (("generic", "converted"), ("qualcomm-htp", "skipped")):
        sites = run(capsys, "explain", DEMO, "--target", target, "--json").json["sites"]
        assert {
            site["status"] for site in sites if (site["signature"], site["pass"]) == ("decode", "mha_to_sha")
        } == {decode}


FOLDED_OUTSIDE = """
signature main = #0 (q=%q, k=%k, v=%v) -> (out=%out)
subgraph main (%q: float32[1,4,3,8], %k: float32[1,2,6,8], %v: float32[1,2,6,8]) {
  %rows: float32[1,2,6,8] = RESHAPE(%q, int32{1, 2, 6, 8}) {new_shape: [1, 2, 6, 8]}
  %sum: float32[1,2,6,8] = STABLEHLO_COMPOSITE(%rows, %k, %v) {name: 'sdpa', decomposition_subgraph_index: 1}
  %heads: float32[1,4,3,8] = RESHAPE(%sum, int32{1, 4, 3, 8}) {new_shape: [1, 4, 3, 8]}
  %back: float32[1,3,4,8] = TRANSPOSE(%heads, int32{0, 2, 1, 3})
  %out: float32[1,3,32] = RESHAPE(%back, int32{1, 3, 32}) {new_shape: [1, 3, 32]}
  return %out
}
subgraph body (%q: float32[1,2,6,8], %k: float32[1,2,6,8], %v: float32[1,2,6,8]) {
  %logits: float32[1,2,6,6] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,2,6,6] = SOFTMAX(%logits) {beta: 1.0}
  %o: float32[1,2,6,8] = BATCH_MATMUL(%p, %v)
  return %o
}
"""


def test_heads_that_lie_in_rows_of_a_composite_are_counted_as_a_conversion_counts_them() -> None:
    model = parse(FOLDED_OUTSIDE)
    before = to_bytes(model)
    (block,) = inspect(model).attention
    opened, site = convert(model, verify="none", dry_run=True).sites
    assert (opened.pass_name, site.heads, site.kv_heads) == ("inline_composites", 4, 2)
    assert (block.heads, block.kv_heads, block.query_length) == (4, 2, 3)
    assert [explained.block for explained in explain(model)] == [None, block]
    assert to_bytes(model) == before


def test_the_body_of_a_composite_that_was_opened_is_no_attention_that_is_left() -> None:
    result = convert(parse(FOLDED_OUTSIDE), verify="none", require_all=True)
    assert len(result.converted) == len(result.sites) == 2
