"""How a stage of `edge-opt build` is carried out in a process of its own, and what the command says of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest
from pretend_stages import Place, write
from terminal_signals import gone

from edge_opt.base.errors import OutputError, UsageError
from edge_opt.build import Job, StageAnswer, StageFailedError, pipeline, stage, stages
from edge_opt.build.stages import Processes
from edge_opt.npu import CompilerFailedError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- the pipeline's own package ---


def test_the_extra_holds_the_version_that_is_known_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"litert-torch=={stages.SUPPORTED}.*" in extras["build"]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"litert-torch": "0.11.0"}, "litert-torch is 0.11.0, but edge-opt supports only 0.10: "),
        ({"torch": None}, "the build needs torch: pip install '."),
    ],
)  # fmt: skip
def test_another_version_or_none_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str | None], sentence: str
) -> None:
    def version(name: str) -> str:
        told = found.get(name, "0.10.0")
        if told is None:
            raise stages.PackageNotFoundError(name)
        return told

    monkeypatch.setattr(stages, "version", version)
    monkeypatch.setattr(stages, "find_spec", lambda _: True)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        Processes().versions()


# --- a stage in a process of its own ---


STARTS_A_PROCESS = """
    import subprocess
    started = subprocess.Popen(["sleep", "600"])
    open({told!r}, "w").write(str(started.pid))
    time.sleep(600)
"""


def put_in_place(place: Place, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make the stage `export` that code in every process that is started from here."""
    body = indent(dedent(code).strip(), "    ")
    (place.folder / "sitecustomize.py").write_text(
        f"import os, time\nfrom edge_opt.build import pipeline\ndef stage(job, progress):\n{body}\n"
        f"pipeline.export = stage\n"
    )
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def child(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: str
) -> tuple[StageAnswer, list[tuple[int, ...]]]:
    """Carry out a stage of that code."""
    put_in_place(place, monkeypatch, code)
    monkeypatch.setattr(stages, "_LOOK_SECONDS", 0.05)
    scratch, made = place.folder / "scratch", place.folder / "made"
    for folder in (scratch, made):
        folder.mkdir()
    steps: list[tuple[int, ...]] = []
    job = Job("export", str(made), libraries=str(place.sdk))
    done = Processes().carry_out(job, place.folder / "log", scratch, lambda _, *step: steps.append(step))
    return done, steps


def test_a_stages_process_tells_its_steps_its_memory_and_what_it_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        progress("x", 3, 7)
        held = bytearray(200 << 20)
        print(os.environ["LD_LIBRARY_PATH"])
        print("Loading weights: 100%|###| 236/236", flush=True)
        time.sleep(0.3)
        return {"tmp": os.environ["TMPDIR"]}
    """
    done, steps = child(place, monkeypatch, code)
    assert {*steps} <= {(0, 1), (3, 7)}
    assert (3, 7) in steps
    assert done.peak_bytes is not None
    assert done.peak_bytes > 200 << 20
    assert done.values == {"tmp": str(place.folder / "scratch" / "tmp")}
    assert str(place.sdk) in (place.folder / "log").read_text()


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        ("raise OSError(28, 'no room')", OutputError, "No space left on device"),
        ("os.kill(os.getpid(), 9)", StageFailedError, "killed by SIGKILL, as the system does when memory runs out"),
        ("os._exit(7)", StageFailedError, "exit status 7"),
    ],
)  # fmt: skip
def test_however_a_stages_process_ends_there_is_a_cause(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        child(place, monkeypatch, code)
    assert str(caught.value) == sentence


def fails(place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What the parent makes of a child's answer to an error, with no process between them."""

    def failing(*_: object) -> dict[str, Any]:
        raise error

    monkeypatch.setitem(stage.STAGES, "export", failing)
    files = [place.folder / name for name in ("job.json", "outcome.json")]
    files[0].write_text(json.dumps({"stage": "export", "output": "x"}))
    monkeypatch.setattr(stage, "begin_child", lambda: files)
    assert stage.main() == 1
    stages._answer(1, place.folder)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ValueError("a scale of zero\nand more"), StageFailedError, "ValueError: a scale of zero"),
        (ValueError("for field x:\n  no int\nor so"), StageFailedError, "ValueError: for field x: no int"),
        (OSError(27, ""), OutputError, "File too large"),
        (UsageError("no such setting"), UsageError, "no such setting"),
    ],
)  # fmt: skip
def test_an_error_of_a_stage_is_told_in_a_sentence(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        fails(place, monkeypatch, error)
    assert str(caught.value) == sentence


def test_a_full_disk_is_the_cause_whatever_a_tool_says(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, used=1, free=0))
    with pytest.raises(OutputError, match="the disk is full"):
        fails(place, monkeypatch, RuntimeError("Unable to write"))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_interrupted_takes_the_processes_of_its_stage_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    told = place.folder / "pid"
    put_in_place(place, monkeypatch, STARTS_A_PROCESS.format(told=str(told)))
    code = (
        "import sys, pathlib; from edge_opt.build import Job; from edge_opt.build.stages import Processes; "
        "here = pathlib.Path(sys.argv[1]); "
        "Processes().carry_out(Job('export', sys.argv[1]), here / 'log', here, lambda *_: None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(place.folder)], stderr=subprocess.DEVNULL
    ) as command:
        while not told.exists() or not told.read_text():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(sign)
    assert gone(int(told.read_text()))


def test_of_a_compiler_that_fails_the_first_complaint_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def npu_compile(*_: object, **__: object) -> None:
        (place.folder / "tmp1.error").write_text("fine\n 0.0ms [ ERROR ]   <E> no room for the weights\n")
        raise ValueError("apply_plugin failed to apply plugin. See /tmp/tmp1.error for details.")

    monkeypatch.setattr(tempfile, "tempdir", str(place.folder))
    pretend = SimpleNamespace(npu_compile=npu_compile, NpuPipelineConfig=SimpleNamespace(from_dict=dict))
    monkeypatch.setattr(pipeline, "_lib", lambda _: pretend)
    job = Job("compile", str(place.folder), {"model": "m"}, {}, {"compile_configs": {}})
    with pytest.raises(CompilerFailedError, match=r"^no room for the weights$"):
        pipeline.compile_bundle(job, lambda *_: None)


@pytest.mark.parametrize(
    ("ranges", "sentence"),
    [
        ({}, "does not run prefill_4, decode, so its ranges"),
        ({"decode_kv_cache_k_0": 0}, "does not run prefill_4, so its ranges"),
        ({"decode_kv_cache_k_0": 0, "prefill_4_kv_cache_k_0": 0}, ""),
    ],
)  # fmt: skip
def test_prompts_that_leave_an_entry_point_out_are_a_sentence(
    tmp_path: Path, ranges: dict[str, int], sentence: str
) -> None:
    """The pipeline says nothing, and fails in the next stage."""
    told = json.dumps({"model_qsvs": ranges})
    (tmp_path / "Section3_tf_lite_prefill_decode.tflite.json").write_text(told)
    with pytest.raises(UsageError, match=sentence) if sentence else nullcontext():
        pipeline.check_all_ran(["prefill_4", "decode"], tmp_path)


def test_ranges_of_sums_that_litert_would_abort_on_are_widened(tmp_path: Path) -> None:
    ends = "return %y\n}\n"
    positions = (
        f"subgraph main (%x: float32[8,1], %one: float32[]) {{\n  %y: float32[8,1] = ADD(%x, %one)\n  {ends}"
    )
    model = write(tmp_path / "m.litertlm", positions)
    ranges = {name: {"min": [0.0], "max": [512.0]} for name in ("x", "y")}
    file = tmp_path / "Section3_tf_lite_prefill_decode.tflite.json"
    file.write_text(json.dumps({"model_qsvs": ranges, "metadata": {}}))
    (tmp_path / "calibration.json").write_text('{"of": "another kind"}')
    pipeline.widen_sums(model, tmp_path)
    told = json.loads(file.read_text())["model_qsvs"]
    assert told == {"x": ranges["x"], "y": {"min": [0.0], "max": [517.12]}}
