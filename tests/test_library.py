"""The library in a notebook: it prints little, takes what is said as it is said, and leaves whole what it is given."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle, model_part
from cli_runs import DEMO

import edge_opt
from edge_opt.ir import to_bytes
from edge_opt.passes import Demand, Proof


def test_a_model_is_saved_by_its_own_method(tmp_path: Path) -> None:
    model = edge_opt.load(DEMO)
    model.save(tmp_path / "copy.tflite")
    assert edge_opt.compare(DEMO, tmp_path / "copy.tflite").bitwise
    with pytest.raises(edge_opt.UsageError, match="exists"):
        model.save(tmp_path / "copy.tflite")
    model.save(tmp_path / "copy.tflite", overwrite=True)


def test_what_a_notebook_prints_of_an_object_is_short() -> None:
    model = edge_opt.load(DEMO)
    result = edge_opt.convert(model, dry_run=True, verify="none")
    operator = model.subgraphs[0].operators[0]
    shown = [model, model.table, model.subgraphs[0], model.metadata[0], model.buffers[1], result]
    shown += [edge_opt.inspect(DEMO), edge_opt.compare(DEMO, DEMO)]
    for thing in (*shown, model.operator_codes[0], operator.options):
        assert 0 < len(repr(thing)) < 500, type(thing)
    assert "prefill_8: 122 operators" in repr(model)
    assert repr(edge_opt.Model()) == "Model(in memory, empty; 0 subgraphs in all)"
    assert "5 of 5 sites converted" in repr(result)


def test_a_notebook_shows_tables_whose_names_are_text() -> None:
    model = edge_opt.load(DEMO)
    model.signatures[0].key = "<b>prefill</b>"
    result = edge_opt.convert(model, dry_run=True, verify="none")
    for thing in (model, result, edge_opt.compare(model, model)):
        page = thing._repr_html_()
        assert page.count("<tr>") == 3
        assert "&lt;b&gt;prefill&lt;/b&gt;" in page
        assert "<b>" not in page


def test_a_model_of_a_bundle_is_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.litertlm"
    path.write_bytes(bundle([model_part("prefill_decode", DEMO.read_bytes())]))
    with edge_opt.load(path, model="prefill_decode") as model:
        assert [signature.key for signature in model.signatures] == ["prefill_8", "decode"]
    with pytest.raises(edge_opt.UsageError, match="model 'aux' does not exist, there are: prefill_decode"):
        edge_opt.load(path, model="aux")
    with pytest.raises(edge_opt.UsageError, match="is not a bundle: leave model='aux' out"):
        edge_opt.load(DEMO, model="aux")
    with pytest.raises(edge_opt.EdgeOptError, match=r"load.path, model='prefill_decode'"):
        edge_opt.load(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": "fully"}, "verification 'fully' does not exist, did you mean 'full'"),
        ({"target": Path("no.toml")}, "target file no.toml cannot be read"),
    ],
)
def test_an_option_of_another_type_is_refused_before_the_work(options: dict[str, Any], said: str) -> None:
    with pytest.raises(edge_opt.UsageError, match=said):
        edge_opt.convert(DEMO, dry_run=True, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    compared: dict[str, Any] = {"seed": np.int64(3), "atol": np.float32(0.5)}
    assert json.loads(json.dumps(edge_opt.compare(DEMO, DEMO, **compared).to_dict()))["seed"] == 3


def test_operators_are_a_sequence_and_signatures_have_names() -> None:
    model = edge_opt.load(DEMO)
    decode = model.signatures["decode"].subgraph
    assert decode is model.signatures[1].subgraph
    assert [*decode] == [*decode.operators]
    assert len(decode.operators) == len(decode) == 145
    assert decode.operators[0] is next(iter(decode))
    assert [*decode.operators[-2:]] == [*decode][-2:]
    assert repr(decode.operators[1]).startswith(f"Operator({decode.operators[1].name}")
    with pytest.raises(KeyError, match="no signature 'decod', there are: prefill_8, decode"):
        model.signatures["decod"]
    assert [one.key for one in copy.deepcopy(model).signatures] == ["prefill_8", "decode"]


def test_a_deep_copy_is_the_same_model_and_is_edited_apart() -> None:
    model = edge_opt.load(DEMO)
    before = to_bytes(model)
    twin = copy.deepcopy(model)
    assert to_bytes(twin) == before
    edge_opt.convert(twin, verify="none")
    twin.subgraphs[0].tensors[0].name = "renamed"
    for operator in twin.subgraphs[0].operators:
        if operator.name == "SOFTMAX" and operator.options is not None:
            operator.options.set("beta", 2.0)
    assert to_bytes(model) == before
    assert to_bytes(twin) != before


def test_a_dry_run_leaves_the_model_alone_and_gives_what_it_would_become() -> None:
    model = edge_opt.load(DEMO)
    before = to_bytes(model)
    result = edge_opt.convert(model, dry_run=True, verify="none")
    assert to_bytes(model) == before
    assert result.model is not None
    assert result.model is not model
    assert len(edge_opt.inspect(model).sites) == 5
    assert to_bytes(model) == before


def test_plain_data_is_json_without_infinity() -> None:
    result = edge_opt.convert(DEMO, dry_run=True, verify="none")
    result.sites[0].proof = Proof(Demand(), holds=False, bitwise=False, max_abs=float("inf"))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["sites"][0]["proof"]["max_abs"] is None
