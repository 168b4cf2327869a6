"""Models read into the graph and written again: what nobody changed stays, what a rewrite left unused goes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from ai_edge_litert.tools import flatbuffer_utils
from cli_runs import DEMO, QUANTIZED, Captured, run
from schema_models import everything, pack, plain, tfl, unpack, values

from edge_opt import ir
from edge_opt.ir import Constants, DType, Model, Operator, Tensor, load, to_bytes, to_tables
from edge_opt.ir.cleanup import ModelPart, name_apart, parts_in_use, remove_unused
from edge_opt.ir.parse import parse
from edge_opt.ir.text import to_text
from edge_opt.schema import Data, model_bytes, new_table, read_model

demos = pytest.mark.parametrize("path", [DEMO, QUANTIZED], ids=lambda path: path.stem)


def sample() -> bytes:
    """Two signatures whose order is not the subgraphs'; one weight shared by both."""
    model = parse("""
        signature a = #1 (x=%x) -> (y=%y)
        signature b = #0 (x=%x) -> (y=%y)
        subgraph b (%x: float32[4]) { %y: float32[4] = ADD(%x, float32{0, 1, 2, 3}) return %y }
        subgraph a (%x: float32[4]) { %y: float32[4] = MUL(float32{0, 1, 2, 3}, %x) return %y }
    """)
    weight, note = model.buffers[1], ir.Buffer(Data(b"kept"))
    for graph in model.subgraphs:
        x, y, w = graph.tensors
        graph.tensors, w.name, w.buffer = [x, w, y], "w", weight
    model.buffers[2:], model.metadata, model.metadata_buffers = (
        [note],
        [ir.Metadata("note", note)],
        [note],
    )
    return to_bytes(model)


@demos
def test_a_model_that_nobody_changed_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    assert values(to_tables(load(path))) == values(read_model(path))
    content = to_bytes(load(path))
    written = flatbuffer_utils.read_model_from_bytearray(bytearray(content))
    assert plain(written) == plain(flatbuffer_utils.read_model(str(path)))
    assert to_bytes(load(path)) == to_bytes(load(content)) == content
    load(path).save(tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").read_bytes() == content


def sane_everything() -> bytes:
    """A model with a bit of everything whose indices and sizes fit."""
    model = everything()
    graph = model.subgraphs[0]
    graph.operators = graph.operators[:1]
    model.buffers[1].data = np.arange(4, dtype=np.uint8)
    graph.tensors[1].buffer = 0  # is written by the operator
    graph.outputs = np.array([1], np.int32)
    model.signatureDefs[0].outputs[0].tensorIndex = 1
    return pack(model)


@pytest.mark.parametrize("make", [sample, sane_everything])
def test_hand_made_models_have_the_same_tables(make: Callable[[], bytes]) -> None:
    content = make()
    assert values(to_tables(load(content))) == values(read_model(content))
    assert plain(unpack(to_bytes(load(content)))) == plain(unpack(content))


def test_signatures_keep_their_names_and_order_whatever_the_subgraphs_order() -> None:
    model = load(sample())
    first, second = model.subgraphs
    assert model.entry_points() == [("a", second), ("b", first)]
    assert (first.name, second.name, model.signature_name(first)) == ("b", "a", "b")
    assert first.tensors[1].buffer is second.tensors[1].buffer, "a weight that both share is one"
    written = unpack(to_bytes(model))
    assert [(s.signatureKey, s.subgraphIndex) for s in written.signatureDefs] == [
        (b"a", 1),
        (b"b", 0),
    ]
    assert written.subgraphs[0].tensors[1].buffer == written.subgraphs[1].tensors[1].buffer
    model = parse("subgraph main (%x: float32[1]) { return %x }")
    assert model.entry_points() == [("main", model.subgraphs[0])]


@pytest.mark.parametrize(
    "inside", [np.zeros(0, np.uint8), np.ones(16, np.uint8)], ids=["empty", "filled"]
)
def test_buffer_0_holds_no_constants_whatever_is_in_it(inside: np.ndarray[Any, Any]) -> None:
    """As the runtime has it: tensors without bytes refer to buffer 0, and it never looks inside."""
    model = unpack(sample())
    model.buffers[0].data = inside
    read = load(pack(model))
    assert [tensor.is_constant for tensor in read.subgraphs[0].tensors] == [False, True, False]
    assert plain(unpack(to_bytes(read))) == plain(unpack(pack(model)))


def test_a_scalar_constant_has_a_rank_even_where_the_file_does_not_say_so() -> None:
    content = unpack(sample())
    for graph in content.subgraphs:
        for tensor in graph.tensors:
            tensor.hasRank, tensor.shape = False, np.array([], np.int32)
    content.buffers[1].data = content.buffers[1].data[:4]
    x, w, _ = load(pack(content)).subgraphs[0].tensors
    assert (x.has_rank, w.has_rank) == (False, True)


def test_an_operator_code_is_the_larger_of_two_fields_and_a_custom_code_on_a_builtin_says_nothing() -> (
    None
):
    content = unpack(sample())
    wide = tfl.BuiltinOperator.STABLEHLO_ADD
    content.operatorCodes[0] = tfl.OperatorCodeT(
        builtinCode=wide, deprecatedBuiltinCode=127, version=2
    )
    mul = tfl.BuiltinOperator.MUL
    content.operatorCodes[1] = tfl.OperatorCodeT(deprecatedBuiltinCode=mul, customCode="MUL")
    content.subgraphs[0].operators[0].builtinOptions = None
    content.subgraphs[0].operators[0].builtinOptionsType = 0
    model = load(pack(content))
    assert [(code.name, code.version) for code in model.operator_codes] == [
        ("STABLEHLO_ADD", 2),
        ("MUL", 1),
    ]
    assert model.operator_code("MUL") == model.operator_codes[1]
    assert unpack(to_bytes(model)).operatorCodes[1].customCode == b"MUL"


def test_new_tensors_operators_and_constants_are_written_behind_what_was_there() -> None:
    model = load(sample())
    graph = model.signatures[0].subgraph
    two = Constants(model).make("two", np.array(2, np.float32), DType.FLOAT32)
    scaled = Tensor("scaled", (4,), DType.FLOAT32, quantization=ir.Quantization.affine(0.5, 3))
    product = graph.operators[0].output
    graph.append(
        Operator(model.operator_code("ADD", 7), [product, two], [scaled], new_table("AddOptions"))
    )
    graph.outputs = [scaled]
    model.signatures[0].outputs["y"] = scaled
    before, after = unpack(sample()), unpack(to_bytes(model))
    tensors, kept = after.subgraphs[1].tensors, before.subgraphs[1].tensors
    for now, then in (
        (after.subgraphs[0], before.subgraphs[0]),
        (after.buffers[:-1], before.buffers),
        (after.operatorCodes[:-1], before.operatorCodes),
        (tensors[:3], kept),
    ):
        assert plain(now) == plain(then)
    new = after.operatorCodes[-1]
    assert (new.builtinCode, new.deprecatedBuiltinCode, new.version) == (0, 0, 7)
    added = [(b"two", True, len(before.buffers)), (b"scaled", True, 0)]
    assert [(t.name, t.hasRank, t.buffer) for t in tensors[3:]] == added
    assert list(tensors[4].quantization.zeroPoint) == [3]
    assert after.signatureDefs[0].outputs[0].tensorIndex == after.subgraphs[1].outputs[0] == 4
    assert to_text(load(to_bytes(model))) == to_text(model)
    assert unpack(to_bytes(Model(subgraphs=[ir.Subgraph()]))).subgraphs[0].name is None


def test_what_is_taken_from_a_tensor_is_gone_from_the_file() -> None:
    content = unpack(sample())
    x = content.subgraphs[0].tensors[0]
    x.shape, x.shapeSignature = np.array([4, 1], np.int32), np.array([-1, 1], np.int32)
    x.quantization = tfl.QuantizationParametersT(scale=[1.0], zeroPoint=[0])
    model = load(pack(content))
    tensor = model.subgraphs[0].tensors[0]
    assert (tensor.is_dynamic, tensor.is_quantized) == (True, True)
    tensor.shape_signature = tensor.quantization = None
    written = load(to_bytes(model)).subgraphs[0].tensors[0]
    assert (written.shape_signature, written.quantization) == (None, None)


def test_the_bytes_of_a_buffer_are_written_whatever_the_file_had() -> None:
    model = load(pack(unpack(sample())))
    constant = next(tensor for tensor in model.subgraphs[0].tensors if tensor.is_constant)
    zeros = np.zeros_like(constant.array())
    assert constant.buffer is not None
    constant.buffer.data = Data(zeros.tobytes())
    written = load(to_bytes(model)).subgraphs[0].tensors[model.subgraphs[0].tensors.index(constant)]
    assert np.array_equal(written.array(), zeros)


def test_equal_constants_are_one_tensor_in_a_subgraph_and_one_buffer_in_the_model() -> None:
    model = Model()
    here, there = Constants(model), Constants(model)
    values = np.array([1, 2], np.int32)
    first = here.make("a", values, DType.INT32)
    assert here.make("b", values.copy(), DType.INT32) is first
    assert there.make("c", values, DType.INT32).buffer is first.buffer
    assert there.make("c", values, DType.INT32) is not first
    others = [
        here.make("shape", values.reshape(1, 2), DType.INT32),
        here.make("type", values.view(np.uint32), DType.UINT32),
        here.make("scale", values, DType.INT32, ir.Quantization.affine(0.5)),
    ]
    assert len({id(tensor) for tensor in (first, *others)}) == 4
    assert {id(tensor.buffer) for tensor in others} == {id(first.buffer)}
    assert here.make("number", np.array([1, 3], np.int32), DType.INT32).buffer is not first.buffer


def rewired() -> tuple[Model, set[ModelPart]]:
    """The sample with an unused tensor, buffer and operator code, and its ADD of a weight made a NEG."""
    content = unpack(sample())
    idle = np.array([9], np.uint8)
    content.buffers += [tfl.BufferT(data=idle), tfl.BufferT(data=idle)]
    unused = tfl.TensorT(name="idle", shape=[1], type=tfl.TensorType.UINT8, buffer=3)
    content.subgraphs[0].tensors.append(unused)
    absolute = tfl.BuiltinOperator.ABS
    content.operatorCodes.append(
        tfl.OperatorCodeT(builtinCode=absolute, deprecatedBuiltinCode=absolute)
    )
    model = load(pack(content))
    usage = parts_in_use(model)
    graph = model.subgraphs[0]
    (add,) = graph.operators
    graph.remove(add)
    graph.append(Operator(model.operator_code("NEG"), [graph.inputs[0]], [graph.outputs[0]]))
    return model, usage


def test_cleanup_drops_what_the_rewrite_left_unused_and_keeps_what_was_unused_before() -> None:
    model, usage = rewired()
    remove_unused(model, usage)
    written = unpack(to_bytes(model))
    assert [t.name for t in written.subgraphs[0].tensors] == [b"x", b"y", b"idle"]
    assert [t.name for t in written.subgraphs[1].tensors] == [b"x", b"w", b"y"], "still read"
    assert len(written.buffers) == 5, "the weight is read elsewhere, the idle ones were idle before"
    names = [tfl.BuiltinOperator.MUL, tfl.BuiltinOperator.NEG]
    assert [code.builtinCode for code in written.operatorCodes] == names


def test_cleanup_drops_a_buffer_with_its_last_reader_and_the_others_move_up() -> None:
    model = load(sample())
    remove_unused(model, parts_in_use(model))
    assert values(to_tables(model)) == values(read_model(sample())), "nothing was changed"
    model, usage = rewired()
    graph = model.subgraphs[1]
    (multiply,) = graph.operators
    graph.set_input(multiply, 0, graph.inputs[0])
    remove_unused(model, usage)
    written = unpack(to_bytes(model))
    assert written.buffers[0].data is None, "buffer 0 is the empty one"
    assert bytes(written.buffers[1].data) == b"kept"
    assert written.metadata[0].buffer == 1
    assert list(written.metadataBuffer) == [1]
    idle = load(to_bytes(model)).subgraphs[0].tensors[-1]
    assert (idle.name, idle.numpy().tolist()) == ("idle", [9])


def test_cleanup_keeps_what_only_a_signature_still_names() -> None:
    model = load(sample())
    graph = model.subgraphs[0]
    weight = graph.tensors[1]
    model.signatures[1].outputs["weight"] = weight
    usage = parts_in_use(model)
    (add,) = graph.operators
    graph.set_input(add, 1, graph.inputs[0])
    remove_unused(model, usage)
    assert weight in graph.tensors
    del model.signatures[1].outputs["weight"]
    remove_unused(model, usage)
    assert weight not in graph.tensors


def test_new_tensors_get_names_of_their_own_and_old_ones_keep_theirs() -> None:
    model, _ = rewired()
    old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
    before = [tensor.name for tensor in old]
    assert len(set(before)) < len(before), "two subgraphs share names, as some exporters write them"
    first, second = (graph.add_tensor(Tensor("x", (1,), DType.INT32)) for graph in model.subgraphs)
    other = model.subgraphs[0].add_tensor(Tensor("new", (1,), DType.INT32))
    name_apart(model, old)
    assert [tensor.name for tensor in old] == before
    assert (first.name, second.name, other.name) == ("x_2", "x_3", "new")


def test_what_no_runtime_reads_is_kept_or_left_out_with_a_note(
    tmp_path: Path, capsys: Captured
) -> None:
    """Every deprecated field of the schema, as older converters wrote it, and metadata without bytes."""
    path = tmp_path / "old.tflite"
    made = parse(
        "signature old = #0 (x=%x) -> (y=%y) subgraph main (%x: float32[1,2,2,1]) { "
        "%y: float32[1,4,4,1] = RESIZE_BILINEAR(%x, int32{4, 4}) return %y }"
    )
    root = to_tables(made)
    (signature,) = root.get("signature_defs")
    (operator,) = root.get("subgraphs")[0].get("operators")
    signature.set("deprecated_tag", "serve")
    operator.set("builtin_options", new_table("ResizeBilinearOptions", new_height=4, new_width=4))
    root.set("metadata", [new_table("Metadata", name="lost", buffer=99)])
    root.set("metadata_buffer", [0, 99, -1])
    path.write_bytes(model_bytes(root))
    Interpreter(model_path=str(path)).allocate_tensors()
    model = load(path)
    notes = [
        "left out, because the buffer does not exist: "
        + ", ".join(
            [
                "metadata 'lost' (buffer 99)",
                "metadata_buffer (buffer 99)",
                "metadata_buffer (buffer -1)",
            ]
        ),
    ]
    assert model.notes == notes
    shown = run(capsys, "inspect", path).out
    ran = run(capsys, "convert", path, "--report", tmp_path / "report.md")
    assert ran.code == 0
    report = (tmp_path / "report.md").read_text()
    for note in notes:
        assert f"Note: {note}\n" in shown
        assert f"  {note}\n" in ran.out
        assert note.partition(" ")[0] in report
    written = read_model(tmp_path / "old.opt.tflite")
    (signature,) = written.get("signature_defs")
    (operator,) = written.get("subgraphs")[0].get("operators")
    assert signature.get("deprecated_tag") == "serve"
    assert (operator.get("builtin_options").get("new_height"), written.get("metadata")) == (4, [])
    assert written.get("metadata_buffer").tolist() == [0]
    Interpreter(model_path=str(tmp_path / "old.opt.tflite")).allocate_tensors()
