"""The commands for models on real exports: what is written, what is printed, what the options do, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Captured, run, state, written
from syrupy.assertion import SnapshotAssertion

from edge_opt.passes.mha_to_sha import MhaToSha

CONTENT = DEMO.read_bytes()
OTHER = NO_ATTENTION.replace("float32(0.5)", "float32(0.51)")
REFUSES_SPLIT = 'name = "picky"\nsummary = "no SPLIT, no UNPACK"\nrefused_operators = ["SPLIT", "UNPACK"]\n'


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return shutil.copy(DEMO, tmp_path / "gemma.tflite")


@pytest.fixture
def picky(tmp_path: Path) -> Path:
    path = tmp_path / "picky.toml"
    path.write_text(REFUSES_SPLIT)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path, NO_ATTENTION, "a.tflite"), written(tmp_path, OTHER, "b.tflite")


def steady(text: str, folder: Path) -> str:
    """The text without what differs from run to run."""
    return re.sub(r"\d+\.\d s\b", "0.0 s", text.replace(str(folder), "FOLDER"))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dry-run"],
        ["--signatures", "decode", "--verify", "none"],
        ["--skip", "mha_to_sha"],
        ["--verify", "full"],
        ["--target", "PICKY"],
        ["--target", "qualcomm-htp"],
    ],
)
def test_what_is_printed(
    options: list[str], demo: Path, picky: Path, capsys: Captured, snapshot: SnapshotAssertion
) -> None:
    before = state(demo.parent)
    ran = run(capsys, "convert", demo, *(str(picky) if one == "PICKY" else one for one in options))
    assert (ran.code, ran.err) == (0, "")
    assert steady(ran.out, demo.parent) == snapshot
    assert (state(demo.parent) == before) is ("--dry-run" in options)


def test_require_all_exits_1_and_writes_only_the_report(demo: Path, picky: Path, capsys: Captured) -> None:
    before = state(demo.parent)
    given = ("convert", demo, "--target", picky, "--require-all")
    ran = run(capsys, *given, "--json")
    sentence = ran.failed_in_one_sentence(1)
    assert "refuses SPLIT" in sentence
    assert state(demo.parent) == before
    assert (ran.json["error"]["type"], ran.json["output"]) == ("SitesSkippedError", None)
    assert [site["status"] for site in ran.json["sites"]] == ["reverted"] * 5
    reports = [demo.with_name("r.json"), demo.with_name("r.html")]
    ran = run(capsys, *given, *(word for path in reports for word in ("--report", path)))
    told = json.loads(reports[0].read_text())
    ran.failed_in_one_sentence(1)
    assert (len(told["sites"]), told["example"]) == (5, None)
    assert told["failure"].startswith("5 of 5 sites were skipped")
    assert "Refused: 5 of 5 sites" in reports[1].read_text()


def test_a_bug_at_a_site_is_exit_70(demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def broken(*_: object) -> None:
        raise KeyError("seven")

    monkeypatch.delenv("EDGE_OPT_TRACEBACK", raising=False)
    monkeypatch.setattr(MhaToSha, "sites", broken)
    ran = run(capsys, "convert", demo)
    assert (ran.code, ran.err) == (70, "")
    assert "a bug in edge-opt, please report it" in ran.out
    assert demo.with_name("gemma.opt.tflite").exists()
    monkeypatch.setenv("EDGE_OPT_TRACEBACK", "1")
    assert "Traceback" in run(capsys, "convert", demo, "--force").err


@pytest.mark.parametrize("options", [[], ["--target", "qualcomm-htp", "--shapes"]], ids=["plain", "target"])
def test_inspect_prints_what_is_there_and_what_would_be_rewritten(
    options: list[str], demo: Path, capsys: Captured, snapshot: SnapshotAssertion
) -> None:
    ran = run(capsys, "inspect", demo, *options)
    assert (ran.code, ran.err) == (0, "")
    assert steady(ran.out, demo.parent) == snapshot


def test_a_shape_that_the_file_has_wrong_is_exit_1(tmp_path: Path, capsys: Captured) -> None:
    model = written(tmp_path, NO_ATTENTION.replace("%half: float32[1,4]", "%half: float32[1,5]"))
    assert run(capsys, "inspect", model).code == 0
    ran = run(capsys, "inspect", model, "--shapes")
    assert (ran.code, ran.err) == (1, "")
    assert "'half'" in ran.out
    found = run(capsys, "inspect", model, "--shapes", "--json").json["inferred"]["disagreements"]
    assert {"tensor": "half", "recorded": [1, 5], "inferred": [1, 4]}.items() <= found[0].items()


def test_models_that_differ_are_exit_1(
    pair: tuple[Path, Path], capsys: Captured, snapshot: SnapshotAssertion
) -> None:
    ran = run(capsys, "compare", *pair)
    assert (ran.code, ran.err, ran.out) == (1, "", snapshot)
    ran = run(capsys, "compare", *pair, "--atol", "0.1", "--seed", 3, "--json")
    assert (ran.code, ran.json["equal"], ran.json["bitwise"], ran.json["seed"]) == (0, True, False, 3)
    assert run(capsys, "compare", *pair, "--rtol", "0.1").code == 0
    ran = run(capsys, "compare", DEMO, pair[0])
    assert ran.code == 1, "other signatures are a difference"
    assert "prefill_8" in ran.out


def test_golden_records_beside_the_model_and_replaces_nothing(tmp_path: Path, capsys: Captured) -> None:
    model = tmp_path / "gemma.tflite"
    model.write_bytes(DEMO.read_bytes())
    assert f"golden check MODEL {tmp_path}/gemma.golden.npz" in run(capsys, "golden", "record", model).out
    assert run(capsys, "golden", "check", model, tmp_path / "gemma.golden.npz").code == 0
    assert "--force" in run(capsys, "golden", "record", model).failed_in_one_sentence(2)


def test_golden_records_checks_and_replaces_a_file_with_force(tmp_path: Path, capsys: Captured) -> None:
    golden = tmp_path / "g.npz"
    golden.write_text("precious")
    before = state(tmp_path)
    assert "--force" in run(capsys, "golden", "record", DEMO, "-o", golden).failed_in_one_sentence(2)
    assert state(tmp_path) == before
    run(capsys, "golden", "check", DEMO, golden).failed_in_one_sentence(3)
    assert run(capsys, "golden", "record", DEMO, "-o", golden, "--force").code == 0
    assert run(capsys, "golden", "check", DEMO, golden).code == 0
    ran = run(capsys, "golden", "check", QUANTIZED, golden)
    assert (ran.code, ran.err) == (1, "")
    assert "Different:" in ran.out


@pytest.mark.parametrize("command", ["convert IN", "inspect IN --shapes", "compare IN IN", "compare DEMO IN"])
def test_a_file_that_is_no_model_is_exit_3(command: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "model.tflite"
    words = [{"IN": str(path), "DEMO": str(DEMO)}.get(word, word) for word in command.split()]
    assert "does not exist" in run(capsys, *words).failed_in_one_sentence(3)
    for content, expected in ((b"", "is empty"), (CONTENT[: len(CONTENT) // 2], "")):
        path.write_bytes(content)
        said = run(capsys, *words).failed_in_one_sentence(3)
        assert expected in said
        assert said.count("model.tflite") == 1
        assert [*tmp_path.iterdir()] == [path]
