"""The text form: what is printed gives the same bytes again, and what is no model is refused by line."""

import hashlib
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from attention_graphs import Case, build, cases
from cli_runs import Captured, run
from fuzz_seeds import handmade
from hypothesis import Phase, given, settings

from edge_opt.base.errors import ModelFormatError
from edge_opt.conversion import convert
from edge_opt.ir import DType, Metadata, Model, Operator, Quantization, Tensor, load, to_bytes
from edge_opt.ir.graph import Buffer, OperatorCode
from edge_opt.ir.parse import TextFormError, checksum, parse, random_numbers
from edge_opt.ir.text import graphs_text, subgraph_text, to_text
from edge_opt.schema import Data
from edge_opt.schema.table import new_table

TESTDATA = Path(__file__).parent.parent / "testdata"

SMALL = """\
signature decode = #0 (query=%q) -> (output=%logits)
subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,16,8]) {
  %scaled: float32[1,1,4,8] = MUL(%q, float32(0.5))
  %logits: float32[1,1,4,16] = BATCH_MATMUL(%scaled, %k) {adj_y: true}
  return %logits
}
"""


def body(*lines: str, given: str = "%x: float32[4]", result: str = "%y") -> str:
    """A subgraph as text, as it is printed."""
    inner = "".join(f"  {line}\n" for line in lines)
    return f"subgraph main ({given}) {{\n{inner}  return {result}\n}}\n"


def only(text: str) -> Operator:
    (operator,) = parse(text).subgraphs[0].operators
    return operator


INTEGERS = "int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"
ENDS = {name: np.iinfo(name) for name in INTEGERS}
LINES = body(
    "%abs: float32[4] = ABS(%x)",
    "%scalar: float32[4] = ADD(%x, float32(0.1))",
    "%vector: float32[4] = ADD(%x, float32{0.1, -0.0, inf, -inf})",
    "%odd: float32[4] = ADD(%x, float32{nan, 1e-45, 3.4028235e+38, 1.0})",
    "%half: float16[4] = CAST(%x) {out_data_type: 1}",
    "%list: float32[4,1] = RESHAPE(%x, int32{4, 1}) {new_shape: [4, 1]}",
    "%negative: float32[2] = GATHER(%x, int64{3, -1})",
    "%true: bool[4] = LOGICAL_AND(%b, bool{true, false, true, true})",
    "%matrix: float32[4] = ADD(%x, float32[1,4]{1.0, 2.0, 3.0, 4.0})",
    "%splat: float32[4] = ADD(%x, float32[100]{splat -0.5})",
    "%none: float32[] = SUM(%x, int32{0}) {keep_dims: true}",
    "%open: float32[?,4] = EXPAND_DIMS(%o, int32(0))",
    "%empty: float32[0] = SLICE(%x, int32{0}, int32{0})",
    "%optional: float32[4] = FULLY_CONNECTED(%x, float32[4,1]{1.0, 2.0, 3.0, 4.0}, none)",
    "%first: float32[2], %second: float32[2] = SPLIT(int32(0), %x) {num_splits: 2}",
    "%custom: float32[4] = CUSTOM 'MyOp' (%x)",
    "%softmax: float32[4] = SOFTMAX(%x) {beta: 0.25}",
    "%codes: int16[4] q(0.001, 0) = QUANTIZE(%x)",
    "%point: int8[4] q(0.5, -128) = ADD(%q, int8(3) q(0.25, 7))",
    "%points: float32[4] = ABS(int8[2,2]{1, 2, 3, 4} q([0.1, 0.2], [0, 1], axis 1))",
    "%axis: float32[4] = ABS(int8[2,2]{1, 2, 3, 4} q([0.1, 0.2], [0, 0], axis 0))",
    '%"y;1": float32[4] = ABS(%"a \\"b\\"\\n#%")',
    '%"\\u0432": float32[4] = ABS(%x)',
    *(f"%{name}: float32[2] = ABS({name}{{{end.min}, {end.max}}})" for name, end in ENDS.items()),
    given='%x: float32[4], %b: bool[4], %o: float32[?], %q: int8[4] q(0.5, -128), %"a \\"b\\"\\n#%": float32[4]',
    result='%abs, %"y;1"',
)


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        LINES,
        'subgraph "odml.rms_norm.impl_0" () {\n  return \n}\n',
        'signature "serving default" = #0 ("input:0"=%x) -> ()\n' + body(result="%x"),
        "signature b = #1 (x=%x) -> ()\n"
        + body(result="%x")
        + body(given="%x: int8[1]", result="%x"),
    ],
)
def test_what_is_printed_reads_back_and_prints_the_same(text: str) -> None:
    assert to_text(parse(text)) == text


@pytest.mark.parametrize("path", sorted(TESTDATA.glob("*.txt")), ids=lambda path: path.stem)
def test_the_reference_graphs_are_in_the_form_that_is_printed(path: Path) -> None:
    text = path.read_text()
    assert to_text(parse(text)) == "".join(
        line for line in text.splitlines(True) if not line.startswith("#")
    )
    loose = "# a comment\n" + SMALL.replace(" = ", "\n=\n#\n").replace(", ", " , # and\n ")
    assert to_text(parse(loose)) == SMALL


def test_operators_without_results_and_state_are_read_back() -> None:
    text = body(
        "variable %state: float32[4]",
        "unset %scratch: float32[0]",
        "%handle: resource[] = VAR_HANDLE()" + """ {container: "it's", shared_name: 'v'}""",
        "ASSIGN_VARIABLE(%handle, %x)",
        "%all: float32[4] = CONCATENATION(%state, %scratch)",
        """%y: float32[4] = CUSTOM "it's" (%all, %scratch, %handle)""",
    )
    model = parse(text)
    assert to_text(model) == text
    assert [op.outputs for op in model.subgraphs[0].operators][1] == ()
    assert {t.name: t.is_variable for t in model.subgraphs[0].tensors}["state"]
    assert to_text(load(to_bytes(model))) == text


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_a_float_is_printed_as_the_shortest_text_that_reads_back(dtype: type[Any]) -> None:
    values = np.random.default_rng(0).standard_normal(50).astype(dtype)
    model = reading(DType[values.dtype.name.upper()], (50,), values)
    assert only(to_text(model)).input(0).array().tobytes() == values.tobytes()


def reading(dtype: DType, shape: tuple[int, ...], values: np.ndarray) -> Model:
    """A model whose operator reads a constant of these bytes."""
    model = parse(body("%y: float32[4] = ABS(%x)"))
    (graph,) = model.subgraphs
    graph.set_input(
        graph.operators[0], 0, Tensor("c", shape, dtype, buffer=Buffer(Data(values.tobytes())))
    )
    return model


@pytest.mark.parametrize(
    ("dtype", "values", "printed"),
    [
        (DType.INT32, np.arange(100, dtype=np.int32), "int32[100]{...}"),
        (DType.FLOAT32, np.append(np.zeros(99, np.float32), np.float32(-0.0)), "float32[100]{...}"),
        (DType.INT4, np.zeros(2, np.uint8), "int4[4]{...}"),
        (DType.COMPLEX64, np.ones(2, np.complex64), "complex64[2]{...}"),
        (DType.STRING, np.zeros(9, np.uint8), "string[1]{...}"),
    ],
)
def test_the_bytes_of_a_constant_follow_the_graphs(
    dtype: DType, values: np.ndarray, printed: str
) -> None:
    model = reading(dtype, (int(printed.split("[")[1].split("]", maxsplit=1)[0]),), values)
    text = to_text(model)
    assert f"ABS({printed})" in text
    assert gives_its_bytes(model)
    graphs = graphs_text(model)
    assert text.startswith(graphs + "file ")
    with pytest.raises(TextFormError, match=f"^line 2, .*the numbers of constant {dtype}"):
        parse(graphs)


def gives_its_bytes(model: Model) -> bool:
    text = to_text(model, constants="full")
    return text.isascii() and to_bytes(parse(text)) == to_bytes(model)


def test_a_short_text_has_no_large_file_and_is_refused_by_name() -> None:
    model = reading(DType.INT32, (5000,), np.arange(5000, dtype=np.int32))
    text = to_text(model)
    assert text == f"{graphs_text(model)}file of {len(to_bytes(model))} bytes\n"
    message = (
        r"line 2, .*: the numbers of constant int32\[5000\] are not in the text: print it with"
    )
    with pytest.raises(TextFormError, match=message):
        parse(text)
    assert gives_its_bytes(model)
    model = parse(SMALL)
    model.metadata.append(Metadata("long", Buffer(Data(bytes(20_000)))))
    text = to_text(model)
    with pytest.raises(TextFormError, match=r"^line 7, at 'of': .*constants=\"full\", or delete"):
        parse(text)
    assert to_text(parse(text.replace("file of", "# file of"))) == SMALL


def test_graphs_that_were_edited_are_refused_until_the_file_is_deleted() -> None:
    model = parse(SMALL)
    model.metadata.append(Metadata("note", Buffer(Data(b"1.0"))))
    text = to_text(model)
    commented = text.replace("return", "  # the result\n  return")
    assert to_bytes(parse(commented)) == to_bytes(model)
    edited = text.replace("float32(0.5)", "float32(0.25)")
    with pytest.raises(
        TextFormError, match=r"^line 7: the graphs or the `file` line were edited: delete the line"
    ):
        parse(edited)
    assert parse(edited.partition("file ")[0]).subgraphs[0].operators[0].input(1).real() == 0.25


def test_a_file_line_with_other_numbers_is_refused() -> None:
    one, other = (
        to_text(reading(DType.INT32, (100,), np.arange(first, first + 100, dtype=np.int32)))
        for first in (0, 1)
    )
    assert graphs_text(parse(one)) == graphs_text(parse(other))
    line, _, _ = one.rpartition(" ")
    _, _, content = other.rpartition(" ")
    with pytest.raises(TextFormError, match="the `file` line were edited"):
        parse(f"{line} {content}")


SEEDED = """\
subgraph main (%x: float32[4]) {
  %y: TYPE[SIZE] = ABS(TYPE[SIZE]{seed 7})
  return %y
}
"""
SEEDS = {
    "float32": (70, "c7d814fb8e541380"),
    "float16": (70, "6d91c46393c72484"),
    "float64": (70, "f36cfd7137009e4c"),
    "int8": (77, "70eb70b6a224969e"),
    "uint16": (77, "3ab789490ba46bf4"),
    "int64": (70, "3a7aad4d2463bfed"),
    "bool": (77, "2f52fb270fff17e3"),
}


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_gives_the_same_numbers_on_every_machine(name: str) -> None:
    size, digest = SEEDS[name]
    text = SEEDED.replace("TYPE", name).replace("SIZE", str(size))
    values = only(text).input(0).array()
    assert hashlib.sha256(values).hexdigest()[:16] == digest
    assert to_text(parse(text)) == text, "recognised by its name, and checked"
    model = parse(text)
    buffer = model.subgraphs[0].operators[0].input(0).buffer
    assert buffer is not None
    buffer.data = Data(np.roll(values, 1).tobytes())
    assert "{...}" in to_text(model), "a name alone is no proof"
    assert gives_its_bytes(model)


def test_seeded_floats_are_between_minus_one_and_one() -> None:
    values = random_numbers(1, DType.FLOAT32, 1 << 16)
    assert -1 <= values.min() < -0.999
    assert 0.999 < values.max() < 1
    assert abs(float(values.mean())) < 0.01


def test_tensors_of_one_name_are_told_apart() -> None:
    model = parse(SMALL)
    scaled = model.subgraphs[0].operators[0].output
    scaled.name = "q"
    assert '%"q~2": float32[1,1,4,8] = MUL(%q, float32(0.5))' in to_text(model)
    assert to_text(parse(to_text(model))) == to_text(model)
    assert gives_its_bytes(model)
    model.signatures[0].outputs["odd"] = Tensor("odd", (1,), DType.FLOAT32)
    assert "odd=%odd)" in graphs_text(model), "which a signature alone names"


def test_a_graph_and_a_type_print_as_text() -> None:
    model = parse(SMALL)
    assert str(model.subgraphs[0]) == subgraph_text(model.subgraphs[0]) == SMALL.split("\n", 1)[1]
    assert f"{DType.FLOAT32} {DType.INT4!s}" == "float32 int4"


SCALES = "[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], [0, 0, 0, 0, 0, 0, 0, 0, 0]"
GRAPHS = """\
signature a = #0 (x=%x) -> (y=%y)
signature b = #0 (x=%x) -> (y=%c)
subgraph main (%x: int8[2,4] q(0.5, 0), %z: float32[?]) {
  variable %v: float32[4]
  unset %scratch: float32[2]
  constant %c = float32{1.0, 2.0}
  %y: int8[2,4] q(0.5, 0) = RESHAPE(%x, int32{2, 4}) {new_shape: [2, 4]}
  %w: float32[2] = CUSTOM 'Mine' (%c, int32{2, 4}, ONES, ONES, int8[9,1]{splat 1} q(SCALES, axis 0), %v, %scratch)
  %s: float32[2] = WHILE(%w) {cond_subgraph_index: 1, body_subgraph_index: 1}
  return %y, %c, %s
}
subgraph body (%x: float32[2]) {
  return %x
}
""".replace("SCALES", SCALES).replace("ONES", "int8[8]{splat 1}")


def everything() -> Model:
    """A model with something of everything that graphs do not show."""
    model = parse(GRAPHS)
    graph = model.subgraphs[0]
    x, z = graph.inputs
    reshape, custom, _ = graph.operators
    y = reshape.output
    sizes = reshape.input(1)
    again = custom.input(1)
    scaled = custom.input(2)
    model.table = new_table("Model", version=3, description="by \u00e9")
    model.metadata.append(Metadata("note", Buffer(Data(b"1.0"))))
    y.quantization = x.quantization  # one object
    graph.set_input(custom, 1, sizes)  # one constant of two readers, and one of none
    again.name = "unread"
    custom.input(3).buffer = scaled.buffer  # two constants of the same bytes
    odd = np.array([0x7FC00001], np.uint32).view(np.float32)  # NaN has many forms
    z.quantization = Quantization(new_table("QuantizationParameters", min=[-np.inf], max=odd))
    z.shape, z.shape_signature = (7,), (-1,)
    parts = [new_table("DimensionMetadata", dense_size=4), new_table("DimensionMetadata", format=1)]
    parts[1].set("array_segments", new_table("Uint8Vector", values=[0, 2]))
    z.table = new_table("Tensor", sparsity=new_table("SparsityParameters", dim_metadata=parts))
    details = new_table("BlockwiseQuantization", scales=1, block_size=32)
    scaled.quantization = Quantization(new_table("QuantizationParameters", details=details))
    custom.table = new_table(
        "Operator", custom_options=list(b"abc"), mutating_variable_inputs=[False, True]
    )
    custom.options = new_table("AddOptions", fused_activation_function=1)  # of no meaning, and kept
    custom.intermediates = (graph.add_tensor(Tensor("between", (1,), DType.INT16)),)
    reshape.code = OperatorCode(reshape.code.builtin, 2)
    reshape.options = None
    model.subgraphs[1].name = ""
    return model


def test_the_graphs_are_followed_by_the_file() -> None:
    text = to_text(everything())
    graphs = graphs_text(everything())
    assert "q(9 scales, axis 0)" in graphs
    assert text.startswith(f"{graphs}file ")
    assert to_text(parse(text)) == text
    assert gives_its_bytes(everything())
    assert gives_its_bytes(load(to_bytes(everything())))


def test_a_long_option_is_left_out_and_in_the_file() -> None:
    shape = [1] * 65
    text = body(f"%y: float32[4] = RESHAPE(%x, none) {{new_shape: {shape}}}")
    model = parse(text)
    assert "{new_shape: [...]}" in graphs_text(model)
    with pytest.raises(TextFormError, match=r"line 2, at '\.\.\.': expected name"):
        parse(graphs_text(model))
    assert gives_its_bytes(model)


def test_positions_behind_the_flatbuffer_and_bytes_behind_everything_are_given_back() -> None:
    model = load(to_bytes(everything()))
    for buffer in model.buffers[1:3]:
        assert buffer.data is not None
        buffer.data.external = True
    assert model.table is not None
    model.table.trailing = Data(b"a zip archive")
    model.metadata.append(Metadata("long", Buffer(Data(bytes(100)))))
    assert gives_its_bytes(model)
    assert gives_its_bytes(load(to_bytes(model)))


@pytest.mark.parametrize(
    "line",
    [
        "%y: int8[4] q(0.5, 0) = ADD(%x, %x)",
        "%y: int8[4] q(0.5, 0) = BROADCAST_TO(%x, int32{4})",  # the runtime has no version 1
    ],
)
def test_an_operator_has_the_version_that_its_types_need(line: str) -> None:
    text = body(line, given="%x: int8[4] q(0.5, 0)")
    assert only(text).code.version == 2
    assert to_text(parse(text)) == text


@pytest.mark.parametrize("path", sorted(TESTDATA.glob("*.tflite")), ids=lambda path: path.stem)
def test_an_exported_model_and_what_it_is_converted_to_are_given_back(path: Path) -> None:
    assert gives_its_bytes(load(path))
    model = load(path)
    convert(model, target="qualcomm-htp", verify="none")
    assert gives_its_bytes(model)
    assert gives_its_bytes(load(to_bytes(model)))


def test_models_that_were_made_to_be_odd_are_given_back() -> None:
    count = 0
    for seed in handmade():
        with suppress(ModelFormatError):
            assert gives_its_bytes(load(seed.content)), seed.name
            count += 1
    assert count > 5


@settings(max_examples=25, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(cases())
def test_random_attention_is_given_back_before_and_after_it_is_split(case: Case) -> None:
    model = build(case)
    assert gives_its_bytes(model)
    convert(model, verify="none")
    assert gives_its_bytes(model)


MANY = "float32[1048576,1048576]"
REFUSED = {
    "subgraph main (": "line 1, at the end: expected tensor",
    "": "line 1, at the end: the model is invalid: Model.subgraphs: expected at least one subgraph",
    "graph main": "line 1, at 'graph': expected signature or subgraph",
    body("%y: float32[4] = ABS(%q)"): "line 2, at .*: %q is not defined",
    body("%y: float32[4] = ABS(%y)"): "line 2, at .*: %y is not defined",
    body("%x: float32[4] = ABS(%x)"): "line 2, at .*: %x is defined twice",
    body("%y: float32[4] = ABSURD(%x)"): "line 2, at .*: ABSURD is not an operator",
    body("%y: float99[4] = ABS(%x)"): "line 2, at .*: float99 is not a type",
    body("%y: float32[4] = ABS(%x) {sign: 1}"): "line 2, at .*: sign is not an option",
    body(
        "%y: float32[4] = SOFTMAX(%x) {beta: 'a'}"
    ): "line 2, at .*: beta is float32, which this value does not",
    body(
        "%y: float32[4] = ADD(%x, float32[3]{1.0, 2.0})"
    ): "line 2, at .*: 2 numbers for 3 elements",
    body("%y: float32[4] = ADD(%x, float32(1e39))"): "line 2, at .*: overflow",
    body("%y: float32[4] = ADD(%x, int8(128))"): "line 2, at .*: .*out of bounds",
    body("constant %c = int8{128}"): "line 2, at .*: .*out of bounds",
    body("%y: float32[4] = ADD(%x, int4{1})"): "line 2, at .*: numbers of int4 cannot be written",
    body("%y: float32[4] = ADD(%x, float32{splat 1})"): "line 2, at .*: expected a shape in front",
    body(
        f"%y: float32[4] = ADD(%x, {MANY}{{splat 1}})"
    ): "line 2, at .*: constants take 4398046511104 bytes, at most",
    body(
        f"%y: float32[4] = ADD(%x, {MANY}{{seed 1}})"
    ): "line 2, at .*: constants take 4398046511104 bytes, at most",
    body("%y: float32[4] = SOFTMAX(%x) {beta: " + "[" * 5000): r"line 2, at '\['.*: expected name",
    body("%y: float32[4] = ABS(%x, %x)"): "line 5, .*: the model is invalid: .*has 2 inputs",
    body(
        "%y: int8[2,1] = ABS(int8[2,1]{1, 2} q(2 scales, axis 0))"
    ): "line 2, at .*: the scales are not in the text",
    body("%y: int8[1] q(0.1, 0, 1) = ABS(int8{1})"): r"line 2, at '1': expected \)",
    body("%y: int8[1] q(0.1, 0, axis 0, axis 0) = ABS(int8{1})"): r"line 2, at ',': expected \)",
    body('%y: float32[4] = ABS(%x, "%y)'): r"line 2, at .\"%y\).: expected name",
    body("%y: float32[4] = SOFTMAX(%x) {beta: 1, beta: 2}"): "line 2, at .*: beta is given twice",
    "signature a = #0 (x=%x, x=%x) -> ()\n" + body(result="%x"): "line 1, at .*: x is given twice",
    "signature a = #1 () -> ()\n"
    + body(result="%x"): "line 5, .*: signature 'a': there is no subgraph #1",
}


def file_line(content: str) -> str:
    return f"file {checksum(body(result='%x'), content)} '{content}'"


FILES = {
    "file of 684064 bytes": "the graphs do not give the whole file",
    file_line("\u0432"): "the graphs do not give the whole file",
    file_line("A"): "the `file` line is damaged: .*base64",
    file_line("A" * 16): "the `file` line is damaged: .*is not a TFLite model",
    "file 0123456789abcdef 'AAAA'": "the graphs or the `file` line were edited",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *REFUSED.items(),
        *((body(result="%x") + one, text) for one, text in FILES.items()),
    ],
)
def test_what_is_no_model_is_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(
        TextFormError, match=f"(?s)^line [0-9]+.*{message}" if message[0] != "l" else message
    ) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_text_of_unclosed_quotes_is_refused_at_once() -> None:
    with pytest.raises(TextFormError):
        parse('\\"' * 100_000 + f"\n{file_line('AAAA')}")


def test_broken_texts_are_refused_without_a_traceback() -> None:
    dice = Random(0)
    texts = [to_text(everything()), to_text(load(to_bytes(everything()))), LINES]
    words = re.findall(r"'[^'\n]*'|%?\w+|\s+|.", " ".join(texts))
    counts = Counter[bool]()
    for _ in range(1500):
        broken = re.findall(r"'[^'\n]*'|%?\w+|\s+|.", dice.choice(texts))
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(len(broken))
            broken[place : place + dice.randint(0, 2)] = [dice.choice(words)]
        model = None
        with suppress(TextFormError):
            model = parse("".join(broken))
        assert model is None or gives_its_bytes(model)
        counts[model is None] += 1
    assert min(counts.values()) > 50


def test_inspect_prints_a_model_as_text(capsys: Captured, tmp_path: Path) -> None:
    model = parse(SMALL)
    model.subgraphs[0].inputs[0].name = "\x1b[31m\u202ered\n"
    model.signatures[0].key = "\x1b]8;;"
    path = tmp_path / "hostile.tflite"
    model.save(path)
    ran = run(capsys, "inspect", "--text", path)
    assert ran.out == to_text(load(path))
    assert ran.out.isascii()
    assert not set(map(chr, range(32))).intersection(ran.out) - {"\n"}
    for more in ("--json", "--shapes", "--target=generic"):
        refused = run(capsys, "inspect", "--text", path, more)
        assert refused.code == 2
        assert "leave out the other options" in refused.err
