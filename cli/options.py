"""Arguments and options that several commands share, one name for each; how values are completed and read."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Verify = Literal["regions", "exhaustive", "full", "none"]
Sections = Literal["prefill-decode", "all"]
Form = Literal["as-found", "split", "unpack", "split-above"]
Backend = Literal["xnnpack", "reference", "both", "tensorflow"]
Place = Literal["cpu", "npu"]
NPU = "The NPU and its compiler"
"""The group of such options in a command's help."""
_ARGUMENT = re.compile(r"(?<![\w'-])(\w+)=('[^']*'|[\w./…]+)")
_SAME = (
    "cache dry_run evaluate extract_signature form generate held_out inline_composites passes prefill prompts "
    "require_all require_match require_sound rows_per_tile sdk seconds sections signatures skip target verify work"
)
OPTIONS = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME.split()},
    "blocks": "--layers",
    "chip": "--soc",
    "flags": "--flag",
    "overwrite": "--force",
    "settings": "--set",
    "shapes": "--shape",
    "signature": "--signatures",
}
"""Arguments that messages name, and the options that stand for them."""


def argument(text: str, metavar: str, **how: Any) -> Any:
    """An argument with its help; `how` is typer's."""
    return typer.Argument(metavar=metavar, help=text, **how)


def option(text: str, metavar: str | None = None, *names: str, panel: str | None = None, **how: Any) -> Any:
    """An option with its help, by these names or else by the parameter's; `panel` is its group in the help."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **how)


def flag(text: str, *names: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


def complete_target(incomplete: str) -> list[str]:
    """Bundled targets that begin so; the path of a target file is left to the shell."""
    from edge_opt.targets import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


def complete_pass(incomplete: str) -> list[str]:
    """`mha_to_sha,ti` -> `mha_to_sha,tile_rows`: the last name of a list, without passes that it has already."""
    from edge_opt.passes import PASSES

    given, comma, last = incomplete.rpartition(",")
    left = [name for name in PASSES if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in left if name.startswith(last)]


def split_names(values: list[str] | None) -> list[str] | None:
    """`--passes a,b --passes c` -> [a, b, c]; None where the option was not given."""
    names = [name.strip() for value in values or () for name in value.split(",") if name.strip()]
    if values and not names:
        raise typer.BadParameter("it names nothing, leave the option out or give a name")
    return names or None


def read_shapes(values: Iterable[str] | None) -> dict[str, tuple[int, ...]]:
    """`[NAME=1,128,640]` -> the sizes by name; a name may have a = in it."""
    shapes = {}
    for value in values or ():
        name, _, sizes = value.rpartition("=")
        if not name or not all(size.strip().isdecimal() for size in sizes.split(",")):
            raise typer.BadParameter(
                f"--shape '{value}' is no NAME=1,128,640: a name and its sizes are expected"
            )
        if name in shapes:
            raise typer.BadParameter(f"--shape '{name}' is given twice")
        shapes[name] = tuple(int(size) for size in sizes.split(","))
    return shapes


def read_settings(values: Iterable[str] | None) -> dict[str, Any]:
    """`[KEY=VALUE]` -> the values by key; a value is JSON where it reads as JSON, else text."""
    settings: dict[str, Any] = {}
    for given in values or ():
        key, equals, value = given.partition("=")
        if not key.strip() or not equals:
            raise typer.BadParameter(f"--set '{given}' is no setting, write key=value")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value
    return settings


ModelArgument = Annotated[
    Path,
    argument(
        "A .tflite model, or a .litertlm bundle.",
        "FILE",
    ),
]
JsonOption = Annotated[bool, flag("Print one JSON object.", "--json")]
QuietOption = Annotated[bool, flag("Print errors only.", "-q", "--quiet")]
ForceOption = Annotated[bool, flag("Replace files that exist.", "--force")]
TargetOption = Annotated[
    str, option("A name of `edge-opt targets`, or your own .toml file.", "T", autocompletion=complete_target)
]
SignaturesOption = Annotated[list[str] | None, option("Only these signatures.", "S", callback=split_names)]
VerifyOption = Annotated[
    Verify,
    option(
        "regions: prove each rewritten region; exhaustive: on every row; full: also compare whole models; none."
    ),
]
SectionsOption = Annotated[
    Sections, option("Of a bundle, rewrite the prefill/decode model or all of its models.")
]
ReportOption = Annotated[
    list[Path] | None, option("Also write a report, once for each format.", "FILE.json|.md|.html")
]
SdkOption = Annotated[
    Path | None,
    option("The vendor's libraries. Default for Qualcomm: EDGE_OPT_QNN or QNN_SDK_ROOT.", "DIR", panel=NPU),
]
ChipOption = Annotated[
    str | None,
    option("The chip, as the compiler calls it: SM8750, ...", "C", "--soc", "--chip", panel=NPU),
]
FlagOption = Annotated[
    list[str] | None, option("A flag for the compiler; may be repeated.", "F", "--flag", panel=NPU)
]
LayersOption = Annotated[
    int | None, option("Cut out N layers and run only these, to save time.", "N", min=1, panel=NPU)
]
SecondsOption = Annotated[float, option("Time limit for one model; 0: none.", "S", min=0, panel=NPU)]


def in_options(text: str) -> str:
    """A message with options for arguments: `verify='none'` is `--verify none`, `chip=...` is `--soc`."""

    def option(match: re.Match[str]) -> str:
        value = match[2].strip("'")
        name = OPTIONS.get(match[1])
        if name is None:
            return match[0]
        if value == "False":
            return name.replace("--", "--no-")
        return name if value in {"True", "..."} else f"{name} {value}"

    return _ARGUMENT.sub(option, text)
