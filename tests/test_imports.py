"""Imports run one way between rooms, as the table says."""

import ast
import re
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"schema": "edge_opt.schema", "cli": "edge_opt.cli", "converter": "edge_opt"}

# Each room may import itself and the rooms before it. `top` is the module `edge_opt` itself.
ROOMS = [
    "base", "schema", "ir", "shapes", "runtime", "attention", "soundness", "targets", "comparison", "verification",
    "passes", "conversion", "inspection", "npu", "integrations", "building", "testing", "top", "cli", "main",
]  # fmt: skip
ALLOWED = {room: set(ROOMS[: place + 1]) for place, room in enumerate(ROOMS)}
# package -> where it may be imported from
THIRD_PARTY = {
    "ai_edge_litert": ("converter/runtime/",),
    "litert_torch": ("converter/building/pipeline.py", "converter/building/prompts.py"),
    "torch": tuple(
        f"converter/building/{name}.py"
        for name in (
            "checkpoint",
            "evaluation",
            "logits",
            "network",
            "exportable",
            "pipeline",
            "rotation",
            "rounding",
        )
    ),
    "peft": ("converter/building/merging.py",),
    "litert_lm": ("converter/building/litert_lm.py",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "flatbuffers": ("schema/",),
    "numpy": ("converter/", "schema/"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[parts[0]], *(part for part in parts[1:] if part != "__init__")])


MODULES = {
    module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}
ROOM_OF = {name: name.split(".")[1].replace("__main__", "main") for name in MODULES if "." in name}


def room(name: str) -> str:
    """The room of a module; names that `edge_opt` itself offers are at the top."""
    return ROOM_OF.get(".".join(name.split(".")[:2]), "top")


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Every module that a file imports, wherever in it, also by `import_module` with a name written out."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for inside in (f"{node.module}.{alias.name}" for alias in node.names):
                is_ours = inside in MODULES or node.module == "edge_opt"
                found.append((node.lineno, inside if is_ours else str(node.module)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(node.lineno, ast.unparse(name).strip("'")) for name in node.args[:1]]
    return found


def astray(is_allowed: Callable[[str, str], bool]) -> list[str]:
    """Imports that are not allowed, of all modules."""
    every = ((name, *found) for name, path in MODULES.items() for found in imported(path))
    return [
        f"{name}:{line} imports {other}"
        for name, line, other in every
        if not is_allowed(name, other)
    ]


def test_imports_run_one_way() -> None:
    assert (
        astray(lambda name, to: not to.startswith("edge_opt") or room(to) in ALLOWED[room(name)])
        == []
    )


def test_the_page_lists_the_rooms_in_their_order_and_each_says_what_happens_in_it() -> None:
    page = (ROOT / "docs" / "write-a-pass.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", page.partition("<!-- rooms -->\n")[2].partition("\n\n")[0])
    assert listed == [room for room in ROOMS if room not in {"top", "testing", "main"}]
    rooms = {path.parent for path in MODULES.values()}
    assert [folder for folder in rooms if not (folder / "__init__.py").exists()] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    wanted = {name: {one for _, one in imported(path)} for name, path in MODULES.items()}
    graph = {name: found & MODULES.keys() - {name} for name, found in wanted.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_heavy_packages_are_imported_only_where_they_belong() -> None:
    def is_allowed(name: str, to: str) -> bool:
        return (
            MODULES[name]
            .relative_to(ROOT)
            .as_posix()
            .startswith(THIRD_PARTY.get(to.split(".", 1)[0], ""))
        )

    assert astray(is_allowed) == []


def test_an_upward_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "def f():\n    from edge_opt import convert\n    import_module('edge_opt.cli.app')\n"
    )
    assert {room(name) for _, name in imported(file)} == {"top", "cli"}
