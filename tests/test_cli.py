"""What holds for every command: help, exit codes, one JSON object, one sentence for an error, quiet when piped."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path

import pytest
from attention_checks import attention_text
from cli_runs import (
    DEMO,
    EDGE_OPT,
    NO_ATTENTION,
    SENTENCE,
    Captured,
    Patch,
    commands,
    in_terminal,
    run,
    run_apart,
    written,
)
from syrupy.assertion import SnapshotAssertion

import edge_opt
from edge_opt import cli, inspection
from edge_opt.base.errors import UsageError
from edge_opt.building import build
from edge_opt.cli import models, phones
from edge_opt.cli.app import in_options
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.npu import tune
from edge_opt.passes import PASSES
from edge_opt.targets import load_target, target_names

COMMANDS = (
    "convert", "inspect", "compare", "build", "evaluate", "profile", "tune", "demo", "passes", "targets", "doctor",
    "golden record", "golden check",
)  # fmt: skip
# Help needs none of these; each costs more than all the rest together.
HEAVY = "numpy rich flatbuffers ai_edge_litert torch tensorflow edge_opt.schema edge_opt.ir"
NOTED = KeyboardInterrupt()
NOTED.add_note("run it again to go on")


@pytest.mark.parametrize("command", ["", "golden", *COMMANDS])
def test_help_says_what_is_taken(
    command: str, capsys: Captured, monkeypatch: Patch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(capsys, *command.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == snapshot
    assert not re.search(r"\w\.\.\.\n", ran.out.partition("\n")[2]), "a text is cut"
    assert not re.search(r"<(path|str|int|float|list)\b", ran.out), "a type of Python"


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("help", "--help"),
        ("help convert", "convert --help"),
        ("help golden", "golden --help"),
        ("help golden record", "golden record --help"),
        ("golden help", "golden --help"),
        ("golden help record", "golden record --help"),
        ("help help", "--help"),
    ],
)
def test_the_command_help_prints_the_same_as_the_option(
    given: str, same: str, capsys: Captured
) -> None:
    ran = run(capsys, *given.split())
    assert (ran.code, ran.err) == (0, "")
    assert ran == run(capsys, *same.split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["convert", "--help"], ["golden", "-h"]]
)
def test_help_loads_neither_the_library_nor_its_dependencies(arguments: list[str]) -> None:
    code = f"import sys, edge_opt.cli; edge_opt.cli.main({arguments}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY.split()) & set(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (models.convert, convert),
        (models.compare, compare),
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
        name: {w for option in one.params for w in option.opts} for name, one in commands().items()
    }
    assert [name for name in words if "--json" not in words[name]] == ["demo"]
    assert {name for name in words if "-q" not in words[name]} == {
        "inspect",
        "demo",
        "passes",
        "targets",
        "doctor",
    }
    for word in ("--json", "--quiet", "--force", "--report", "--verify", "--sdk", "--shape"):
        helps = {o.help for c in commands().values() for o in c.params if word in o.opts}
        assert len(helps) == 1, word
    assert sorted(commands()) == sorted(COMMANDS)


def test_version_is_that_of_the_package(capsys: Captured) -> None:
    """And `python -m` is the same command."""
    for ran in (run(capsys, "--version"), run(capsys, "-V"), run_apart("--version")):
        assert (ran.code, ran.out, ran.err) == (0, f"edge-opt {edge_opt.__version__}\n", "")
    assert run(capsys) == run(capsys, "--help")
    told = run(capsys, "--version", "--json").json
    assert told["edge-opt"] == edge_opt.__version__
    assert told["ai-edge-litert"]
    sentence = "--json has no place before the command"
    assert run(capsys, "--json", "passes").failed_in_one_sentence(2).startswith(sentence)


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("conv", "convert"),
        ("convert --target q", "qualcomm-htp"),
        ("convert --target SM87", "SM8750"),
        ("build --soc Tensor_G6", "Tensor_G6"),
        ("convert IN --skip mask_to", "mask_to_add"),
    ],
)
def test_the_shell_completes_commands_targets_chips_and_passes(
    line: str, answers: str, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setenv("_EDGE_OPT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"edge-opt {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    with pytest.raises(SystemExit, match="0"):
        cli.main([])
    assert capsys.readouterr().out.split() == [answers]


@pytest.mark.parametrize(
    "line",
    [
        "conver",
        "convert",
        "convert IN OUT -o OUT",
        "compare a",
        "compare a b c",
        "convert a --forse",
        "passes --quiet",
        "convert a --verify fll",
        "convert a --shape x=1,b",
        "convert a --shape x=1 --shape x=2",
        "convert a --skip ,",
        "compare a b --seed -1",
        "compare a b --soc SM8750",
        "compare a b --on npu --generate 2",
        "golden",
        "build m -o o.litertlm --soc SM8750 --set x",
        "convert DEMO --dry-run --target gneric",
        "convert DEMO --dry-run --skip mha-to-sha",
        "convert DEMO --dry-run --signatures decod",
        "convert DEMO --dry-run --signatures xyz",
        "convert DEMO -o x.litertlm",
        "passes mha_to_shaa",
        "targets qualcom-htp",
        "golden check g.npz m.tflite",
    ],
)
def test_usage_errors_are_one_sentence(
    line: str, capsys: Captured, snapshot: SnapshotAssertion
) -> None:
    assert (
        run(capsys, *line.replace("DEMO", str(DEMO)).split()).failed_in_one_sentence(2) == snapshot
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["convert", DEMO, "-o", ""], "'-o'"),
        (["convert", DEMO, ""], f"'{DEMO}'"),
        (["convert", ""], "'convert'"),
        (["inspect", DEMO, "--node-data="], "'--node-data'"),
        (["golden", "record", DEMO, "--output", ""], "'--output'"),
        (["build", "m", "-o", "o.litertlm", "--soc", "SM8750", "--work", ""], "'--work'"),
    ],
)
def test_an_empty_value_is_refused_by_every_command(
    words: list[object], named: str, capsys: Captured
) -> None:
    sentence = run(capsys, *words).failed_in_one_sentence(2)
    assert sentence == f"empty value after {named}: give one, or leave it out"


def test_an_output_that_standard_output_is_redirected_to_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        words = ["convert", DEMO, "-o", "/dev/stdout", "--force", "--verify", "none"]
        done = subprocess.run(
            [*EDGE_OPT, *words], stdout=file, stderr=subprocess.PIPE, check=False, text=True
        )
    assert done.returncode == 2
    assert "/dev/stdout is where messages are printed: give another output" in done.stderr
    assert log.read_bytes() == b""


def test_errors_name_the_words_of_who_asked(tmp_path: Path, capsys: Captured) -> None:
    """The library its arguments, the command line its options."""
    destination = tmp_path / "out.tflite"
    destination.touch()
    assert "pass --force" in run(capsys, "convert", DEMO, "-o", destination).failed_in_one_sentence(
        2
    )
    with pytest.raises(UsageError, match="overwrite=True"):
        convert(DEMO, destination)
    for text, expected in (
        ("verify='none', evaluate=False", "--verify none, --no-evaluate"),
        ("give cache=32 or more, or work=... for it", "give --cache 32 or more, or --work for it"),
        ("chip=SM8750 and flags=... with sdk=DIR", "--soc SM8750 and --flag with --sdk DIR"),
        ("load(path, model='prefill_decode')", "load(path, model='prefill_decode')"),
        ("--target=x 'target=x' retarget=x", "--target=x 'target=x' retarget=x"),
    ):
        assert in_options(text) == expected


def test_every_command_and_option_that_a_message_names_exists() -> None:
    words = {w for c in commands().values() for o in c.params for w in (*o.opts, *o.secondary_opts)}
    of_others = {"--no-deps", "--force-reinstall", "--local-dir"}  # those of pip and hf
    texts = [
        node.value
        for package in (edge_opt, cli)
        for folder in package.__path__
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {
        w for text in texts for w in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b(?![_=])", text)
    }
    assert named - {"--no"} <= words | of_others | {"--help", "--version"}
    called = {w for text in texts for w in re.findall(r"`edge-opt (\w+)", text)}
    assert called <= {name.split()[0] for name in commands()}


def test_json_is_one_object_also_for_errors(tmp_path: Path, capsys: Captured) -> None:
    ran = run(capsys, "inspect", tmp_path / "missing.tflite", "--json")
    sentence = ran.failed_in_one_sentence(3)
    assert ran.json == {"error": {"type": "ModelFormatError", "message": sentence, "exit_code": 3}}
    ran = run(capsys, "inspect", "--json", "--nonsense")
    assert ran.json["error"]["exit_code"] == ran.code == 2
    assert run(capsys, "--json", "inspect").json["error"]["exit_code"] == 2
    ran = run(capsys, "inspect", "--", "--json")
    ran.failed_in_one_sentence(3)
    assert ran.out == "", "behind two dashes it is the name of a file"


@pytest.mark.parametrize(("options", "shown"), [([], True), (["-q"], False)])
def test_progress_goes_to_a_terminal_on_stderr(
    options: list[str], shown: bool, tmp_path: Path
) -> None:
    model = written(tmp_path, attention_text())
    words = ("convert", model, tmp_path / "o.tflite", "--verify", "none", *options)
    done, drawn = in_terminal([*EDGE_OPT, *words], "stderr")
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert ((b"rewriting" in drawn), (done.stdout != b"")) == (shown, shown)


@pytest.mark.parametrize(
    ("env", "hued"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_verdict_has_a_colour_on_a_terminal_that_wants_it(
    env: dict[str, str], hued: bool, model: Path
) -> None:
    done, said = in_terminal([*EDGE_OPT, "inspect", model, "--shapes"], "stdout", **env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"all match the file" in said
    assert (b"\x1b[32m" in said) is hued


def test_a_pipe_gets_neither_progress_nor_colour_and_quiet_only_errors(
    tmp_path: Path, capsys: Captured
) -> None:
    ran = run_apart("convert", DEMO, tmp_path / "out.tflite")
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    assert "5 of 5 attention blocks split" in ran.out
    given = ("convert", DEMO, "-o", tmp_path / "quiet.tflite", "-q", "--verify", "none")
    ran = run(capsys, *given)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    outputs = [(tmp_path / name).read_bytes() for name in ("out.tflite", "quiet.tflite")]
    assert outputs[0] == outputs[1], "an output is an argument or an option"
    run(capsys, *given).failed_in_one_sentence(2)


def test_a_name_that_the_terminal_cannot_encode_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "\N{GREEK SMALL LETTER ALPHA}"
    folder.mkdir()
    ran = run_apart(
        "inspect", written(folder, NO_ATTENTION), env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (ran.code, ran.err) == (0, "")
    assert "\\u03b1" in ran.out


def ends_with(error: BaseException | None) -> Callable[..., None]:
    """A library function that raises, or gets a signal."""

    def ending(*_: object, **__: object) -> None:
        if error is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise error

    return ending


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (NOTED, 130, "interrupted; run it again to go on"),
        (None, 143, "ended by SIGTERM"),
    ],
)
def test_an_interrupt_is_one_line_and_has_the_exit_code_of_its_signal(
    error: BaseException | None, code: int, said: str, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr(inspection, "inspect", ends_with(error))
    ran = run(capsys, "inspect", DEMO)
    assert (ran.code, ran.out, ran.err) == (code, "", f"edge-opt: {said}\n")
    told = run(capsys, "inspect", DEMO, "--json").json
    assert told["error"] == {"type": "KeyboardInterrupt", "message": said, "exit_code": code}


def test_an_interrupt_during_imports_is_a_sentence(monkeypatch: Patch, capsys: Captured) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "edge_opt.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "edge_opt.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert cli.main(["--version"]) == 130
    assert capsys.readouterr().err == "edge-opt: interrupted\n"


@pytest.mark.parametrize("wants", [False, True])
def test_a_bug_is_one_sentence(wants: bool, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr(inspection, "inspect", ends_with(ZeroDivisionError("seven\nby zero")))
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
    with subprocess.Popen(
        [*EDGE_OPT, "passes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["passes"], ["--help"], ["inspect", DEMO, "--json"]])
def test_standard_output_that_cannot_be_written_is_exit_5(arguments: list[object]) -> None:
    command = [*EDGE_OPT, *map(str, arguments)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert (
        done.stderr == f"{SENTENCE}standard output could not be written: No space left on device\n"
    )


def test_lists_are_generated_from_the_code_and_take_a_name(
    tmp_path: Path, capsys: Captured
) -> None:
    lines = run(capsys, "passes").out.splitlines()
    assert all(
        any(name in line and one.summary in line for line in lines) for name, one in PASSES.items()
    )
    assert all(name in run(capsys, "targets").out for name in target_names())
    name, chosen = next(iter(PASSES.items()))
    assert run(capsys, "passes", name).out.startswith(f"{name} {chosen.summary}.\n")
    assert [one["name"] for one in run(capsys, "passes", name, "--json").json["passes"]] == [name]
    for wrong in ("xyz", "mask*"):
        assert f"pass '{wrong}' does not exist" in run(
            capsys, "passes", wrong
        ).failed_in_one_sentence(2)
    (tmp_path / "mine.toml").write_text(run(capsys, "targets", "qualcomm-htp").out)
    assert load_target(str(tmp_path / "mine.toml")) == load_target("qualcomm-htp"), "a target file"
    said = run(capsys, "targets", "qualcomm-htp", "--json").json["targets"]
    assert [one["on_chip_bytes"] for one in said] == [8388608]
