"""Packages are found by the modules that they provide: a nightly build has another name."""

import logging
import re

import pytest
from cli_runs import DEMO, Captured, Patch, run
from doc_pages import ROOT

from edge_opt.base import packages
from edge_opt.building import stages
from edge_opt.building.doctor import diagnose
from edge_opt.conversion import convert
from edge_opt.inspection.report import conversion_report
from edge_opt.npu import compiler
from edge_opt.npu.compiler import CompilerMissingError, find_tool
from edge_opt.npu.profiling import versions
from edge_opt.runtime.protocol import RuntimeUnavailable
from edge_opt.runtime.runner import Worker


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


def test_the_lock_file_has_hashes_the_versions_of_the_extra_and_no_address() -> None:
    text = (ROOT / "requirements-build.txt").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+) \\$", text, re.MULTILINE))
    assert locked["litert-torch"].startswith(f"{stages.TRIED[0]}.")
    assert {"ai-edge-litert", "litert-lm", "peft", "tensorflow"} <= locked.keys()
    assert text.count("--hash=sha256:") >= len(locked) > 50
    assert "://" not in text
    assert "index" not in text.replace("--no-emit-index-url", "")


def test_doctor_says_what_works_and_one_command_for_the_rest(
    monkeypatch: Patch, capsys: Captured
) -> None:
    """As in an environment of `pip install .`, without a vendor's libraries."""
    for name in ("EDGE_OPT_QNN", "QNN_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    runtime = {packages.RUNTIME: packages._providers()[packages.RUNTIME]}
    monkeypatch.setattr(packages, "_providers", lambda: runtime)
    found = run(capsys, "doctor", "--json").json
    works = [one["name"] for one in found["abilities"] if not one["problem"]]
    assert works == ["convert, compare"]
    libraries = "pip download --no-deps onnxruntime-qnn==2.7.0 && python -m zipfile"
    assert found["remedy"].startswith(f"pip install '.[build,lm]' && {libraries}")
    assert found["versions"]["torch"] is None
    shown = run(capsys, "doctor").out
    for line in (
        r"torch +not installed",
        r"convert, compare +works",
        r"evaluate +torch is not installed",
        r"emulator +the Hexagon compiler needs Qualcomm's QNN libraries",
        r"To mend the rest, in a checkout of edge-opt: pip install '\.\[build,lm\]' && pip download",
    ):
        assert re.search(f"^{line}", shown, re.MULTILINE), line


def test_doctor_warns_of_an_untried_version_and_finds_a_runtime_that_does_not_load(
    monkeypatch: Patch,
) -> None:
    def fail(_: Worker) -> None:
        raise RuntimeUnavailable("the LiteRT runtime could not be loaded: reinstall it")

    providers = {"litert_torch": ["some"], "peft": ["some"]}
    monkeypatch.setattr(packages, "_providers", lambda: providers)
    monkeypatch.setattr(packages.metadata, "version", lambda _: "0.99")
    monkeypatch.setattr(Worker, "start", fail)
    found = diagnose()
    assert found.abilities[0].problem == "the LiteRT runtime could not be loaded: reinstall it"
    assert found.abilities[0].summary == "the LiteRT runtime could not be loaded"
    assert found.remedy.startswith("pip install --force-reinstall ai-edge-litert && ")
    assert [one.name for one in found.abilities if not one.problem][:1] == [
        "build from a LoRA folder"
    ]
    (warning,) = found.warnings
    assert warning.startswith("litert-torch is 0.99, and edge-opt was tried with 0.10 and 0.11: ")
