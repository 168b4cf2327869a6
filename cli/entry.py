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
from edge_opt.cli.declare import Action
from edge_opt.cli.suggestion import nearest

PROGRAM = "edge-opt"
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
TRACEBACK = "EDGE_OPT_TRACEBACK"

# The base of typer's usage errors; where it lives depends on typer's version, that BadParameter has it does not.
_ParseError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, whatever happens."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    output.make_tolerant()
    try:
        with _asked_to_end():
            code = _run(given)
        output.flush()
    except _AskedToEndError as error:
        return _end(error.exit_code, f"{PROGRAM}: ended by {error}")
    except (KeyboardInterrupt, typer.Abort):
        return _end(EXIT_INTERRUPTED, f"{PROGRAM}: interrupted")
    except BrokenPipeError:
        output.discard_rest()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        options = given[: given.index("--")] if "--" in given else given
        return _failed(error, as_json="--json" in options)
    finally:
        streams.clean()
    return code


class _AskedToEndError(KeyboardInterrupt):
    """A signal asks the process to end; what is under way cleans up as at an interrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """Within the block, signals that would end the process at once let it remove its temporary files first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise _AskedToEndError(number)

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
    # Parsing only gives back what to do: what a command raises is ours to explain, not typer's.
    chosen: Action | int | None
    with output.writing():  # help and version are printed while parsing
        chosen = command.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    if chosen == EXIT_INTERRUPTED:  # typer's own word for it, while a command was loading
        raise KeyboardInterrupt
    return chosen() if callable(chosen) else chosen or 0


def _failed(error: Exception, *, as_json: bool) -> int:
    from edge_opt.schema.errors import EdgeOptError  # noqa: PLC0415

    if isinstance(error, EdgeOptError):
        code, sentence = error.exit_code, streams.named(str(error))
    elif isinstance(error, _ParseError):
        code, sentence = EXIT_USAGE, _usage_sentence(error)
    else:
        code, sentence = EXIT_BUG, _bug_sentence(error)
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if as_json:
        result = getattr(error, "result", None)
        known = {} if result is None else result.to_dict()
        known["error"] = {"type": type(error).__name__, "message": sentence, "exit_code": code}
        try:
            output.say_json(known)
            output.flush()
        except (OSError, EdgeOptError):
            output.discard_rest()
    return _end(code, f"{PROGRAM}: error: {sentence}")


def _usage_sentence(error: Any) -> str:
    context: Any = getattr(error, "ctx", None)
    names_it = getattr(error, "param", None) is not None or not error.message
    message: str = error.format_message() if names_it else error.message
    if hasattr(error, "possibilities") and (meant := nearest(error.option_name, context.command)):
        message += f", did you mean {meant}?"
    message = " ".join(message.split()).rstrip(".").replace(". Did you mean", ", did you mean")
    return f"{message} (see `{PROGRAM if context is None else context.command_path} --help`)"


def _bug_sentence(error: Exception) -> str:
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"this is a bug in edge-opt, please report it with the command and the model's source: {what} "
        f"({TRACEBACK}=1 in the environment shows where)"
    )


def _end(code: int, sentence: str) -> int:
    output.complain(sentence)
    return code
