"""Fixtures that many tests share."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cli_runs import NO_ATTENTION, written
from kept_workers import kept_workers
from pretend_npu import SDK_VARIABLES, Compilers, pretend
from pretend_stages import Place

from edge_opt.runtime import runner
from edge_opt.runtime.runner import ChildProcess, Worker
from edge_opt.verification.examine import Verifier


def pytest_configure() -> None:
    """An interrupt interrupts, here and in what tests start: processes that share the tests out ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_sdk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quick test shows does not depend on whose libraries the machine has."""
    if "slow" not in request.keywords:
        for name in SDK_VARIABLES:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """What a build needs, with pretended stages."""
    return Place(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file without attention."""
    return written(tmp_path, NO_ATTENTION)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return partial(pretend, tmp_path, monkeypatch)


_CLOSE = Worker.close


@pytest.fixture(scope="session", autouse=True)
def _kept_workers() -> Iterator[None]:
    if (
        "CHILDREN_COVERED" in os.environ
    ):  # benchmarks/mutants.py asks which test a process belongs to
        yield
        return
    with kept_workers():
        yield


@pytest.fixture
def own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the processes themselves: each starts its own, and closing ends it."""
    monkeypatch.setattr(runner, "ChildProcess", ChildProcess)
    monkeypatch.setattr(Worker, "close", _CLOSE)


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """The real one; its process is started once for all tests."""
    with Verifier() as made:
        yield made


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """One process that runs models, for all tests that do not look at the process itself."""
    with Worker(time_limit=60) as made:
        yield made
