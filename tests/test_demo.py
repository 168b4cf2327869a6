"""`edge-opt demo` shows the main job on bundled models, and leaves nothing where nobody asked for it; an example."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cli_runs import DEMO, QUANTIZED, Captured, Patch, run, state

from edge_opt.cli import show_models
from edge_opt.inspection import inspect

ROOT = Path(__file__).resolve().parent.parent
FILES = {f"demo_gemma3{kind}{opt}.tflite" for kind in ("", "_a16w8") for opt in ("", ".opt")}


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
    assert ran.out.count("5 of 5 sites converted, each verified bit for bit") == 2
    assert ran.out.count("Equal: all 13 outputs of 2 signatures are bit-identical.") == 2
    before, after = ran.out.split("== an attention block of prefill_8, before")[1].split("== after")
    assert "SPLIT(" in after
    assert "SPLIT(" not in before
    assert set(state(folder)) == FILES
    assert (folder / "demo_gemma3.tflite").read_bytes() == DEMO.read_bytes()


def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
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


def test_a_folder_that_cannot_be_made_is_exit_5(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr(show_models, "_demo_in", lambda *_, **__: 0)
    assert run(capsys, "demo", tmp_path / "new" / "folder").code == 0
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    assert "cannot be created" in run(capsys, "demo", tmp_path / "file" / "folder").failed_in_one_sentence(5)


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
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and quantizer)")
    script, quiet = ROOT / "examples" / "quantize_both_orders.py", {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    options = ["--recipe", "a16w8", "--samples", "3", "--judged", "3", "--json"]
    command = [sys.executable, script, DEMO, tmp_path, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["splitting_last_is_bitwise"] is True
    first, last = found["split_then_quantized"], found["quantized_then_split"]
    assert first["softmax_scales"] == 5 * 4, "every head of every block has a scale of its own"
    assert last["softmax_scales"] == 5, "all heads of a block have one"
    for order in (first, last):
        assert order["logits"]["decode/logits"]["snr_db"] > 5
