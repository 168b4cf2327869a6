"""`import edge_opt` is cheap, and every public name is there, the same for people and for type checkers."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edge_opt

HEAVY = ("numpy", "flatbuffers", "ai_edge_litert", "rich", "typer", "torch", "tensorflow")


def apart(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = apart("import edge_opt, sys; print(*sys.modules)").split()
    ours = [name for name in loaded if name.startswith("edge_opt.")]
    assert ours == []
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)


def test_every_public_name_is_found_by_name_and_by_from_import() -> None:
    names = edge_opt.__all__
    by_name = "; ".join(f"edge_opt.{name}" for name in names)
    by_import = "; ".join(f"from edge_opt import {name}; assert {name} is edge_opt.{name}" for name in names)
    assert apart(f"import edge_opt; {by_name}; {by_import}") == apart(
        f"import edge_opt; {by_import}; {by_name}"
    )


def test_no_submodule_hides_a_public_function() -> None:
    assert set(edge_opt.__all__) <= set(dir(edge_opt)), "also names that are not loaded yet"
    functions = [name for name in edge_opt.__all__ if callable(getattr(edge_opt, name))]
    hidden = [name for name in functions if importlib.util.find_spec(f"edge_opt.{name}") is not None]
    assert functions
    assert hidden == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'edge_opt' has no attribute 'converte'"):
        _ = edge_opt.converte  # type: ignore[attr-defined]


def test_help_shows_every_option_of_convert_with_its_type_and_default_and_explains_it() -> None:
    shown = inspect.signature(edge_opt.convert).parameters
    options = {name: entry for name, entry in shown.items() if entry.kind is entry.KEYWORD_ONLY}
    assert len(options) == 11
    assert all(entry.annotation is not entry.empty for entry in options.values())
    arguments = str(edge_opt.convert.__doc__).partition("Args:")[2].partition("Raises:")[0]
    assert set(re.findall(r"^ {8}(\w+): ", arguments, re.MULTILINE)) == set(shown)


TYPED = """
import edge_opt
from edge_opt import ConversionResult

result: ConversionResult = edge_opt.convert("a.tflite", require_all=True)
differs: bool = edge_opt.compare("a.tflite", "b.tflite").bitwise
version: str = edge_opt.__version__
shape = edge_opt.shapes.broadcast((1, 2), (3, 1))
edge_opt.convert("a.tflite", overwrite="yes")
edge_opt.converte("a.tflite")
"""


@pytest.mark.slow
def test_type_checkers_see_the_real_types(tmp_path: Path) -> None:
    """Needs no model, but mypy takes its time."""
    if "site-packages" not in Path(str(edge_opt.__file__)).parts:
        pytest.skip("an editable install is invisible to mypy; .ci/run installs a wheel")
    (tmp_path / "user.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout
    assert errors[0].startswith("user.py:9:")
    assert "[arg-type]" in errors[0]
    assert errors[1].startswith("user.py:10:")
    assert "[attr-defined]" in errors[1]
