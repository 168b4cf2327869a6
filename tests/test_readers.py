"""Other readers take what we write, and compute the same: OpenVINO, Vela, the Hexagon compiler. One test per reader."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED
from sdk import require_qnn
from text_parser import parse

from edge_opt.conversion import convert
from edge_opt.ir import save
from edge_opt.npu import CompilerMissingError, profile
from edge_opt.npu.ethos import find_vela
from edge_opt.runtime.inputs import array_of, plan
from edge_opt.runtime.runner import Worker

TESTDATA = Path(__file__).parent.parent / "testdata"
ATTENTION = {"BATCH_MATMUL", "SOFTMAX", "SPLIT", "CONCATENATION", "SLICE"}

INT8 = """
signature main = #0 (q=%q, k=%k, v=%v, mask=%mask) -> (out=%out)
subgraph main (%q: int8[1,2,8,16] q(0.02, 0), %k: int8[1,2,32,16] q(0.02, 0),
               %v: int8[1,2,32,16] q(0.02, 0), %mask: int8[1,1,8,32] q(0.4, 127)) {
  %logits: int8[1,2,8,32] q(0.1, 3) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %masked: int8[1,2,8,32] q(0.4, 120) = ADD(%logits, %mask)
  %p: int8[1,2,8,32] q(0.00390625, -128) = SOFTMAX(%masked) {beta: 1.0}
  %heads: int8[1,2,8,16] q(0.02, 1) = BATCH_MATMUL(%p, %v)
  %t: int8[1,8,2,16] q(0.02, 1) = TRANSPOSE(%heads, int32{0, 2, 1, 3})
  %out: int8[1,8,32] q(0.02, 1) = RESHAPE(%t, int32{1, 8, 32})
  return %out
}
"""


def need_vela() -> None:
    try:
        find_vela()
    except CompilerMissingError as error:
        pytest.skip(str(error))


def need_qnn() -> None:
    require_qnn()


@pytest.mark.slow
@pytest.mark.parametrize("inline_composites", [True, False], ids=["inlined", "composites"])
@pytest.mark.parametrize("signature", ["prefill_8", "decode"])
def test_openvino_reads_an_extracted_signature_and_agrees(
    signature: str, tmp_path: Path, *, inline_composites: bool
) -> None:
    openvino = pytest.importorskip("openvino", reason="extra dev is not installed")
    output = tmp_path / "one.tflite"
    convert(DEMO, output, extract_signature=signature, inline_composites=inline_composites)
    with Worker() as worker:
        described = {info.name: info for info in worker.describe(DEMO)}[signature]
        inputs = {made.info.name: array_of(made) for made in plan(described)}
        expected = worker.run(DEMO, signature, inputs)
    compiled = openvino.Core().compile_model(output, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    by_tensor = {info.tensor: inputs[info.name] for info in described.inputs}
    results = compiled({port: by_tensor[port.get_any_name()] for port in compiled.inputs})
    found = {port.get_any_name(): results[port] for port in compiled.outputs}
    for info in described.outputs:
        reference = expected[info.name]
        np.testing.assert_allclose(found[info.tensor], reference, atol=1e-4 * np.abs(reference).max())


def test_openvino_reads_a_quantized_model_only_as_its_target_writes_it(tmp_path: Path) -> None:
    """ai-edge-quantizer stores weights after the flatbuffer, and leaves the deprecated field of a QUANTIZE at 0."""
    openvino = pytest.importorskip("openvino", reason="extra dev is not installed")
    generic, ours = tmp_path / "generic.tflite", tmp_path / "ours.tflite"
    options = {"extract_signature": "prefill_8", "inline_composites": True, "verify": "none"}
    convert(QUANTIZED, generic, **options)
    with pytest.raises(RuntimeError, match="FrontEnd API failed"):
        openvino.Core().read_model(generic)
    convert(QUANTIZED, ours, target="intel-npu", **options)
    assert len(openvino.Core().read_model(ours).get_ops()) > 100


@pytest.mark.slow
def test_vela_takes_every_operator_of_a_split_int8_attention(tmp_path: Path) -> None:
    need_vela()
    source, output = tmp_path / "int8.tflite", tmp_path / "split.tflite"
    save(parse(INT8), source)
    result = convert(source, output, target="ethos-u85", require_all=True, verify="full")
    assert [site.heads for site in result.converted] == [2]
    (figures,) = profile(output, "ethos-u85").to_dict()["signatures"]
    assert figures["taken"] == figures["operators"] > 10
    assert figures["on_cpu"] == {}


@pytest.mark.slow
def test_vela_compiles_a_language_model_in_int8_and_takes_its_attention(tmp_path: Path) -> None:
    need_vela()
    for package in ("litert_torch", "ai_edge_quantizer"):
        pytest.importorskip(package, reason=f"{package} is not installed (extras torch and quantizer)")
    script = [sys.executable, str(TESTDATA / "quantize_model.py"), "a8w8-int", str(DEMO)]
    subprocess.run([*script, "--out", str(tmp_path)], check=True, capture_output=True, timeout=600)
    output = tmp_path / "one.tflite"
    convert(
        tmp_path / f"{DEMO.stem}.a8w8-int.tflite",
        output,
        target="ethos-u85",
        extract_signature="prefill_8",
        inline_composites=True,
    )
    (figures,) = profile(output, "ethos-u85").to_dict()["signatures"]
    assert figures["taken"] > 100
    refused = {entry.split(":")[0] for entry in figures["on_cpu"]}
    assert refused, "ai-edge-quantizer leaves the norms of a language model in floating point"
    assert not refused & ATTENTION


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEMO, QUANTIZED], ids=["float32", "int16"])
@pytest.mark.parametrize("target", ["generic", "qualcomm-htp"])
def test_the_hexagon_compiler_takes_every_operator_in_one_partition(
    target: str, model: Path, tmp_path: Path
) -> None:
    need_qnn()
    output = tmp_path / "converted.tflite"
    convert(model, output, target=target)
    report = profile(output, "qualcomm-htp").to_dict()
    assert len(report["signatures"]) == 2
    for figures in report["signatures"]:
        assert figures["taken"] == figures["operators"] > 100
        assert figures["partitions"] == 1
