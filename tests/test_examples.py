"""The examples do what the documentation says of them, on a real export."""

import json
import os
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
