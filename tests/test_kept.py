"""What a conversion has to keep although no operator reads it: what signatures name, and the order of operators."""

from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from text_parser import parse

from edge_opt import convert, load, testdata
from edge_opt.base.errors import UsageError
from edge_opt.ir import Buffer, Metadata, Model, save, to_bytes
from edge_opt.ir.cleanup import CONTROL_EDGES
from edge_opt.schema import Data

TESTDATA = Path(testdata.__file__).parent
DEMO = TESTDATA / "demo_gemma3.tflite"
PREFILL = Path(__file__).parent.parent / "testdata" / "reference_prefill.txt"


def test_an_output_that_a_signature_alone_names_is_still_computed(tmp_path: Path) -> None:
    model = parse(PREFILL.read_text())
    (signature,) = model.signatures
    source, output = tmp_path / "in.tflite", tmp_path / "out.tflite"
    save(naming(model, "scaled", "mul"), source)
    assert convert(source, output, passes=["mha_to_sha"]).converted
    found = load(output).signatures[0].outputs["scaled"]
    assert found.producer is not None
    assert found.producer.name == "MUL"
    inputs = {name: np.ones(t.shape, np.float32) for name, t in signature.inputs.items()}
    # XNNPACK keeps its intermediate results to itself.
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    ran = Interpreter(str(output), experimental_op_resolver_type=plain).get_signature_runner()(**inputs)
    assert ran["scaled"].shape == (1, 128, 4, 256)


def naming(model: Model, argument: str, tensor: str) -> Model:
    """The model as a file gives it whose signature also names an inner tensor."""
    signature = model.signatures[0]
    signature.outputs[argument] = next(t for t in signature.subgraph.tensors if t.name == tensor)
    return load(to_bytes(model))


def test_a_signature_is_not_extracted_from_a_model_that_orders_operators_by_their_place(
    tmp_path: Path,
) -> None:
    model = load(DEMO)
    model.metadata.append(Metadata(CONTROL_EDGES, Buffer(Data(b"\x01\x00"))))
    save(model, tmp_path / "in.tflite")
    with pytest.raises(UsageError, match="orders operators by their place"):
        convert(tmp_path / "in.tflite", tmp_path / "out.tflite", extract_signature="decode", verify="none")
    assert not (tmp_path / "out.tflite").exists()
