"""What cannot be proved is not written: the runtime missing, crashing, killed, or a region that it may not see."""

from collections.abc import Callable
from pathlib import Path

import proof_models
import pytest
from cli_runs import Patch
from pass_runs import but

import edge_opt
from edge_opt import testdata
from edge_opt.comparison import golden
from edge_opt.conversion import ConversionResult, convert
from edge_opt.passes import Status
from edge_opt.runtime.pair import ProofRequest
from edge_opt.runtime.protocol import RuntimeUnavailable
from edge_opt.runtime.runner import Worker

pytestmark = pytest.mark.usefixtures("own_workers")

DEMO = Path(testdata.__file__).parent / "demo_gemma3.tflite"


def convert_decode(output: Path) -> ConversionResult:
    return convert(DEMO, output, signatures=["decode"], skip=but("mha_to_sha"))


def test_without_a_runtime_all_stops(tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / "ai_edge_litert"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "interpreter.py").write_text("raise ImportError('libLiteRt.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="exit status 1; its last output: ImportError:") as caught:
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


def test_a_crash_reverts_its_site_and_names_it(tmp_path: Path, monkeypatch: Patch) -> None:
    prove, crashing = Worker.prove, proof_models.crashing()
    instead = (crashing, crashing, ProofRequest())  # of every region
    monkeypatch.setattr(Worker, "prove", lambda self, *_, **options: prove(self, *instead, **options))
    result = convert_decode(tmp_path / "out.tflite")
    site = next(site for site in result.sites if site.heads != 1)
    assert site.status is Status.REVERTED
    assert "region 'decode' up to '" in site.reason
    assert f"of model '{DEMO}': the runtime's process ended with SIGSEGV" in site.reason
    assert not result.converted
    assert (tmp_path / "out.tflite").exists()


def test_every_public_way_to_the_runtime_reads_the_file_first(tmp_path: Path) -> None:
    """A model that calls itself: the runtime's stack would overflow."""
    path = tmp_path / "model.tflite"
    path.write_bytes(proof_models.recursive())
    ways: list[Callable[[], object]] = [
        lambda: edge_opt.compare(path, path),
        lambda: edge_opt.compare(DEMO, path.read_bytes()),
        lambda: edge_opt.convert(path, verify="full"),
        lambda: edge_opt.testing.assert_golden(path, tmp_path / "golden.npz"),
        lambda: edge_opt.testing.assert_equivalent(path, path),
        lambda: Worker().run(path, None, {}),
        lambda: Worker().prove(path.read_bytes(), path.read_bytes(), ProofRequest()),
    ]
    golden.record(DEMO, tmp_path / "golden.npz", signatures=["decode"])
    ways.append(lambda: golden.record(path, tmp_path / "other.npz"))
    for way in ways:
        with pytest.raises(edge_opt.EdgeOptError, match="are recursive"):
            way()
