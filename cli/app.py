"""Registers the commands, and turns errors into exit codes and messages.

Imports nothing heavy, so that `--help` and usage errors are fast: each command imports the library when it runs.
"""

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer

from edge_opt.base.errors import TRACEBACK, EdgeOptError, UsageError
from edge_opt.cli import installation, models, options, output, phones

PROGRAM = "edge-opt"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_ARGUMENT = re.compile(r"(?<![\w'-])(\w+)=('[^']*'|[\w./…]+)")
# The base class of typer's usage errors is public only as a base of BadParameter.
_ParseError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _Group(typer.core.TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `help COMMAND` as `COMMAND --help`."""
        while args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    epilog="Exit codes: 0 success (skipped sites are reported); 1 a difference, or --require-all and a site was "
    "skipped; 2 usage error; 3 the model cannot be read or run; 5 the output cannot be written; 70 a bug in edge-opt.",
    # Plain text: help is often piped, and rich's panels take longer to load than everything else.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def help_groups(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """A command's parameters and their help, by the title of their group; arguments without their Python types."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        name, text = parameter.get_help_record(context)
        title = "Options"
        if parameter.param_type_name == "argument":
            title = "Arguments"
            name, _, _ = name.partition(" <")
        title = getattr(parameter, "rich_help_panel", None) or title
        groups.setdefault(title, []).append((name, text))
    return groups


class _Command(typer.core.TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty value, often an unset variable: as a path, it would mean the current folder."""
        for before, word in pairwise([str(self.name), *args]):
            option, equals, value = word.partition("=")
            if not word or (option.startswith("--") and equals and not value):
                raise UsageError(
                    f"empty value after '{option or before}': give one, or leave it out"
                )
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print groups of options, which typer does only with rich."""
        for title, rows in help_groups(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(rows)


for _command in (
    models.convert,
    models.inspect,
    models.compare,
    phones.build,
    phones.evaluate,
    phones.profile,
    phones.tune,
    models.demo,
    models.passes,
    models.targets,
    installation.doctor,
):
    app.command(cls=_Command)(_command)
golden = typer.Typer(
    cls=_Group, help="Record a model's outputs in a small file, and check them in CI."
)
golden.command(cls=_Command)(models.record)
golden.command(cls=_Command)(models.check)
app.add_typer(golden, name="golden")


@app.callback(invoke_without_command=True)
def edge_opt(
    *,
    version: Annotated[
        bool,
        options.option("Print the version; with --json, of all packages.", None, "-V", "--version"),
    ] = False,
    as_json: Annotated[bool, options.option("With --version: as JSON.", None, "--json")] = False,
) -> None:
    """Rewrite the attention of .tflite language models for NPUs, and verify each rewrite."""
    if version:
        installation.print_version(as_json=as_json)
        raise typer.Exit
    if as_json:
        raise UsageError("--json has no place before the command: write it behind")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, also after an error."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    received: list[signal.Signals] = []
    output.make_tolerant()
    try:
        with _signals_as_interrupts(received):
            return _run(given)
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = _ending(error, received)
        if "--json" in takewhile(lambda word: word != "--", given):
            result = getattr(error, "result", None)
            known = {} if result is None else result.to_dict()
            known["error"] = {
                "type": type(error).__name__,
                "message": sentence.removeprefix("error: "),
                "exit_code": code,
            }
            with suppress(BrokenPipeError, EdgeOptError):
                output.say_json(known)
        output.complain(f"{PROGRAM}: {sentence}")
        return code


@contextmanager
def _signals_as_interrupts(received: list[signal.Signals]) -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, to remove temporary files; ignored signals stay ignored."""

    def interrupt(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # others cannot
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    if "_EDGE_OPT_COMPLETE" in os.environ:
        command.main(prog_name=PROGRAM)  # prints completions for the shell, and exits
    try:
        # Not `command.main`, which prints errors itself.
        with command.make_context(PROGRAM, [*arguments] or ["--help"]) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:  # help and version
        return end.exit_code
    except OSError:
        output.write("")  # if help could not be printed, this raises an error that says why
        raise


def _ending(error: BaseException, received: Sequence[signal.Signals]) -> tuple[int, str]:
    """Exit code and message for the exception that ended a command."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        how = f"ended by {received[0].name}" if received else "interrupted"
        code = 128 + received[0] if received else EXIT_INTERRUPTED
        return code, "; ".join((how, *getattr(error, "__notes__", ())))
    if os.environ.get(TRACEBACK):
        for line in "".join(traceback.format_exception(error)).splitlines():
            output.complain(line)
    if isinstance(error, MemoryError):
        from edge_opt.base.processes import MORE_MEMORY

        return EdgeOptError.exit_code, f"error: memory ran out: {MORE_MEMORY}"
    if isinstance(error, EdgeOptError):
        return error.exit_code, f"error: {in_options(str(error))}"
    if isinstance(error, _ParseError):
        usage: Any = error
        message = " ".join(usage.format_message().split()).rstrip(".")
        message = message.replace("Value error, ", "")  # which newer releases of typer add
        command = getattr(getattr(usage, "ctx", None), "command_path", PROGRAM)
        return EXIT_USAGE, f"error: {message} (see `{command} --help`)"
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return output.EXIT_BUG, (
        f"error: this is a bug in edge-opt, please report it with the command and the model's source: {what} "
        f"({TRACEBACK}=1 in the environment shows the traceback)"
    )


def in_options(text: str) -> str:
    """Replace a message's arguments by options: `verify='none'` -> `--verify none`, `overwrite=True` -> `--force`."""
    names: dict[str, str] = {}
    for command in _commands_below(typer.main.get_command(app)):
        for parameter in command.params:
            long = [word for word in parameter.opts if word.startswith("--")]
            if long:
                names[str(parameter.name)] = long[0]

    def option(match: re.Match[str]) -> str:
        name = names.get(match[1])
        value = match[2].strip("'")
        if name is None:
            return match[0]
        if value == "False":
            return name.replace("--", "--no-")
        return name if value in {"True", "..."} else f"{name} {value}"

    return _ARGUMENT.sub(option, text)


def _commands_below(command: Any) -> Iterator[Any]:
    """A command, and all commands in it."""
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from _commands_below(inner)
