"""`edge-opt demo` shows the main job on bundled models, and leaves nothing where nobody asked for it."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli_runs import DEMO, QUANTIZED, run, state

from edge_opt.inspection import inspect

Captured = pytest.CaptureFixture[str]
SCRIPT = Path(__file__).resolve().parent.parent / "testdata" / "make_demo.py"
FILES = {f"demo_gemma3{kind}{opt}.tflite" for kind in ("", "_a16w8") for opt in ("", ".opt")}


def test_the_demo_converts_and_compares_both_models_and_shows_a_block(
    tmp_path: Path, capsys: Captured
) -> None:
    ran = run(capsys, "demo", tmp_path / "new" / "folder")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("5 of 5 sites converted, each verified bit for bit") == 2
    assert ran.out.count("Equal: all 13 outputs of 2 signatures are bit-identical.") == 2
    before, after = ran.out.split("== an attention block of prefill_8, before")[1].split("== after")
    assert "SPLIT(" in after
    assert "SPLIT(" not in before
    assert set(state(tmp_path / "new" / "folder")) == FILES
    assert (tmp_path / "new" / "folder" / "demo_gemma3.tflite").read_bytes() == DEMO.read_bytes()


def test_the_demo_overwrites_only_with_force(tmp_path: Path, capsys: Captured) -> None:
    for existing in sorted(FILES):
        (tmp_path / existing).write_text("precious")
        before = state(tmp_path)
        assert existing in run(capsys, "demo", tmp_path).failed_in_one_sentence(2)
        assert state(tmp_path) == before
        (tmp_path / existing).unlink()
    (tmp_path / existing).write_text("old")
    assert run(capsys, "demo", tmp_path, "--force").code == 0
    assert set(state(tmp_path)) == FILES


def test_without_a_folder_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
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


def test_a_folder_that_cannot_be_made_is_exit_5(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be created" in run(capsys, "demo", tmp_path / "file" / "folder").failed_in_one_sentence(5)


@pytest.mark.slow
def test_the_script_makes_the_bundled_models(tmp_path: Path) -> None:
    """From a real export. Other versions of the exporter may name things differently: the content is compared."""
    pytest.importorskip("litert_torch", reason="needs the extra `torch`")
    pytest.importorskip("ai_edge_quantizer", reason="needs the extra `quantizer`")
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True, capture_output=True)
    for bundled in (DEMO, QUANTIZED):
        made, known = inspect(tmp_path / bundled.name), inspect(bundled)
        assert bundled.stat().st_size < 1_000_000
        assert made.weights == known.weights
        assert made.signatures == known.signatures
        assert [(b.signature, b.mask, b.key_lengths) for b in made.attention] == [
            (b.signature, b.mask, b.key_lengths) for b in known.attention
        ]
