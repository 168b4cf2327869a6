"""What a conversion has to keep although no operator reads it: what signatures name, and the order of operators."""

from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from text_parser import parse

from edge_opt import convert, load, testdata
from edge_opt.ir import Buffer, Metadata, Model, save, to_bytes
from edge_opt.ir.cleanup import CONTROL_EDGES, reordered
from edge_opt.output.errors import UsageError
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


# Subgraph 0: operator 1 before 2, and 300 before -1; subgraph 1: none; subgraph 2: 0 before 3. Numbers are zigzag.
EDGES = (b"\x02\x02\x04\xd8\x04\x01", b"\x00", b"\x01\x00\x06")


def test_the_order_of_operators_moves_with_their_subgraph() -> None:
    assert reordered(b"\x01\x03" + b"".join(EDGES), [2, 0]) == b"\x01\x02" + EDGES[2] + EDGES[0]
    many = reordered(b"\x01\x03" + b"".join(EDGES), [1] * 200)
    assert many == b"\x01\xc8\x01" + b"\x00" * 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\x00",
        b"\x01",
        b"\x01\x01",
        b"\x01\x01\x01\x02",
        b"\x01\x01\x00\x00",
        b"\x01\x01\x00\x80",
        b"\x01\xff\xff\xff\x7f",
        b"\x01\x01\x80" + b"\x80" * 20 + b"\x01",
        b"\x01\x01" + b"\xff" * 9 + b"\x7f",
    ],
)
def test_an_order_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match="orders operators"):
        reordered(content, [0])


def test_extracting_a_signature_leaves_the_order_of_operators_of_its_graphs_alone(tmp_path: Path) -> None:
    model = load(DEMO)
    count = len(model.subgraphs)
    # One edge for each subgraph, from operator 0 to that with the subgraph's own number.
    edges = [b"\x01\x00" + bytes([2 * index]) for index in range(count)]
    model.metadata.append(Metadata(CONTROL_EDGES, Buffer(Data(b"\x01" + bytes([count]) + b"".join(edges)))))
    source, output = tmp_path / "in.tflite", tmp_path / "out.tflite"
    save(model, source)
    decode = next(s.subgraph for s in model.signatures if s.key == "decode")
    names = {graph.name: index for index, graph in enumerate(model.subgraphs)}
    assert len(names) == count
    assert names[decode.name]
    convert(source, output, extract_signature="decode", verify="none")
    written = load(output)
    (entry,) = [entry for entry in written.metadata if entry.name == CONTROL_EDGES]
    assert entry.buffer.data is not None
    kept = [edges[names[graph.name]] for graph in written.subgraphs]
    assert bytes(entry.buffer.data.view()) == b"\x01" + bytes([len(kept)]) + b"".join(kept)
    assert 1 < len(kept) < count
    Interpreter(model_path=str(output)).allocate_tensors()
