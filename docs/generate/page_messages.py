"""Every message of an error that a user can cause, read off the source; what a run fills in is written as "…"."""

import ast
import html
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from edge_opt import EdgeOptError
from edge_opt.cli.options import in_options

FILLED = "…"
REFUSAL = "Refusal"
_REFUSALS = (REFUSAL, "RefusedError")
_REFUSING = ("attention", "passes", "targets")
"""Rooms whose refusals become the reason of a site; those of other rooms are never told."""


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` is the error's class, or "Refusal" for why a site stays as it is."""

    kind: str
    text: str
    module: str


@cache
def error_classes() -> dict[str, type[EdgeOptError]]:
    """Every kind of error, the base first, each behind its parent."""
    for root in _roots():
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not module.name.startswith(("edge_opt.testdata.", "edge_opt.__main__")):
                importlib.import_module(module.name)
    return {kind.__name__: kind for kind in _family(EdgeOptError)}


def _family(kind: type[EdgeOptError]) -> Iterator[type[EdgeOptError]]:
    yield kind
    for child in sorted(kind.__subclasses__(), key=lambda child: child.__name__):
        yield from _family(child)


@cache
def messages() -> list[Message]:
    """Every message in the package, by the class of error that carries it."""
    kinds = {*error_classes(), *_REFUSALS}
    found: dict[Message, None] = {}
    for path in _sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        helpers = _helpers(tree, kinds)
        for call in _calls(tree):
            name = _name(call.func)
            kind = name if name in kinds else helpers.get(name)
            texts = [text for argument in call.args if (text := template(argument)) and " " in text]
            if name in _REFUSALS:
                texts = _conditions(call, tree)
            if kind in _REFUSALS:
                kind = REFUSAL if path.parent.name in _REFUSING else None
            if kind and texts:
                found[Message(kind, texts[0], path.stem)] = None
    return list(found)


@cache
def texts() -> set[str]:
    """Every text in the package."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in _sources())
    found = (template(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return {text for text in found if text}


def template(node: ast.expr) -> str | None:
    """A text as it stands in the source, `FILLED` for each part that a run fills in; None for what is no text."""
    if isinstance(node, ast.Constant):
        return in_options(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else FILLED for part in node.values]
        return in_options(re.sub(f"{FILLED}+", FILLED, "".join(parts)))
    return None


def listed() -> str:
    """All messages, one section for each kind of error."""
    by_kind: dict[str, list[Message]] = defaultdict(list)
    for message in messages():
        by_kind[message.kind].append(message)
    classes = error_classes()
    sections = []
    for name, kind in classes.items():
        if by_kind[name]:
            title = f"<code>{name}</code>, exit code {kind.exit_code} ({len(by_kind[name])} messages)"
            sections.append(_collapsed(title, _about(kind), by_kind[name]))
    return "\n\n".join(sections)


def table() -> str:
    """The kinds of errors, with what each means."""
    rows = [f"| `{name}` | {kind.exit_code} | {_about(kind)} |" for name, kind in error_classes().items()]
    return "\n".join(["| error | exit code | |", "|---|---|---|", *rows])


def refusals() -> str:
    """Why a site stays as it is: what `explain` and reports say."""
    said = [message for message in messages() if message.kind == REFUSAL]
    return "\n".join(["| reason | said by |", "|---|---|", *(_row(message) for message in said)])


def _about(kind: type[EdgeOptError]) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _collapsed(title: str, about: str, said: list[Message]) -> str:
    rows = "\n".join(["| message | said by |", "|---|---|", *(_row(message) for message in said)])
    return f"<details markdown><summary>{title}</summary>\n\n{about}\n\n{rows}\n\n</details>"


def _row(message: Message) -> str:
    return f"| {html.escape(message.text, quote=False).replace('|', '&#124;')} | `{message.module}` |"


def _roots() -> list[ModuleType]:
    """The three folders of the repository, which an editable install leaves where they are."""
    return [importlib.import_module(name) for name in ("edge_opt", "edge_opt.schema", "edge_opt.cli")]


def _sources() -> list[Path]:
    """The package's files in the order of their module names, which is one for an editable and for a plain install."""
    named: dict[str, Path] = {}
    for root in _roots():
        for folder in map(Path, root.__path__):
            for path in folder.rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                named[".".join([root.__name__, *parts])] = path
    return [named[name] for name in sorted(named) if not name.startswith("edge_opt.testdata.")]


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _helpers(tree: ast.AST, kinds: set[str]) -> dict[str, str]:
    """Functions of a module that make or raise one kind of error: their name, and which."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_") in ("fail", "refuse", "unknown"):
            made = {_name(call.func) for call in _calls(node)} & kinds
            if len(made) == 1:
                found[node.name] = made.pop()
    return found


def _conditions(refusal: ast.Call, tree: ast.AST) -> list[str]:
    """The texts of a refusal's first argument; of a variable the text that it was given last."""
    found = list(refusal.args[0].values if isinstance(refusal.args[0], ast.BoolOp) else refusal.args[:1])
    for index, value in enumerate(found):
        if isinstance(value, ast.Name):
            given = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                and [ast.unparse(target) for target in node.targets] == [value.id]
                and node.lineno < value.lineno
            ]
            found[index] = max(given, key=lambda node: node.lineno).value if given else value
    return [text for value in found if (text := template(value)) and re.search("[a-z]", text)]


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
