"""What is no graph is refused by one sentence that names subgraph, operator or tensor; what only looks odd is read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from schema_models import pack, tfl, unpack
from tiny_models import Graph, Op, T, build, options

from edge_opt.ir import load
from edge_opt.schema import EdgeOptError, ModelFormatError

Change = Callable[[Any], object]


def model() -> Any:
    """Two operators after each other: `y = (x + w) * v`, as the bindings' object."""
    tensors = [
        T("x", (2, 3)),
        T("w", (3,), value=np.arange(3, dtype=np.float32)),
        T("v", (1,), value=np.ones(1, np.float32)),
        T("sum", (2, 3)),
        T("y", (2, 3)),
    ]
    operators = [
        Op("ADD", ["x", "w"], ["sum"], options("AddOptions")),
        Op("MUL", ["sum", "v"], ["y"], options("MulOptions")),
    ]
    made = unpack(build(Graph(tensors, operators, ["x"], ["y"], "run")))
    made.metadata = [tfl.MetadataT(name="note", buffer=0)]
    return made


def changed(*changes: Change) -> bytes:
    made = model()
    for change in changes:
        change(made)
    return pack(made)


def setting(place: str, value: Any) -> Change:
    """A change of one field, e.g. `subgraphs[0].tensors[1].shape`."""

    def change(made: Any) -> None:
        head, _, field = place.rpartition(".")
        target = eval(f"made.{head}", {"made": made}) if head else made
        setattr(target, field, value)

    return change


def int32s(*values: int) -> Any:
    return np.array(values, np.int32)


TENSOR = "subgraphs[0].tensors[{}].{}".format
OPERATOR = "subgraphs[0].operators[{}].{}".format


def quantization(**fields: Any) -> Any:
    return tfl.QuantizationParametersT(**fields)


REFUSED: dict[str, tuple[Change, str]] = {
    "no subgraph": (setting("subgraphs", []), "expected at least one subgraph, found none"),
    "two producers": (
        setting(OPERATOR(1, "outputs"), int32s(3)),
        "subgraph 'run', operator 1 (MUL): defines 'sum', which is already defined",
    ),
    "defines an input": (
        setting(OPERATOR(0, "outputs"), int32s(0)),
        "operator 0 (ADD): defines 'x', which is already defined",
    ),
    "defines a constant": (
        setting(OPERATOR(0, "outputs"), int32s(1)),
        "operator 0 (ADD): defines 'w', which is already defined",
    ),
    "cyclic": (
        setting(OPERATOR(0, "inputs"), int32s(4, 1)),
        "operator 0 (ADD): reads 'y' before it is defined",
    ),
    "reads its own result": (
        setting(OPERATOR(0, "inputs"), int32s(3, 1)),
        "operator 0 (ADD): reads 'sum' before it is defined",
    ),
    "out of order": (
        lambda made: made.subgraphs[0].operators.reverse(),
        "operator 0 (MUL): reads 'sum' before it is defined",
    ),
    "read but defined by nobody": (
        setting("subgraphs[0].inputs", int32s()),
        "operator 0 (ADD): reads 'x' before it is defined",
    ),
    "operator code": (
        setting(OPERATOR(1, "opcodeIndex"), 7),
        "subgraph 'run', operator 1: operator code 7 does not exist, there are 2",
    ),
    "input tensor": (
        setting(OPERATOR(1, "inputs"), int32s(3, 5)),
        "subgraph 'run', operator 1 (MUL): input tensor 5 does not exist, there are 5",
    ),
    "input below -1": (
        setting(OPERATOR(1, "inputs"), int32s(3, -2)),
        "operator 1 (MUL): input tensor -2 does not exist",
    ),
    "output tensor": (
        setting(OPERATOR(1, "outputs"), int32s(-1)),
        "operator 1 (MUL): output tensor -1 does not exist",
    ),
    "intermediate tensor": (
        setting(OPERATOR(1, "intermediates"), int32s(99)),
        "operator 1 (MUL): intermediate tensor 99 does not exist",
    ),
    "graph input": (setting("subgraphs[0].inputs", int32s(9)), "subgraph 'run' inputs: tensor 9 does not exist"),
    "graph output": (setting("subgraphs[0].outputs", int32s(-1)), "subgraph 'run' outputs: tensor -1 does not"),
    "buffer": (
        setting(TENSOR(1, "buffer"), 3),
        "subgraph 'run', tensor 1 'w': buffer 3 does not exist, there are 3",
    ),
    "metadata": (setting("metadata[0].buffer", 8), "metadata 'note': buffer 8 does not exist"),
    "metadata_buffer": (setting("metadataBuffer", int32s(8)), "metadata_buffer: buffer 8 does not exist"),
    "signature's subgraph": (
        setting("signatureDefs[0].subgraphIndex", 1),
        "signature 'run': subgraph 1 does not exist, there are 1",
    ),
    "signature's tensor": (
        setting("signatureDefs[0].outputs[0].tensorIndex", 5),
        "signature 'run': outputs: tensor 5 does not exist, there are 5",
    ),
    "signature twice": (
        lambda made: made.signatureDefs.append(made.signatureDefs[0]),
        "signature 'run' is there twice",
    ),
    "argument twice": (
        lambda made: made.signatureDefs[0].inputs.append(made.signatureDefs[0].inputs[0]),
        "signature 'run': inputs names 'x' twice",
    ),
    "constant too short": (
        setting("buffers[1].data", np.zeros(8, np.uint8)),
        "tensor 1 'w': FLOAT32[3] needs 12 bytes, its buffer holds 8",
    ),
    "constant too long": (
        setting("buffers[1].data", np.zeros(13, np.uint8)),
        "tensor 1 'w': FLOAT32[3] needs 12 bytes, its buffer holds 13",
    ),
    "constant without bytes": (
        setting("buffers[1].data", np.zeros(0, np.uint8)),
        "tensor 1 'w': FLOAT32[3] needs 12 bytes, its buffer holds 0",
    ),
    "packed constant": (
        setting(TENSOR(1, "type"), tfl.TensorType.INT4),
        "tensor 1 'w': INT4[3] needs 2 bytes, its buffer holds 12",
    ),
    "negative size": (
        setting(TENSOR(3, "shape"), int32s(2, -3)),
        "tensor 3 'sum': shape [2, -3] is not one that memory can hold",
    ),
    "huge shape": (
        setting(TENSOR(3, "shape"), int32s(2**31 - 1, 2**31 - 1)),
        "tensor 3 'sum': shape [2147483647, 2147483647] is not one that memory can hold",
    ),
    "huge beside zero": (
        setting(TENSOR(3, "shape"), int32s(0, 2**31 - 1, 2**31 - 1)),
        "is not one that memory can hold",
    ),
    "many dimensions": (
        setting(TENSOR(3, "shape"), int32s(*[1] * 33)),
        "tensor 3 'sum': 33 dimensions, expected at most 32",
    ),
    "negative dynamic size": (
        setting(TENSOR(3, "shapeSignature"), int32s(-2, 3)),
        "tensor 3 'sum': shape [-2, 3] is not one that memory can hold",
    ),
    "scale not finite": (
        setting(TENSOR(3, "quantization"), quantization(scale=[float("nan")], zeroPoint=[0])),
        "tensor 3 'sum': quantization scales must be finite and not negative",
    ),
    "scale negative": (
        setting(TENSOR(3, "quantization"), quantization(scale=[-0.5], zeroPoint=[0])),
        "quantization scales must be finite and not negative",
    ),
    "zero points missing": (
        setting(
            TENSOR(3, "quantization"),
            quantization(scale=[1.0, 1.0, 1.0], zeroPoint=[0, 0], quantizedDimension=1),
        ),
        "tensor 3 'sum': 3 scales but 2 zero points",
    ),
    "scales do not fit": (
        setting(TENSOR(3, "quantization"), quantization(scale=[1.0, 1.0], zeroPoint=[0, 0], quantizedDimension=1)),
        "tensor 3 'sum': 2 scales do not fit axis 1 of [2, 3]",
    ),
    "axis of the scales": (
        setting(TENSOR(3, "quantization"), quantization(scale=[1.0, 1.0], zeroPoint=[0, 0], quantizedDimension=2)),
        "tensor 3 'sum': 2 scales do not fit axis 2 of [2, 3]",
    ),
    "options of another operator": (
        setting(OPERATOR(0, "builtinOptionsType"), tfl.BuiltinOptions.MulOptions),
        "operator 0 (ADD): has MulOptions, expected AddOptions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_graph_is_refused(case: str) -> None:
    change, sentence = REFUSED[case]
    with pytest.raises(ModelFormatError) as caught:
        load(changed(change))
    assert isinstance(caught.value, EdgeOptError)
    assert caught.value.exit_code == 3
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


READ: dict[str, Change] = {
    "as it is": lambda made: None,
    "an optional input left out": setting(OPERATOR(1, "intermediates"), int32s()),
    "a constant of no elements": lambda made: (
        setting(TENSOR(2, "shape"), int32s(0))(made),
        setting("buffers[2].data", np.zeros(0, np.uint8))(made),
    ),
    "a dynamic size": setting(TENSOR(3, "shapeSignature"), int32s(-1, 3)),
    "one zero point for many scales": setting(
        TENSOR(3, "quantization"), quantization(scale=[1.0, 1.0, 1.0], zeroPoint=[0], quantizedDimension=1)
    ),
    "scales without zero points": setting(TENSOR(3, "quantization"), quantization(scale=[0.5])),
    "ranges without scales": setting(TENSOR(3, "quantization"), quantization(min=[-1.0], max=[1.0])),
    "a scale of 0": setting(TENSOR(3, "quantization"), quantization(scale=[0.0], zeroPoint=[0])),
    "a variable that nobody defines": lambda made: (
        setting("subgraphs[0].inputs", int32s())(made),
        setting("signatureDefs", [])(made),
        setting(TENSOR(0, "isVariable"), True)(made),
    ),
    "two signatures of one subgraph": lambda made: made.signatureDefs.append(
        tfl.SignatureDefT(signatureKey="again", subgraphIndex=0, inputs=[], outputs=[])
    ),
    "a sparse constant": lambda made: (
        setting(TENSOR(1, "sparsity"), tfl.SparsityParametersT(traversalOrder=int32s(0)))(made),
        setting("buffers[1].data", np.zeros(4, np.uint8))(made),
    ),
    "a string constant": setting(TENSOR(1, "type"), tfl.TensorType.STRING),
}


@pytest.mark.parametrize("case", READ)
def test_what_only_looks_odd_is_read(case: str) -> None:
    assert load(changed(READ[case])).subgraphs[0].name == "run"


def test_a_subgraph_without_a_name_goes_by_its_number() -> None:
    content = changed(setting("subgraphs[0].name", None), lambda made: made.subgraphs[0].operators.reverse())
    with pytest.raises(ModelFormatError, match="subgraph '#0', operator 0"):
        load(content)


def test_numbers_of_a_tensor_that_has_none() -> None:
    x, w, *_ = load(changed(lambda made: None)).subgraphs[0].tensors
    assert w.array().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"tensor 'x' \(FLOAT32\) has no numbers to read"):
        x.array()
    text = load(changed(setting(TENSOR(1, "type"), tfl.TensorType.STRING))).subgraphs[0].tensors[1]
    with pytest.raises(ValueError, match=r"tensor 'w' \(STRING\) has no numbers to read"):
        text.array()


def test_constants_cannot_be_written_to() -> None:
    w = load(changed(lambda made: None)).subgraphs[0].tensors[1]
    with pytest.raises(ValueError, match="read-only"):
        w.array()[0] = 5
