"""Other readers take what we write, and compute the same: OpenVINO, the Hexagon compiler, the LiteRT-LM runtime."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED
from pass_runs import INLINING
from pretend_npu import require_qnn

from edge_opt.conversion import convert
from edge_opt.ir import Model, load
from edge_opt.ir.cleanup import _renumber, parts_in_use, remove_unused
from edge_opt.npu import profile
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import array_of, plan
from edge_opt.runtime.runner import Worker
from edge_opt.targets import load_target


def alone(path: Path, signature: str) -> Model:
    """The model with one entry point, as subgraph 0, for readers that look at nothing else."""
    model = load(path)
    before = parts_in_use(model)
    model.signatures[:] = [model.signatures[signature]]
    chosen = model.signatures[0].subgraph
    _renumber(model, sorted(model.subgraphs, key=lambda graph: graph is not chosen))
    remove_unused(model, before)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("inline_composites", [True, False], ids=["inlined", "composites"])
@pytest.mark.parametrize("signature", ["prefill_8", "decode"])
def test_openvino_reads_one_and_agrees(
    signature: str, tmp_path: Path, *, inline_composites: bool
) -> None:
    openvino = pytest.importorskip("openvino", reason="extra dev is not installed")
    output = tmp_path / "one.tflite"
    convert(alone(DEMO, signature), output, target=INLINING if inline_composites else None)
    with Worker() as worker:
        described = describe(load(DEMO))[signature]
        inputs = {made.info.name: array_of(made) for made in plan(described)}
        expected = worker.run(DEMO, signature, inputs)
    compiled = openvino.Core().compile_model(output, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    by_tensor = {info.tensor: inputs[info.name] for info in described.inputs}
    results = compiled({port: by_tensor[port.get_any_name()] for port in compiled.inputs})
    found = {port.get_any_name(): results[port] for port in compiled.outputs}
    for info in described.outputs:
        reference = expected[info.name]
        np.testing.assert_allclose(
            found[info.tensor], reference, atol=1e-4 * np.abs(reference).max()
        )


@pytest.mark.slow
def test_openvino_reads_a_quantized_model_only_as_its_target_writes_it(tmp_path: Path) -> None:
    """ai-edge-quantizer stores weights after the flatbuffer, and leaves the deprecated field of a QUANTIZE at 0."""
    openvino = pytest.importorskip("openvino", reason="extra dev is not installed")
    generic, ours = tmp_path / "generic.tflite", tmp_path / "ours.tflite"
    convert(alone(QUANTIZED, "prefill_8"), generic, target=INLINING, verify="none")
    with pytest.raises(RuntimeError, match="FrontEnd API failed"):
        openvino.Core().read_model(generic)
    target = replace(load_target("intel-npu"), inline_composites=True)
    convert(alone(QUANTIZED, "prefill_8"), ours, target=target, verify="none")
    assert len(openvino.Core().read_model(ours).get_ops()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
@pytest.mark.parametrize("target", ["generic", "qualcomm-htp"])
def test_the_hexagon_compiler_takes_all_in_one_partition(
    target: str, model: Path, tmp_path: Path
) -> None:
    require_qnn()
    output = tmp_path / "converted.tflite"
    convert(model, output, target=target)
    report = profile(output).to_dict()
    assert len(report["signatures"]) == 2
    for figures in report["signatures"]:
        assert figures["taken"] == figures["operators"] > 100
        assert figures["partitions"] == 1
        assert 0 < figures["time"]["us_low"] <= figures["time"]["us"] <= figures["time"]["us_high"]
        assert figures["ddr_read"] > 0


def tokens(bundle: Path) -> list[str]:
    """What the runtime says on the CPU: sampled hot, so that every logit counts, with a fixed seed."""
    program = shutil.which("litert-lm", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [
        program,
        "run",
        str(bundle),
        "--prompt",
        "w5 w6 w11",
        "--backend",
        "cpu",
        "--no-template",
    ]
    sampled = "--max-num-tokens 36 --temperature 30 --top-k 40 --top-p 0.99 --seed 7"
    command += sampled.split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what litert-torch exports of a tiny Gemma3, bundled, and the same bundle converted."""
    for package in ("litert_torch", "litert_lm", "litert_lm_builder"):
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and lm)")
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "testdata"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        import checkpoints

        # Wide enough that random weights do not say one word for ever.
        widths = {"head_size": 32, "hidden": 128, "ffn": 256, "vocab": 512}
        sizes = checkpoints.Sizes(kv_heads=1, prefill=16, cache=64, **widths)
        checkpoints.save_checkpoint("gemma3", sizes, folder / "hf")
        from litert_torch.generative.export_hf.export import export

        export(
            model=str(folder / "hf"),
            output_dir=str(folder / "out"),
            prefill_lengths=[16],
            cache_length=64,
            quantization_recipe="",
            bundle_litert_lm=True,
        )
    assert len(convert(folder / "out" / "model.litertlm").converted) == 5
    return folder / "out"


@pytest.mark.slow
def test_an_exported_bundle_says_the_same_after_the_conversion(
    exported: Path, tmp_path: Path
) -> None:
    before = tokens(exported / "model.litertlm")
    assert len(before) > 10
    assert len(set(before)) > 5
    assert tokens(exported / "model.opt.litertlm") == before
    output = tmp_path / "all.litertlm"
    convert(exported / "model.litertlm", output, sections="all", target=INLINING)
    assert tokens(output) == before
