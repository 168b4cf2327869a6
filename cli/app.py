"""The program: its commands, and what becomes of whatever ends a command.

Loads nothing heavy itself, so that `--help` and usage errors answer at once: a command loads the library when it runs.
"""

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer

from edge_opt.cli import models, output, phones

PROGRAM = "edge-opt"
_PATHS = " <list[Path]>"
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
_ARGUMENT = re.compile(r"(?<![\w'-])(\w+)=('[^']*'|[\w./…]+)")
# The base of typer's usage errors; where it lives depends on typer's version, that BadParameter has it does not.
_ParseError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    help="Rewrite the attention of .tflite language models for NPUs, and verify each rewrite.",
    epilog="Exit codes: 0 done (skipped sites are reported); 1 a difference, or --require-all and a site was skipped; "
    "2 usage; 3 the model cannot be read; 5 the output could not be written.",
    # Plain text: help is often piped, and a panel of boxes takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., int], ...] = (
    *(models.convert, models.inspect, models.compare),
    *(phones.build, phones.evaluate, phones.profile, phones.tune),
    *(models.demo, models.passes, models.targets),
)


class _Command(typer.core.TyperCommand):
    """Help without the type of several files, which typer writes as Python does."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_PATHS, " " * len(_PATHS))


for _command in _COMMANDS:
    app.command(cls=_Command)(_command)
app.add_typer(models.golden, name="golden")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edge-opt {version('edge-opt')}")
        raise typer.Exit


@app.callback()
def edge_opt(
    *,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rewrite the attention of .tflite language models for NPUs, and verify each rewrite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, whatever happens."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    received: list[signal.Signals] = []
    output.make_tolerant()
    try:
        with _asked_to_end(received):
            code = _run(given)
        output.flush()
    except BrokenPipeError:
        output.discard_rest()
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort) as error:
        how = f"ended by {received[0].name}" if received else "interrupted"
        code = 128 + received[0] if received else EXIT_INTERRUPTED
        return _end(code, "; ".join((how, *getattr(error, "__notes__", ()))), error, as_json=as_json)
    except Exception as error:
        return _failed(error, as_json=as_json)
    return code


@contextmanager
def _asked_to_end(received: list[signal.Signals]) -> Iterator[None]:
    """Within the block, signals that would end the process at once are interrupts: temporary files go first.

    They are listed in `received`. One that is ignored stays so: `nohup` asks for that.
    """

    def end(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    if "_EDGE_OPT_COMPLETE" in os.environ:
        command.main(prog_name=PROGRAM)  # answers the shell, and exits
    try:
        # Not `command.main`: what ends a command is ours to explain, not typer's.
        with command.make_context(PROGRAM, arguments or ["--help"]) as context:
            code: int | None = command.invoke(context)
    except typer.Exit as end:  # help and version
        return end.exit_code
    except OSError:
        output.flush()  # help that could not be printed is still there, and says why
        raise
    return code or 0


def _failed(error: Exception, *, as_json: bool) -> int:
    from edge_opt.base.errors import TRACEBACK, EdgeOptError

    if isinstance(error, EdgeOptError):
        code, sentence = error.exit_code, in_options(str(error))
    elif isinstance(error, _ParseError):
        code, sentence = EXIT_USAGE, _usage_sentence(error)
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        code = output.EXIT_BUG
        sentence = (
            f"this is a bug in edge-opt, please report it with the command and the model's source: {what} "
            f"({TRACEBACK}=1 in the environment shows where)"
        )
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    return _end(code, f"error: {sentence}", error, as_json=as_json)


def in_options(text: str) -> str:
    """A message with options for arguments: `verify='none'` is `--verify none`, `overwrite=True` is `--force`."""

    def option(match: re.Match[str]) -> str:
        name, value = option_names().get(match[1]), match[2].strip("'")
        if name is None:
            return match[0]
        if value == "False":
            return name.replace("--", "--no-")
        return name if value in {"True", "..."} else f"{name} {value}"

    return _ARGUMENT.sub(option, text)


@cache
def option_names() -> dict[str, str]:
    """The options of all commands, by the library's arguments that they stand for."""
    pending, names = [typer.main.get_command(app)], dict[str, str]()
    for command in pending:
        pending += getattr(command, "commands", {}).values()
        options = [one for one in command.params if one.param_type_name == "option"]
        names |= {str(one.name): next(word for word in one.opts if word[:2] == "--") for one in options}
    return names


def _usage_sentence(error: Any) -> str:
    """What typer says of a usage error, in one line, and which help to read."""
    names_it = getattr(error, "param", None) is not None or not error.message
    message = " ".join((error.format_message() if names_it else error.message).split()).rstrip(".")
    message = message.replace("Value error, ", "")
    if near := getattr(error, "possibilities", None):
        message += f", did you mean {' or '.join(sorted(near))}?"
    context = getattr(error, "ctx", None)
    return f"{message} (see `{PROGRAM if context is None else context.command_path} --help`)"


def _end(code: int, sentence: str, error: BaseException, *, as_json: bool) -> int:
    """Say how the command ended; as JSON also what was done until then."""
    from edge_opt.base.errors import EdgeOptError

    if as_json:
        result = getattr(error, "result", None)
        known = {} if result is None else result.to_dict()
        message = sentence.removeprefix("error: ")
        known["error"] = {"type": type(error).__name__, "message": message, "exit_code": code}
        try:
            output.say_json(known)
        except (OSError, EdgeOptError):
            output.discard_rest()
    output.complain(f"{PROGRAM}: {sentence}")
    return code
