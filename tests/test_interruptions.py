"""Whatever interrupts a conversion, the output is absent or whole, and the input as it was."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cli_runs import DEMO
from schema_models import names
from terminal_signals import gone, started

from edge_opt.conversion import convert

# Runs `convert`; argument 3 says in which call (function, how many before it) the process kills itself.
_DYING = """
import os, signal, sys
from pathlib import Path
from edge_opt.cli import main
source, target, (owner, name, left) = sys.argv[1], sys.argv[2], sys.argv[3].split()
owner, left = {"os": os, "path": Path}[owner], [int(left)]
function = getattr(owner, name)
def dying(*arguments, **options):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return function(*arguments, **options)
setattr(owner, name, dying)
sys.exit(main(["convert", source, "-o", target, "--verify", "none", "-q", "--force"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a copy of the demo model."""
    (tmp_path / "in.tflite").write_bytes(DEMO.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a conversion that nobody interrupts writes."""
    path = tmp_path_factory.mktemp("whole") / "out.tflite"
    convert(DEMO, path, verify="none")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("step", "before"),
    [("os pwrite 0", b"x"), ("os pwrite 2", None), ("path rename 0", b"it"), ("os fsync 1", b"it")],
)
def test_killed_at_any_step_of_writing(
    folder: Path, whole: bytes, step: str, before: bytes | None
) -> None:
    source, output = folder / "in.tflite", folder / "out.tflite"
    if before is not None:
        output.write_bytes(before)
    done = subprocess.run(
        [sys.executable, "-c", _DYING, source, output, step], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert source.read_bytes() == DEMO.read_bytes()
    assert (output.read_bytes() if output.exists() else None) in (before, whole)
    convert(source, output, verify="none", overwrite=True)
    assert output.read_bytes() == whole


# What is run says so in the moment when it begins, by a line.
_ANNOUNCED = """
from pathlib import Path
from edge_opt.cli import main
def announce(owner, name, line):
    function = getattr(owner, name)
    def announced(*arguments):
        print(line(*arguments), flush=True)
        return function(*arguments)
    setattr(owner, name, announced)
"""

_PROVING = """
from edge_opt.runtime import runner
from edge_opt.verification import examine
from edge_opt.verification.trial import Trial
run, endless = examine.run_versions, proof_models.endless()
examine.run_versions = lambda worker, *_, **options: run(worker, endless, endless, Trial(), **options)
announce(runner.ChildProcess, "exchange", lambda process, *_: process._child.pid)
sys.exit(main(["convert", sys.argv[1], "-o", sys.argv[2], "-q"]))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks the worker up in /proc")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_during_the_proof(
    folder: Path,
    sign: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # SIGKILL leaves scratch files, which must not stay on the machine.
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
    with started(_ANNOUNCED + _PROVING, folder / "in.tflite", folder / "out.tflite") as process:
        worker = int(process.stdout.readline())
        time.sleep(0.2)
        process.send_signal(sign)
        said = process.stderr.read()
    if sign is signal.SIGINT:
        assert (process.returncode, said) == (130, "edge-opt: interrupted\n")
    if sign is signal.SIGTERM:
        assert (process.returncode, said) == (143, "edge-opt: ended by SIGTERM\n")
    assert gone(worker)
    assert names(folder) == ["in.tflite"]


# The model in a bundle is copied to a scratch file, which the interpreter reads. The signal comes once all folders are
# there: Python cannot remove one that is being made.
_COMPARING = """
from bundles import bundle, model_part
from edge_opt.runtime.runner import Worker
Path(sys.argv[1]).write_bytes(bundle([model_part("prefill_decode", proof_models.endless())]))
announce(Worker, "run_calls", lambda *_: "comparing")
sys.exit(main(["compare", sys.argv[1], sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("sign", "end"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_scratch_files_go_when_the_process_ends(
    tmp_path: Path, sign: signal.Signals, end: int
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with started(
        _ANNOUNCED + _COMPARING, tmp_path / "endless.litertlm", env=environment
    ) as process:
        assert process.stdout.readline() == "comparing\n"
        copied = names(scratch)
        process.send_signal(sign)
        process.communicate()
    assert process.returncode == end
    assert copied != []
    assert names(scratch) == []


def test_an_output_on_another_file_system_is_the_same(folder: Path, whole: bytes) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == folder.stat().st_dev:
        pytest.skip("needs /dev/shm as a file system of its own")
    with TemporaryDirectory(dir=memory) as other:
        convert(folder / "in.tflite", Path(other) / "out.tflite", verify="none")
        assert (Path(other) / "out.tflite").read_bytes() == whole
        assert names(Path(other)) == ["out.tflite"]


def test_two_runs_that_may_replace_the_output_leave_one_whole_file(
    folder: Path, whole: bytes
) -> None:
    """In one process: the second begins to write while the first one's file is there."""
    waiting = threading.Barrier(2, timeout=60)

    def meet(stage: str, done: int, total: int) -> None:
        if stage == "writing" and done == total:
            waiting.wait()

    how: dict[str, Any] = {"verify": "none", "overwrite": True, "progress": meet}
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(convert, folder / "in.tflite", folder / "out.tflite", **how)
            for _ in range(2)
        ]
    assert all(run.result() for run in runs)
    assert names(folder) == ["in.tflite", "out.tflite"]
    assert (folder / "out.tflite").read_bytes() == whole
