"""What the README says, works as written there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cli_runs import DEMO, run

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The indented lines under a heading, as one text."""
    body = README.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return "\n".join(line[4:] for line in body.splitlines() if line.startswith("    ") or not line)


def test_the_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(DEMO, tmp_path / "gemma.tflite")
    monkeypatch.chdir(tmp_path)
    exec(compile(section("As a library"), "README.md", "exec"), {})
    assert (tmp_path / "gemma.opt.tflite").exists()


def test_the_commands_for_ci_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    shutil.copy(DEMO, tmp_path / "gemma.tflite")
    monkeypatch.chdir(tmp_path)
    record = re.search(r"`edge-opt (golden\s+record[^`]+)`", README)
    assert record is not None
    assert run(capsys, *record[1].split()).code == 0
    commands = [line for line in section("In CI").splitlines() if line.startswith("edge-opt ")]
    assert len(commands) == 2
    for command in commands:
        assert run(capsys, *command.split(">")[0].split()[1:]).code == 0


def test_the_commands_for_an_npu_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    shutil.copy(DEMO, tmp_path / "gemma.tflite")
    monkeypatch.chdir(tmp_path)
    commands = [line for line in section("For an NPU").splitlines() if line.startswith("edge-opt ")]
    assert len(commands) == 2
    for command in commands:
        assert run(capsys, *command.split()[1:]).code == 0


def test_the_two_commands_are_what_ci_runs() -> None:
    first, second = (
        line for line in section("Two commands").splitlines() if line.startswith(("python3", "bash"))
    )
    assert first == "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/edge-opt demo"
    assert second == "bash .ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_contributing_names_the_same_command() -> None:
    assert "\n    bash .ci/run\n" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_option_that_is_mentioned_exists(capsys: Captured) -> None:
    commands = ("convert", "compare", "inspect", "explain", "shapes", "demo", "golden", "profile", "targets")
    known = "".join(run(capsys, command, "--help").out for command in commands)
    for option in set(re.findall(r"--[a-z]+(?:-[a-z]+)*", README)):
        assert f"{option} " in known or f"{option}\n" in known, option
