"""Runs a command and turns whatever ends it into an exit code and one sentence.

Loads nothing heavy itself, so that `--help` and usage errors answer at once.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from edge_opt.cli import output, streams
from edge_opt.cli.app import app
from edge_opt.cli.declare import Action, as_written
from edge_opt.cli.suggestion import nearest

PROGRAM = "edge-opt"
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# The base of typer's usage errors; where it lives depends on typer's version, that BadParameter has it does not.
_ParseError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


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
    finally:
        streams.clean()
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

    # One that is ignored stays so: `nohup` asks for that.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    if not arguments or arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    # Parsing only gives back what to do: what a command raises is ours to explain, not typer's.
    chosen: Action | int | None
    with output.writing():  # help and version are printed while parsing
        chosen = command.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    if chosen == EXIT_INTERRUPTED:  # typer's own word for it, while a command was loading
        raise KeyboardInterrupt
    return chosen() if callable(chosen) else chosen or 0


def _failed(error: Exception, *, as_json: bool) -> int:
    from edge_opt.output.errors import TRACEBACK, EdgeOptError  # noqa: PLC0415

    if isinstance(error, EdgeOptError):
        code, sentence = error.exit_code, as_written(streams.named(str(error)))
    elif isinstance(error, _ParseError):
        code, sentence = EXIT_USAGE, _usage_sentence(error)
    else:
        code, sentence = EXIT_BUG, _bug_sentence(error)
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    return _end(code, f"error: {sentence}", error, as_json=as_json)


def _usage_sentence(error: Any) -> str:
    context: Any = getattr(error, "ctx", None)
    names_it = getattr(error, "param", None) is not None or not error.message
    message: str = error.format_message() if names_it else error.message
    if hasattr(error, "possibilities") and (meant := nearest(error.option_name, context.command)):
        message += f", did you mean {meant}?"
    message = " ".join(message.split()).rstrip(".").replace(". Did you mean", ", did you mean")
    return f"{message} (see `{PROGRAM if context is None else context.command_path} --help`)"


def _bug_sentence(error: Exception) -> str:
    from edge_opt.output.errors import TRACEBACK  # noqa: PLC0415

    what = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"this is a bug in edge-opt, please report it with the command and the model's source: {what} "
        f"({TRACEBACK}=1 in the environment shows where)"
    )


def _end(code: int, sentence: str, error: BaseException, *, as_json: bool) -> int:
    """Say how the command ended; as JSON also what was done until then."""
    from edge_opt.output.errors import EdgeOptError  # noqa: PLC0415

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
