"""A stand-in for LiteRT's ahead-of-time tool: gives the figures that a test wants, and emulates on the CPU."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from edge_opt.npu import CompilerMissingError, Figures, TimeEstimate
from edge_opt.npu.mediatek import MediaTek
from edge_opt.npu.qualcomm import Qualcomm

TAKEN = "Partitioned subgraph<0>, selected 2 ops, from a total of 2 ops. resulted in 1 partitions."
FIGURES = "spill_bytes=0\nfill_bytes=0\nwrite_total_bytes=16\nread_total_bytes=40\nfinalize_runlist: in_runlist=3, x\n"
EVENTS = {2017: 1, 2019: 1200, 2020: 900, 2021: 1400}
EVENTS_OF_US = (2019, 2020, 2021)
SDK_VARIABLES = (*Qualcomm.variables, *MediaTek.variables)

PLACES = {
    "lib/x86_64-linux-clang": ("libQnnHtp.so", "libQnnSystem.so"),
    "v8_0_10/host/lib": ("libneuron_adapter.so",),
    "v9_0_3/host/lib": ("libneuron_adapter.so",),
}
"""Libraries of each vendor's SDK."""

Compilers = Callable[[str], Path]
"""Puts a program in the place of LiteRT's tool; the folder to give as --sdk."""

# Writes its arguments down, gives the answer of its call or chip, and runs what folders are named in the emulator.
TOOL = """
    import json, os, pathlib, sys
    with open(__file__ + ".calls", "a+") as calls:
        calls.seek(0)
        place = len(calls.readlines())
        print(json.dumps(sys.argv[1:]), file=calls)
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    answers = {answers!r}
    answer = answers[place] if isinstance(answers, list) else answers.get(options["--soc_model"], answers.get(""))
    if answer is None:
        print(" 0.0ms [ ERROR ]   <E> no room")
        raise SystemExit(6)
    time, read, taken, *interface = answer
    told = lambda *fields: print(*fields, sep="\\t", file=open(os.environ["EDGE_OPT_PROBE_LOG"], "a"))
    told("interface", *(interface or ("known", "2.40.0")), "5")
    told("finalized", "g", 0)
    print("Partitioned subgraph<0>, selected %d ops, from a total of 9 ops. resulted in 1 partitions." % taken,
          file=sys.stderr)
    print({figures!r}.replace("read_total_bytes=40", "read_total_bytes=%d" % read))
    for event, value in {events!r}.items() if time is not None else ():
        told("event", event, time if event in {of_us!r} else value)
    if "EDGE_OPT_PROBE_RUN" in os.environ:
        import numpy as np
        from ai_edge_litert.interpreter import Interpreter
        is_second = place % 2
        interpreter = Interpreter(options["--model"])
        interpreter.allocate_tensors()
        folders = open(os.environ["EDGE_OPT_PROBE_RUN"])
        for name in iter(folders.readline, ""):
            folder = pathlib.Path(name.strip())
            for detail in interpreter.get_input_details():
                array = np.fromfile(folder / (detail["name"] + ".in"), detail["dtype"])
                interpreter.set_tensor(detail["index"], array.reshape(detail["shape"]))
            told("running", "g")
            interpreter.invoke()
            for detail in interpreter.get_output_details():
                array = interpreter.get_tensor(detail["index"]).copy()
                {change}
                array.tofile(folder / (detail["name"] + ".out"))
            told("ran", "g", 0)
            (folder / "done").touch()
"""


def compiling(answers: list[Any] | dict[str, Any], change: str = "pass") -> str:
    """The tool's program. An answer is microseconds or None, bytes read, operators taken of 9, and maybe an interface.

    None fails. A list has the answers call by call, a dict by chip, "" for any other.
    """
    return TOOL.format(
        answers=answers, figures=FIGURES, events=EVENTS, of_us=EVENTS_OF_US, change=change
    )


def emulator(change: str = "pass", *, taken: int = 9) -> str:
    """The tool's program; `change` edits each output, `array`; `is_second` at every other compilation."""
    return compiling({"": (1200, 40, taken)}, change)


def calls(sdk: Path) -> list[list[str]]:
    """The arguments of each call of the tool."""
    text = (sdk.parent / "apply_plugin_main.calls").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def figures(
    us: int | None, *, read: int = 100, taken: int = 9, parts: int = 1, steps: int = 5
) -> Figures:
    """Of a graph of nine operators; `us` is the estimated time."""
    time = None if us is None else TimeEstimate("SA0", us, us, us, 0)
    counts = (9, taken, parts, 0, 0, read, 0, steps)
    return Figures("prefill_8", *counts, time=time, note="a note", versions={"qnn": "1.0"})


def say(*lines: str) -> str:
    """Code that writes lines of the probe's log."""
    text = "".join(f"{line}\n" for line in lines)
    return f"open(__import__('os').environ['EDGE_OPT_PROBE_LOG'], 'a').write({text!r})"


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Path:
    """Put a program in the tool's place; the folder to give as --sdk."""
    for place, names in PLACES.items():
        libraries = tmp_path / "sdk" / place
        libraries.mkdir(parents=True, exist_ok=True)
        for name in names:
            (libraries / name).touch()
    tool = tmp_path / "apply_plugin_main"
    tool.write_text(f"#!{sys.executable}\n{dedent(program)}", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("edge_opt.npu.compiler.find_tool", lambda _: (tool, tmp_path))
    monkeypatch.setattr("edge_opt.npu.probe.build_probe", lambda: tmp_path)
    return tmp_path / "sdk"


def without_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler is on this machine."""

    def missing() -> Path:
        raise CompilerMissingError("no C compiler")

    monkeypatch.setattr("edge_opt.npu.probe.build_probe", missing)


def require_qnn() -> None:
    """Skip what needs Qualcomm's libraries where they are not installed."""
    if not any(os.environ.get(name) for name in Qualcomm.variables):
        pytest.skip(
            f"Qualcomm's libraries are not installed: set {' or '.join(Qualcomm.variables)}"
        )
