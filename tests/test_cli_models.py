"""The commands for models on real exports: what is written, what is printed, what the options do, what is refused.

`edge-opt demo` shows the main job on bundled models, and leaves nothing where nobody asked for it; an example.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Captured, Patch, run, state, written
from syrupy.assertion import SnapshotAssertion

from edge_opt.base.atomic import scratch_folder
from edge_opt.cli import show_models
from edge_opt.inspection import inspect
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.schema.data import Data

ROOT = Path(__file__).resolve().parent.parent
FILES = {f"demo_gemma3{kind}{opt}.tflite" for kind in ("", "_a16w8") for opt in ("", ".opt")}
CONTENT = DEMO.read_bytes()
REFUSES_SPLIT = (
    'name = "picky"\nsummary = "no SPLIT, no UNPACK"\nrefused_operators = ["SPLIT", "UNPACK"]\n'
)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return shutil.copy(DEMO, tmp_path / "gemma.tflite")


@pytest.fixture
def picky(tmp_path: Path) -> Path:
    path = tmp_path / "picky.toml"
    path.write_text(REFUSES_SPLIT)
    return path


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


def test_require_all_exits_1_and_writes_only_the_report(
    demo: Path, picky: Path, capsys: Captured
) -> None:
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


@pytest.mark.parametrize("command", [["convert", "--dry-run"], ["compare", str(DEMO)]])
def test_without_a_place_for_temporary_files_a_command_says_what_to_do(
    command: list[str], demo: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    def none_is_usable(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", none_is_usable)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", none_is_usable)
    ran = run(capsys, *command, demo)
    ran.failed_in_one_sentence(5)
    assert "temporary files cannot be written: No usable temporary directory found; make" in ran.err


def test_another_full_disk_is_not_that_of_temporary_files() -> None:
    with pytest.raises(OSError, match="elsewhere"), scratch_folder():
        raise OSError(errno.ENOSPC, "full", "/elsewhere/progress.txt")


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (FULL, 5, "temporary files cannot be written: No space left on device; make room, or name"),
        (MemoryError(), 3, "memory ran out: close other programs"),
    ],
)
@pytest.mark.parametrize("command", [["convert", "--dry-run"], ["compare", str(DEMO)]])
def test_what_the_machine_lacks_ends_a_command_and_is_no_bug_of_a_site(
    command: list[str],
    error: Exception,
    code: int,
    told: str,
    demo: Path,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Data, "write", fails)
    monkeypatch.setattr(np, "save", fails)
    ran = run(capsys, *command, demo)
    ran.failed_in_one_sentence(code)
    assert told in ran.err


def test_a_bug_at_a_site_is_exit_70(demo: Path, monkeypatch: Patch, capsys: Captured) -> None:
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


@pytest.mark.parametrize(
    "options", [[], ["--target", "qualcomm-htp", "--shapes"]], ids=["plain", "target"]
)
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
    tmp_path: Path, capsys: Captured, snapshot: SnapshotAssertion
) -> None:
    other = NO_ATTENTION.replace("float32(0.5)", "float32(0.51)")
    pair = written(tmp_path, NO_ATTENTION, "a.tflite"), written(tmp_path, other, "b.tflite")
    ran = run(capsys, "compare", *pair)
    assert (ran.code, ran.err, ran.out) == (1, "", snapshot)
    ran = run(capsys, "compare", *pair, "--atol", "0.1", "--seed", 3, "--json")
    assert (ran.code, ran.json["equal"], ran.json["bitwise"], ran.json["seed"]) == (
        0,
        True,
        False,
        3,
    )
    assert run(capsys, "compare", *pair, "--rtol", "0.1").code == 0
    ran = run(capsys, "compare", DEMO, pair[0])
    assert ran.code == 1, "other signatures are a difference"
    assert "prefill_8" in ran.out


def test_golden_records_beside_the_model_and_replaces_only_with_force(
    demo: Path, capsys: Captured
) -> None:
    golden, model = demo.with_name("gemma.golden.npz"), demo
    golden.write_text("precious")
    before = state(demo.parent)
    run(capsys, "golden", "check", model, golden).failed_in_one_sentence(3)
    for given, said in (((), "--force"), (("-o", model, "--force"), "is the input itself")):
        assert said in run(capsys, "golden", "record", model, *given).failed_in_one_sentence(2)
    assert state(demo.parent) == before
    assert f"golden check MODEL {golden}" in run(capsys, "golden", "record", model, "--force").out
    assert run(capsys, "golden", "check", model, golden).code == 0
    ran = run(capsys, "golden", "check", QUANTIZED, golden)
    assert (ran.code, ran.err) == (1, "")
    assert "Different:" in ran.out


@pytest.mark.parametrize("command", ["convert", "golden record"])
def test_a_name_with_a_slash_is_a_folder_that_has_to_exist(
    command: str, demo: Path, capsys: Captured
) -> None:
    given = (*command.split(), demo, "-o", f"{demo.parent}/new/")
    assert "does not exist: create it" in run(capsys, *given).failed_in_one_sentence(2)
    assert not (demo.parent / "new").exists()


@pytest.mark.parametrize(
    "command", ["convert IN", "inspect IN --shapes", "compare IN IN", "compare DEMO IN"]
)
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


def test_the_demo_converts_and_compares_both_models(tmp_path: Path, capsys: Captured) -> None:
    """It replaces files only with --force."""
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    for existing in sorted(FILES):
        (folder / existing).write_text("precious")
        before = state(folder)
        assert existing in run(capsys, "demo", folder).failed_in_one_sentence(2)
        assert state(folder) == before
        (folder / existing).unlink()
    (folder / existing).write_text("old")
    ran = run(capsys, "demo", folder, "--force")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("5 of 5 attention blocks split, bit-identical") == 2
    assert ran.out.count("Equal: all 13 outputs of 2 signatures are bit-identical.") == 2
    before, after = ran.out.split("== an attention block of prefill_8, before")[1].split("== after")
    assert "SPLIT(" in after
    assert "SPLIT(" not in before
    assert set(state(folder)) == FILES
    assert (folder / "demo_gemma3.tflite").read_bytes() == DEMO.read_bytes()


def test_without_a_folder_nothing_is_left(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    scratch, here = tmp_path / "scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(here)
    ran = run(capsys, "demo")
    assert ran.code == 0
    assert "`edge-opt demo DIR` keeps the models" in ran.out
    assert list(here.iterdir()) == []
    assert not [path for path in scratch.iterdir() if path.name.startswith("edge-opt-demo")]


def test_a_folder_that_cannot_be_made_is_exit_5(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr(show_models, "_demo_in", lambda *_, **__: 0)
    assert run(capsys, "demo", tmp_path / "new" / "folder").code == 0
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    assert "cannot be created" in run(
        capsys, "demo", tmp_path / "file" / "folder"
    ).failed_in_one_sentence(5)


@pytest.mark.slow
def test_the_script_makes_the_bundled_models(tmp_path: Path) -> None:
    """From a real export. Other versions of the exporter may name things differently: the content is compared."""
    pytest.importorskip("litert_torch", reason="needs the extra `torch`")
    pytest.importorskip("ai_edge_quantizer", reason="needs the extra `quantizer`")
    command = [sys.executable, ROOT / "testdata" / "make_demo.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    for bundled in (DEMO, QUANTIZED):
        made, known = inspect(tmp_path / bundled.name), inspect(bundled)
        assert bundled.stat().st_size < 1_000_000
        assert made.weights == known.weights
        assert made.signatures == known.signatures
        assert [(b.signature, b.mask, b.key_lengths) for b in made.attention] == [
            (b.signature, b.mask, b.key_lengths) for b in known.attention
        ]


@pytest.mark.slow
def test_a_model_can_be_quantized_before_and_after_it_is_split(tmp_path: Path) -> None:
    for package in ("litert_torch", "ai_edge_quantizer"):
        pytest.importorskip(
            package, reason=f"{package} is not installed (extras torch and quantizer)"
        )
    script, quiet = (
        ROOT / "examples" / "quantize_both_orders.py",
        {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    options = ["--recipe", "a16w8", "--samples", "3", "--judged", "3", "--json"]
    command = [sys.executable, script, DEMO, tmp_path, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=quiet
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["splitting_last_is_bitwise"] is True
    first, last = found["split_then_quantized"], found["quantized_then_split"]
    assert first["softmax_scales"] == 5 * 4, "every head of every block has a scale of its own"
    assert last["softmax_scales"] == 5, "all heads of a block have one"
    for order in (first, last):
        assert order["logits"]["decode/logits"]["snr_db"] > 5
