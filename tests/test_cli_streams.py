"""`-` is a model from standard input or to standard output; options that do not exist are met by what was meant."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, QUANTIZED, SENTENCE, run, written

from edge_opt.comparison.compare import compare

DISAGREES = """
subgraph main (%x: float32[2,4]) {
  %y: float32[4,2] = ABS(%x)
  return %y
}
"""


def piped(*arguments: object, given: bytes = b"", folder: Path) -> subprocess.CompletedProcess[bytes]:
    """A command with pipes at both ends; temporary files go where they can be looked for."""
    command = [sys.executable, "-m", "edge_opt", *map(str, arguments)]
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    apart = {"TMPDIR": str(scratch)}
    done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=120, env=apart)
    assert list(scratch.iterdir()) == []
    return done


@pytest.mark.parametrize("options", [[], ["-o", "-"], ["-o", "/dev/stdout"]])
def test_a_model_goes_through_a_pipe(tmp_path: Path, options: Sequence[str]) -> None:
    done = piped("convert", "-", *options, given=DEMO.read_bytes(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert compare(DEMO, done.stdout).bitwise
    assert b"standard input (682 KiB) -> standard output" in done.stderr
    assert b"5 of 5 sites converted" in done.stderr


def test_from_a_file_to_a_pipe_and_from_a_pipe_to_a_file(tmp_path: Path) -> None:
    out = piped("convert", QUANTIZED, "-o", "-", folder=tmp_path)
    assert out.stdout[4:8] == b"TFL3"
    into = piped("convert", "-", "-o", tmp_path / "o.tflite", given=DEMO.read_bytes(), folder=tmp_path)
    assert b"5 of 5 sites converted" in into.stdout
    assert (tmp_path / "o.tflite").read_bytes()[4:8] == b"TFL3"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [("-", "standard input could not be kept in "), (DEMO, "the copy of standard output in ")],
)
def test_a_full_folder_of_temporary_files_is_told_from_a_full_output(
    tmp_path: Path, source: object, sentence: str
) -> None:
    command = [sys.executable, "-m", "edge_opt", "convert", str(source), "-o", "-", "--verify", "none"]
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]
    apart = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(limited, input=DEMO.read_bytes(), capture_output=True, check=False, env=apart)
    assert done.returncode == 5
    assert done.stderr.decode().splitlines()[-1].startswith(f"{SENTENCE}{sentence}{tmp_path}")
    assert b"TMPDIR" in done.stderr


def test_a_dry_run_writes_no_model_anywhere(tmp_path: Path) -> None:
    done = piped("convert", "-", "--dry-run", "--json", given=DEMO.read_bytes(), folder=tmp_path)
    assert done.stdout.startswith(b"{")


@pytest.mark.parametrize("command", [["inspect"], ["explain"], ["shapes"], ["compare", DEMO]])
def test_what_looks_at_a_model_takes_it_from_a_pipe_and_writes_one_json_object_to_another(
    tmp_path: Path, command: Sequence[object]
) -> None:
    done = piped(*command, "-", "--json", given=DEMO.read_bytes(), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["convert", "-", "--json"], "--json and the model both go to standard output"),
        (["convert", DEMO, "-o", "-", "--json"], "--json and the model both go to standard output"),
        (["compare", "-", "-"], "standard input holds one model"),
        (["convert", "-"], "standard input is empty"),
    ],
)
def test_what_a_pipe_cannot_give_is_refused(tmp_path: Path, command: Sequence[object], sentence: str) -> None:
    done = piped(*command, folder=tmp_path)
    assert done.returncode in (2, 3)
    assert done.stderr.decode().startswith(SENTENCE)
    assert sentence in (done.stderr + done.stdout).decode()


def test_a_failed_conversion_leaves_the_pipe_empty(tmp_path: Path) -> None:
    model = written(tmp_path, DISAGREES).read_bytes()
    done = piped("convert", "-", "--require-match", given=model, folder=tmp_path)
    assert (done.returncode, done.stdout) == (4, b"")


def test_shapes_takes_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = written(tmp_path, DISAGREES)
    for kind, code in (("prefill_decode", 1), ("embedder", 0)):
        parts = {"prefill_decode": DEMO, "embedder": DEMO, kind: wrong}
        made = [model_part(name, path.read_bytes()) for name, path in parts.items()]
        (tmp_path / "model.litertlm").write_bytes(bundle(made))
        assert run(capsys, "shapes", tmp_path / "model.litertlm").code == code, kind


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("--overwrite", "--force"),
        ("--ouput", "--output"),
        ("--row-per-tile", "--rows-per-tile"),
        ("--forme", "--force or --form"),
        ("--xyzzy", None),
    ],
)
def test_an_option_that_does_not_exist_is_met_by_the_one_that_was_meant(
    unknown: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(capsys, "convert", DEMO, unknown).failed_in_one_sentence(2)
    assert ("did you mean" in said) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in said
