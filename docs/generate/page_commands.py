"""The page of the command line: every command, argument and option, read off the program itself."""

import html
from collections.abc import Iterator
from typing import Any

import typer

from edge_opt.cli.app import app, help_groups

PROGRAM = "edge-opt"


def root() -> Any:
    """The program as its library sees it: a command with commands."""
    return typer.main.get_command(app)


def commands(group: Any = None, path: str = PROGRAM) -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, `edge-opt golden check`, in the order of the help."""
    for name, command in (group or root()).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def table() -> str:
    """One line for each command."""
    rows = [
        f"| [`{name}`](#{_anchor(name)}) | {_text(command.help)} |" for name, command in commands()
    ]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def sections() -> str:
    """One section for each command, then what stands behind all of them."""
    return "\n\n".join([*(_section(name, command) for name, command in commands()), _general()])


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["Usage:", name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", _text(command.help), f"```text\n{usage}\n```"]
    parts += [_rows(title, rows) for title, rows in help_groups(command, context).items()]
    return "\n\n".join(parts)


def _general() -> str:
    (rows,) = help_groups(root(), root().make_context(PROGRAM, [], resilient_parsing=True)).values()
    return "\n\n".join(["## Options of the program", _rows("Options", rows), _text(root().epilog)])


def _rows(title: str, rows: list[tuple[str, str]]) -> str:
    """Arguments or options and their help, as the program itself words them."""
    lines = [f"| `{_escaped(name)}` | {_text(text)} |" for name, text in rows]
    return "\n".join([f"| {title} | |", "|---|---|", *lines])


def _text(words: str | None) -> str:
    return html.escape(" ".join((words or "").split()), quote=False).replace("|", "\\|")


def _escaped(code: str) -> str:
    return code.replace("|", "\\|")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")
