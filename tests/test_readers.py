"""Other readers take what we write, and compute the same."""

from pathlib import Path

import numpy as np
import pytest

from edge_opt.conversion import convert
from edge_opt.verify.inputs import generate, plan
from edge_opt.verify.runner import Worker

DEMO = Path(__file__).parent.parent / "testdata" / "demo_gemma3.tflite"


@pytest.mark.slow
@pytest.mark.parametrize("signature", ["prefill_8", "decode"])
def test_openvino_reads_an_extracted_signature_and_agrees(signature: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino", reason="extra dev is not installed")
    output = tmp_path / "one.tflite"
    convert(DEMO, output, extract_signature=signature, inline_composites=True)
    with Worker() as worker:
        described = {info.name: info for info in worker.describe(DEMO)}[signature]
        inputs = {made.info.name: generate(made) for made in plan(described)}
        expected = worker.run(DEMO, signature, inputs)
    compiled = openvino.Core().compile_model(output, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    by_tensor = {info.tensor: inputs[info.name] for info in described.inputs}
    results = compiled({port: by_tensor[port.get_any_name()] for port in compiled.inputs})
    found = {port.get_any_name(): results[port] for port in compiled.outputs}
    for info in described.outputs:
        reference = expected[info.name]
        np.testing.assert_allclose(found[info.tensor], reference, atol=1e-4 * np.abs(reference).max())
