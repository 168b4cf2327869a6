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
    usage = " ".join([name, *(_usage(parameter) for parameter in command.params)])
    parts = [f"## {name}", _text(command.help), f"```text\n{usage}\n```"]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    if arguments:
        rows = [f"| `{_metavar(item)}` | {_text(getattr(item, 'help', ''))} |" for item in arguments]
        parts.append("\n".join(["| argument | |", "|---|---|", *rows]))
    if options:
        rows = [f"| {_names(item)} | {_text(item.help)}{_default(item)} |" for item in options]
        parts.append("\n".join(["| option | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _general() -> str:
    rows = [
        f"| {_names(item)} | {_text(item.help)} |"
        for item in root().params
        if item.param_type_name == "option" and not getattr(item, "hidden", False)
    ]
    return "\n\n".join(
        ["## Options of the program", "\n".join(["| option | |", "|---|---|", *rows]), _text(root().epilog)]
    )


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = _metavar(parameter)
    else:
        value = "" if parameter.is_flag else f" {_metavar(parameter)}"
        shown = f"{parameter.opts[0]}{value}"
    return shown if parameter.required else f"[{shown}]"


def _metavar(parameter: Any) -> str:
    named: str = parameter.metavar or parameter.name.upper()
    return named


def _names(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = "" if option.is_flag or getattr(option, "count", False) else f" `{_metavar(option)}`"
    return (names + value).replace("|", "\\|")


def _default(option: Any) -> str:
    known = option.default
    shown = known not in (None, False, ()) and not callable(known) and isinstance(known, str | int | float)
    return f" Default: `{known}`." if shown else ""


def _text(words: str | None) -> str:
    return html.escape(" ".join((words or "").split()), quote=False).replace("|", "\\|")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")
