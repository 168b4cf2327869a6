"""The program: its commands in groups, its help in plain text, and what becomes of whatever ends a command.

Loads nothing heavy itself, so that `--help` and usage errors answer at once: a command loads the library when it runs.
"""

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

from edge_opt.cli import models, output, phones
from edge_opt.cli.options import OPTIONS, in_options

GROUPS = {
    "Models": (models.convert, models.inspect, models.explain, models.compare, models.shapes),
    "Phones": (phones.build, phones.evaluate, phones.profile, phones.tune),
    "In your CI": (),
    "Demo and lists": (models.demo, models.passes, models.targets),
}
PROGRAM = "edge-opt"
COMPLETION = "_EDGE_OPT_COMPLETE"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_AGAIN_SECONDS = 0.05
# The base of typer's usage errors; where it lives depends on typer's version, that BadParameter has it does not.
_ParseError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _write_sections(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Rows of help under the titles that go with them, in the order of these."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, row in rows:
        sections.setdefault(title, []).append(row)
    for title, listed in sections.items():
        with formatter.section(title):
            formatter.write_dl(listed)


class Program(typer.core.TyperGroup):
    """Lists the commands by what they are for, each with the first part of its help and without cutting it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        titles = [*GROUPS]
        commands: list[tuple[str, Any]] = [*self.commands.items()]
        commands.sort(key=lambda item: titles.index(item[1].rich_help_panel))
        heads = ((name, re.split(r"[:;]", command.help or "")[0].rstrip(".")) for name, command in commands)
        _write_sections(formatter, zip((c.rich_help_panel for _, c in commands), heads, strict=True))


class Command(typer.core.TyperCommand):
    """Lists its options in the groups that they name, which typer does with rich only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        titles = {"argument": "Arguments", "option": "Options"}
        _write_sections(
            formatter,
            (
                (getattr(parameter, "rich_help_panel", None) or titles[parameter.param_type_name], record)
                for parameter in self.get_params(ctx)
                if (record := parameter.get_help_record(ctx)) is not None
            ),
        )


app = typer.Typer(
    cls=Program,
    help="Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed.",
    epilog="Exit codes: 0 done; 1 a difference was found, or --require-all and a site was not converted; 2 usage; "
    "3 the model cannot be read; 4 nothing matched under --require-match; 5 the output could not be written.",
    # Plain text: help is often piped, and a panel of boxes takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models.golden, name="golden", rich_help_panel="In your CI")
for group, functions in GROUPS.items():
    for function in functions:
        app.command(cls=Command, rich_help_panel=group)(function)


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
    """Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed."""


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
        sentence = "; ".join((how, *getattr(error, "__notes__", ())))
        code = 128 + received[0] if received else EXIT_INTERRUPTED
        return _end(code, sentence, error, as_json=as_json)
    except Exception as error:
        return _failed(error, as_json=as_json)
    return code


@contextmanager
def _asked_to_end(received: list[signal.Signals]) -> Iterator[None]:
    """Within the block, signals that would end the process at once let it remove its temporary files first.

    They are listed in `received`: parsing makes an exception of its own of every interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    def unraised(what: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised while it finalizes an object: an interrupt comes again a little later."""
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)
            return
        main_thread, number = threading.get_ident(), received[-1] if received else signal.SIGINT
        threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main_thread, number)).start()

    # One that is ignored stays so: `nohup` asks for that.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    hook, sys.unraisablehook = sys.unraisablehook, unraised
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    if COMPLETION in os.environ:
        command.main(prog_name=PROGRAM)  # answers the shell, and exits
    if not arguments or arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    try:
        # Not `command.main`: what ends a command is ours to explain, not typer's.
        with command.make_context(PROGRAM, arguments) as context:
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


def _usage_sentence(error: Any) -> str:
    context: Any = getattr(error, "ctx", None)
    names_it = getattr(error, "param", None) is not None or not error.message
    message: str = error.format_message() if names_it else error.message
    if hasattr(error, "possibilities"):
        # typer's suggestions, and for an argument of the library the option that stands for it
        name = error.option_name.removeprefix("--").replace("-", "_")
        options = {text for parameter in context.command.params for text in parameter.opts}
        likely = [OPTIONS[name]] if OPTIONS.get(name) in options else sorted(error.possibilities or ())
        message += f", did you mean {' or '.join(likely)}?" if likely else ""
    message = " ".join(message.split()).rstrip(".").replace(". Did you mean", ", did you mean")
    help_of = PROGRAM if context is None else context.command_path
    return f"{message.replace('Value error, ', '')} (see `{help_of} --help`)"


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
            output.flush()
        except (OSError, EdgeOptError):
            output.discard_rest()
    output.complain(f"{PROGRAM}: {sentence}")
    return code
