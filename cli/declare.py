"""How a command is declared: a class whose fields are its arguments and options, with help and default, once."""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast, dataclass_transform

import typer

from edge_opt.cli import completion, streams

Action = Callable[[], int]


class Command:
    """What was asked for on the command line; `run` names the function that does it, loaded when it is to be done."""

    run: ClassVar[str]

    def action(self) -> Action:
        """What to do, once everything that was asked for can be done together.

        Raises:
            typer.BadParameter: it cannot.
        """
        module, name = self.run.split(":")
        return partial(getattr(import_module(f"edge_opt.cli.{module}"), name), self)

    def options(self, *but: str) -> dict[str, Any]:
        """Every field except these, by name: what the library's function takes under the same names."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(cast("Any", self))
            if field.name not in but
        }


Declared = TypeVar("Declared", bound=Command)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def command(group: typer.Typer, name: str | None = None) -> Callable[[type[Declared]], type[Declared]]:
    """Make a class a command of `group`: its docstring is the help, its fields are the parameters."""

    def declare(declared: type[Declared]) -> type[Declared]:
        made = dataclass(frozen=True, kw_only=True)(declared)

        def parse(**values: Any) -> Action:
            return made(**values).action()

        parameters = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=field.type,
            )
            for field in fields(cast("Any", made))
        ]
        parse.__doc__ = made.__doc__
        parse.__name__ = made.__name__.lower()
        parse.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        cast("Any", parse).__signature__ = Signature(parameters)
        group.command(name)(parse)
        return made

    return declare


def one_of(allowed: Iterable[str], text: str) -> Any:
    """An option that takes one of these words."""
    known = tuple(allowed)

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            from edge_opt.schema.errors import did_you_mean  # noqa: PLC0415  help needs nothing of the library

            raise typer.BadParameter(f"'{value}' does not exist, {did_you_mean(value, known)}")
        return value

    return typer.Option(
        metavar="|".join(known), callback=check, autocompletion=completion.one_of(known), help=text
    )


def listed(values: list[str] | None) -> list[str] | None:
    """`--passes a,b --passes c` -> [a, b, c]; None where the option was not given."""
    names = [name.strip() for value in values or () for name in value.split(",") if name.strip()]
    if values and not names:
        raise typer.BadParameter("it names nothing, leave the option out or give a name")
    return names or None


def given(text: str, metavar: str = "FILE") -> Any:
    """An argument that is a file, or `-` for standard input."""
    return typer.Argument(metavar=metavar, callback=streams.given, help=text)


def _some(values: list[str] | None) -> list[str] | None:
    return values or None


ModelArgument = Annotated[Path, given("A .tflite model; - for standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
CompilerTarget = Annotated[
    str,
    typer.Option(
        metavar="T",
        autocompletion=completion.targets,
        help="qualcomm-htp or ethos-u85, or a target file of yours.",
    ),
]
Sdk = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Qualcomm's libraries. Default: EDGE_OPT_QNN or QNN_SDK_ROOT."),
]
Chip = Annotated[
    str | None,
    typer.Option(
        "--soc", "--chip", metavar="C", help="The chip, as the compiler calls it: SM8750, ethos-u85-256, ..."
    ),
]
Flags = Annotated[
    list[str] | None,
    typer.Option(
        "--flag",
        metavar="F",
        callback=_some,
        help="For the compiler, once for each; default: those of the target.",
    ),
]
