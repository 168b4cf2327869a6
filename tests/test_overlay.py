"""`inspect --node-data`: the overlay that ai-edge-model-explorer reads."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cli_runs import DEMO, NO_ATTENTION, run, state, written

from edge_opt import convert, load
from edge_opt.inspection import node_data

Captured = pytest.CaptureFixture[str]


@cache
def before() -> dict[str, Any]:
    return node_data(DEMO)


def texts(data: dict[str, Any]) -> Counter[str]:
    return Counter(result["value"] for graph in data.values() for result in graph["results"].values())


def operator(path: Path, graph: str, place: str) -> Any:
    (found,) = (subgraph for subgraph in load(path).subgraphs if subgraph.name == graph)
    return list(found.operators)[int(place)]


def test_every_operator_of_a_block_says_what_becomes_of_it() -> None:
    assert set(before()) == {"prefill_8", "decode"}
    blocks = {text: count for text, count in texts(before()).items() if text.startswith("converted")}
    assert len(blocks) == 5
    assert all(f": {count} operators become" in text for text, count in blocks.items())
    own = [text for text in texts({"": before()["prefill_8"]}) if text in blocks]
    grown = sum(int(text.rsplit(" ", 1)[1]) - blocks[text] for text in own)
    assert grown == 186 - 122, "as the whole signature grows"
    names = Counter(operator(DEMO, "prefill_8", place).name for place in before()["prefill_8"]["results"])
    assert (names["SOFTMAX"], names["BATCH_MATMUL"], names["FULLY_CONNECTED"]) == (2, 8, 0)


def test_what_is_left_says_why(tmp_path: Path) -> None:
    path = written(tmp_path, NO_ATTENTION)
    (result,) = node_data(path)["main"]["results"].values()
    assert result["value"].startswith("nothing to do (mha_to_sha #0): ")


def test_the_command_writes_it(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "nodes.json"
    ran = run(capsys, "inspect", DEMO, "--node-data", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.json["attention"]) == 5
    assert json.loads(path.read_text()) == before()
    model = written(tmp_path, NO_ATTENTION)
    known = state(tmp_path)
    assert "exists" in run(capsys, "inspect", DEMO, "--node-data", path).failed_in_one_sentence(2)
    own = run(capsys, "inspect", model, "--node-data", model, "--force")
    assert "input itself" in own.failed_in_one_sentence(2)
    assert state(tmp_path) == known


@pytest.mark.slow
def test_model_explorer_finds_every_node(tmp_path: Path) -> None:
    explorer = pytest.importorskip("model_explorer", reason="pip install '.[explorer]'")
    from model_explorer.builtin_tflite_flatbuffer_adapter import BuiltinTfliteFlatbufferAdapter

    builder = explorer.node_data_builder
    path, data = DEMO, before()
    (loaded,) = BuiltinTfliteFlatbufferAdapter().convert(str(path), {})["graphCollections"]
    collection = loaded if isinstance(loaded, dict) else vars(loaded)
    graphs = {
        graph["id"]: {node["id"]: node["label"] for node in graph["nodes"]} for graph in collection["graphs"]
    }
    assert set(data) <= set(graphs)
    made = {}
    for name, graph in data.items():
        results = {key: builder.NodeDataResult(**result) for key, result in graph["results"].items()}
        made[name] = builder.GraphNodeData(**{**graph, "results": results})
    read = builder.ModelNodeData(made)
    said = json.loads(read.to_json_string())
    for name, graph in data.items():
        assert said[name]["results"] == graph["results"]
        for place in graph["results"]:
            label = graphs[name][place].replace("_", "").replace(".", "")
            assert label == operator(path, name, place).name.lower().replace("_", "")
    file = tmp_path / f"{path.name}.json"
    file.write_text(json.dumps(data))
    config = explorer.config()
    config.add_model_from_path(str(path)).add_node_data_from_path(str(file))
    assert config.node_data_sources == [str(file)]


def outermost_boxes(path: Path) -> dict[str, set[str]]:
    """The boxes that Model Explorer opens a graph with: the outermost names in the last path that `;` separates."""
    from model_explorer.builtin_tflite_flatbuffer_adapter import BuiltinTfliteFlatbufferAdapter

    (loaded,) = BuiltinTfliteFlatbufferAdapter().convert(str(path), {})["graphCollections"]
    collection = loaded if isinstance(loaded, dict) else vars(loaded)
    return {
        graph["id"]: {
            node["namespace"].rstrip(";").rsplit(";", 1)[-1].split("/")[0]
            for node in graph["nodes"]
            if node["incomingEdges"]  # constants and inputs have boxes of their own
        }
        for graph in collection["graphs"]
    }


@pytest.mark.slow
def test_heads_are_drawn_within_the_layer_that_they_belong_to(tmp_path: Path) -> None:
    pytest.importorskip("model_explorer", reason="pip install '.[explorer]'")
    convert(DEMO, tmp_path / "out.tflite", verify="none")
    old, new = outermost_boxes(DEMO), outermost_boxes(tmp_path / "out.tflite")
    for signature in ("prefill_8", "decode"):
        assert new[signature] <= old[signature]
