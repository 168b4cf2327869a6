"""The examples do what the documentation says of them, on a real export."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import DEMO

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_a_model_can_be_quantized_before_and_after_it_is_split(tmp_path: Path) -> None:
    for package in ("litert_torch", "ai_edge_quantizer"):
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and quantizer)")
    command = [sys.executable, EXAMPLES / "quantize_both_orders.py", DEMO, tmp_path, "--recipe", "a16w8"]
    done = subprocess.run(
        [*map(str, command), "--samples", "3", "--judged", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["splitting_last_is_bitwise"] is True
    first, last = found["split_then_quantized"], found["quantized_then_split"]
    assert first["softmax_scales"] == 5 * 4, "every head of every block has a scale of its own"
    assert last["softmax_scales"] == 5, "all heads of a block have one"
    for order in (first, last):
        assert order["logits"]["decode/logits"]["snr_db"] > 5


def test_the_notebook_runs_and_its_page_shows_cells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads((EXAMPLES / "look_and_write_a_pass.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    page = (EXAMPLES.parent / "docs" / "notebook.md").read_text(encoding="utf-8")
    shown = [block.rstrip() for block in re.findall("```python\n(.*?)```", page, re.DOTALL)]
    assert len(shown) > 4
    assert [cell for cell in code if cell in shown] == shown
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in code:
        exec(cell, names)
    assert (tmp_path / "gemma.split.tflite").exists()
