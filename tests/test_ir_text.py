"""The text form: what is printed reads back as the same model, and what is no model is refused by line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_parser import TextFormError, parse

from edge_opt.ir import DType, Metadata, Model, Operator, Tensor, load, to_bytes
from edge_opt.ir.graph import Buffer
from edge_opt.ir.text import subgraph_text, to_text
from edge_opt.schema import Data

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
        (DType.INT32, np.zeros(1 << 17, np.int32), "int32[131072]{...}"),
        (DType.INT4, np.zeros(2, np.uint8), "int4[4]{...}"),
        (DType.STRING, np.zeros(9, np.uint8), "string[1]{...}"),
    ],
)
def test_large_and_packed_constants_are_only_shown(
    dtype: DType, values: np.ndarray, printed: str
) -> None:
    text = to_text(reading(dtype, (int(printed.split("[")[1].split("]", maxsplit=1)[0]),), values))
    assert f"ABS({printed})" in text
    with pytest.raises(TextFormError, match="line 2: "):
        parse(text)


def test_tensors_of_one_name_are_told_apart() -> None:
    model = parse(SMALL)
    scaled = model.subgraphs[0].operators[0].output
    scaled.name = "q"
    assert '%"q~2": float32[1,1,4,8] = MUL(%q, float32(0.5))' in to_text(model)
    assert to_text(parse(to_text(model))) == to_text(model)
    model.signatures[0].outputs["odd"] = Tensor("odd", (1,), DType.FLOAT32)
    assert "odd=%odd)" in to_text(model), "which a signature alone names"


def test_a_graph_and_a_type_print_as_text() -> None:
    model = parse(SMALL)
    assert str(model.subgraphs[0]) == subgraph_text(model.subgraphs[0]) == SMALL.split("\n", 1)[1]
    assert f"{DType.FLOAT32} {DType.INT4!s}" == "float32 int4"
    model.metadata.append(Metadata("note", Buffer(Data(b"x"))))
    assert to_text(model) == SMALL, "nothing is printed of metadata"
