"""The pages: commands and Python run as written; the site is complete and loads nothing from the network."""

import ast
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from cli_runs import DEMO, Captured, Patch, commands, run
from doc_pages import PAGES, ROOT, Block, Command, blocks, own_text, supplies, supply

from edge_opt.ir import load, save

DOCS = ROOT / "docs"
TASKS = (
    *("index", "concepts", "build", "android", "speed", "quality", "other", "ci", "verification"),
    *("phone", "troubleshooting", "write-a-pass", "why-not"),
)
QUICK = ("README.md", "write-a-pass.md")
# What a browser fetches by itself when it opens a page.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)[^>]*\s(?:src|data)=["']?(?:https?:)?//"""
    r"""|<link[^>]*\shref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import\s+["']?(?:https?:)?//"""
)
AVOIDED = re.compile(
    r"\b(told|ruined?|ruins|undone|anew|likes of|(?<!here )(?:is|are) no(?! longer)|riddles?|derived? again)\b"
)


def of_pages(found: list[Path]) -> list[object]:
    """Each page as a case; all but what people see first cost too much for the quick run."""
    return [
        pytest.param(
            page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow][page.name in QUICK :]
        )
        for page in found
    ]


def parse_only(command: Command) -> None:
    """Understood by the program's own parser; nothing is run."""
    for name, found in commands().items():
        if command.arguments[: len(name.split())] == name.split():
            with suppress(typer.Exit):  # help
                found.make_context(name, command.arguments[len(name.split()) :])
            return
    assert command.arguments in (["--version"], ["--help"]), command.where


def test_every_command_and_option_on_a_page_exists(capsys: Captured) -> None:
    known = "".join(run(capsys, *name.split(), "--help").out for name in ["", *commands()])
    for page in PAGES:
        for command in (command for block in blocks(page) for command in block.commands):
            if command.program == "edge-opt" and "--install-completion" not in command.words:
                parse_only(command)
            for script in (word for word in command.words if word.endswith((".py", ".ci/run"))):
                assert (ROOT / script).exists(), command.where
        for name, option in re.findall(r"`edge-opt ([a-z]+)?[^`]*?(--[a-z-]+)?`", own_text(page)):
            assert not name or name in {one.split()[0] for one in commands()}, (
                f"{page.name}: edge-opt {name}"
            )
            assert not option or re.search(rf"{option}\b", known), f"{page.name}: {option}"


def test_every_source_file_and_name_on_a_page_exists() -> None:
    for page in PAGES:
        named = [] if page.name == "CHANGELOG.md" else re.findall(r"`([^`\n]+)`", own_text(page))
        for name in named:
            if re.fullmatch(r"[\w./-]+\.(py|toml|csv)", name):
                places = (ROOT, ROOT / "converter", page.parent)
                assert any((place / name).exists() for place in places), f"{page.name}: {name}"
            elif re.fullmatch(r"edge_opt(\.\w+)+", name):
                pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    "page",
    of_pages([page for page in PAGES if any(c.runnable for b in blocks(page) for c in b.commands)]),
)
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    for place, block in enumerate(blocks(page)):
        commands = [command for command in block.commands if command.runnable]
        folder = tmp_path / str(place)
        folder.mkdir()
        supply(folder, page, commands)
        monkeypatch.chdir(folder)
        for command in commands:
            done = run(capsys, *command.arguments)
            assert done.code == 0, f"{command.where}\n{done.err}"


def python_of(page: Path) -> list[list[Block]]:
    """A page's Python as one; blocks that need a package, each on its own."""
    found = [
        block
        for block in blocks(page)
        if "import edge_opt" in block.text or block.language == "python"
    ]
    together = [block for block in found if not block.needs and "def test_" not in block.text]
    return [[block] for block in found if block.needs] + ([together] if together else [])


@pytest.mark.parametrize("page", of_pages([page for page in PAGES if python_of(page)]))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    shutil.copytree(supplies(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "gemma.opt.tflite").unlink()
    monkeypatch.chdir(tmp_path)
    for found in python_of(page):
        if found[0].needs and importlib.util.find_spec(found[0].needs.partition(" ")[0]) is None:
            continue
        if "gemma-checkpoint" in found[0].text:
            monkeypatch.syspath_prepend(str(ROOT / "testdata"))
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
            checkpoints = importlib.import_module("checkpoints")
            sizes = checkpoints.Sizes(kv_heads=1, prefill=16, cache=64)
            checkpoints.save_checkpoint("gemma3", sizes, tmp_path / "gemma-checkpoint")
        names: dict[str, object] = {"__name__": "page"}
        for block in found:
            exec(compile(block.text, page.name, "exec"), names)


def test_the_two_commands_of_the_readme_do_all_the_set_up_and_ci_runs_the_second() -> None:
    first, second = (
        [" ".join(c.words) for c in block.commands] for block in blocks(ROOT / "README.md")[:2]
    )
    assert first == ["python3 -m venv .venv", ".venv/bin/pip install .", ".venv/bin/edge-opt demo"]
    tests = "pytest -m not slow --numprocesses auto --dist loadfile"
    assert second == [".venv/bin/pip install .[test]", f".venv/bin/{tests}"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install --quiet '.[test]'" in ci
    assert "pytest -m 'not slow' --numprocesses auto --dist loadfile" in ci
    assert "bash .ci/run" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_pages_docstrings_and_messages_keep_to_their_words() -> None:
    words = {page: len(own_text(DOCS / f"{page}.md").split()) for page in TASKS}
    too_many = sum(words.values()) - 14_000
    assert too_many <= 0, f"shorten docs/{{{','.join(TASKS)}}}.md by {too_many} words together"
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
    for page in (*(DOCS / f"{name}.md" for name in TASKS), ROOT / "README.md"):
        assert AVOIDED.findall(own_text(page)) == [], page.name
    for path in (
        path for folder in ("cli", "converter", "schema") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert AVOIDED.findall(node.value) == [], f"{path.name}:{node.lineno}"


def literals(path: Path) -> Iterator[str]:
    """The strings of a source file, values in f-strings as "…"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "…" for one in node.values]
            yield "".join(map(str, parts))


def test_each_message_that_troubleshooting_explains_is_one_of_ours() -> None:
    """Three words of each part of it: most messages are made of several strings."""
    folders = ("cli", "converter", "schema")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    ours = "\n".join(text for path in sources for text in literals(path))
    headings = re.findall(
        r"^### (.*)", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    messages = [message for heading in headings for message in re.findall(r"`(.+?)`", heading)]
    parts = [
        part for message in messages for part in re.findall(r"[\w.'-]{2,}(?: [\w.'-]+)*", message)
    ]
    assert len(parts) > 80
    for part in parts:
        words = part.split()
        known = [" ".join(words[at : at + 3]) in ours for at in range(max(1, len(words) - 2))]
        assert any(known), part


@pytest.mark.parametrize("broken", [False, True], ids=["the model", "another model"])
def test_the_pytest_example_tells_the_model_from_another(tmp_path: Path, broken: bool) -> None:
    (example,) = (block.text for block in blocks(DOCS / "ci.md") if "def test_" in block.text)
    (tmp_path / "test_model.py").write_text(example)
    for name in ("gemma.tflite", "gemma.golden.npz"):
        shutil.copy(supplies() / name, tmp_path / name)
    if broken:
        model = load(DEMO)
        graph = dict(model.entry_points())["decode"]
        (merge, *_) = (operator for operator in graph.operators if operator.name == "ADD")
        graph.set_input(merge, 0, merge.input(1))
        save(model, tmp_path / "gemma.tflite", overwrite=True)
    apart = [
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
    ]  # no other settings
    command = [sys.executable, "-m", "pytest", "-q", *apart, "."]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert ("1 failed, 2 passed" if broken else "3 passed") in ran.stdout, ran.stdout


@pytest.mark.slow
def test_what_the_pages_say_of_the_code_is_what_the_code_says() -> None:
    pytest.importorskip("griffe", reason="pip install '.[docs]'")
    import write

    assert sorted(page.name for page in write.stale(write=False)) == [], write.STALE


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (extra docs)")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
def test_no_page_names_anything_of_the_network_to_load(site: Path) -> None:
    for path in (path for path in site.rglob("*") if path.suffix in (".html", ".css")):
        found = FETCHED.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(site)}: {found}"
