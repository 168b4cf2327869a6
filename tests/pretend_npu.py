"""A stand-in for LiteRT's ahead-of-time tool: says what a test wants, or computes on the CPU what an emulator would."""

import json
import stat
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

TAKEN = "Partitioned subgraph<0>, selected 2 ops, from a total of 2 ops. resulted in 1 partitions."
FIGURES = "spill_bytes=0\nfill_bytes=0\nwrite_total_bytes=16\nread_total_bytes=40\nfinalize_runlist: in_runlist=3, x\n"
EVENTS = {2006: 1500, 2007: 1000, 2008: 2500, 2017: 1, 2019: 1200, 2020: 900, 2021: 1400}

EVENTS_OF_US = (2019, 2020, 2021)

# Writes its arguments down, and gives the next of a list of answers, or that for the chip.
COMPILER = """
    import json, os, sys
    with open(__file__ + ".calls", "a+") as calls:
        calls.seek(0)
        place = len(calls.readlines())
        print(json.dumps(sys.argv[1:]), file=calls)
    chip = next(a.partition("=")[2] for a in sys.argv if a.startswith("--soc_model="))
    answers = {answers!r}
    answer = answers[place] if isinstance(answers, list) else answers[chip]
    if answer is None:
        print(" 0.0ms [ ERROR ]   <E> no room")
        raise SystemExit(6)
    time, read, taken, *interface = answer
    log = open(os.environ["EDGE_OPT_PROBE_LOG"], "w")
    print("interface", *(interface or ("known", "2.40.0")), "5", sep="\\t", file=log)
    print("finalized", "g", 0, sep="\\t", file=log)
    print("Partitioned subgraph<0>, selected %d ops, from a total of 9 ops. resulted in 1 partitions." % taken,
          file=sys.stderr)
    print("spill_bytes=0\\nfill_bytes=0\\nwrite_total_bytes=16\\nread_total_bytes=%d" % read)
    print("finalize_runlist: in_runlist=3, x")
    for event, value in {events!r}.items() if time is not None else ():
        print("event", event, time if event in {of_us!r} else value, sep="\\t", file=log)
"""


def compiling(answers: list[Any] | dict[str, Any]) -> str:
    """The tool's program. An answer is microseconds or None, bytes read, operators taken of 9, and maybe an interface.

    None fails. A list has the answers call by call, a dict by chip.
    """
    return COMPILER.format(answers=answers, events=EVENTS, of_us=EVENTS_OF_US)


def calls(sdk: Path) -> list[list[str]]:
    """The arguments of each call of such a tool."""
    text = (sdk.parent / "apply_plugin_main.calls").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


EMULATOR = """
    import os, pathlib, sys
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter
    told = lambda *fields: print(*fields, sep="\\t", file=open(os.environ["EDGE_OPT_PROBE_LOG"], "a"))
    model = next(a.partition("=")[2] for a in sys.argv if a.startswith("--model="))
    calls = pathlib.Path(__file__ + ".calls")
    print(end=".", file=calls.open("a"))
    is_second = calls.stat().st_size % 2 == 0
    print({taken!r}, file=sys.stderr)
    print({figures!r})
    told("interface", "known", "2.40.0", "5.51.0")
    told("finalized", "g", 0)
    interpreter = Interpreter(model)
    interpreter.allocate_tensors()
    folders = open(os.environ["EDGE_OPT_PROBE_RUN"])
    for name in iter(folders.readline, ""):
        folder = pathlib.Path(name.strip())
        numbers = dict(reversed(l.split("\\t")) for l in (folder / "tensors").read_text().splitlines())
        for detail in interpreter.get_input_details():
            array = np.fromfile(folder / (numbers[detail["name"]] + ".in"), detail["dtype"])
            interpreter.set_tensor(detail["index"], array.reshape(detail["shape"]))
        told("running", "g")
        interpreter.invoke()
        for detail in interpreter.get_output_details():
            array = interpreter.get_tensor(detail["index"]).copy()
            {change}
            array.tofile(folder / (numbers[detail["name"]] + ".out"))
        told("ran", "g", 0, 0.25)
        (folder / "partial").write_text("0.25")
        (folder / "partial").rename(folder / "done")
"""


def emulator(change: str = "pass", *, taken: str = TAKEN) -> str:
    """The tool's program; `change` edits each output, `array`; `is_second` at every other compilation."""
    return EMULATOR.format(taken=taken, figures=FIGURES, change=change)


def say(*lines: str) -> str:
    """Code that writes lines of the probe's log."""
    text = "".join(f"{line}\n" for line in lines)
    return f"open(__import__('os').environ['EDGE_OPT_PROBE_LOG'], 'a').write({text!r})"


def executable(path: Path, program: str) -> Path:
    """A Python program as a file that can be run."""
    path.write_text(f"#!{sys.executable}\n{dedent(program)}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Path:
    """Put a program in the tool's place; the folder to give as --sdk."""
    libraries = tmp_path / "sdk" / "lib" / "x86_64-linux-clang"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in ("libQnnHtp.so", "libQnnSystem.so"):
        (libraries / name).touch()
    tool = executable(tmp_path / "apply_plugin_main", program)
    monkeypatch.setattr("edge_opt.npu.sdk._find_tool", lambda: (tool, tmp_path))
    monkeypatch.setattr("edge_opt.npu.sdk.build_probe", lambda: tmp_path)
    return tmp_path / "sdk"
