"""Runs of the command line and the models that tests give it."""

import hashlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer

from edge_opt.cli import main
from edge_opt.cli.app import app
from edge_opt.ir import save
from edge_opt.ir.parse import parse

DEMO = Path(str(resources.files("edge_opt.testdata") / "demo_gemma3.tflite"))
QUANTIZED = Path(str(resources.files("edge_opt.testdata") / "demo_gemma3_a16w8.tflite"))
SENTENCE = "edge-opt: error: "
EDGE_OPT = [sys.executable, "-m", "edge_opt"]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

NO_ATTENTION = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,4]) {
  %half: float32[1,4] = MUL(%x, float32(0.5))
  %y: float32[1,4] = SOFTMAX(%half) {beta: 1.0}
  return %y
}
"""


@dataclass(frozen=True)
class Ran:
    """What came of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output; anything beside it does not parse."""
        return json.loads(self.out)

    def failed_in_one_sentence(self, code: int) -> str:
        """The sentence, after checking that there is nothing else."""
        assert self.code == code, self
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith(SENTENCE), self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix(SENTENCE)


def commands(group: Any = None, before: str = "") -> dict[str, Any]:
    """Every command by its name, as typer has it."""
    found = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        inner = hasattr(command, "commands")
        found |= commands(command, f"{name} ") if inner else {f"{before}{name}": command}
    return found


def run(capsys: Captured, *arguments: object) -> Ran:
    """One command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


def run_apart(*arguments: object, **options: Any) -> Ran:
    """One command in a process of its own, with pipes instead of a terminal."""
    command = [*EDGE_OPT, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def in_terminal(
    command: Sequence[object], *streams: str, **wishes: str
) -> tuple[subprocess.CompletedProcess[bytes], bytes]:
    """A command with a terminal as these standard streams and pipes as the others, and all that the terminal gets."""
    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while some := os.read(ours, 1 << 16):
                drawn.append(some)

    reader = Thread(target=read, daemon=True)
    reader.start()
    plain = {name: os.environ[name] for name in os.environ.keys() - {"NO_COLOR", "FORCE_COLOR"}}
    ends: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ends |= dict.fromkeys(streams, theirs)
    environment = {**plain, "TERM": "xterm", **wishes}
    done = subprocess.run([*map(str, command)], env=environment, check=False, **ends)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return done, b"".join(drawn)


def written(folder: Path, text: str, name: str = "model.tflite") -> Path:
    """A model given in the text form, as a file."""
    path = folder / name
    save(parse(text), path)
    return path


def state(folder: Path) -> dict[str, str]:
    """Every file under a folder and its content's hash: equal states mean that nothing was touched."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
