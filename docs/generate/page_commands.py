"""The page of the command line: every command, argument and option, read off the program itself."""

import html
from collections.abc import Iterator
from typing import Any

import typer

from edge_opt.cli.app import app

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
    rows = [f"| [`{name}`](#{_anchor(name)}) | {_text(command.help)} |" for name, command in commands()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def sections() -> str:
    """One section for each command, then what stands behind all of them."""
    return "\n\n".join([*(_section(name, command) for name, command in commands()), _general()])


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["Usage:", name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", _text(command.help), f"```text\n{usage}\n```"]
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        title = getattr(parameter, "rich_help_panel", None) or parameter.param_type_name
        groups.setdefault(title, []).append(_row(parameter, context))
    parts += ["\n".join([f"| {title} | |", "|---|---|", *rows]) for title, rows in groups.items()]
    return "\n\n".join(parts)


def _general() -> str:
    shown = [item for item in root().params if not getattr(item, "hidden", False)]
    rows = [_row(item, root().make_context(PROGRAM, [], resilient_parsing=True)) for item in shown]
    return "\n\n".join(
        ["## Options of the program", "\n".join(["| option | |", "|---|---|", *rows]), _text(root().epilog)]
    )


def _row(parameter: Any, context: Any) -> str:
    """An argument or option and its help, as the program itself words them."""
    names, text = parameter.get_help_record(context)
    return f"| `{_escaped(names)}` | {_text(text)} |"


def _text(words: str | None) -> str:
    return html.escape(" ".join((words or "").split()), quote=False).replace("|", "\\|")


def _escaped(code: str) -> str:
    return code.replace("|", "\\|")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")
