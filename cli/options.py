"""Arguments and options shared by several commands, and parsers for their values."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edge_opt.base.errors import UsageError

if TYPE_CHECKING:
    from edge_opt.npu import Compiler

Verify = Literal["regions", "full", "none"]
Place = Literal["cpu", "reference", "npu"]


def argument(text: str, metavar: str, **how: Any) -> Any:
    """An argument with its help; `how` goes to typer."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, **how)


def option(text: str, metavar: str | None = None, *names: str, **how: Any) -> Any:
    """An option with its help, named after its parameter unless `names` are given; `how` goes to typer."""
    return typer.Option(*names, metavar=metavar, help=text, **how)


def expert(text: str, metavar: str | None, *names: str, **how: Any) -> Any:
    """An option that few users need; help has these in a group of their own."""
    return option(text, metavar, *names, rich_help_panel="Expert options", **how)


def pass_names() -> list[str]:
    """All passes, for the shell."""
    from edge_opt.passes import PASSES

    return [*PASSES]


def chip_names() -> list[str]:
    """All chips, for the shell."""
    from edge_opt.targets.chips import NAMES

    return NAMES


def target_names() -> list[str]:
    """All targets, for the shell."""
    from edge_opt.targets import target_names

    return target_names()


def targets_and_chips() -> list[str]:
    """All targets and chips, for the shell."""
    return [*target_names(), *chip_names()]


def split_names(values: list[str] | None) -> list[str] | None:
    """`--skip a,b --skip c` -> [a, b, c]; None if the option was not given."""
    names: list[str] = []
    for value in values or ():
        names += filter(None, map(str.strip, value.split(",")))
    if values and not names:
        raise typer.BadParameter("no name is given: give one, or leave the option out")
    return names or None


def read_shapes(values: Iterable[str] | None) -> dict[str, tuple[int, ...]]:
    """`[NAME=1,128,640]` -> the sizes by name; a name may contain `=`."""
    shapes = {}
    for value in values or ():
        name, _, text = value.rpartition("=")
        sizes = text.split(",")
        if not name or not all(size.strip().isdecimal() for size in sizes):
            raise UsageError(f"--shape '{value}' must be a name and its sizes, NAME=1,128,640")
        if name in shapes:
            raise UsageError(f"--shape '{name}' is given twice")
        shapes[name] = tuple(map(int, sizes))
    return shapes


def read_settings(values: Iterable[str] | None) -> dict[str, Any]:
    """`[KEY=VALUE]` -> the values by key, each parsed as JSON or kept as text."""
    settings: dict[str, Any] = {}
    for given in values or ():
        key, equals, value = given.partition("=")
        if not key.strip() or not equals:
            raise UsageError(f"--set '{given}' must be KEY=VALUE")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value
    return settings


def compiler_of(
    sdk: Path | None, chip: str | None, flags: Sequence[str] | None = None
) -> "Compiler":
    """The NPU's compiler with these settings."""
    from edge_opt.npu import Compiler
    from edge_opt.targets.chips import DEFAULT_CHIP

    return Compiler(chip or DEFAULT_CHIP, tuple(flags or ()), sdk)


def check_meaning(on: str, **given: Any) -> None:
    """Refuse options that do not apply to `on`."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name} does not apply with --on {on}: leave one of them out")


ModelArgument = Annotated[Path, argument("A .tflite model or a .litertlm bundle.", "IN")]
JsonOption = Annotated[bool, option("Print one JSON object.", None, "--json")]
QuietOption = Annotated[bool, option("Print errors only.", None, "-q", "--quiet")]
ForceOption = Annotated[bool, option("Replace existing files.", None, "--force")]
TargetOption = Annotated[
    str | None,
    option(
        "A name from `edge-opt targets`, a chip such as SM8750, or a .toml file.",
        "<TARGET>",
        autocompletion=targets_and_chips,
    ),
]
SdkOption = Annotated[
    Path | None,
    option(
        "The vendor's libraries. Default: EDGE_OPT_QNN, QNN_SDK_ROOT or EDGE_OPT_NEUROPILOT.",
        "<DIR>",
    ),
]

_chip = option(
    "The chip: SM8750, SM8850, ...", "<CHIP>", "--soc", "--chip", autocompletion=chip_names
)
RequiredChip = Annotated[str, _chip]
ChipOption = Annotated[str | None, _chip]
SignaturesOption = Annotated[
    list[str] | None,
    expert("Only these signatures; * matches any text.", "<A,B>", callback=split_names),
]
ShapeOption = Annotated[
    list[str] | None,
    expert(
        "Static shape for an input with open lengths; repeatable.",
        "<NAME=1,128,640>",
        "--shape",
    ),
]
FlagOption = Annotated[
    list[str] | None,
    expert("A flag for the NPU's compiler; repeatable.", "<FLAG>", "--flag"),
]
