"""The pytest example of docs/testing.md is run as it stands there: it passes, and it fails when the model is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import DEMO, run

from edge_opt.ir import load, save

PAGE = Path(__file__).parents[1] / "docs" / "testing.md"


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "test_model.py").write_text(example)
    (tmp_path / "gemma.tflite").write_bytes(DEMO.read_bytes())
    recorded = tmp_path / "gemma.npz"
    assert run(capsys, "golden", "record", tmp_path / "gemma.tflite", "-o", recorded).code == 0
    assert recorded.stat().st_size < 1_000_000
    return tmp_path


def run_example(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_the_example_passes(project: Path) -> None:
    ran = run_example(project)
    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout


def test_the_example_fails_where_the_model_is_another_one(project: Path) -> None:
    model = load(DEMO)
    graph = dict(model.entry_points())["decode"]
    (merge, *_) = (operator for operator in graph.operators if operator.name == "ADD")
    graph.set_input(merge, 0, merge.input(1))
    save(model, project / "gemma.tflite", overwrite=True)
    ran = run_example(project)
    assert ran.returncode == 1
    assert "FAILED test_model.py::test_shipped_model_computes_what_was_recorded" in ran.stdout
    assert "1 failed, 2 passed" in ran.stdout
