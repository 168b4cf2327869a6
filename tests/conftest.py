"""Fixtures that many tests share."""

import signal
from collections.abc import Iterator

import pytest

from edge_opt.npu.sdk import SDK_VARIABLES
from edge_opt.proof.regions import RegionProver


def pytest_configure() -> None:
    """An interrupt interrupts, here and in what tests start: processes that share the tests out ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_sdk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quick test shows does not depend on whose libraries the machine has."""
    if "slow" not in request.keywords:
        for name in SDK_VARIABLES:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def prover() -> Iterator[RegionProver]:
    """The real one; its process is started once for all tests."""
    with RegionProver() as made:
        yield made
