"""Attention whose lengths are known only at run time is split for all lengths, or left with a reason."""

from pathlib import Path

import numpy as np
import pytest
from cli_runs import run

from edge_opt.comparison.compare import compare
from edge_opt.conversion import ConversionResult, convert
from edge_opt.inspection import explain, inspect
from edge_opt.ir import to_bytes
from edge_opt.ir.text import parse
from edge_opt.passes import Status, open_lengths
from edge_opt.proof.runner import Worker

ATTENTION = """
    subgraph main (%q: float32[1,4,?,5], %k: float32[1,4,?,5], %v: float32[1,4,?,5]) {{
      %l: float32[1,4,?,?] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      {masked}
      %p: float32[1,4,?,?] = SOFTMAX({logits}) {{beta: 1.0}}
      %o: float32[1,4,?,5] = BATCH_MATMUL(%p, %v)
      %t: float32[1,?,4,5] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
      {output}
      return %r
    }}
    """
MERGED = "%r: float32[1,?,20] = RESHAPE(%t, int32{1, -1, 20}) {new_shape: [1, -1, 20]}"
BATCHED = """
    subgraph main (%q: float32[?,4,?,5], %k: float32[?,4,?,5], %v: float32[?,4,?,5]) {
      %l: float32[?,4,?,?] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[?,4,?,?] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[?,4,?,5] = BATCH_MATMUL(%p, %v)
      %t: float32[?,?,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %s: int32[4] = SHAPE(%q) {out_type: 2}
      %b: int32[1] = SLICE(%s, int32{0}, int32{1})
      %to: int32[3] = CONCATENATION(%b, int32{-1}, int32{20}) {axis: 0}
      %r: float32[?,?,20] = RESHAPE(%t, %to)
      return %r
    }
    """
PROJECTED = """
    subgraph main (%q: float32[?,?,20], %kt: float32[?,?,4,5], %vt: float32[?,?,4,5]) {
      %s: int32[3] = SHAPE(%q) {out_type: 2}
      %sizes: int32[2] = SLICE(%s, int32{0}, int32{2})
      %to: int32[4] = CONCATENATION(%sizes, int32{4, 5}) {axis: 0}
      %qt: float32[?,?,4,5] = RESHAPE(%q, %to)
      %qh: float32[?,4,?,5] = TRANSPOSE(%qt, int32{0, 2, 1, 3})
      %k: float32[?,4,?,5] = TRANSPOSE(%kt, int32{0, 2, 1, 3})
      %v: float32[?,4,?,5] = TRANSPOSE(%vt, int32{0, 2, 1, 3})
      %l: float32[?,4,?,?] = BATCH_MATMUL(%qh, %k) {adj_y: true}
      %p: float32[?,4,?,?] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[?,4,?,5] = BATCH_MATMUL(%p, %v)
      %t: float32[?,?,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %back: int32[3] = CONCATENATION(%sizes, int32{20}) {axis: 0}
      %r: float32[?,?,20] = RESHAPE(%t, %back)
      return %r
    }
    """
GROWN = """
    subgraph main (%q: float32[1,4,?,5], %k: float32[1,4,?,5], %v: float32[1,4,?,5],
                   %past_k: float32[1,4,?,5], %past_v: float32[1,4,?,5]) {
      %keys: float32[1,4,?,5] = CONCATENATION(%past_k, %k) {axis: 2}
      %values: float32[1,4,?,5] = CONCATENATION(%past_v, %v) {axis: 2}
      %l: float32[1,4,?,?] = BATCH_MATMUL(%q, %keys) {adj_y: true}
      %s: int32[4] = SHAPE(%l) {out_type: 2}
      %z: float32[1,4,?,?] = FILL(%s, float32(0.0))
      %m: float32[1,4,?,?] = ADD(%l, %z)
      %p: float32[1,4,?,?] = SOFTMAX(%m) {beta: 1.0}
      %o: float32[1,4,?,5] = BATCH_MATMUL(%p, %values)
      %t: float32[1,?,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %r: float32[1,?,20] = RESHAPE(%t, int32{1, -1, 20}) {new_shape: [1, -1, 20]}
      return %r
    }
    """
ZEROS = """
      %s: int32[4] = SHAPE(%l) {out_type: 2}
      %z: float32[1,4,?,?] = FILL(%s, float32(0.0))
      %m: float32[1,4,?,?] = ADD(%l, %z)
    """


def attention(*, masked: str = "", logits: str = "%l", output: str = MERGED) -> bytes:
    """q, k, v `[1,4,?,5]`."""
    return to_bytes(parse(ATTENTION.format(masked=masked, logits=logits, output=output)))


def converted(source: bytes) -> ConversionResult:
    """Converted in memory."""
    return convert(source, passes="mha_to_sha", dry_run=True)


def test_heads_are_split_and_the_lengths_stay_open() -> None:
    result = converted(attention())
    (graph,) = result.model.subgraphs
    assert [site.status for site in result.sites] == [Status.CONVERTED]
    softmaxes = [operator.output for operator in graph.operators if operator.name == "SOFTMAX"]
    assert [tensor.shape_signature for tensor in softmaxes] == [(1, 1, -1, -1)] * 4
    assert graph.inputs[0].shape_signature == (1, 4, -1, 5)
    assert graph.outputs[0].shape_signature == (1, -1, 20)


RANGES = "int32{0, 0, 0, 1}, int32{0, 0, 0, 0}, int32{1, 1, 1, 1}"
WHOLE = {
    "as they are": ("", "%l"),
    "SLICE": ("%m: float32[1,4,?,?] = SLICE(%l, int32{0, 0, 0, 0}, int32{1, 4, -1, -1})", "%m"),
    "STRIDED_SLICE": (
        f"%m: float32[1,4,?,?] = STRIDED_SLICE(%l, {RANGES}) {{begin_mask: 15, end_mask: 15}}",
        "%m",
    ),
}


@pytest.mark.parametrize("length", [1, 6, 20])  # below and above those that regions are proved at
@pytest.mark.parametrize("logits", WHOLE)
def test_what_is_written_runs_at_any_length(logits: str, length: int) -> None:
    before = attention(masked=WHOLE[logits][0], logits=WHOLE[logits][1])
    model = converted(before).model
    strided = (operator for operator in model.subgraphs[0].operators if operator.name == "STRIDED_SLICE")
    assert {operator.option("end_mask") for operator in strided} <= {0b1100}, "bits of the two open axes"
    after = to_bytes(model)
    shapes = {"q": (1, 4, length, 5), "k": (1, 4, 17, 5), "v": (1, 4, 17, 5)}
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    with Worker() as worker:
        (old,), (new,) = (worker.run(model, None, inputs).values() for model in (before, after))
    assert old.shape == (1, length, 20)
    assert old.tobytes() == new.tobytes()


def test_the_shape_of_the_logits_is_asked_for_above_them() -> None:
    result = converted(attention(masked=ZEROS, logits="%m"))
    assert [(site.pass_name, site.status) for site in result.sites] == [
        ("shapes_above", Status.CONVERTED),
        ("mha_to_sha", Status.CONVERTED),
    ]
    (graph,) = result.model.subgraphs
    asked = [operator.input(0) for operator in graph.operators if operator.name == "SHAPE"]
    assert set(asked) == set(graph.inputs[:2])


def test_shapes_are_asked_for_above_only_where_heads_are_split() -> None:
    result = convert(attention(masked=ZEROS, logits="%m"), skip=["mha_to_sha"])
    assert "shapes_above" not in {site.pass_name for site in result.sites}


@pytest.mark.parametrize("layers", [2, 32])
def test_a_shape_is_asked_for_above_what_products_read_in_however_many_layers(layers: int) -> None:
    given = ["%x: float32[1,?,4,5]"]
    lines = [
        "%m: float32[1,4,?,5] = TRANSPOSE(%x, int32{0, 2, 1, 3})",
        "%s: int32[4] = SHAPE(%m) {out_type: 2}",
        "%z: float32[1,4,?,5] = FILL(%s, float32(0.0))",
    ]
    for i in range(layers):
        given += [f"%k{i}: float32[1,4,?,5]", f"%v{i}: float32[1,4,?,5]"]
        lines += [
            f"%g{i}: float32[1,4,?,5] = MUL(%m, float32(0.5))",
            f"%h{i}: float32[1,4,?,5] = ADD(%g{i}, float32(0.{i + 1}))",
            f"%l{i}: float32[1,4,?,?] = BATCH_MATMUL(%h{i}, %k{i}) {{adj_y: true}}",
            f"%p{i}: float32[1,4,?,?] = SOFTMAX(%l{i}) {{beta: 1.0}}",
            f"%o{i}: float32[1,4,?,5] = BATCH_MATMUL(%p{i}, %v{i})",
        ]
    results = ", ".join(["%z", *(f"%o{i}" for i in range(layers))])
    result = converted(
        to_bytes(parse(f"subgraph main ({', '.join(given)}) {{ {' '.join(lines)} return {results} }}"))
    )
    assert "shapes_above" in {site.pass_name for site in result.converted}


def test_batch_and_sequence_may_both_be_open() -> None:
    source = to_bytes(parse(BATCHED))
    result = converted(source)
    assert [site.status for site in result.sites] == [Status.CONVERTED]
    (graph,) = result.model.subgraphs
    assert graph.outputs[0].producer is not None
    assert graph.outputs[0].producer.name == "SQUEEZE"


def test_cut_above_the_transpose_a_head_moves_or_gets_an_axis_of_one_between_two_open_lengths() -> None:
    result = convert(to_bytes(parse(PROJECTED)), passes="mha_to_sha", target="qualcomm-htp", dry_run=True)
    assert [(site.status, site.reason) for site in result.sites] == [(Status.CONVERTED, "")]
    names = {operator.name for operator in result.model.subgraphs[0].operators}
    assert {"EXPAND_DIMS", "TRANSPOSE", "SQUEEZE"} <= names


@pytest.mark.parametrize(
    ("source", "result", "dropped"),
    [
        ((1, 11, 1, 13), (11, 1, 13), [0]),
        ((11, 1, 1, 13), (11, 1, 13), [2]),
        ((11, 1, 13, 1), (11, 13), [1, 3]),
        ((11, 13, 1, 1), (11, 1, 13), None),
        ((11, 26), (11, 13), None),
    ],
)
def test_axes_of_one_are_dropped_where_nothing_else_moves(
    source: tuple[int, ...], result: tuple[int, ...], dropped: list[int] | None
) -> None:
    assert open_lengths._dropped(source, result) == dropped


def test_caches_that_grow_by_new_keys_may_have_any_length() -> None:
    result = converted(to_bytes(parse(GROWN)))
    assert [(site.pass_name, site.status) for site in result.sites] == [
        ("shapes_above", Status.CONVERTED),
        ("mha_to_sha", Status.CONVERTED),
    ]
    (graph,) = result.model.subgraphs
    asked = [operator.input(0) for operator in graph.operators if operator.name == "SHAPE"]
    assert set(asked) <= set(graph.inputs)


def test_a_length_that_was_left_in_the_graph_is_caught_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(open_lengths._SIZES, "RESHAPE")
    (site,) = converted(attention()).sites
    assert site.status is not Status.CONVERTED
    assert "with other lengths" in site.reason


@pytest.mark.parametrize(
    ("split", "told"), [(False, "1 x multi-head: N=4 K=4"), (True, "4 x single-head: N=1 K=1")]
)
def test_inspect_tells_the_lengths_known_only_at_run_time(
    split: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "open.tflite"
    file.write_bytes(to_bytes(converted(attention()).model) if split else attention())
    assert f"{told} H=5 T=?, ? keys, no mask" in run(capsys, "inspect", file).out
    assert {(block.query_length, block.key_lengths) for block in inspect(file).attention} == {(-1, (-1,))}


def test_explain_describes_attention_of_open_lengths() -> None:
    (site,) = explain(attention())
    assert site.block is not None
    assert (site.block.heads, site.block.query_length, site.block.key_lengths) == (4, -1, (-1,))


def test_compare_runs_at_lengths_above_1_where_there_is_a_difference_to_see(tmp_path: Path) -> None:
    files = {
        "a": attention(),
        "b": attention(masked="%m: float32[1,4,?,?] = MUL(%l, float32(2.0))", logits="%m"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert compare(tmp_path / "a", tmp_path / "a").bitwise
    # Over one key every probability is 1, whatever the logits are.
    assert not compare(tmp_path / "a", tmp_path / "b").bitwise
