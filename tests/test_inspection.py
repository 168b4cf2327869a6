"""What `inspect` finds in a model and says of a conversion, as library calls, as JSON, and for Model Explorer."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attention_checks import masked_text
from bundles import bundle, model_part
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Captured, run, state, written
from pass_runs import SELECT_PAGE
from text_parser import parse

from edge_opt import convert, load
from edge_opt.cli.show_models import show_inspection
from edge_opt.inspection import Inspection, inspect
from edge_opt.ir import to_bytes


@cache
def inspected() -> Inspection:
    return inspect(DEMO)


@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
def test_every_attention_block_is_listed(model: Path, capsys: Captured) -> None:
    said = run(capsys, "inspect", model, "--json", "--target", "qualcomm-htp").json
    split = [site for site in said["sites"] if site["pass"] == "mha_to_sha"]
    assert [site["status"] for site in split] == ["converted"] * 2 + ["nothing to do"] * 3
    blocks = said["attention"]
    assert [site["operator"] for site in split] == [block["softmax"] for block in blocks]
    assert [block["signature"] for block in blocks] == ["prefill_8"] * 2 + ["decode"] * 3
    kinds = ("local", "global") * 2 + ("local",)
    assert [block["mask"] for block in blocks] == [f"mask_{kind}" for kind in kinds]
    for block in blocks:
        rows = 8 if block["signature"] == "prefill_8" else 1
        assert block["form"] == "multi-head"
        assert (block["heads"], block["kv_heads"], block["head_size"]) == (4, 1, 16)
        assert (block["query_length"], block["key_lengths"]) == (rows, [32, rows])


@pytest.mark.parametrize(
    ("target", "heads"), [("generic", [1] * 20), ("qualcomm-htp", [1] * 8 + [4] * 3)]
)
def test_after_a_conversion_blocks_have_fewer_heads_and_the_same_masks(
    target: str, heads: list[int]
) -> None:
    """Also where the mask is added to each part of the scores before they are joined."""
    model = load(DEMO)
    convert(model, target=target, verify="none")
    blocks = inspect(model).attention
    assert [block.heads for block in blocks] == heads
    assert {block.mask for block in blocks} == {"mask_local", "mask_global"}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("NEG(%a)", "first"),
        ("MINIMUM(%a, %b)", "mask"),
        ("NEG(float32[1,1,6,8]{splat 1.0})", "mask"),
    ],
)
def test_a_mask_is_named_by_the_argument_it_is_made_of_or_its_tensor(made: str, named: str) -> None:
    text = masked_text().replace(
        "%mask: float32[1,1,6,8]", "%a: float32[1,1,6,8], %b: float32[1,1,6,8]"
    )
    text = text.replace("  %m:", f"  %mask: float32[1,1,6,8] = {made}\n  %m:")
    model = parse(f"signature main = #0 (q=%q, k=%k, v=%v, first=%a, second=%b) -> (r=%r)\n{text}")
    assert [block.mask for block in inspect(model).attention] == [named]


def test_sizes_operators_arguments_and_dtypes(capsys: Captured) -> None:
    said = run(capsys, "inspect", QUANTIZED, "--json").json
    assert said["size"] == QUANTIZED.stat().st_size
    # Under 256 KiB of weights this quantizer stores them inside.
    assert next(iter(said["weights"])) == "INT8"
    assert set(said["weights"]) == {"INT8", "INT16", "INT32", "FLOAT32"}
    prefill, decode = said["signatures"]
    assert prefill["operators"] == sum(prefill["operator_counts"].values()) == 150
    assert prefill["operator_counts"]["SOFTMAX"] == 2
    assert {"name": "embeddings", "shape": [1, 8, 64], "dtype": "FLOAT32"} in prefill["inputs"]
    assert {"name": "kv_cache_k_0", "shape": [1, 1, 32, 16], "dtype": "INT16"} in prefill["inputs"]
    assert {"name": "logits", "shape": [1, 1, 64], "dtype": "INT16"} in decode["outputs"]
    assert inspected().weights == {"FLOAT32": 323_924, "INT32": 428}, (
        "shared weights are counted once"
    )


def test_attention_that_is_not_understood_is_counted(capsys: Captured) -> None:
    found = inspect(DEMO)
    found.signatures[0] = replace(found.signatures[0], attention_unmatched=3)
    show_inspection(found)
    assert "  2 multi-head, 3 not understood\n" in capsys.readouterr().out


FOLDED_OUTSIDE = """
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
    found = inspect(model)
    (block,) = found.attention
    opened, site = convert(model, verify="none", dry_run=True).sites
    assert (opened.pass_name, site.heads, site.kv_heads) == ("inline_composites", 4, 2)
    assert (block.heads, block.kv_heads, block.query_length) == (4, 2, 3)
    assert [one.operator == block.softmax for one in found.sites] == [False, True]
    assert to_bytes(model) == before
    result = convert(model, verify="none", require_all=True)
    assert len(result.converted) == len(result.sites) == 2, "its body is no attention that is left"


def texts(data: dict[str, Any]) -> Counter[str]:
    return Counter(
        result["value"] for graph in data.values() for result in graph["results"].values()
    )


def operator(path: Path, graph: str, place: str) -> Any:
    (found,) = (subgraph for subgraph in load(path).subgraphs if subgraph.name == graph)
    return list(found.operators)[int(place)]


def test_every_operator_of_a_block_says_what_becomes_of_it(tmp_path: Path) -> None:
    data = inspected().node_data
    assert set(data) == {"prefill_8", "decode"}
    blocks = {text: count for text, count in texts(data).items() if text.startswith("converted")}
    assert len(blocks) == 5
    assert all(f": {count} operators become" in text for text, count in blocks.items())
    own = [text for text in texts({"": data["prefill_8"]}) if text in blocks]
    grown = sum(int(text.rsplit(" ", 1)[1]) - blocks[text] for text in own)
    assert grown == 186 - 122, "as the whole signature grows"
    names = Counter(
        operator(DEMO, "prefill_8", place).name for place in data["prefill_8"]["results"]
    )
    assert (names["SOFTMAX"], names["BATCH_MATMUL"], names["FULLY_CONNECTED"]) == (2, 8, 0)
    twice = texts(inspect(parse(SELECT_PAGE)).node_data)
    assert twice["converted by mask_to_add #2: 4 operators become 6"] == 4, (
        "the first pass of an operator counts"
    )
    found = inspect(written(tmp_path, NO_ATTENTION))
    assert (found.attention, found.signatures[0].attention_unmatched) == ([], 0)
    (result,) = found.node_data["main"]["results"].values()
    assert result["value"].startswith("nothing to do (mha_to_sha #0): ")


def test_the_command_writes_node_data_of_models_and_bundles(
    tmp_path: Path, capsys: Captured
) -> None:
    path, model = tmp_path / "nodes.json", tmp_path / "m.litertlm"
    model.write_bytes(bundle([model_part("prefill_decode", DEMO.read_bytes())]))
    for source in (DEMO, model):
        ran = run(capsys, "inspect", source, "--node-data", path, "--json", "--force")
        assert (ran.code, ran.err, len(ran.json["attention"])) == (0, "", 5)
        assert json.loads(path.read_text()) == inspected().node_data
    known = state(tmp_path)
    assert "exists" in run(capsys, "inspect", DEMO, "--node-data", path).failed_in_one_sentence(2)
    own = run(capsys, "inspect", model, "--node-data", model, "--force")
    assert "input itself" in own.failed_in_one_sentence(2)
    assert state(tmp_path) == known


def explored(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The nodes of each graph, as Model Explorer reads a file."""
    from model_explorer.builtin_tflite_flatbuffer_adapter import BuiltinTfliteFlatbufferAdapter

    (loaded,) = BuiltinTfliteFlatbufferAdapter().convert(str(path), {})["graphCollections"]
    collection = loaded if isinstance(loaded, dict) else vars(loaded)
    return {graph["id"]: graph["nodes"] for graph in collection["graphs"]}


@pytest.mark.slow
def test_model_explorer_finds_every_node() -> None:
    explorer = pytest.importorskip("model_explorer", reason="pip install '.[explorer]'")
    builder, graphs = explorer.node_data_builder, explored(DEMO)
    for name, graph in inspected().node_data.items():
        labels = {
            node["id"]: node["label"].replace("_", "").replace(".", "") for node in graphs[name]
        }
        for place, result in graph["results"].items():
            assert builder.NodeDataResult(**result)
            assert labels[place] == operator(DEMO, name, place).name.lower().replace("_", "")


@pytest.mark.slow
def test_heads_are_drawn_within_the_layer_that_they_belong_to(tmp_path: Path) -> None:
    """The boxes of a graph are the outermost names in the last path that `;` separates."""
    pytest.importorskip("model_explorer", reason="pip install '.[explorer]'")
    convert(DEMO, tmp_path / "out.tflite", verify="none")
    old, new = (
        {
            name: {
                node["namespace"].rstrip(";").rsplit(";", 1)[-1].split("/")[0]
                for node in nodes
                if node["incomingEdges"]  # constants and inputs have boxes of their own
            }
            for name, nodes in explored(path).items()
        }
        for path in (DEMO, tmp_path / "out.tflite")
    )
    for signature in ("prefill_8", "decode"):
        assert new[signature] <= old[signature]
