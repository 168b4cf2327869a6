"""The referee on whole models: every derived shape equals what the interpreter allocates, 100 % of the tensors."""

import subprocess
import sys
from pathlib import Path

import pytest
from shapes_referee import compare_all

from edge_opt import ir
from edge_opt.shapes import shape_report

ROOT = Path(__file__).parent.parent
BUNDLED = sorted((ROOT / "testdata").glob("*.tflite"))
FAMILIES = [
    "gemma3_k2", "gemma3_one_cache", "gemma3_gpu", "gemma3_gpu_fused", "gemma3_gpu_sdpa", "gemma2_k2",
    "gemma2_gpu", "qwen3_k2", "llama_k2", "llama_gpu",
]  # fmt: skip


def without_recorded_shapes(model: bytes) -> bytes:
    """The model with the shapes of all results erased: the interpreter trusts some that it is told."""
    loaded = ir.load(model)
    for subgraph in loaded.subgraphs:
        for operator in subgraph.operators:
            for tensor in operator.outputs:
                tensor.shape, tensor.shape_signature = (), None
    return ir.to_bytes(loaded)


def check_every_tensor(model: bytes) -> None:
    report = shape_report(ir.load(model))
    assert (report.disagreements, report.unknown) == ((), 0)
    for erased in (model, without_recorded_shapes(model)):
        count, wrong = compare_all(erased, model)
        assert (wrong, count) == ([], report.tensors)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_models(path: Path) -> None:
    check_every_tensor(path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_freshly_exported_families(name: str, tmp_path: Path) -> None:
    pytest.importorskip("litert_torch", reason="families are exported with litert-torch, in the torch extra")
    script = ROOT / "testdata" / "make_families.py"
    command = [sys.executable, str(script), str(tmp_path), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_every_tensor((tmp_path / f"{name}.tflite").read_bytes())
