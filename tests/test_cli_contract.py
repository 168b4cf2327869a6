"""What holds for every command: help, exit codes, one JSON object, one sentence for an error, quiet when piped."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from cli_runs import DEMO, NO_ATTENTION, SENTENCE, run, run_apart, written
from text_parser import parse

import edge_opt
from edge_opt import cli, inspection, schema
from edge_opt.attention.block import FORM_NAMES
from edge_opt.base.errors import UsageError
from edge_opt.build import build
from edge_opt.cli import app, models, options, output, phones
from edge_opt.cli.options import OPTIONS as WORDS
from edge_opt.cli.options import in_options
from edge_opt.comparison.compare import Backend, compare
from edge_opt.conversion import Verify, convert
from edge_opt.conversion.container import Sections
from edge_opt.ir import save
from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.tuning import tune
from edge_opt.passes import PASSES
from edge_opt.targets import load_target, target_names

Captured = pytest.CaptureFixture[str]

ROOMS = [Path(folder) for package in (edge_opt, schema) for folder in package.__path__]
COMMANDS = ("convert", "inspect", "compare", "shapes", "explain", "golden", "passes", "targets", "demo")
OPTIONS = {
    "convert": (
        "--output --target --passes --skip --signatures --verify --sections --json --dry-run --require-match "
        "--require-all --force --quiet"
    ),
    "inspect": "--json",
    "compare": "--backend --runs --seed --atol --rtol --json",
    "shapes": "--json",
    "explain": "--json",
    "demo": "--force",
}
# Help needs none of these; each costs more than all the rest together.
HEAVY = "numpy rich flatbuffers ai_edge_litert torch tensorflow edge_opt.schema edge_opt.ir"


# --- help ---


def test_help_names_every_command_and_the_exit_codes(capsys: Captured) -> None:
    ran = run(capsys, "--help")
    assert (ran.code, ran.err) == (0, "")
    for command in COMMANDS:
        assert f"  {command} " in ran.out
    assert "Exit codes: 0 done; 1 a difference" in ran.out


def test_help_is_printed_by_the_program_alone_and_by_the_word(capsys: Captured) -> None:
    shown = run(capsys, "--help")
    assert run(capsys) == shown
    assert run(capsys, "help") == shown
    assert run(capsys, "help", "golden", "check") == run(capsys, "golden", "check", "--help")
    assert run(capsys, "-V") == run(capsys, "--version")


def commands(group: Any = None) -> dict[str, Any]:
    """Every command by its name, as typer has it."""
    found = {}
    for name, command in (group or typer.main.get_command(app.app)).commands.items():
        found |= commands(command) if hasattr(command, "commands") else {name: command}
    return found


def test_every_command_is_in_the_help_and_is_not_cut(capsys: Captured) -> None:
    listed = run(capsys, "--help").out.partition("Models:")[2]
    for name in typer.main.get_command(app.app).commands:  # type: ignore[attr-defined]
        assert f"\n  {name} " in listed
    assert "..." not in listed


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_a_command_names_its_options(command: str, capsys: Captured) -> None:
    ran = run(capsys, command, "--help")
    assert ran.code == 0
    for option in OPTIONS[command].split():
        assert option in ran.out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"], ["golden", "-h"]])
def test_help_loads_neither_the_library_nor_its_dependencies(arguments: list[str]) -> None:
    code = (
        f"import sys; from edge_opt.cli import main; main({arguments}); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY.split()) & set(done.stderr.split())


def test_options_with_fixed_values_name_those_of_the_library() -> None:
    assert get_args(options.Verify) == get_args(Verify)
    assert get_args(options.Sections) == get_args(Sections)
    assert get_args(options.Backend) == get_args(Backend)
    assert get_args(options.Form) == FORM_NAMES


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (models.convert, convert),
        (models.compare, compare),
        (models.compare, compare_on_npu),
        (phones.build, build),
        (phones.tune, tune),
    ],
)
def test_the_defaults_of_the_command_line_are_those_of_the_library(
    command: Callable[..., int], function: Callable[..., object]
) -> None:
    ours = signature(command).parameters
    for name, parameter in signature(function).parameters.items():
        if parameter.default not in (None, Parameter.empty, ()) and name in ours:
            assert ours[name].default == parameter.default, name


def test_every_command_has_the_same_words() -> None:
    """`--json` wherever something is answered, `-q` wherever a model is worked on, one text for each option."""
    words = {
        name: {word for option in command.params for word in option.opts}
        for name, command in commands().items()
    }
    assert [name for name in words if "--json" not in words[name]] == ["demo"]
    assert [name for name in words if "-q" not in words[name]] == [
        "inspect",
        "explain",
        "demo",
        "passes",
        "targets",
    ]
    for word in ("--json", "--quiet", "--force", "--report", "--verify", "--sections", "--sdk", "--layers"):
        helps = {o.help for c in commands().values() for o in c.params if word in o.opts}
        assert len(helps) == 1, word
    assert not [name for name in words if {"--signature", "--blocks"} & words[name]]


def test_the_target_has_one_default_but_where_a_compiler_or_nothing_is_asked_for() -> None:
    defaults = {n: o.default for n, c in commands().items() for o in c.params if "--target" in o.opts}
    lint = dict.fromkeys(("inspect", "build"))
    assert defaults == {"convert": "generic", "explain": "generic", "tune": "qualcomm-htp", **lint}


def test_options_of_the_npu_are_a_group_of_the_help(capsys: Captured) -> None:
    helped = run(capsys, "compare", "--help").out
    head, rest = helped.split("The CPU and its kernels:")
    cpu, npu = rest.split("The NPU and its compiler:")
    assert "--atol" in head
    assert "--backend" in cpu
    assert "--npu-db" in npu
    assert "--sdk" not in head + cpu


def test_version_is_that_of_the_package(capsys: Captured) -> None:
    """And `python -m` is the same command."""
    for ran in (run(capsys, "--version"), run_apart("--version")):
        assert (ran.code, ran.out, ran.err) == (0, f"edge-opt {edge_opt.__version__}\n", "")


# --- usage errors ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["conver"], "No such command 'conver', did you mean 'convert'?"),
        (["convert"], "Missing argument 'FILE'"),
        (["compare", "a"], "Missing argument 'B'"),
        (["compare", "a", "b", "c"], "unexpected extra argument"),
        (["convert", "a", "--forse"], "did you mean --force"),
        (["compare", "a", "b", "--sdx"], "did you mean --sdk"),
        (["passes", "--quiet"], "No such option: --quiet (see"),
        (["golden", "check", "--foo"], "No such option: --foo (see"),
        (["convert", "a", "--verify", "fll"], "'fll' is not one of 'regions', 'exhaustive', 'full', 'none'"),
        (["convert", "a", "--shape", "x=1,b"], "'x=1,b' is no NAME=1,128,640"),
        (["convert", "a", "--shape", "x"], "'x' is no NAME=1,128,640"),
        (["convert", "a", "--passes", ","], "it names nothing"),
        (["compare", "a", "b", "--runs", "0"], "--runs"),
        (["compare", "a", "b", "--backend", "xnpack"], "'xnpack' is not one of 'xnnpack'"),
        (["golden"], "Missing command"),
        (["shapes"], "Missing argument 'FILE'"),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: Captured
) -> None:
    said = run(capsys, *arguments).failed_in_one_sentence(2)
    assert sentence in said
    assert "Invalid value: " not in said, "of options that do not go together, no single one is wrong"
    assert "--help`" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "gneric"], "target 'gneric' does not exist, did you mean 'generic'?"),
        (["--passes", "mha_to_shaa"], "pass 'mha_to_shaa' does not exist, did you mean 'mha_to_sha'?"),
        (["--skip", "mha-to-sha"], "pass 'mha-to-sha' does not exist, did you mean 'mha_to_sha'?"),
        (["--signatures", "decod"], "signature 'decod' does not exist, did you mean 'decode'?"),
        (["--signatures", "xyz"], "signature 'xyz' does not exist, there are: prefill_8, decode"),
    ],
)
def test_unknown_names_suggest_the_closest(arguments: list[str], sentence: str, capsys: Captured) -> None:
    ran = run(capsys, "convert", DEMO, "--dry-run", *arguments)
    assert ran.failed_in_one_sentence(2) == sentence


def test_a_list_takes_a_name_and_shows_all_about_it(tmp_path: Path, capsys: Captured) -> None:
    shown = run(capsys, "passes", "tile_rows")
    assert shown.code == 0
    assert f"tile_rows {PASSES['tile_rows'].summary}." in shown.out
    assert "Proved to be bitwise" in shown.out
    assert "Sites: " in shown.out
    assert [one["name"] for one in run(capsys, "passes", "tile_rows", "--json").json["passes"]] == [
        "tile_rows"
    ]
    shown = run(capsys, "targets", "qualcomm-htp")
    (tmp_path / "mine.toml").write_text(shown.out)
    assert load_target(str(tmp_path / "mine.toml")) == load_target("qualcomm-htp"), "a target file"
    said = run(capsys, "targets", "qualcomm-htp", "--json").json["targets"]
    assert [one["on_chip_bytes"] for one in said] == [8388608]
    for word, names in (("pass", "mha_to_shaa"), ("target", "qualcom-htp")):
        ran = run(capsys, {"pass": "passes", "target": "targets"}[word], names)
        assert ran.failed_in_one_sentence(2).startswith(f"{word} '{names}' does not exist, did you mean")


# --- --json ---


def test_json_is_one_object_also_for_errors(tmp_path: Path, capsys: Captured) -> None:
    ran = run(capsys, "inspect", tmp_path / "missing.tflite", "--json")
    sentence = ran.failed_in_one_sentence(3)
    assert ran.json == {"error": {"type": "ModelFormatError", "message": sentence, "exit_code": 3}}
    ran = run(capsys, "inspect", "--json", "--nonsense")
    assert ran.json["error"]["exit_code"] == ran.code == 2
    ran = run(capsys, "inspect", "--", "--json")
    ran.failed_in_one_sentence(3)
    assert ran.out == "", "behind two dashes it is the name of a file"


def test_figures_that_are_not_finite_are_null(capsys: Captured) -> None:
    output.say_json({"a": [float("inf"), {"b": float("nan")}], "c": (1.5, True, None)})
    said = "".join(capsys.readouterr().out.split())
    assert said == '{"a":[null,{"b":null}],"c":[1.5,true,null]}'


# --- what is printed where ---


def test_on_a_pipe_there_is_neither_progress_nor_colour(tmp_path: Path) -> None:
    ran = run_apart("convert", DEMO, "-o", tmp_path / "out.tflite")
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    assert "5 of 5 sites converted" in ran.out


@pytest.mark.parametrize(("options", "shown"), [([], True), (["-q"], False)])
def test_progress_goes_to_a_terminal_on_standard_error(
    options: list[str], shown: bool, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    given = ["convert", str(DEMO), "-o", str(tmp_path / "o.tflite"), *options]
    command, environment = [sys.executable, "-m", "edge_opt", *given], {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=False)
    os.close(theirs)
    drawn = b""
    while piece := _read(ours):
        drawn += piece
    os.close(ours)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert (b"rewriting" in drawn) is shown
    assert (done.stdout != b"") is shown


@pytest.mark.parametrize(
    ("wish", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_verdict_has_a_colour_on_a_terminal_that_wants_it(wish: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "edge_opt", "shapes", str(DEMO)]
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**plain, "TERM": "xterm", **wish}
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(theirs)
    said = _read(ours)
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"all as the file says" in said
    assert (b"\x1b[32m" in said) is coloured


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side of a terminal is closed
        return b""


def test_quiet_prints_errors_only(tmp_path: Path, capsys: Captured) -> None:
    ran = run(capsys, "convert", DEMO, "-o", tmp_path / "out.tflite", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    run(capsys, "convert", DEMO, "-o", tmp_path / "out.tflite", "-q").failed_in_one_sentence(2)


def test_names_from_a_model_cannot_steer_the_terminal(tmp_path: Path, capsys: Captured) -> None:
    hostile = parse(NO_ATTENTION)
    hostile.signatures[0].key = "red\x1b[31m\x9b"
    hostile.subgraphs[0].outputs[0].name = "bell\x07"
    model = tmp_path / "model.tflite"
    save(hostile, model)
    for command, *given in (["inspect"], ["explain"], ["convert", "--dry-run"]):
        ran = run(capsys, command, model, *given)
        assert ran.code == 0
        assert "red\\x1b[31m\\x9b" in ran.out
        assert not {"\x1b", "\x9b", "\x07"} & set(ran.out)
    ran = run(capsys, "inspect", tmp_path / "\x1b[31m.tflite")
    assert "\\x1b[31m" in ran.failed_in_one_sentence(3)


def test_a_name_that_the_terminal_cannot_encode_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "\N{GREEK SMALL LETTER ALPHA}"
    folder.mkdir()
    model = written(folder, NO_ATTENTION)
    ran = run_apart("inspect", model, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ran.code, ran.err) == (0, "")
    assert "\\u03b1" in ran.out


# --- the end of a command ---


def test_an_interrupt_is_one_line_and_exit_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspection, "inspect", interrupted)
    ran = run(capsys, "inspect", DEMO)
    assert (ran.code, ran.out, ran.err) == (130, "", "edge-opt: interrupted\n")
    told = json.loads(run(capsys, "inspect", DEMO, "--json").out)
    assert told["error"] == {"type": "KeyboardInterrupt", "message": "interrupted", "exit_code": 130}


def test_a_note_of_an_interrupt_is_said_with_it(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*_: object, **__: object) -> None:
        error = KeyboardInterrupt()
        error.add_note("run it again to go on")
        raise error

    monkeypatch.setattr(inspection, "inspect", interrupted)
    assert run(capsys, "inspect", DEMO).err == "edge-opt: interrupted; run it again to go on\n"


def test_a_signal_while_a_command_is_parsed_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """typer's own `main` makes a number of its own of the interrupt."""

    def asked_to_end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(app.Command, "parse_args", asked_to_end)
    ran = run(capsys, "inspect", DEMO, "--json")
    assert ran.code == 143
    assert json.loads(ran.out)["error"]["exit_code"] == 143
    assert ran.err == "edge-opt: ended by SIGTERM\n"
    assert run(capsys, "inspect", DEMO).err == "edge-opt: ended by SIGTERM\n"


@pytest.mark.parametrize("wants", [False, True])
def test_a_bug_is_one_sentence_that_says_how_to_see_more(
    wants: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seven\nby zero")

    monkeypatch.setattr(inspection, "inspect", broken)
    monkeypatch.setenv("EDGE_OPT_TRACEBACK", "1" if wants else "")
    ran = run(capsys, "inspect", DEMO)
    assert ran.code == 70
    last = ran.err.splitlines()[-1]
    assert last.startswith(f"{SENTENCE}this is a bug in edge-opt, please report it")
    assert "ZeroDivisionError: seven by zero" in last
    assert "EDGE_OPT_TRACEBACK=1" in last
    assert ("Traceback" in ran.err) is wants
    assert wants or len(ran.err.splitlines()) == 1


def test_a_reader_that_goes_away_ends_the_command_in_silence() -> None:
    command = [sys.executable, "-m", "edge_opt", "passes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["passes"],
        ["--help"],
        ["inspect", DEMO, "--json"],
        ["convert", DEMO, "-o", "-", "-q", "--verify", "none"],
    ],
)
def test_standard_output_that_cannot_be_written_is_exit_5(arguments: list[object]) -> None:
    command = [sys.executable, "-m", "edge_opt", *map(str, arguments)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr == f"{SENTENCE}standard output could not be written: No space left on device\n"


def test_lists_are_generated_from_the_code(capsys: Captured) -> None:
    passes, targets = run(capsys, "passes"), run(capsys, "targets")
    for name, chosen in PASSES.items():
        assert any(name in line and chosen.summary in line for line in passes.out.splitlines())
    for name in target_names():
        assert name in targets.out


@pytest.mark.parametrize("command", ["inspect", "explain", "shapes", "convert", "compare"])
def test_a_line_break_in_a_name_forges_no_line(command: str, tmp_path: Path, capsys: Captured) -> None:
    model = parse(
        "signature main = #0 (q=%q, v=%v) -> (r=%r)\n"
        "subgraph main (%q: float32[1,4,6,8], %v: float32[1,4,8,5]) {\n"
        "  %s: float32[1,4,6,8] = MUL(%q, %q)\n  %p: float32[1,4,6,8] = SOFTMAX(%s) {beta: 1.0}\n"
        "  %r: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)\n  return %r\n}"
    )
    model.signatures[0].key = "main\nForged"
    for tensor in model.subgraphs[0].tensors:
        tensor.name += "\nForged"
    path = tmp_path / "m.tflite"
    save(model, path)
    others = {"compare": [str(path)], "convert": ["--dry-run", "--verify", "none"]}.get(command, [])
    ran = run(capsys, command, path, *others)
    lines = (ran.out + ran.err).splitlines()
    assert lines
    assert not [line for line in lines if line.startswith("Forged")]


def test_errors_name_the_words_of_who_asked(tmp_path: Path, capsys: Captured) -> None:
    """The library its arguments, the command line its options."""
    output = tmp_path / "out.tflite"
    output.touch()
    for command, word, flag in (
        (["convert", DEMO, "-o", output], "pass overwrite=True", "pass --force"),
        (
            ["convert", DEMO, "--require-match", "--passes", "tile_rows"],
            "require_match=True",
            "--require-match",
        ),
    ):
        told = run(capsys, *command).err
        assert flag in told
        assert word not in told
    with pytest.raises(UsageError, match="overwrite=True"):
        convert(DEMO, output)


def test_an_interrupt_during_the_imports_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "edge_opt.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "edge_opt.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert cli.main(["--version"]) == 130
    assert capsys.readouterr().err == "edge-opt: interrupted\n"


def test_words_of_the_library_become_options_and_others_stay() -> None:
    for text, expected in (
        ("verify='none', evaluate=False", "--verify none, --no-evaluate"),
        ("give cache=32 or more, or seconds=... for it", "give --cache 32 or more, or --seconds for it"),
        ("chip=SM8750 and flags=... with sdk=DIR", "--soc SM8750 and --flag with --sdk DIR"),
        ("load(path, model='prefill_decode')", "load(path, model='prefill_decode')"),
        ("--target=x 'target=x' retarget=x", "--target=x 'target=x' retarget=x"),
    ):
        assert in_options(text) == expected


def test_every_argument_that_a_message_names_is_an_option() -> None:
    """What a command takes, messages may name: each has a word on the command line, which exists."""
    words = {
        word
        for command in commands().values()
        for o in command.params
        for word in (*o.opts, *o.secondary_opts)
    }
    assert set(WORDS.values()) <= words
    sources = [path.read_text() for room in ROOMS for path in room.rglob("*.py")]
    named = {
        name for text in sources for name in re.findall(r"\b([a-z_]+)=(?:\.\.\.|True (?:asks|to))", text)
    }
    assert named - {"plugin"} <= set(WORDS)


def test_what_the_list_of_commands_says_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for line in run(capsys, "--help").out.splitlines():
        assert line.count("(") == line.count(")"), line
