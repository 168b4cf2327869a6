"""What tests of real builds share: the script that makes checkpoints, options, and the packages that they need."""

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "testdata" / "make_checkpoint.py"
OPTIONS: dict[str, Any] = {
    "soc": "SM8750",
    "prefill": [128],
    "cache": 1024,
    "settings": {"max_calibration_decode_steps": 4},
}


def require_packages() -> None:
    """Skip a test if a package of the build is missing."""
    for module in ("litert_torch", "tensorflow", "litert_lm"):
        pytest.importorskip(module, reason=f"{module} is not installed (extras build and lm)")
