"""`-` for a file: a model from standard input, or the result to standard output, kept in a temporary file meanwhile.

So that a model is read and written as every other is, with its weights on the disk and not in memory.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from edge_opt.cli import output

_DASH = Path("-")
_DASHES = (_DASH, Path("/dev/stdout"))
_INPUT, _OUTPUT = "standard input", "standard output"
_names: dict[Path, str] = {}


def given(path: Path | None) -> Path | None:
    """The file that was named on the command line; for `-`, what standard input held."""
    from edge_opt.base.errors import OutputError, UsageError

    if path != _DASH:
        return path
    if _INPUT in _names.values():
        raise UsageError("standard input holds one model: give `-` once, and a file for the other")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("standard input is a terminal: pipe a model into it, or give a file")
    try:
        kept = _kept(_INPUT)
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        raise OutputError(
            f"standard input could not be kept in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder "
            "with room for the model, or give a file"
        ) from error
    return kept


def name(path: str | Path) -> str:
    """What to call a file: by its path, or as the stream that it stands for."""
    return _names.get(Path(path), str(path))


def named(text: str, instead: str = "") -> str:
    """A text that names no temporary file, but the stream that it stands for, or something else `instead`."""
    for path, stream in _names.items():
        text = text.replace(str(path), instead or stream)
    return text


@contextmanager
def written(path: Path | None, source: Path, *, as_json: bool) -> Iterator[Path | None]:
    """Where to write a result to; for `-`, or a source from standard input, it goes to standard output at the end.

    What is said meanwhile then goes to standard error.
    """
    from edge_opt.base.errors import OutputError, UsageError

    if path not in _DASHES and not (path is None and source in _names):
        yield path
        return
    if as_json:
        raise UsageError("--json and the model both go to standard output: write the model to a file with -o")
    if sys.stdout.isatty():
        raise UsageError("a model is no text for a terminal: send standard output to a file, or use -o")
    kept = _kept(_OUTPUT).with_suffix("")
    _names[kept] = _OUTPUT
    try:
        with redirect_stdout(sys.stderr):
            yield kept
    except OutputError as error:
        copy = f"the copy of standard output in {tempfile.gettempdir()} (TMPDIR)"
        error.args = (str(error).replace(str(kept), copy),)
        raise
    if kept.exists():
        with output.writing(), kept.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def clean() -> None:
    """Remove what was kept."""
    for path in _names:
        shutil.rmtree(path.parent, ignore_errors=True)
    _names.clear()


def _kept(stream: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="edge-opt-")) / f"{stream.split()[1]}.tflite"
    _names[path] = stream
    return path
