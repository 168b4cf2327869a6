"""What the pages tell readers to run, works as written there; names and messages that they mention exist."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from cli_runs import DEMO, run
from doc_pages import (
    PAGES,
    PROGRAMS,
    ROOT,
    Block,
    Command,
    blocks,
    inline_commands,
    own_text,
    supplies,
    supply,
)

import edge_opt
from edge_opt.cli.app import app
from edge_opt.ir import load, save

Captured = pytest.CaptureFixture[str]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
TESTING = ROOT / "docs" / "testing.md"


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def runnable(command: Command) -> bool:
    """A command of ours that every machine can run; completion and the demo have tests of their own."""
    apart = {"--install-completion", "demo"} & set(command.words)
    return command.program == "edge-opt" and not command.needs and not apart


def with_commands() -> list[object]:
    """Pages with commands of ours; all but the first page that people see cost too much for the quick run."""
    quick = (ROOT / "README.md",)
    pages = [page for page in PAGES if any(runnable(c) for block in blocks(page) for c in block.commands)]
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=() if page in quick else pytest.mark.slow)
        for page in pages
    ]


def python_blocks() -> list[object]:
    """Each page's Python, as one; blocks that need a package, each on its own."""
    together: dict[Path, list[Block]] = {}
    apart = []
    for page in PAGES:
        for block in blocks(page):
            if block.needs:
                apart.append(pytest.param([block], id=f"{page.name}:{block.line}", marks=pytest.mark.slow))
            elif block.text.startswith("import edge_opt") or block.language == "python":
                together.setdefault(page, []).append(block)
    shown = {page: [b for b in found if "def test_" not in b.text] for page, found in together.items()}
    quick = ("README.md", "adding-a-pass.md", "notebook.md")
    return [
        pytest.param(found, id=page.name, marks=() if page.name in quick else pytest.mark.slow)
        for page, found in shown.items()
        if found
    ] + apart


def parse_only(command: Command) -> None:
    """Understood by the program's own parser; nothing is run."""
    import typer

    group, arguments = typer.main.get_command(app), command.arguments
    with suppress(typer.Exit):  # help
        while hasattr(group, "commands") and arguments:
            group.make_context("edge-opt", [*arguments])
            name = next(word for word in arguments if word in group.commands)
            group, arguments = group.commands[name], arguments[arguments.index(name) + 1 :]
        group.make_context("edge-opt", [*arguments])


@pytest.mark.parametrize("page", named(PAGES))
def test_every_command_is_one_that_exists(page: Path, capsys: Captured) -> None:
    for command in (command for block in blocks(page) for command in block.commands):
        assert command.program in PROGRAMS, f"{command.where}: what is {command.program}?"
        if command.program == "edge-opt" and "--install-completion" not in command.words:
            parse_only(command)
        for extra in (
            re.findall(r"(?:\.|edge-opt)\[([\w,-]+)\]", " ".join(command.words))
            if command.program == "pip"
            else ()
        ):
            assert set(extra.split(",")) <= set(EXTRAS), command.where
        for script in (word for word in command.words if word.endswith((".py", ".ci/run"))):
            assert (ROOT / script).exists(), command.where


@pytest.mark.parametrize("page", named(PAGES))
def test_commands_in_sentences_name_commands_and_options_that_exist(page: Path, capsys: Captured) -> None:
    for command in inline_commands(page):
        words = command.arguments
        path = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)] if words[0][0] != "-" else []
        group = path if path[:1] == ["golden"] else path[:1]
        known = run(capsys, *group, "--help")
        assert known.code == 0, command.where
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(^|\s|,){re.escape(option.partition('=')[0])}\b", known.out), command.where


@pytest.mark.parametrize("page", with_commands())
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for block in blocks(page):
        commands = [command for command in block.commands if runnable(command)]
        folder = tmp_path / str(block.line)
        folder.mkdir()
        supply(folder, page, commands)
        monkeypatch.chdir(folder)
        for command in commands:
            done = run(capsys, *command.arguments)
            assert done.code == 0, f"{command.where}\n{done.err}"


@pytest.mark.parametrize("found", python_blocks())
def test_the_python_of_a_page_runs(
    found: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = found[0].needs
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    shutil.copytree(supplies(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "gemma.opt.tflite").unlink()
    if "gemma-checkpoint" in found[0].text:
        _checkpoint(tmp_path / "gemma-checkpoint", monkeypatch)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in found:
        exec(compile(block.text, f"{block.page.name}:{block.line}", "exec"), names)


@pytest.mark.slow
def test_a_type_checker_takes_the_python_of_pages_and_notebooks(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra dev)")
    if Path(edge_opt.__file__).is_relative_to(ROOT):
        pytest.skip("a type checker does not find an editable installation")
    code = {page.name: [b.text for b in blocks(page) if b.language == "python"] for page in PAGES}
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code[notebook.name] = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    files = [tmp_path / f"{re.sub('[^a-z]', '_', name)}.py" for name, texts in code.items() if texts]
    for file, texts in zip(files, filter(None, code.values()), strict=True):
        file.write_text("\n".join(texts), encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *files],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(files) > 5
    assert checked.returncode == 0, checked.stdout


def _checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "testdata"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import checkpoints

    checkpoints.save_checkpoint("gemma3", checkpoints.Sizes(kv_heads=1, prefill=16, cache=64), folder)


def test_the_two_commands_of_the_readme_do_all_the_set_up() -> None:
    first, second = (
        [command.where.partition(": ")[2] for command in block.commands]
        for block in blocks(ROOT / "README.md")[:2]
    )
    assert first == ["python3 -m venv .venv", ".venv/bin/pip install .", ".venv/bin/edge-opt demo"]
    quick = ".venv/bin/pytest -m 'not slow' --numprocesses auto --dist loadfile"
    assert second == [".venv/bin/pip install '.[test]'", quick]


def test_ci_runs_the_readme_s_command_and_contributing_names_all_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install --quiet '.[test]'" in ci
    assert "pytest -m 'not slow' --numprocesses auto --dist loadfile" in ci
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "\n    bash .ci/run\n" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_option_that_is_mentioned_exists(capsys: Captured) -> None:
    commands = [("golden", "record"), ("golden", "check"), *((name,) for name in sorted(_names()))]
    known = "".join(run(capsys, *command, "--help").out for command in [(), *commands])
    for page in PAGES:
        mentioned = re.findall(r"`(--[a-z][a-z_-]+)", own_text(page))
        for option in (option for option in mentioned if "_" not in option):  # those are a compiler's
            assert re.search(rf"{option}\b", known), f"{page.name}: {option}"


def _names() -> set[str]:
    import typer

    return set(typer.main.get_command(app).commands) - {"golden"}  # type: ignore[attr-defined]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The pytest example of docs/testing.md, with a model and what was recorded of it."""
    (example,) = (block.text for block in blocks(TESTING) if "def test_" in block.text)
    (tmp_path / "test_model.py").write_text(example)
    for name in ("gemma.tflite", "gemma.npz"):
        shutil.copy(supplies() / name, tmp_path / name)
    assert (tmp_path / "gemma.npz").stat().st_size < 1_000_000
    return tmp_path


def run_example(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "."]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_pytest_example_passes(project: Path) -> None:
    ran = run_example(project)
    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout


def test_the_pytest_example_fails_where_the_model_is_another_one(project: Path) -> None:
    model = load(DEMO)
    graph = dict(model.entry_points())["decode"]
    (merge, *_) = (operator for operator in graph.operators if operator.name == "ADD")
    graph.set_input(merge, 0, merge.input(1))
    save(model, project / "gemma.tflite", overwrite=True)
    ran = run_example(project)
    assert ran.returncode == 1
    assert "FAILED test_model.py::test_shipped_model_computes_what_was_recorded" in ran.stdout
    assert "1 failed, 2 passed" in ran.stdout
