"""`edge-opt convert` on real exports: what is written, what is printed, what the options do."""

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, run, state, written

from edge_opt.ir import load
from edge_opt.ir.text import subgraph_text

Captured = pytest.CaptureFixture[str]
REFUSES_SPLIT = 'name = "picky"\nsummary = "no SPLIT, no UNPACK"\nrefused_operators = ["SPLIT", "UNPACK"]\n'


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return shutil.copy(DEMO, tmp_path / "gemma.tflite")


# --- the main job ---


@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
def test_every_block_is_converted_proved_and_gives_the_same_numbers(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out.tflite"
    ran = run(capsys, "convert", model, "-o", out, "--require-all", "--require-match", "--json")
    assert (ran.code, ran.err) == (0, "")
    said = ran.json
    assert [site["signature"] for site in said["sites"]] == ["prefill_8"] * 2 + ["decode"] * 3
    expected = {"pass": "mha_to_sha", "status": "converted", "heads": 4, "kv_heads": 1}
    for site in said["sites"]:
        assert expected.items() <= site.items()
        assert {"demand": "bitwise", "bitwise": True, "max_abs": 0}.items() <= site["proof"].items()
    compared = run(capsys, "compare", model, out, "--backend", "both", "--json")
    assert compared.code == 0
    assert compared.json["bitwise"]
    # Split means split: whatever works on logits holds one head.
    for name, graph in load(out).entry_points():
        rows = 8 if name == "prefill_8" else 1
        for operator in graph.operators:
            if operator.name == "SOFTMAX":
                assert operator.outputs[0].shape[:-1] == (1, 1, rows)


def test_json_has_the_fields_of_the_contract(demo: Path, capsys: Captured) -> None:
    said = run(capsys, "convert", demo, "--json").json
    assert said["input"] == str(demo)
    assert said["output"] == str(demo.with_name("gemma.opt.tflite"))
    assert (said["target"], said["verified"]) == ("generic", "regions")
    assert said["seconds"] > 0
    assert [entry["name"] for entry in said["signatures"]] == ["prefill_8", "decode"]
    for entry in said["signatures"]:
        assert entry["operators_before"] < entry["operators_after"]
    assert set(said["sites"][0]) >= {
        "pass", "signature", "index", "status", "reason", "heads", "kv_heads", "proof",
    }  # fmt: skip
    assert set(said["sites"][0]["proof"]) >= {
        "demand", "bitwise", "max_abs", "steps", "fully_masked_rows_max_abs", "repeated",
    }  # fmt: skip


def test_the_table_shows_each_signature_before_and_after(demo: Path, capsys: Captured) -> None:
    ran = run(capsys, "convert", demo)
    assert ran.code == 0
    assert f"{demo} (682 KiB) -> {demo.with_name('gemma.opt.tflite')}" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.startswith(("prefill_8 ", "decode "))]
    assert [row[4:7] for row in rows] == [["2", "of", "2"], ["3", "of", "3"]]
    assert "5.00 KiB -> 2.50 KiB" in ran.out
    assert "5 of 5 sites converted, each proved bit for bit" in ran.out


# --- options ---


def test_dry_run_writes_nothing(demo: Path, capsys: Captured) -> None:
    before = state(demo.parent)
    ran = run(capsys, "convert", demo, "--dry-run")
    assert (ran.code, state(demo.parent)) == (0, before)
    assert "nothing written (dry run)" in ran.out
    assert "5 of 5 sites converted" in ran.out
    assert run(capsys, "convert", demo, "--dry-run", "--json").json["output"] is None


def test_force_replaces_an_existing_output(demo: Path, capsys: Captured) -> None:
    out = demo.with_name("gemma.opt.tflite")
    out.write_text("precious")
    assert run(capsys, "convert", demo, "--force").code == 0
    assert len(load(out).subgraphs) == 35


def test_signatures_leaves_the_others_as_they_are(demo: Path, capsys: Captured) -> None:
    said = run(capsys, "convert", demo, "--signatures", "decode", "--verify", "none", "--json").json
    prefill, decode = said["signatures"]
    assert prefill["operators_before"] == prefill["operators_after"]
    assert decode["operators_before"] < decode["operators_after"]
    assert {(site["signature"], site["status"]) for site in said["sites"]} == {("decode", "converted")}
    pairs = zip(load(demo).subgraphs[:2], load(said["output"]).subgraphs[:2], strict=True)
    assert [subgraph_text(old) == subgraph_text(new) for old, new in pairs] == [True, False]


@pytest.mark.parametrize(
    "options",
    [["--skip", "mha_to_sha"], ["--passes", "mask_to_add"], ["--passes", "matmul_convert,mask_to_add"]],
)
def test_passes_and_skip_choose(options: list[str], demo: Path, capsys: Captured) -> None:
    sites = run(capsys, "convert", demo, "--json", *options).json["sites"]
    left = ("mha_to_sha", "skipped", "the pass mha_to_sha was left out")
    assert [(site["pass"], site["status"], site["reason"]) for site in sites] == [left] * 5


@pytest.mark.parametrize(("verify", "proved"), [("regions", True), ("full", True), ("none", False)])
def test_verify_says_what_was_verified(verify: str, proved: bool, demo: Path, capsys: Captured) -> None:
    said = run(capsys, "convert", demo, "--verify", verify, "--json").json
    assert said["verified"] == verify
    assert all((site["proof"] is not None) is proved for site in said["sites"])


def test_a_site_that_the_target_refuses_stays_and_is_reported(demo: Path, capsys: Captured) -> None:
    target = demo.with_name("picky.toml")
    target.write_text(REFUSES_SPLIT)
    ran = run(capsys, "convert", demo, "--target", target)
    assert ran.code == 0
    assert "0 of 5 sites converted" in ran.out
    assert "rolled-back 5 sites of mha_to_sha (prefill_8#0, prefill_8#1, decode#0" in ran.out
    assert "target 'picky' does not take SPLIT" in ran.out


def test_require_all_exits_1_and_writes_nothing(demo: Path, capsys: Captured) -> None:
    target = demo.with_name("picky.toml")
    target.write_text(REFUSES_SPLIT)
    before = state(demo.parent)
    ran = run(capsys, "convert", demo, "--target", target, "--require-all", "--json")
    sentence = ran.failed_in_one_sentence(1)
    assert "5 of 5 sites were not converted" in sentence
    assert "does not take SPLIT" in sentence
    assert state(demo.parent) == before
    assert ran.json["error"]["type"] == "SitesLeftError"
    assert ran.json["output"] is None
    assert [site["status"] for site in ran.json["sites"]] == ["rolled-back"] * 5


def test_a_refusal_is_in_the_report_too(demo: Path, capsys: Captured) -> None:
    target = demo.with_name("picky.toml")
    target.write_text(REFUSES_SPLIT)
    reports = [demo.with_name("r.json"), demo.with_name("r.html")]
    options = [word for path in reports for word in ("--report", path)]
    ran = run(capsys, "convert", demo, "--target", target, "--require-all", *options)
    sentence = ran.failed_in_one_sentence(1)
    told = json.loads(reports[0].read_text())
    assert told["failure"] in sentence
    assert len(told["sites"]) == 5
    assert "Refused: 5 of 5 sites were not converted" in reports[1].read_text()


# --- models without attention ---


def test_without_attention_require_match_exits_4_and_require_all_is_fulfilled(
    tmp_path: Path, capsys: Captured
) -> None:
    model = written(tmp_path, NO_ATTENTION)
    before = state(tmp_path)
    ran = run(capsys, "convert", model, "--require-match")
    assert "no attention block was converted" in ran.failed_in_one_sentence(4)
    assert state(tmp_path) == before
    ran = run(capsys, "convert", model, "--require-all")
    assert ran.code == 0, "all of nothing"
    assert "The model holds no attention: there was nothing to split." in ran.out.splitlines()


def test_attention_that_the_target_leaves_is_not_called_single_head(capsys: Captured, tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    target.write_text('name = "mine"\nsummary = "splits nothing"\nsplit_signatures = []\n')
    ran = run(capsys, "convert", DEMO, "--dry-run", "--target", target)
    assert ran.code == 0
    assert "Target 'mine' leaves the attention of these signatures as it is" in ran.out + ran.err
    assert "single-head already" not in ran.out + ran.err
