"""Pieces that run one after the other: each query waits for the piece before it, and computes the same bits."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attention_checks import assert_same_bits, random_inputs

from edge_opt.conversion import convert
from edge_opt.ir import Model, Operator, to_bytes
from edge_opt.ir.text import parse, to_text
from edge_opt.passes import Status
from edge_opt.verify.native import run

TESTDATA = Path(__file__).parent.parent / "testdata"

ONE_HEAD = """
subgraph main (%q: float32[1,1,4,2], %k: float32[1,1,3,2], %v: float32[1,1,3,2], %mask: float32[1,1,4,3]) {
  %logits: float32[1,1,4,3] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %masked: float32[1,1,4,3] = ADD(%logits, %mask)
  %p: float32[1,1,4,3] = SOFTMAX(%masked) {beta: 1.0}
  %out: float32[1,1,4,2] = BATCH_MATMUL(%p, %v)
  return %out
}
"""
TWO_TILES = """
subgraph main (%q: float32[1,1,4,2], %k: float32[1,1,3,2], %v: float32[1,1,3,2], %mask: float32[1,1,4,3]) {
  %q/piece_0: float32[1,1,2,2], %q/piece_1: float32[1,1,2,2] = SPLIT(int32(2), %q) {num_splits: 2}
  %logits/rows_0: float32[1,1,2,3] = BATCH_MATMUL(%q/piece_0, %k) {adj_y: true}
  %mask/piece_0: float32[1,1,2,3], %mask/piece_1: float32[1,1,2,3] = SPLIT(int32(2), %mask) {num_splits: 2}
  %masked/rows_0: float32[1,1,2,3] = ADD(%logits/rows_0, %mask/piece_0)
  %p/rows_0: float32[1,1,2,3] = SOFTMAX(%masked/rows_0) {beta: 1.0}
  %out/rows_0: float32[1,1,2,2] = BATCH_MATMUL(%p/rows_0, %v)
  %out/rows_0/first: float32[1,1,1,1] = SLICE(%out/rows_0, int32{0, 0, 0, 0}, int32{1, 1, 1, 1})
  %out/rows_0/first/negative: bool[1,1,1,1] = LESS(%out/rows_0/first, float32[1,1,1,1]{0.0})
  %out/rows_0/first/number: float32[1,1,1,1] = CAST(%out/rows_0/first/negative) {in_data_type: 6}
  %q/piece_1/zero: float32[1,1,1,1] = MUL(%out/rows_0/first/number, float32[1,1,1,1]{0.0})
  %q/piece_1/waiting: float32[1,1,2,2] = SUB(%q/piece_1, %q/piece_1/zero)
  %logits/rows_1: float32[1,1,2,3] = BATCH_MATMUL(%q/piece_1/waiting, %k) {adj_y: true}
  %masked/rows_1: float32[1,1,2,3] = ADD(%logits/rows_1, %mask/piece_1)
  %p/rows_1: float32[1,1,2,3] = SOFTMAX(%masked/rows_1) {beta: 1.0}
  %out/rows_1: float32[1,1,2,2] = BATCH_MATMUL(%p/rows_1, %v)
  %out: float32[1,1,4,2] = CONCATENATION(%out/rows_0, %out/rows_1) {axis: 2}
  return %out
}
"""


# Type of numbers -> scales of queries, keys and values, logits, probabilities, results.
SCALES = {
    "float32": ("",) * 5,
    "int16": ("q(0.02, 0)", "q(0.03, 0)", "q(0.05, 0)", "q(3.0517578e-05, 0)", "q(0.04, 0)"),
    "int8": ("q(0.02, 3)", "q(0.03, 3)", "q(0.05, 3)", "q(0.00390625, -128)", "q(0.04, 3)"),
}


def two_heads(numbers: str = "float32", *, real: bool = False) -> Model:
    """Two heads of four rows; with `real`, the results are dequantized before they are merged."""
    q, k, logits, p, out = (scale + " " if scale else "" for scale in SCALES[numbers])
    dequantized = "%real: float32[1,2,4,4] = DEQUANTIZE(%heads)"
    merged, kind, scale = ("%real", "float32", "") if real else ("%heads", numbers, out)
    return parse(f"""
    signature main = #0 (q=%q, k=%k, v=%v, mask=%mask) -> (out=%out)
    subgraph main (%q: {numbers}[1,2,4,4] {q}, %k: {numbers}[1,1,6,4] {k}, %v: {numbers}[1,1,6,4] {k},
                   %mask: {numbers}[1,1,4,6] {logits}) {{
      %logits: {numbers}[1,2,4,6] {logits}= BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %masked: {numbers}[1,2,4,6] {logits}= ADD(%logits, %mask) {{pot_scale_int16: false}}
      %p: {numbers}[1,2,4,6] {p}= SOFTMAX(%masked) {{beta: 1.0}}
      %heads: {numbers}[1,2,4,4] {out}= BATCH_MATMUL(%p, %v)
      {dequantized if real else ""}
      %t: {kind}[1,4,2,4] {scale}= TRANSPOSE({merged}, int32{{0, 2, 1, 3}})
      %out: {kind}[1,4,8] {scale}= RESHAPE(%t, int32{{1, 4, 8}}) {{new_shape: [1, 4, 8]}}
      return %out
    }}""")


def before(operator: Operator) -> set[Operator]:
    """Everything that an operator waits for."""
    found: set[Operator] = set()
    pending = [operator]
    while pending:
        for tensor in pending.pop().inputs:
            if tensor is not None and tensor.producer is not None and tensor.producer not in found:
                found.add(tensor.producer)
                pending.append(tensor.producer)
    return found


def softmaxes(model: Model, names: str = "") -> list[Operator]:
    graph = model.entry_points()[0][1]
    return [op for op in graph.operators if op.name == "SOFTMAX" and names in op.outputs[0].name]


def test_the_second_piece_waits_for_an_element_of_the_first() -> None:
    result = convert(parse(ONE_HEAD), rows_per_tile=2, chain=True)
    assert result.model is not None
    assert to_text(result.model) == TWO_TILES.lstrip()


def test_rows_are_cut_first_and_a_tile_s_heads_come_in_turn() -> None:
    result = convert(two_heads(), rows_per_tile=2, chain=True)
    assert result.model is not None
    pieces = softmaxes(result.model)
    assert [piece.outputs[0].name for piece in pieces] == [
        "p/rows_0/head_0", "p/rows_0/head_1", "p/rows_1/head_0", "p/rows_1/head_1",
    ]  # fmt: skip
    for earlier, later in pairwise(pieces):
        assert earlier in before(later)
    joins = [op for op in result.model.subgraphs[0].operators if op.name == "CONCATENATION"]
    assert [op.option("axis") for op in joins] == [3, 3, 2], "heads of a tile along H, then the tiles along T"
    assert [site.note for site in result.sites] == ["2 tiles of 2 rows, one piece after the other"]


def test_without_a_chain_no_piece_waits() -> None:
    result = convert(two_heads(), rows_per_tile=2)
    assert result.model is not None
    pieces = softmaxes(result.model)
    assert len(pieces) == 4
    assert not any(before(piece) & set(pieces) for piece in pieces)
    assert [site.note for site in result.sites] == [""]


@pytest.mark.parametrize("numbers", ["float32", "int16", "int8"])
def test_the_chain_is_proved_bit_for_bit(numbers: str) -> None:
    model = two_heads(numbers)
    original = to_bytes(model)
    result = convert(model, rows_per_tile=1, chain=True)
    assert [site.status for site in result.sites] == [Status.CONVERTED]
    assert all(site.proof is not None and site.proof.bitwise for site in result.sites)
    assert result.model is not None
    names = {op.name for op in result.model.subgraphs[0].operators}
    assert {"SUB", "MUL", "SLICE"} <= names
    assert ("LESS" in names) == (numbers == "float32")
    for kernels in ("xnnpack", "reference"):
        assert_same_bits(original, to_bytes(result.model), random_inputs(model), kernels)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_what_is_no_number_in_one_piece_stays_there(broken: float, kernels: str) -> None:
    model = two_heads()
    original = to_bytes(model)
    result = convert(model, rows_per_tile=2, chain=True, verify="none")
    assert result.model is not None
    inputs = random_inputs(result.model)
    inputs["q"][0, 0, 0] = broken
    expected, found = (
        next(iter(run(content, kernels, None, [lambda: inputs])))["out"]
        for content in (original, to_bytes(result.model))
    )
    assert np.isnan(expected[0, 0, :4]).all()
    assert np.isfinite(expected[0, :, 4:]).all()
    assert np.isfinite(expected[0, 1:]).all()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["demo_gemma3", "demo_gemma3_a16w8"])
def test_a_real_export_is_chained_layer_by_layer(name: str) -> None:
    result = convert(TESTDATA / f"{name}.tflite", dry_run=True, rows_per_tile=2, chain=True)
    assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
    notes = [site.note for site in result.converted]
    assert notes == ["4 tiles of 2 rows, one piece after the other"] * 2 + [""] * 3
    assert result.model is not None
    pieces = softmaxes(result.model, "rows_")
    assert len(pieces) == 2 * 4 * 4
    for earlier, later in pairwise(pieces):
        assert earlier in before(later)


def test_pieces_whose_queries_and_results_differ_in_type_are_not_chained_and_that_is_told() -> None:
    result = convert(two_heads("int16", real=True), rows_per_tile=2, chain=True)
    assert [site.status for site in result.sites] == [Status.CONVERTED]
    assert [site.note for site in result.sites] == [
        "the pieces do not wait for each other: its queries are int16, its results float32"
    ]
    assert result.model is not None
    assert not {op.name for op in result.model.subgraphs[0].operators} & {"SUB", "LESS"}


def test_a_length_of_one_has_no_rows_to_chain() -> None:
    result = convert(
        TESTDATA / "demo_gemma3.tflite", dry_run=True, signatures=["decode"], chain=True, verify="none"
    )
    assert {site.note for site in result.converted} == {""}
