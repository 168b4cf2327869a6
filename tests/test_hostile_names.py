"""Names in a file are shown as text: whatever they hold, no command fails by them or lets them steer a terminal."""

import json
import re
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from attention_checks import attention_text
from bundles import bundle, model_part
from cli_runs import Captured, in_terminal, run

from edge_opt.base.words import one_line
from edge_opt.ir import Model, load, to_bytes, to_tables
from edge_opt.ir.parse import parse
from edge_opt.schema import model_bytes, new_table

NAMES = [
    "[/x]",
    "[red]:smile:[bold",
    "\x1b[2J\x1b[1;1H",
    "\x1b]8;;http://evil.test\x1b\\click\x1b]8;;\x1b\\",
    "\x9b2J\x85\x7f",
    "\nForged: equal\r\x1b[A",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE}\N{HANGUL FILLER}\N{LEFT-TO-RIGHT ISOLATE}\N{LINE SEPARATOR}",
    "{0}%s${x}\\u001b'\"`<b>|",
    "long" * 2000,
]
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\].*?(?:\x07|\x1b\\)|.)", re.DOTALL)
_RUN = """
import json, sys
from edge_opt.cli import main
from kept_workers import kept_workers
with kept_workers():
    codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
open(sys.argv[2], "w").write(json.dumps(codes))
"""
_TEXT = f"signature main = #0 (q=%q, k=%k, v=%v) -> (r=%r)\n{attention_text()}"


def renamed(names: list[str]) -> Model:
    """A model whose signature, arguments, tensors and subgraph end in these names."""
    model = parse(_TEXT)
    endings: Iterator[str] = cycle(names)
    for graph in model.subgraphs:
        graph.name += next(endings)
        for number, tensor in enumerate([*graph.inputs, *(one.output for one in graph)]):
            tensor.name += f"{number}{next(endings)}"
    for signature in model.signatures:
        signature.key += "".join(names)[:300]
        signature.inputs = {f"{name}{next(endings)}": one for name, one in signature.inputs.items()}
        signature.outputs = {
            f"{name}{next(endings)}": one for name, one in signature.outputs.items()
        }
    return model


def prepared(folder: Path, names: list[str]) -> list[list[str]]:
    """Files with these names in them, and commands on each; all commands of both folders have the same words."""
    folder.mkdir()
    kept = [
        *map(str, (folder / name for name in ("a.tflite", "b.tflite", "c.litertlm", "g.npz", "o")))
    ]
    a, b, c, golden, out = kept
    root = to_tables(renamed(names))
    root.set("metadata", [new_table("Metadata", name=name, buffer=99) for name in names])
    Path(a).write_bytes(model_bytes(root))
    other = renamed(names)
    (softmax,) = (one for one in other.subgraphs[0] if one.name == "SOFTMAX")
    softmax.options = new_table("SoftmaxOptions", beta=0.5)
    Path(b).write_bytes(to_bytes(other))
    Path(c).write_bytes(
        bundle(
            [model_part(f"{place}{name}", Path(a).read_bytes()) for place, name in enumerate(names)]
        )
    )
    reports = [word for kind in ("md", "html", "json") for word in ("--report", f"{out}.{kind}")]
    return [
        ["inspect", a, "--shapes", "--target", "SM8750"],
        ["inspect", c],
        ["convert", a, f"{out}.tflite", *reports],
        ["convert", b, f"{out}2.tflite", "--target", "SM8750", "--verify", "full"],
        ["convert", c, f"{out}.litertlm", "--all-models", "--verify", "none"],
        ["convert", a, "--signatures", "none"],
        ["convert", a, "--shape", "none=1", "--dry-run"],
        ["compare", a, a],
        ["compare", a, b],
        ["compare", a, b, "--generate", "2"],
        ["compare", a, b, "--json"],
        ["golden", "record", a, "-o", golden],
        ["golden", "check", a, golden],
        ["golden", "check", b, golden],
        ["convert", f"{folder}/{names[0]}\x1b[2J.tflite"],
    ]  # fmt: skip


def ran(folder: Path, names: list[str]) -> tuple[list[int], bytes]:
    """The exit codes of the commands, run in one process on a terminal, and all that it gets."""
    commands, told = json.dumps(prepared(folder, names)), folder.with_suffix(".json")
    command = [sys.executable, "-c", _RUN, commands, told]
    ours = str(Path(__file__).parent)
    done, drawn = in_terminal(command, "stdin", "stdout", "stderr", PYTHONPATH=ours)
    assert done.returncode == 0
    return json.loads(told.read_text()), drawn


def test_hostile_names_change_neither_an_exit_code_nor_what_steers_the_terminal(
    tmp_path: Path,
) -> None:
    codes, plain = ran(tmp_path / "plain", ["x"] * len(NAMES))
    found, shown = ran(tmp_path / "hostile", NAMES)
    assert found == codes
    assert 70 not in codes
    # On a busy machine a bar may be drawn before it is complete, in another colour.
    assert {*_SEQUENCE.findall(shown)} <= {*_SEQUENCE.findall(plain), b"\x1b[91m"}
    assert b"[/x]" in shown
    assert b"\nForged" not in shown
    text = _SEQUENCE.sub(b"", shown).decode()
    assert {letter for letter in text if not letter.isprintable()} <= {"\r", "\n"}


def test_hostile_names_are_escaped_in_pipes_and_exact_in_json(
    tmp_path: Path, capsys: Captured
) -> None:
    for command in prepared(tmp_path / "hostile", NAMES):
        ran = run(capsys, *command)
        assert "Traceback" not in ran.err, command
        lines = f"{ran.out}{ran.err}".split("\n")
        assert all(line.isprintable() for line in lines), command
        assert max(map(len, lines)) < 100_000
    found = run(capsys, "inspect", tmp_path / "hostile" / "a.tflite", "--json").json
    (signature,) = load(tmp_path / "hostile" / "a.tflite").signatures
    assert found["signatures"][0]["name"] == signature.key
    assert [one["name"] for one in found["signatures"][0]["inputs"]] == [*signature.inputs]
    page = (tmp_path / "hostile" / "o.html").read_text()
    assert "<b>" not in page
    assert all(line.isprintable() for line in page.split("\n"))
    assert all(
        line.isprintable() for line in (tmp_path / "hostile" / "o.md").read_text().split("\n")
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name.1/x", "plain name.1/x"),
        ("вариант 変数 é", "вариант 変数 é"),
        ("\x1b[2J\t\x7f\x85", "\\x1b[2J\\t\\x7f\\x85"),
        ("a\u202eb\u200b\u2067\ufeff\u2028", "a\\u202eb\\u200b\\u2067\\ufeff\\u2028"),
        ("\udc80\u3164\ufe0f\U000e0041", "\\udc80\\u3164\\ufe0f\\U000e0041"),
    ],
)
def test_only_visible_characters_are_shown_as_they_are(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(shown) == shown
