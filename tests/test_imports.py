"""Imports run one way between rooms, as the table says."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"schema": "edge_opt.schema", "cli": "edge_opt.cli", "converter": "edge_opt"}

# Each room may import itself and the rooms before it. `top` is the module `edge_opt` itself.
ROOMS = [
    "base", "schema", "ir", "shapes", "attention", "soundness", "targets", "passes", "runtime", "proof", "comparison",
    "conversion", "inspection", "npu", "integrations", "build", "testing", "top", "cli", "main",
]  # fmt: skip
ALLOWED = {room: set(ROOMS[: place + 1]) for place, room in enumerate(ROOMS)}
# package -> where it may be imported from
THIRD_PARTY = {
    "ai_edge_litert": ("converter/runtime/",),
    "litert_torch": ("converter/build/pipeline.py", "converter/build/prompts.py"),
    "torch": tuple(f"converter/build/{name}.py" for name in ("evaluation", "logits", "pipeline", "rotation")),
    "litert_lm": ("converter/build/evaluation.py",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "flatbuffers": ("schema/",),
    "numpy": ("converter/", "schema/"),
}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[parts[0]], *(part for part in parts[1:] if part != "__init__")])


MODULES = {module_name(path): path for path in sources()}


def layer_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] != "converter":
        return parts[0]
    if len(parts) == 2 and parts[1] != "__init__.py":
        return {"__main__.py": "main"}.get(parts[1], Path(parts[1]).stem)
    return parts[1] if len(parts) > 2 else "top"


def layer_of_module(name: str) -> str:
    parts = name.split(".")
    if len(parts) < 2:
        return "top"
    if parts[1] in ALLOWED:
        return parts[1]
    return "top"


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Every module that a file imports, wherever in it, also by `import_module` with a name written out."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield node.lineno, inside if inside in MODULES or node.module == "edge_opt" else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def test_every_layer_is_in_the_table() -> None:
    assert {layer_of_file(path) for path in sources()} <= set(ALLOWED)


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_run_one_way(layer: str) -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources()
        if layer_of_file(path) == layer
        for line, name in imported(path)
        if name.split(".")[0] == "edge_opt" and layer_of_module(name) not in ALLOWED[layer]
    ]
    assert upward == []


def test_the_page_lists_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "write-a-pass.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", page.partition("<!-- rooms -->\n")[2].partition("\n\n")[0])
    assert listed == [room for room in ROOMS if room not in {"top", "testing", "main"}]


def test_no_modules_import_each_other_in_a_circle() -> None:
    wanted = {name: {one for _, one in imported(path)} for name, path in MODULES.items()}
    graph = {name: found & MODULES.keys() - {name} for name, found in wanted.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_heavy_packages_are_imported_only_where_they_belong(package: str) -> None:
    astray = [
        f"{place}:{line} imports {name}"
        for path in sources()
        for place in [path.relative_to(ROOT).as_posix()]
        for line, name in imported(path)
        if name.split(".")[0] == package and not place.startswith(THIRD_PARTY[package])
    ]
    assert astray == []


def test_an_upward_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from edge_opt import convert\n    import_module('edge_opt.cli.app')\n")
    layers = {layer_of_module(name) for _, name in imported(file)}
    assert layers == {"top", "cli"}
    assert not layers & ALLOWED["passes"]


def test_every_room_says_what_happens_in_it() -> None:
    rooms = {path.parent for path in sources()}
    assert [room for room in rooms if not (room / "__init__.py").exists()] == []
