"""The wheel holds what runs and nothing else, installs without a compiler, and the source distribution is complete."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks

IGNORED = (".git", ".venv*", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
FOLDERS = {"converter": "edge_opt", "schema": "edge_opt/schema", "cli": "edge_opt/cli"}
pytestmark = pytest.mark.slow


def succeeded(command: list[str], folder: Path) -> str:
    """What the command prints, where there is no compiler and no other environment."""
    apart = ("PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
    env = {**kept, "CC": "/bin/false", "CXX": "/bin/false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    how: Any = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    ran = subprocess.run(command, check=False, timeout=900, **how)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging") / "source"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*IGNORED))
    shutil.rmtree(
        folder / "build", ignore_errors=True
    )  # of an earlier one; `converter/building` is ours
    return folder


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Path, Path]:
    """The wheel, built from the source distribution, and that."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("build is not installed (extra dev)")
    out = source.parent / "dist"
    succeeded([sys.executable, "-m", "build", "--outdir", str(out), str(source)], source.parent)
    (wheel,), (distribution,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, distribution


def test_the_wheel_holds_every_module_and_the_bundled_models_alone(
    built: tuple[Path, Path],
) -> None:
    assert built[0].name.endswith("-py3-none-any.whl"), "for every platform"
    names = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".typed", ".c")
    }
    assert modules <= names
    assert "edge_opt/py.typed" in names
    bundled = {name for name in names if name.startswith("edge_opt/testdata/")}
    models = {f"edge_opt/testdata/{path.name}" for path in (ROOT / "testdata").glob("*.tflite")}
    assert bundled == {"edge_opt/testdata/__init__.py", *models}
    assert all(name.startswith("edge_opt/") for name in names)


@pytest.mark.parametrize("url", [None, "https://example.org/edge-opt"])
def test_the_readme_of_a_package_index_has_no_broken_links(
    built: tuple[Path, Path], source: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    if url is None:
        wheel = zipfile.ZipFile(built[0])
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(name).decode()
    else:
        monkeypatch.setenv("EDGE_OPT_REPO_URL", url)
        text = succeeded([sys.executable, "setup.py", "--long-description"], source)
    assert "makes language models faster" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(target.startswith("https://") for target in targets), targets
    paths = [
        target.removeprefix(f"{url}/").split("/", 2) for target in targets if url and url in target
    ]
    assert len(paths) > 5 if url else not paths
    for kind, _, path in paths:
        assert kind == ("raw" if path.endswith(".svg") else "blob")
        assert (source / path.partition("#")[0]).is_file(), path


def test_the_source_distribution_holds_what_ci_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = (
        ".ci/run mkdocs.yml docs/generate/hooks.py tests/conftest.py testdata/make_demo.py LICENSE"
    )
    assert set(wanted.split()) <= names
    assert not any(name.endswith((".pyc", ".so")) for name in names)


def least(package: str) -> str:
    """The oldest version of a requirement that we say we run with, as pip takes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = (text for text in project["dependencies"] if text.startswith(f"{package}>="))
    return str(required).replace(">=", "==")


@pytest.mark.parametrize("age", ["newest", "oldest"])
def test_the_wheel_installs_without_a_compiler_and_runs_the_demo_on_either_end_of_the_runtimes(
    built: tuple[Path, Path], tmp_path: Path, age: str
) -> None:
    runtime = [least("ai-edge-litert")] if age == "oldest" else []
    succeeded([sys.executable, "-m", "venv", "venv"], tmp_path)
    install = [
        "venv/bin/pip",
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
        str(built[0]),
        *runtime,
    ]
    succeeded(install, tmp_path)
    shown = succeeded(["venv/bin/edge-opt", "demo"], tmp_path)
    assert shown.count("5 of 5 attention blocks split, bit-identical") == 2
    assert shown.count("are bit-identical") == 2
    assert succeeded(["venv/bin/python", "-m", "edge_opt", "--version"], tmp_path).startswith(
        "edge-opt "
    )


def test_the_first_command_of_the_readme_works_on_a_fresh_clone(source: Path) -> None:
    (command,) = blocks(ROOT / "README.md")[0].text.splitlines()
    assert "== after: single heads, joined" in succeeded(["bash", "-c", command], source)
