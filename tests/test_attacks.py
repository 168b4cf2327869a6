"""Attacks by name, on what reads a file: each is refused with one sentence, or does no harm.

Those on the layout of the file are in test_schema_hostile.py, subgraphs that call themselves in test_ir_checks.py.
"""

import struct
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from bundles import GENERIC, bundle, model_part
from schema_models import everything, names, pack, tfl
from text_parser import parse

import edge_opt
from edge_opt.attention.block import NotABlock
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import ModelFormatError
from edge_opt.conversion import convert
from edge_opt.ir import load
from edge_opt.ir.model import to_bytes
from edge_opt.schema import Table, model_bytes, new_table, read_model
from edge_opt.schema.litertlm import read_bundle

ADD, CONCATENATION = 0, 2


def tensor(name: str = "t", shape: list[int] | None = None, **fields: Any) -> Table:
    return new_table("Tensor", name=name, shape=[2] if shape is None else shape, **fields)


def operator(inputs: list[int], outputs: list[int], code: int = 0) -> Table:
    return new_table("Operator", opcode_index=code, inputs=inputs, outputs=outputs)


def model(tensors: list[Table], operators: list[Table] = [], **fields: Any) -> bytes:  # noqa: B006 - only read
    """A model of one subgraph whose first tensor is its input; operator code 0 is ADD, 1 CONCATENATION."""
    graph = new_table("SubGraph", tensors=tensors, inputs=[0], outputs=[0], operators=operators, name="main")
    codes = [new_table("OperatorCode", builtin_code=code, deprecated_builtin_code=code) for code in (0, 2)]
    root = {"subgraphs": [graph], "operator_codes": codes, "buffers": [new_table("Buffer")], **fields}
    return model_bytes(new_table("Model", version=3, **root))


def refusal(content: bytes) -> str:
    """The sentence; within the time that any malformed file may take."""
    with fuzz.time_limit(), pytest.raises(ModelFormatError) as caught:
        load(content)
    return str(caught.value)


# The file


def test_an_offset_that_leads_to_itself_is_refused() -> None:
    content = bytearray(pack(everything()))
    tensors = tfl.Model.GetRootAs(content, 0).Subgraphs(0)._tab
    struct.pack_into("<I", content, tensors.Vector(tensors.Offset(4)), 0)
    assert refusal(bytes(content))


def test_a_vtable_inside_its_own_table_is_no_way_to_read_twice() -> None:
    content = bytearray(pack(everything()))
    position = tfl.Model.GetRootAs(content, 0).Subgraphs(0)._tab.Pos
    struct.pack_into("<i", content, position, 0)
    assert "vtable" in refusal(bytes(content)) or "outside its table" in refusal(bytes(content))


def test_tables_that_overlap_cannot_multiply_a_file() -> None:
    """Four thousand buffers one byte apart, all with one vtable of 60,000 bytes."""
    vtable = struct.pack("<HH", 4, 60_000)
    count = 4000
    body = bytearray(struct.pack("<I4s", 0, b"TFL3")) + vtable
    root_vtable = len(body)
    body += struct.pack("<HHHHHHH", 14, 8, 0, 0, 0, 0, 4)
    body += bytes(-len(body) % 4)
    root = len(body)
    body += struct.pack("<iI", root - root_vtable, 4) + struct.pack("<I", count)
    first = len(body) + 4 * count
    for index in range(count):
        body += struct.pack("<I", first + 4 * index - len(body))
    for _ in range(count):
        body += struct.pack("<i", len(body) - 8)
    body += bytes(60_000)
    struct.pack_into("<I", body, 0, root)
    assert "overlap" in refusal(bytes(body))


def test_a_million_tables_are_refused() -> None:
    shared = new_table("Buffer")
    assert "more than 500000 tables" in refusal(model([tensor()], buffers=[shared] * 1_000_000))


def test_a_vector_that_a_thousand_subgraphs_share_cannot_multiply_a_file() -> None:
    tensors = [tensor(shape=[1])] * 2000
    graphs = [new_table("SubGraph", tensors=tensors) for _ in range(1000)]
    content = model([tensor()], subgraphs=graphs)
    assert len(content) < 100_000
    assert "the graphs hold 4000000 tensors, operators and indices" in refusal(content)


def test_a_subgraph_that_is_listed_thousands_of_times_cannot_either() -> None:
    graph = new_table("SubGraph", tensors=[tensor(), tensor()], operators=[operator([0, 0], [1])], inputs=[0])
    assert "the graphs hold 45000 tensors" in refusal(model([tensor()], subgraphs=[graph] * 5000))


def test_inputs_that_thousands_of_operators_share_cannot_multiply_it_either() -> None:
    many = new_table("Operator", opcode_index=1, inputs=[0] * 10_000, outputs=[])
    assert "the graphs hold" in refusal(model([tensor()], [many] * 10_000))


def test_scales_that_thousands_of_tensors_share_are_looked_through_once() -> None:
    scales = np.ones(1_000_000, np.float32)
    parameters = [new_table("QuantizationParameters", scale=scales) for _ in range(3_000)]
    content = model([tensor(shape=[1_000_000], quantization=each) for each in parameters])
    with fuzz.time_limit():
        assert len(load(content).subgraphs[0].tensors) == 3_000


@pytest.mark.parametrize("name", ["x", "main", "serving"])
def test_names_that_are_no_utf8_are_refused_with_their_place(name: str) -> None:
    signature = new_table("SignatureDef", signature_key="serving", subgraph_index=0)
    content = model([tensor("x")], signature_defs=[signature])
    for bad in (b"\xff", b"\xc0", b"\xed"):
        raw = name.encode()
        broken = content.replace(raw + b"\0", bad + raw[1:] + b"\0", 1)
        with pytest.raises(ModelFormatError, match="not valid UTF-8") as caught:
            load(broken)
        assert caught.value.offset == content.index(raw + b"\0")


# Bundles


def tiny_bundle() -> bytes:
    return bundle([model_part("prefill_decode", block()), (GENERIC, {"name": "words"}, b"text")])


def test_a_bundle_whose_sections_share_a_long_list_takes_no_time(tmp_path: Path) -> None:
    """Sixty thousand sections that are one table, with sixty thousand items that are one item."""
    part = (GENERIC, {"name": "words"}, b"")
    (tmp_path / "b.litertlm").write_bytes(bundle([part], repeated=60_000))
    with fuzz.time_limit(), pytest.raises(ModelFormatError, match="more than 4096 sections and entries"):
        read_bundle(tmp_path / "b.litertlm")


def test_a_bundle_whose_positions_are_stored_in_one_place_is_not_rewritten(tmp_path: Path) -> None:
    """Tables that overlap may share the bytes of a position; writing the second spoils the first."""
    (tmp_path / "b.litertlm").write_bytes(tiny_bundle())
    opened = read_bundle(tmp_path / "b.litertlm")
    first, second = opened.sections
    opened.sections[1] = second._replace(begin_at=first.begin_at, end_at=first.end_at)
    with pytest.raises(ModelFormatError, match="so that no section can be moved"):
        opened.write({}, tmp_path / "out.litertlm")
    assert names(tmp_path) == ["b.litertlm"]


# The graph: what is refused is in test_ir_refusals.py


def test_what_a_custom_operator_reads_is_its_own_affair() -> None:
    """Compilers for microcontrollers hand their operator scratch memory as an input that nobody defines."""
    codes = [new_table("OperatorCode", builtin_code=32, custom_code="ethos-u")]
    load(model([tensor(), tensor("scratch"), tensor()], [operator([0, 1], [2])], operator_codes=codes))
    cycle = [operator([0, 2], [1]), operator([0, 1], [2])]
    assert "before it is defined" in refusal(
        model([tensor(), tensor(), tensor()], cycle, operator_codes=codes)
    )


# The matcher, and what follows it

_BLOCK = """
    subgraph main (%q: {type}[1,2,4,8] {q}, %k: {type}[1,2,6,8] {q}, %v: {type}[1,2,6,8] {q}) {{
      {query}
      %l: {type}[1,2,4,6] {q} = BATCH_MATMUL({q0}, %k) {{adj_y: true}}
      {logits}
      %p: {type}[1,2,4,6] {p} = SOFTMAX({l0})
      {probabilities}
      %w: {type}[1,2,4,8] {q} = BATCH_MATMUL({p0}, %v)
      {tail}
      %t: {type}[1,4,2,8] {q} = TRANSPOSE({w0}, int32{{0, 2, 1, 3}})
      %o: {type}[1,4,16] {q} = RESHAPE(%t, int32{{1, 4, 16}})
      return %o
    }}
"""


def block(**parts: tuple[str, str]) -> bytes:
    """A model with one attention block; `parts` are lines to put in a place, and the tensor that they end in."""
    places = {"query": "%q", "logits": "%l", "probabilities": "%p", "tail": "%w"}
    names = {"query": "q0", "logits": "l0", "probabilities": "p0", "tail": "w0"}
    text = {"type": "float32", "q": "", "p": ""}
    for place, source in places.items():
        text[place], text[names[place]] = parts.get(place, ("", source))
    return to_bytes(parse(_BLOCK.format(**text)))


_SHAPES = {"query": "[1,2,4,8]", "logits": "[1,2,4,6]", "probabilities": "[1,2,4,6]", "tail": "[1,2,4,8]"}
_SOURCES = {"query": "%q", "logits": "%l", "probabilities": "%p", "tail": "%w"}


def chain(place: str, length: int, step: str) -> tuple[str, str]:
    """`length` operators after one another; `step` has the operand as {0}."""
    lines, value = [], _SOURCES[place]
    for index in range(length):
        lines.append(f"%c{index}: float32{_SHAPES[place]} = {step.format(value)}")
        value = f"%c{index}"
    return "\n".join(lines), value


_CHAINS = {
    "chain of 4,000": (4000, "NEG({0})"),
    "chain of 1,500": (1500, "NEG({0})"),
    "2^60 paths of ADD": (60, "ADD({0}, {0})"),
    "2^60 paths of MUL": (60, "MUL({0}, {0})"),
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [("probabilities", kind) for kind in _CHAINS]
    + [(place, kind) for place in ("query", "logits", "tail") for kind in list(_CHAINS)[1:]],
)
def test_long_chains_and_exponential_graphs_take_no_time(place: str, kind: str) -> None:
    content = block(**{place: chain(place, *_CHAINS[kind])})
    with fuzz.time_limit(10):
        found = load(content)
        assert len(list(find_blocks(found.subgraphs[0]))) == 1
        convert(found, verify="none", dry_run=True)


def test_attention_that_feeds_attention_a_thousand_times_takes_no_stack() -> None:
    """Each block's heads are the queries of the next, with nothing between that would tell where they are."""
    lines, query = [], "%q"
    for index in range(400):
        lines.append(f"%l{index}: float32[1,2,4,6] = BATCH_MATMUL({query}, %k) {{adj_y: true}}")
        lines.append(f"%p{index}: float32[1,2,4,6] = SOFTMAX(%l{index})")
        lines.append(f"%w{index}: float32[1,2,4,8] = BATCH_MATMUL(%p{index}, %v)")
        query = f"%w{index}"
    inputs = "%q: float32[1,2,4,8], %k: float32[1,2,6,8], %v: float32[1,2,6,8]"
    end = f"%t: float32[1,4,2,8] = TRANSPOSE({query}, int32{{0, 2, 1, 3}})"
    last = "%o: float32[1,4,16] = RESHAPE(%t, int32{1, 4, 16})"
    text = "\n".join([f"subgraph main ({inputs}) {{", *lines, end, last, "return %o }"])
    with fuzz.time_limit(10):
        assert len(convert(to_bytes(parse(text)), verify="none", passes=["mha_to_sha"]).sites) == 400


def test_a_head_size_of_zero_is_no_division() -> None:
    plain = dict.fromkeys(("q", "p", "query", "logits", "probabilities", "tail"), "")
    text = _BLOCK.format(type="float32", q0="%q", l0="%l", p0="%p", w0="%w", **plain)
    for tensor, size in (("%v", 6), ("%w", 4)):
        text = text.replace(f"{tensor}: float32[1,2,{size},8]", f"{tensor}: float32[1,2,{size},0]")
    (match,) = find_blocks(load(to_bytes(parse(text))).subgraphs[0])
    assert isinstance(match, NotABlock)
    assert "is empty" in str(match.reason)


def two_products(query: str, result: str = "float32[1,2,4,8]") -> str:
    """Two value products of one SOFTMAX, that nothing merges into rows of heads."""
    keys = "%k: float32[1,2,6,0]" if "4,0]" in query else "%k: float32[1,2,6,8]"
    return f"""
        subgraph main (%x: float32[1,2,4,8], {keys}, %v: float32[1,2,6,8]) {{
          {query}
          %l: float32[1,2,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
          %p: float32[1,2,4,6] = SOFTMAX(%l)
          %w: float32[1,2,4,8] = BATCH_MATMUL(%p, %v)
          %u: float32[1,2,4,8] = BATCH_MATMUL(%p, %v)
          %s: {result} = ADD(%w, %u)
          return %s
        }}
    """


@pytest.mark.parametrize(
    "query",
    [
        "%q: float32[] = SUM(%x, int32{0, 1, 2, 3})",
        "%q: float32[1,2,4,0] = RESHAPE(%x, int32{1, 2, 4, 0})",
    ],
    ids=["a scalar query", "nothing to contract"],
)
def test_products_that_lie_tell_nothing_of_heads_that_nothing_merges(query: str) -> None:
    assert not convert(to_bytes(parse(two_products(query))), verify="none").converted


def test_a_lie_behind_the_products_stays_as_it_is() -> None:
    result = convert(
        to_bytes(parse(two_products("%q: float32[1,2,4,8] = NEG(%x)", "float32[]"))), verify="none"
    )
    assert len(result.converted) == 1
    assert result.model is not None
    (last,) = result.model.subgraphs[0].outputs
    assert last.shape == ()
    assert last.producer is not None
    assert [tensor.shape for tensor in last.producer.inputs if tensor is not None] == [(1, 2, 4, 8)] * 2


def test_the_plain_block_is_converted() -> None:
    assert len(convert(block(), verify="none").converted) == 1


@pytest.mark.parametrize(
    "lie",
    [
        ("%r: float32[1,2,4,6] = RESHAPE(%l, int32{1, 2, 4, 7})", "%r"),
        ("%r: float32[1,4,2,6] = RESHAPE(%l, int32{1, 2, 4, 6})", "%r"),
        ("%r: float32[1,2,4,6] = RESHAPE(%l, int32{1, 4, 2, 6})", "%r"),
        ("%r: float32[1,2,4,6] = RESHAPE(%l, int32{-1, -1, 4, 6})", "%r"),
        ("%r: float32[1,2,4,6] = RESHAPE(%l, int32{0, 2, 4, 6})", "%r"),
        ("%r: float32[1,2,4,6] = TRANSPOSE(%l, int32{0, 1, 3, 2})", "%r"),
        ("%r: float32[1,2,4,6] = TRANSPOSE(%l, int32{0, 1, 2, 2})", "%r"),
        ("%r: float32[1,2,4,6] = TRANSPOSE(%l, int32{0, 1, 2, 9})", "%r"),
        ("%r: float32[1,2,4,6] = ADD(%l, float32[5,5]{splat 0.0})", "%r"),
        ("%r: float32[1,2,4,6] = CONCATENATION(%l, %l) {axis: 3}", "%r"),
        ("%r: float32[1,2,4,6] = CONCATENATION(%l) {axis: 77}", "%r"),
        ("%r: float32[1,2,4,6] = SLICE(%l, int32{0, 0, 0, 3}, int32{1, 2, 4, 6})", "%r"),
        ("%r: float32[1,2,4,6] = SLICE(%l, int32{0, 0}, int32{1, 2, 4, 6})", "%r"),
        ("%r: float32[1,2,4,6] = GATHER(%l, int32{0, 1, 7}) {axis: 9}", "%r"),
    ],
    ids=lambda lie: lie[0].partition("= ")[2],
)
def test_operators_that_lie_about_their_result_are_left_alone(lie: tuple[str, str]) -> None:
    result = convert(block(logits=lie), verify="none")
    assert not result.converted
    assert all(site.reason for site in result.sites)


@pytest.mark.parametrize("place", ["q", "p"])
def test_zero_scales_do_no_harm(place: str) -> None:
    """A row of nothing but zeros has scale 0: exporters write that, and nobody may divide by it."""
    text = _BLOCK.format(
        type="int16", q="q(0.0, 0)" if place == "q" else "q(0.5, 0)", p="q(0.0, 0)" if place == "p" else "q(0.5, 0)",
        query="", logits="", probabilities="", tail="", q0="%q", l0="%l", p0="%p", w0="%w",
    )  # fmt: skip
    with np.errstate(all="raise"):
        result = convert(to_bytes(parse(text)), verify="none")
    assert load(to_bytes(result.model)) if result.model else None
    assert result.sites


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("ADD(int32{{3}}, int32{{4}})", "ADD(%x, int32{{{0}}})"),
        ("PACK(%g, int32(1)) {{values_count: 2}}", "CONCATENATION(%x, %x, int32{{1}})"),
    ],
    ids=["other values", "other sizes"],
)
def test_subgraphs_that_call_the_next_twice_take_no_time(first: str, other: str) -> None:
    """2^30 ways to enter the last one, no two alike."""
    lines = [f"subgraph main (%g: int32[]) {{ %x: int32[?] = {first.format()}"]
    for index in range(30):
        call = f"{{name: 'n', decomposition_subgraph_index: {index + 1}}}"
        lines.append(f"%a: int32[?] = STABLEHLO_COMPOSITE(%x) {call}")
        lines.append(f"%y: int32[?] = {other.format(1 << index)}")
        lines.append(f"%b: int32[?] = STABLEHLO_COMPOSITE(%y) {call}")
        lines.append(f"return %b }} subgraph g{index} (%x: int32[?]) {{")
    lines.append("%z: int32[?] = NEG(%x) return %z }")
    with fuzz.time_limit(10):
        edge_opt.infer_shapes(load(to_bytes(parse("\n".join(lines)))))


def test_a_version_of_thousands_of_digits_does_no_harm() -> None:
    from edge_opt.schema import Data

    content = block()
    root = read_model(content).root
    root.fields["buffers"] = [*root.get("buffers"), new_table("Buffer", data=Data(b"9" * 5000))]
    entry = new_table("Metadata", name="min_runtime_version", buffer=len(root.get("buffers")) - 1)
    root.fields["metadata"] = [entry]
    assert convert(model_bytes(root), verify="none").converted
