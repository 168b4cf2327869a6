"""Qualcomm's libraries, for the tests that need them; the others never see them."""

import os

import pytest

from edge_opt.npu.sdk import SDK_VARIABLES


def require_qnn() -> None:
    """Skip what runs where they are not installed."""
    if not any(os.environ.get(name) for name in SDK_VARIABLES):
        pytest.skip(f"Qualcomm's libraries are not installed: set {' or '.join(SDK_VARIABLES)}")
