"""How a command is declared: a class whose fields are its arguments and options, with help and default, once."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, TypeVar, cast, dataclass_transform

import typer

from edge_opt.cli import streams

Action = Callable[[], int]
Completion = Callable[[str], list[str]]
_OPTION = re.compile(r"(?<![\w'-])(\w+)=('[^']*'|[\w./…]+)")
_written: dict[str, str] = {}
REQUIRED = MISSING
"""In place of a default: the option must be given."""


def as_written(text: str) -> str:
    """A message of the library in the words of the command line: `overwrite=True` is `--force`."""

    def replaced(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        if name not in _written:
            return found[0]
        if value == "False":
            return option_name(name).replace("--", "--no-")
        return option_name(name) if value in {"True", "..."} else f"{option_name(name)} {value}"

    return _OPTION.sub(replaced, text)


def option_name(name: str) -> str:
    """How a field of a command is written on the command line."""
    return _written[name].split("/")[0]


def starting(names: Iterable[str]) -> Completion:
    """Completes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def target_names(incomplete: str) -> list[str]:
    """Completes a bundled target's name; a target file by its path is left to the shell."""
    from edge_opt.targets import target_names as bundled  # noqa: PLC0415  loaded when a shell asks

    return starting(bundled())(incomplete)


def pass_names(incomplete: str) -> list[str]:
    """Completes the last name of a list `a,b` of passes, without those that it has."""
    from edge_opt.passes import PASSES  # noqa: PLC0415

    given, comma, last = incomplete.rpartition(",")
    left = [name for name in PASSES if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in starting(left)(last)]


def argument(text: str, metavar: str, *, default: Any = REQUIRED, **how: Any) -> Any:
    """An argument by its place; one without a default must be given. `how` is typer's."""
    return field(default=default, metadata={"told": typer.Argument(metavar=metavar, help=text, **how)})


def option(text: str, metavar: str | None = None, *names: str, default: Any = None, **how: Any) -> Any:
    """An option by these names, else by the field's; `how` is typer's."""
    return field(
        default=default,
        metadata={"told": typer.Option(*names, metavar=metavar, help=text, **how), "names": names},
    )


def flag(text: str, *names: str) -> Any:
    """An option without a value."""
    return option(text, None, *names, default=False)


def one_of(known: Sequence[str], text: str) -> Any:
    """An option that takes one of these words, by default the first."""

    def check(value: str) -> str:
        if value not in known:
            from edge_opt.output.errors import did_you_mean  # noqa: PLC0415  help needs nothing of the library

            raise typer.BadParameter(f"'{value}' does not exist, {did_you_mean(value, known)}")
        return value

    return option(text, "|".join(known), default=known[0], callback=check, autocompletion=starting(known))


def file_argument(text: str, metavar: str = "FILE") -> Any:
    """An argument that is a file, or `-` for standard input."""
    return argument(text, metavar, callback=streams.given)


def names_option(text: str, metavar: str, **how: Any) -> Any:
    """`--passes a,b --passes c` -> [a, b, c]; None where the option was not given."""

    def listed(values: list[str] | None) -> list[str] | None:
        found = [name.strip() for value in values or () for name in value.split(",") if name.strip()]
        if values and not found:
            raise typer.BadParameter("it names nothing, leave the option out or give a name")
        return found or None

    return option(text, metavar, callback=listed, **how)


def several(text: str, metavar: str, *names: str, **how: Any) -> Any:
    """An option that may be given again and again; None where it was not."""
    return option(text, metavar, *names, callback=lambda values: values or None, **how)


def shape_option(text: str) -> Any:
    """An option `NAME=1,128,640` that may be given again and again."""

    def check(values: list[str] | None) -> list[str] | None:
        sizes(values)
        return values or None

    return option(text, "NAME=1,128,640", "--shape", callback=check)


def sizes(values: Iterable[str] | None) -> dict[str, tuple[int, ...]]:
    """`[NAME=1,128,640]` -> the sizes by name; a name may have a = in it."""
    found = {}
    for name, _, listed in (value.rpartition("=") for value in values or ()):
        if not name or not all(size.strip().isdecimal() for size in listed.split(",")):
            raise typer.BadParameter(
                f"'{name}={listed}' is no NAME=1,128,640: a name and its sizes are expected"
            )
        if name in found:
            raise typer.BadParameter(f"'{name}' is given twice")
        found[name] = tuple(int(size) for size in listed.split(","))
    return found


class Command:
    """What was asked for on the command line; `run` names the function that does it, as `module:function`."""

    run: ClassVar[str]

    def check(self) -> None:
        """Whether everything that was asked for can be done together.

        Raises:
            typer.BadParameter: it cannot.
        """

    def options(self, *but: str) -> dict[str, Any]:
        """Every field except these, by name: what the library's function takes under the same names."""
        known = [entry.name for entry in fields(cast("Any", self))]
        return {name: getattr(self, name) for name in known if name not in but}


Declared = TypeVar("Declared", bound=Command)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(argument, option, flag))
def command(group: typer.Typer, run: str) -> Callable[[type[Declared]], type[Declared]]:
    """Make a class a command of `group`: its docstring is the help, its fields are the parameters."""

    def declare(declared: type[Declared]) -> type[Declared]:
        made = dataclass(frozen=True, kw_only=True)(declared)
        made.run = run

        def parse(**values: Any) -> Action:
            asked = made(**values)
            asked.check()
            module, function = run.split(":")
            return partial(getattr(import_module(f"edge_opt.cli.{module}"), function), asked)

        for entry in fields(cast("Any", made)):
            if "names" in entry.metadata:  # an option
                own = f"--{entry.name.replace('_', '-')}"
                _written[entry.name] = next((n for n in entry.metadata["names"] if n.startswith("--")), own)
        parameters = [
            Parameter(
                entry.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if entry.default is MISSING else entry.default,
                annotation=Annotated[entry.type, entry.metadata["told"]],
            )
            for entry in fields(cast("Any", made))
        ]
        parse.__doc__ = made.__doc__
        parse.__name__ = made.__name__.lower()
        parse.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        cast("Any", parse).__signature__ = Signature(parameters)
        group.command()(parse)
        return made

    return declare
