"""What processes, threads and signals share: errors and models that are pickled, compilers, the collector."""

import gc
import os
import pickle
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest
from cli_runs import DEMO, run, written
from terminal_signals import gone, started

import edge_opt
from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.base.processes import killed_by
from edge_opt.base.words import signal_name
from edge_opt.conversion import SitesLeftError, convert
from edge_opt.ir import load
from edge_opt.ir.opening import rare_collections
from edge_opt.ir.text import to_text

CONSTANT = """
subgraph main (%x: float32[1,4]) {
  %y: float32[1,4] = MUL(%x, float32{1, 2, 3, 4})
  return %y
}"""


def kinds(base: type[EdgeOptError] = EdgeOptError) -> list[type[EdgeOptError]]:
    """Every type of error of the package."""
    if base is EdgeOptError:
        for module in walk_packages(edge_opt.__path__, "edge_opt."):
            if module.name.split(".")[1] not in ("__main__", "testdata"):
                import_module(module.name)
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


def test_every_error_comes_out_of_another_process_as_it_was() -> None:
    found = set(kinds())
    assert len(found) > 10
    for kind in found:
        error = pickle.loads(pickle.dumps(kind("a sentence")))
        assert (type(error), str(error)) == (kind, "a sentence")


def test_an_error_with_its_result_is_pickled_too(tmp_path: Path) -> None:
    model = written(tmp_path, CONSTANT)
    with pytest.raises(EdgeOptError) as caught:
        convert(model, require_match=True, verify="none")
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.result.to_dict() == caught.value.result.to_dict()
    assert not isinstance(error, SitesLeftError)


# --- a model in another process ---


def test_a_pickled_model_has_no_file(tmp_path: Path) -> None:
    path = written(tmp_path, CONSTANT)
    with pytest.raises(ModelFormatError, match="was closed"):
        to_text(pickle.loads(pickle.dumps(load(path))))


def test_a_model_gives_its_file_back(tmp_path: Path) -> None:
    path = written(tmp_path, CONSTANT)
    with load(path) as model:
        assert model.file is not None
        assert model.file.source.fd is not None
    assert model.file.source.fd is None
    with pytest.raises(ModelFormatError, match="was closed"):
        to_text(model)


# --- the collector ---


def test_overlapping_blocks_leave_the_collector_as_they_found_it() -> None:
    before, inside, go = gc.get_threshold(), threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with rare_collections():
        go.set()
        thread.join()
        assert gc.get_threshold() != before, "this block is still open"
    assert gc.get_threshold() == before


# --- signals, pipes and limits ---


def test_signals_without_a_name_are_numbers() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert killed_by(-(signal.SIGRTMIN + 1)) == f"killed by signal {signal.SIGRTMIN + 1}"


_COMPILING = """
from edge_opt.base.processes import run
run(["sh", "-c", "echo $$; echo $$ > " + sys.argv[1] + "; exec sleep 60"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of the end of its parent")
def test_a_compiler_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with started(_COMPILING, told) as parent:
        while not (told.exists() and told.read_text().strip()):
            assert parent.poll() is None
        parent.kill()
    assert gone(int(told.read_text()))


def test_a_pipe_that_nobody_wrote_to_yet_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ends: list[Any] = [os.open(pipe, os.O_RDWR)]
    try:
        for command in ("inspect", "convert"):
            ran = run(capsys, command, pipe)
            assert "is a pipe, not a file" in ran.failed_in_one_sentence(3)
        os.write(ends[0], DEMO.read_bytes()[:64])
        assert "is a pipe, not a file" in run(capsys, "inspect", pipe).failed_in_one_sentence(3)
    finally:
        os.close(ends[0])


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "0"])
def test_seconds_of_a_proof_that_no_clock_takes_are_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(capsys, "convert", DEMO, "--dry-run", "--proof-seconds", seconds)
    assert "the seconds of a proof must be more than 0 and at most 1,000,000" in ran.failed_in_one_sentence(2)


@pytest.mark.parametrize("name", ["out.onnx", "out.litertlm", "OUT.TASK"])
def test_an_output_named_as_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be written: the result is a \.tflite, name it so"):
        convert(DEMO, tmp_path / name, verify="none")
    assert convert(DEMO, tmp_path / "out.bin", verify="none").output == str(tmp_path / "out.bin")
