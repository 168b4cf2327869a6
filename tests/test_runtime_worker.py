"""The native runtime in a child process: results, refusals, crashes, hangs, and who dies with whom.

What it cannot verify is not written: the runtime missing, crashing, killed, or a region that it may not see.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import proof_models as models
import pytest
from cli_runs import DEMO, Patch, written
from pass_runs import but
from terminal_signals import gone

import edge_opt
from edge_opt.comparison import golden
from edge_opt.conversion import ConversionResult, SitesSkippedError, convert
from edge_opt.ir import DType, load
from edge_opt.ir.parse import parse
from edge_opt.runtime import runner
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import array_of, plan
from edge_opt.runtime.protocol import (
    RuntimeCrashed,
    RuntimeRefused,
    RuntimeTimedOut,
    RuntimeUnavailable,
)
from edge_opt.runtime.runner import ChildProcess, Worker
from edge_opt.verification import examine
from edge_opt.verification.extremes import KINDS
from edge_opt.verification.trial import Trial

pytestmark = pytest.mark.usefixtures("own_workers")

X = np.arange(8, dtype=np.float32).reshape(2, 4)
PAIR = {"x": X, "y": 10 * X}


@pytest.mark.parametrize(
    ("signature", "kernels", "inputs"),
    [
        ("main", "xnnpack", PAIR),
        ("main", "reference", PAIR),
        (None, "xnnpack", dict(reversed(PAIR.items()))),
    ],
)
def test_a_signature_is_run_on_inputs_by_name(
    worker: Worker, signature: str | None, kernels: runner.Kernels, inputs: dict[str, np.ndarray]
) -> None:
    assert np.array_equal(worker.run(models.adder(), signature, inputs, kernels)["z"], 11 * X)


@pytest.mark.parametrize("key", ["main", ""])
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_a_variable_tensor_is_0_at_first_and_keeps_its_state_between_calls(
    worker: Worker, key: str, kernels: runner.Kernels
) -> None:
    """LiteRT allocates it with the other tensors, after the model is opened."""
    ones = "splat 1.0"
    model = parse(f"""subgraph main (%x: float32[1,4], %state: float32[1,6]) {{
      %y: float32[1,2] = SVDF(%x, float32[2,4]{{{ones}}}, float32[2,3]{{{ones}}}, none, %state) {{rank: 1}}
      return %y
    }}""")
    (graph,) = model.subgraphs
    graph.inputs.pop().is_variable = True
    written = models.signed(model, key)
    (signature,) = describe(load(written)).values()
    calls = [(signature.name, plan(signature))] * 3
    one, two, three = (outputs["y"] for outputs in worker.run_calls(written, calls, kernels))
    assert signature.keeps_state
    assert np.all(one != 0)
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_a_model_without_signatures_is_run_as_main_and_bytes_go_through_a_file_that_is_removed(
    worker: Worker, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = models.adder(key="")
    (main,) = describe(load(model)).values()
    assert (main.name, main.positional) == ("main", True)
    plans = [plan(main, run=run) for run in range(2)]
    results = worker.run_calls(model, [(None, each) for each in plans])
    for (x, y), outputs in zip((map(array_of, pair) for pair in plans), results, strict=True):
        assert np.array_equal(outputs["z"], x + y)
    assert not np.array_equal(results[0]["z"], results[1]["z"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeRefused, match="no signature 'decode', there is 'main'"):
        worker.run(model, "decode", PAIR)


def test_a_refusal_gives_the_runtimes_reason_and_names_model_and_signature(worker: Worker) -> None:
    model = models.adder(other=(2, 3))
    with pytest.raises(
        RuntimeRefused, match=r"model of \d+ bytes, signature 'main', reference kernels: .*refused"
    ) as caught:
        worker.run(model, "main", {"x": X, "y": np.ones((2, 3), np.float32)}, "reference")
    assert "failed to prepare" in caught.value.reason


def test_a_described_tensor_has_its_quantization_and_closing_ends_the_child() -> None:
    (described,) = describe(load(models.requantized(scale=0.25))).values()
    with Worker() as worker:
        worker.run(models.adder(), "main", PAIR)
        pid = child_of(worker)
    assert (described.outputs[0].quantization, described.outputs[0].quantized) == (
        ((0.25,), (0,), 0),
        True,
    )
    assert gone(pid)


def child_of(worker: Worker) -> int:
    return worker._process._child.pid


@pytest.mark.parametrize("moment", ["during a request", "between two"])
def test_a_worker_that_is_killed_is_a_crash(moment: str) -> None:
    with Worker(time_limit=60) as worker:
        worker.run(models.adder(), "main", PAIR)
        pid = child_of(worker)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        assert moment == "during a request" or gone(pid)
        with pytest.raises(RuntimeCrashed, match="SIGKILL"):
            worker.run(models.endless(), "main", {"x": np.ones(1, np.float32)})


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (models.endless(), RuntimeTimedOut, r"within 0\.5 s"),
        (
            models.crashing(),
            RuntimeCrashed,
            "xnnpack kernels: the runtime's process ended with SIGSEGV",
        ),
    ],
)
def test_after_a_hang_or_a_crash_work_goes_on(
    model: bytes, error: type[Exception], said: str
) -> None:
    with Worker(time_limit=60) as worker:
        worker.run(models.adder(), "main", PAIR)
        first = child_of(worker)
        worker.time_limit = 0.5
        with pytest.raises(error, match=f"signature 'main'.*{said}"):
            worker.run(model, "main", {"x": np.ones(1, np.float32)})
        assert gone(first)
        worker.time_limit = 60
        assert np.array_equal(worker.run(models.adder(), "main", PAIR)["z"], 11 * X)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_DATA")
def test_memory_is_limited_request_by_request(monkeypatch: Patch) -> None:
    monkeypatch.setattr(runner, "_BASE_MEMORY", 256 << 20)
    with Worker(time_limit=60) as worker:
        with pytest.raises(RuntimeRefused, match="allowed 256 MiB"):
            worker.run(models.greedy(), "main", {"x": np.ones((2, 3), np.float32)})
        monkeypatch.setattr(runner, "_BASE_MEMORY", 1 << 30)
        assert worker.run(models.greedy(), "main", {"x": np.ones((2, 3), np.float32)})["z"] > 0


def test_the_memory_allowed_grows_with_what_a_request_reads(monkeypatch: Patch) -> None:
    asked = []
    monkeypatch.setattr(
        ChildProcess, "exchange", lambda _, header, *__: asked.append(header) or ({}, {})
    )
    with Worker() as worker:
        worker.run(models.adder(), "main", PAIR)
    assert asked[0]["memory_limit"] == (4 << 30) + 3 * (len(models.adder()) + 2 * X.nbytes)


def test_a_worker_starts_where_the_standard_streams_are_closed(tmp_path: Path) -> None:
    """As in a daemon: sockets then get the numbers 0 to 2, which are the child's own streams."""
    (tmp_path / "model.tflite").write_bytes(models.adder())
    script = (
        "import os, sys\nimport numpy as np\nfrom edge_opt.runtime.runner import Worker\nos.closerange(0, 3)\n"
        "x = np.ones((2, 4), np.float32)\n"
        "with Worker() as worker: os._exit(7 if worker.run(sys.argv[1], 'main', {'x': x, 'y': x}) else 8)"
    )
    command = [sys.executable, "-c", script, tmp_path / "model.tflite"]
    assert subprocess.run(command, check=False).returncode == 7


def test_what_the_child_prints_is_no_answer(tmp_path: Path, monkeypatch: Patch) -> None:
    noisy = "import sys\nprint('x' * 200_000)\nsys.stdout.flush()\nprint('y' * 200_000, file=sys.stderr)\n"
    (tmp_path / "sitecustomize.py").write_text(noisy)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Worker(time_limit=60) as worker:
        assert np.array_equal(worker.run(models.adder(), "main", PAIR)["z"], 11 * X)


def test_the_parent_never_loads_the_runtime(tmp_path: Path) -> None:
    path = tmp_path / "adder.tflite"
    path.write_bytes(models.adder())
    script = (
        "import sys\n"
        "from edge_opt.comparison.compare import compare\n"
        f"assert compare({str(path)!r}, {str(path)!r}).bitwise\n"
        "assert not [name for name in sys.modules if name.startswith('ai_edge_litert')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_custom_operator_that_no_kernel_knows_is_named_with_what_still_works(
    tmp_path: Path,
) -> None:
    text = "subgraph main (%x: float32[4]) {\n  %y: float32[4] = CUSTOM 'MyOp' (%x)\n  return %y\n}"
    path = written(tmp_path, text, "custom.tflite")
    with (
        Worker() as worker,
        pytest.raises(
            RuntimeRefused, match=r"custom\.tflite'.* no kernel for the custom operator"
        ) as caught,
    ):
        worker.run(path, None, {"x": np.zeros(4, np.float32)})
    assert "verify='regions'" in str(caught.value)


def convert_decode(output: Path) -> ConversionResult:
    return convert(DEMO, output, signatures=["decode"], skip=but("mha_to_sha"))


def test_without_a_runtime_all_stops(tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / "ai_edge_litert"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "interpreter.py").write_text("raise ImportError('libLiteRt.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        RuntimeUnavailable, match="exit status 1; its last output: ImportError:"
    ) as caught:
        convert_decode(tmp_path / "out.tflite")
    assert "verify='none'" in str(caught.value)
    assert not (tmp_path / "out.tflite").exists()


def test_a_refused_process_is_the_same_error(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    open_files = Path("/proc/self/fd")
    before = len([*open_files.iterdir()])
    with pytest.raises(RuntimeUnavailable, match="Resource temporarily unavailable"):
        convert_decode(tmp_path / "out.tflite")
    assert len([*open_files.iterdir()]) == before


def test_a_crash_is_no_answer_and_names_its_site(tmp_path: Path, monkeypatch: Patch) -> None:
    run, crashing = examine.run_versions, models.crashing()
    instead = (crashing, crashing, Trial())  # of every region
    monkeypatch.setattr(
        examine, "run_versions", lambda worker, *_, **options: run(worker, *instead, **options)
    )
    with pytest.raises(SitesSkippedError) as caught:
        convert_decode(tmp_path / "out.tflite")
    site = next(site for site in caught.value.result.sites if site.heads != 1)
    assert (site.status, site.why) == ("skipped", "inconclusive")
    assert all(one in site.reason for one in ("region 'decode'", f"'{DEMO}'", "SIGSEGV"))
    assert not (tmp_path / "out.tflite").exists()


def test_kernels_that_abort_on_the_original_are_left_out_and_this_is_told(
    monkeypatch: Patch,
) -> None:
    run = examine.run_versions

    def without_reference(*arguments: Any, **options: Any) -> Any:
        asked = arguments[-1]
        if "reference" in asked.kernels:
            raise RuntimeCrashed("ended with SIGABRT")
        return run(*arguments, **options)

    monkeypatch.setattr(examine, "run_versions", without_reference)
    result = convert(DEMO, signatures=["decode"], skip=but("mha_to_sha"), dry_run=True)
    proofs = [site.proof for site in result.converted if site.proof is not None]
    assert len(proofs) == 3
    assert all(proof.note.startswith("on xnnpack kernels only") for proof in proofs)


def test_every_public_way_to_the_runtime_reads_the_file_first(tmp_path: Path) -> None:
    """A model that calls itself: the runtime's stack would overflow."""
    path = tmp_path / "model.tflite"
    path.write_bytes(models.recursive())
    ways: list[Callable[[], object]] = [
        lambda: edge_opt.compare(path, path),
        lambda: edge_opt.compare(DEMO, path.read_bytes()),
        lambda: edge_opt.convert(path, verify="full"),
        lambda: edge_opt.testing.assert_golden(path, tmp_path / "golden.npz"),
        lambda: edge_opt.testing.assert_equivalent(path, path),
        lambda: Worker().run(path, None, {}),
        lambda: examine.run_versions(Worker(), path.read_bytes(), path.read_bytes(), Trial()),
    ]
    golden.record(DEMO, tmp_path / "golden.npz", signatures=["decode"])
    ways.append(lambda: golden.record(path, tmp_path / "other.npz"))
    for way in ways:
        with pytest.raises(edge_opt.EdgeOptError, match="are recursive"):
            way()


QUANTIZED_TYPES = ("int8", "uint8", "int16", "int32")


@pytest.mark.parametrize("dtype", DType)
def test_every_type_passes_through_the_worker_or_is_refused_by_a_typed_error(dtype: DType) -> None:
    name = dtype.name.lower()
    scales = ["", " q(0.01, 3)"] if name in QUANTIZED_TYPES else [""]
    with Worker() as worker:
        for scale in scales:
            kind = f"{name}[2,2]{scale}"
            text = f"subgraph main (%a: {kind}) {{ %z: {kind} = RESHAPE(%a, int32{{2, 2}}) return %z }}"
            try:
                model = models.written(text, key="")
                outcome = examine.run_versions(worker, model, model, Trial(extremes=tuple(KINDS)))
            except RuntimeRefused:
                assert name not in (*QUANTIZED_TYPES, "float32", "bool")
            else:
                assert all(
                    one.bitwise
                    for kinds in outcome.found.values()
                    for ones in kinds.values()
                    for one in ones
                )
