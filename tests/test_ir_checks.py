"""What is no graph is neither read nor written, with one sentence that names subgraph, operator or tensor."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from schema_models import pack, tfl, unpack
from text_parser import parse
from tiny_models import Graph, Op, T, build, options

from edge_opt.attention.rules import RULES
from edge_opt.base.errors import ModelFormatError
from edge_opt.ir import (
    Buffer,
    DType,
    Model,
    Operator,
    OperatorCode,
    Signature,
    Subgraph,
    Tensor,
    load,
    to_bytes,
)
from edge_opt.ir.checks import DEEPEST
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS, SUBGRAPH_FIELDS
from edge_opt.schema import TABLES, new_table
from edge_opt.schema.data import Data

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
    "no subgraph": (
        lambda made: (made.subgraphs.clear(), made.signatureDefs.clear()), "expected at least one subgraph, found none",
    ),
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
            ("input", [3], [5, -2, -(2**31)]), ("output", [], [5, -1, 2**31 - 1]),
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
        for size in (0, 11, 13)
    },
    "packed constant": (
        setting(TENSOR(1, "type"), tfl.TensorType.INT4), "tensor 1 'w': INT4[3] needs 2 bytes, its buffer holds 12",
    ),
    **{
        f"{field} {name}": (setting(TENSOR(3, field), int32s(*sizes)), f"subgraph 'run', tensor 3 'sum': {sentence}")
        for field, negative in (("shape", -1), ("shapeSignature", -2))
        for name, sizes, sentence in [
            ("negative", [2, negative], f"shape [2, {negative}] is not one that files and memory can hold"),
            ("far below 0", [2, -(2**31)], "shape [2, -2147483648] is not one that files and memory can hold"),
            ("huge", [2**31 - 1] * 2, "shape [2147483647, 2147483647] is not one that files and memory can hold"),
            ("huge beside zero", [0, 2**31 - 1, 2**31 - 1], "shape [0, 2147483647, 2147483647] is not one"),
            ("of many axes", [1] * 33, "33 dimensions, expected at most 32"),
            ("of very many axes", [1] * 100_000, "100000 dimensions, expected at most 32"),
        ]
    },
    **{
        f"scale {scale}": (
            setting(TENSOR(3, "quantization"), quantization(scale=[0.5, scale], zeroPoint=[0])),
            "subgraph 'run', tensor 3 'sum': quantization scales must be finite and not negative",
        )
        for scale in (float("nan"), float("inf"), -0.5)
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


def test_numbers_can_be_read_of_constants_alone_and_not_written() -> None:
    x, w, *_ = load(changed()).subgraphs[0].tensors
    assert w.array().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        w.array()[0] = 5
    text = load(changed(setting(TENSOR(1, "type"), tfl.TensorType.STRING))).subgraphs[0].tensors[1]
    for tensor, dtype in ((x, "FLOAT32"), (text, "STRING")):
        with pytest.raises(ValueError, match=rf"tensor '.' \({dtype}\) has no numbers to read"):
            tensor.array()
    unnamed = changed(setting("subgraphs[0].name", None), lambda made: made.subgraphs[0].operators.reverse())
    with pytest.raises(ModelFormatError, match="subgraph '#0', operator 0"):
        load(unnamed)


# Operators, and the subgraphs that they call


def model_of(name: str, inputs: int, outputs: int, missing: int | None = None) -> bytes:
    """A model of one operator, which may leave out an input."""
    tensors = [T(f"{side}{i}", (2,)) for side, count in (("x", inputs), ("y", outputs)) for i in range(count)]
    read = [f"x{i}" for i in range(inputs)]
    used = [None if i == missing else x for i, x in enumerate(read)]
    return build(Graph(tensors, [Op(name, used, [f"y{i}" for i in range(outputs)])], read, []))


def test_every_operator_that_a_rewrite_may_follow_is_checked_when_it_is_read() -> None:
    assert set(KINDS) == set(BUILTIN_OPERATORS)
    assert all(KINDS[name].is_followed for name in RULES)


@pytest.mark.parametrize(
    ("name", "data"),
    {"SPLIT": [1], "SELECT_V2": [1, 2], "PADV2": [0, 2], "CONCATENATION": [0, 1, 2], "TOPK_V2": [0]}.items(),
)
def test_a_record_says_which_inputs_the_results_are_made_of(name: str, data: list[int]) -> None:
    assert KINDS[name].data_operands([0, 1, 2]) == data
    assert KINDS[name].data_results([0, 1, 2]) == ([0, 1, 2] if name == "SPLIT" else [0])


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "missing", "reason"),
    [
        ("SOFTMAX", 0, 1, None, r"operator 0 \(SOFTMAX\): has 0 inputs, expected 1$"),
        ("ADD", 3, 1, None, "has 3 inputs, expected 2$"),
        ("CONV_2D", 4, 1, None, "has 4 inputs, expected 2 or 3$"),
        ("PACK", 0, 1, None, "has 0 inputs, expected 1 or more$"),
        ("SOFTMAX", 1, 0, None, "has 0 outputs, expected 1$"),
        ("SPLIT", 2, 0, None, "has 0 outputs, expected 1 or more$"),
        ("ADD", 2, 1, 1, "leaves out an input that it needs$"),
        ("CONCATENATION", 3, 1, 2, "leaves out an input that it needs$"),
        ("FULLY_CONNECTED", 3, 1, 2, ""),
        ("SPLIT", 2, 3, None, ""),
        ("CUSTOM", 0, 0, None, ""),
    ],
)
def test_an_operator_of_another_form_is_refused(
    name: str, inputs: int, outputs: int, missing: int | None, reason: str
) -> None:
    """Inputs that may be left out, and operators that nobody knows, pass."""
    with pytest.raises(ModelFormatError, match=reason) if reason else nullcontext():
        load(model_of(name, inputs, outputs, missing))


def test_any_input_of_a_subgraph_that_is_run_may_be_left_out() -> None:
    assert KINDS["STABLEHLO_COMPOSITE"].misfit([None, None], []) is None
    assert KINDS["IF"].misfit([None], []) == "leaves out an input that it needs"


def test_every_option_that_names_a_subgraph_is_known() -> None:
    """By name: the schema says of no integer what it indexes."""
    named = {
        (table, field.name)
        for table, spec in TABLES.items()
        for field in spec.fields
        if "subgraph" in field.name or "computation" in field.name
    }
    others = {("Model", "subgraphs"), ("SignatureDef", "subgraph_index"), ("StablehloScatterOptions", "")}
    assert {(table, name) for table, names in SUBGRAPH_FIELDS.items() for name in names} == named - others


def chain(length: int, last: int) -> bytes:
    """Subgraph i calls i + 1; the last one calls `last`."""
    model = Model()
    code = OperatorCode(BUILTIN_OPERATORS["CALL_ONCE"])
    for index in range(length):
        graph = Subgraph(f"g{index}")
        following = index + 1 if index + 1 < length else last
        graph.append(Operator(code, [], [], new_table("CallOnceOptions", init_subgraph_index=following)))
        model.subgraphs.append(graph)
    model.subgraphs.append(Subgraph("end"))
    return to_bytes(model)


def test_subgraphs_may_call_others_but_neither_too_deep_nor_in_a_circle() -> None:
    load(chain(DEEPEST - 1, DEEPEST - 1))
    for length, last in ((DEEPEST, DEEPEST), (1500, 1500), (3, 0), (3, 1), (3, 2)):
        with pytest.raises(ModelFormatError, match="subgraph 0 'g0': its calls lead in a circle, or over 48"):
            load(chain(length, last))
    for index in (-1, 3):
        with pytest.raises(
            ModelFormatError, match=rf"'g1', operator 0 \(CALL_ONCE\): subgraph {index} does not"
        ):
            load(chain(2, index))


# What is written

_TEXT = """
signature run = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[2,2]) {
  %y: float32[2,2] = ADD(%x, float32[2,2]{1.0, 2.0, 3.0, 4.0})
  return %y
}
"""


def constant(model: Model) -> Tensor:
    return model.subgraphs[0].operators[0].input(1)


NEW = Tensor("z", (1,), DType.FLOAT32)
UNWRITABLE: list[tuple[Callable[[Model], object], str]] = [
    (lambda m: setattr(m.subgraphs[0].inputs[0], "shape", (-1, 2)), r"tensor \d 'x': shape \[-1, 2\] is not one that"),
    (lambda m: setattr(m.subgraphs[0].inputs[0], "shape", (1 << 31,)), r"shape \[2147483648\] is not one that files"),
    (lambda m: setattr(constant(m), "buffer", Buffer(Data(b"1234"))), r"FLOAT32\[2, 2\] needs 16 bytes, its buffer"),
    (lambda m: (m.subgraphs.clear(), m.signatures.clear()), "expected at least one subgraph, found none"),
    (lambda m: m.signatures.append(m.signatures[0]), "signature 'run' is there twice"),
    (
        lambda m: m.signatures.append(Signature("other", Subgraph("other"), {}, {})),
        "signature 'other': its subgraph is not one of the model's",
    ),
    (lambda m: m.signatures[0].inputs.update(z=NEW), "signature 'run': its subgraph does not hold 'z'"),
    (
        lambda m: m.signatures[0].outputs.update(late=m.subgraphs[0].add_tensor(replace(NEW))),
        "signature 'run': nothing defines its output 'late'",
    ),
    (lambda m: m.subgraphs[0].outputs.append(NEW), "subgraph 'main': nothing defines its output 'z'"),
    (
        lambda m: m.subgraphs[0].set_input(m.subgraphs[0].operators[0], 0, NEW),
        r"operator 0 \(ADD\): reads 'z' before it is defined",
    ),
    (
        lambda m: m.subgraphs[0].append(m.new_operator("WHILE", [], [], cond_subgraph_index=7)),
        "subgraph 7 does not exist, there are 1|leaves out|expected 1 or more",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), UNWRITABLE)
def test_a_model_that_load_would_refuse_is_not_written(
    change: Callable[[Model], object], sentence: str, tmp_path: Path
) -> None:
    model = parse(_TEXT)
    change(model)
    with pytest.raises(ModelFormatError, match=sentence):
        model.save(tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelFormatError, match=sentence):
        to_bytes(model)
