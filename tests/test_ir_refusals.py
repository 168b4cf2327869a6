"""What is no graph is refused by one sentence that names subgraph, operator or tensor; what only looks odd is read."""

from collections.abc import Callable
from typing import Any

import fuzz
import numpy as np
import pytest
from schema_models import pack, tfl, unpack
from tiny_models import Graph, Op, T, build, options

from edge_opt.base.errors import EdgeOptError, ModelFormatError
from edge_opt.ir import load

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
    **{
        name: (
            setting(OPERATOR(at, "outputs"), int32s(*outputs)),
            f"subgraph 'run', operator {at} ({code}): defines '{tensor}', which is already defined",
        )
        for name, at, code, outputs, tensor in [
            ("two producers", 1, "MUL", [3], "sum"), ("defines an input", 0, "ADD", [0], "x"),
            ("defines a constant", 0, "ADD", [1], "w"), ("defines one result twice", 1, "MUL", [4, 4], "y"),
        ]
    },
    "cyclic": (setting(OPERATOR(0, "inputs"), int32s(4, 1)), "operator 0 (ADD): reads 'y' before it is defined"),
    "reads its own result": (setting(OPERATOR(0, "inputs"), int32s(3, 1)), "operator 0 (ADD): reads 'sum' before"),
    "out of order": (lambda made: made.subgraphs[0].operators.reverse(), "operator 0 (MUL): reads 'sum' before it"),
    "defined by nobody": (setting("subgraphs[0].inputs", int32s()), "operator 0 (ADD): reads 'x' before it is defined"),
    "operator code": (
        setting(OPERATOR(1, "opcodeIndex"), 7), "subgraph 'run', operator 1: operator code 7 does not exist",
    ),
    **{
        f"{side} {index}": (
            setting(OPERATOR(1, f"{side}s"), int32s(*before, index)),
            f"subgraph 'run', operator 1 (MUL): {side} tensor {index} does not exist, there are 5",
        )
        for side, before, indices in [
            ("input", [3], [5, -2, 2**31 - 1, -(2**31)]), ("output", [], [5, -1, -2, 2**31 - 1, -(2**31)]),
            ("intermediate", [], [99]),
        ]
        for index in indices
    },
    "graph input": (setting("subgraphs[0].inputs", int32s(9)), "subgraph 'run' inputs: tensor 9 does not exist"),
    "graph output": (setting("subgraphs[0].outputs", int32s(-1)), "subgraph 'run' outputs: tensor -1 does not exist"),
    "buffer": (setting(TENSOR(1, "buffer"), 3), "subgraph 'run', tensor 1 'w': buffer 3 does not exist, there are 3"),
    "metadata": (setting("metadata[0].buffer", 8), "metadata 'note': buffer 8 does not exist"),
    "metadata_buffer": (setting("metadataBuffer", int32s(8)), "metadata_buffer: buffer 8 does not exist"),
    "signature's subgraph": (
        setting("signatureDefs[0].subgraphIndex", 1), "signature 'run': subgraph 1 does not exist, there are 1",
    ),
    **{
        f"signature's tensor {index}": (
            setting("signatureDefs[0].outputs[0].tensorIndex", index),
            f"signature 'run': outputs: tensor {index} does not exist, there are 5",
        )
        for index in (5, 4_000_000_000)
    },
    "signature twice": (
        lambda made: made.signatureDefs.append(made.signatureDefs[0]), "signature 'run' is there twice",
    ),
    "input named twice": (
        lambda made: made.signatureDefs[0].inputs.append(made.signatureDefs[0].inputs[0]),
        "signature 'run': inputs names 'x' twice",
    ),
    "output named twice": (
        lambda made: made.signatureDefs[0].outputs.append(made.signatureDefs[0].outputs[0]),
        "signature 'run': outputs names 'y' twice",
    ),
    **{
        f"constant of {size} bytes": (
            setting("buffers[1].data", np.zeros(size, np.uint8)),
            f"tensor 1 'w': FLOAT32[3] needs 12 bytes, its buffer holds {size}",
        )
        for size in (0, 8, 11, 13, 800)
    },
    "packed constant": (
        setting(TENSOR(1, "type"), tfl.TensorType.INT4), "tensor 1 'w': INT4[3] needs 2 bytes, its buffer holds 12",
    ),
    **{
        f"{field} {name}": (setting(TENSOR(3, field), int32s(*sizes)), f"subgraph 'run', tensor 3 'sum': {sentence}")
        for field, negative in (("shape", -1), ("shapeSignature", -2))
        for name, sizes, sentence in [
            ("negative", [2, negative], f"shape [2, {negative}] is not one that memory can hold"),
            ("far below 0", [2, -(2**31)], "shape [2, -2147483648] is not one that memory can hold"),
            ("huge", [2**31 - 1] * 2, "shape [2147483647, 2147483647] is not one that memory can hold"),
            ("huge in every axis", [2**31 - 1] * 32, "shape ["),
            ("huge beside zero", [0, 2**31 - 1, 2**31 - 1], "shape [0, 2147483647, 2147483647] is not one"),
            ("of many axes", [1] * 33, "33 dimensions, expected at most 32"),
            ("of many axes of 2", [2] * 33, "33 dimensions, expected at most 32"),
            ("of very many axes", [1] * 100_000, "100000 dimensions, expected at most 32"),
        ]
    },
    **{
        f"scale {scale}": (
            setting(TENSOR(3, "quantization"), quantization(scale=[0.5, scale], zeroPoint=[0])),
            "subgraph 'run', tensor 3 'sum': quantization scales must be finite and not negative",
        )
        for scale in (float("nan"), float("inf"), float("-inf"), -0.5)
    },
    **{
        sentence: (
            setting(TENSOR(3, "quantization"), quantization(scale=scales, zeroPoint=points, quantizedDimension=axis)),
            f"tensor 3 'sum': {sentence}",
        )
        for scales, points, axis, sentence in [
            ([1.0] * 3, [0] * 2, 1, "3 scales but 2 zero points"),
            ([1.0] * 2, [0] * 2, 1, "2 scales do not fit axis 1 of [2, 3]"),
            ([1.0] * 2, [0] * 2, 2, "2 scales do not fit axis 2 of [2, 3]"),
        ]
    },
    "options of another operator": (
        setting(OPERATOR(0, "builtinOptionsType"), tfl.BuiltinOptions.MulOptions),
        "operator 0 (ADD): has MulOptions, expected AddOptions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_graph_is_refused(case: str) -> None:
    change, sentence = REFUSED[case]
    content = changed(change)
    with fuzz.time_limit(), pytest.raises(ModelFormatError) as caught:
        load(content)
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
