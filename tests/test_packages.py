"""Packages are found by the modules that they provide: a nightly build has another name."""

import logging

import pytest
from cli_runs import DEMO, Patch

from edge_opt.base import packages
from edge_opt.conversion import convert
from edge_opt.inspection.report import conversion_report
from edge_opt.npu.compiler import CompilerMissingError, find_tool
from edge_opt.npu.profiling import versions


@pytest.fixture
def nightly(monkeypatch: Patch) -> None:
    """The runtime is a nightly build."""
    providers = {packages.RUNTIME: ["ai-edge-litert-nightly"]}
    monkeypatch.setattr(packages, "_providers", lambda: providers)
    monkeypatch.setattr(packages.metadata, "version", lambda name: f"2.4 of {name}")


@pytest.mark.usefixtures("nightly")
def test_a_nightly_runtime_is_named_in_reports_profiles_and_messages() -> None:
    expected = "2.4 of ai-edge-litert-nightly"
    report = conversion_report(convert(DEMO, dry_run=True, verify="none"))
    assert report.origin["ai-edge-litert"] == expected
    assert versions([]) == {"ai-edge-litert": expected}
    with pytest.raises(
        CompilerMissingError, match=f"ai-edge-litert {expected} in .*ai_edge_litert"
    ):
        find_tool("Nobody")


def test_a_release_over_a_nightly_is_one_warning_when_the_runtime_starts(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    class Found:
        def __init__(self, name: str) -> None:
            self.name, self.version = name, "2.3"

        @classmethod
        def discover(cls, name: str) -> "list[Found]":
            return [cls(name)]

    assert packages.overwritten() == ""
    monkeypatch.setattr(packages.metadata, "Distribution", Found)
    packages.warn_if_overwritten.cache_clear()
    for _ in range(2):
        convert(DEMO, dry_run=True, passes=["mha_to_sha"])
    packages.warn_if_overwritten.cache_clear()
    (record,) = (record for record in caplog.records if record.name == "edge_opt")
    assert record.levelno == logging.WARNING
    both = "ai-edge-litert 2.3 and ai-edge-litert-nightly 2.3 are both installed and share their files: run `pip "
    assert both in record.getMessage()
