"""Inputs of open lengths are given static shapes; attention of lengths that stay open is left with a reason."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_checks import attention_text
from cli_runs import Captured, run

from edge_opt.base.errors import UsageError
from edge_opt.comparison.compare import compare
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import load, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes import Status
from edge_opt.runtime.description import describe
from edge_opt.runtime.runner import Worker
from edge_opt.shapes import infer_shapes
from edge_opt.shapes.folding import FOLDERS
from edge_opt.verification.audit import UnverifiedChangeError


def opened(text: str) -> str:
    """An attention whose numbers of queries and keys, 6 and 8, are open."""
    return re.sub(r"(?<=[\[,])[68](?=[\],])", "?", text).replace("{1, 6, 20}", "{1, -1, 20}")


LOGITS = "float32[1,4,6,8]"
HALF = f"  %m: {LOGITS} = MUL(%l, float32(0.5))\n  %p: {LOGITS} = SOFTMAX(%m) {{beta: 1.0}}"
SCALED = opened(attention_text(softmax=HALF))
BATCHED = opened(
    attention_text(
        tail="""
      %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %s: int32[4] = SHAPE(%q) {out_type: 2}
      %b: int32[1] = SLICE(%s, int32{0}, int32{1})
      %to: int32[3] = CONCATENATION(%b, int32{-1}, int32{20}) {axis: 0}
      %r: float32[1,6,20] = RESHAPE(%t, %to)"""
    )
).replace("float32[1,", "float32[?,")
GROWN = opened(
    attention_text(
        scores=f"""
      %keys: float32[1,4,8,5] = CONCATENATION(%past_k, %k) {{axis: 2}}
      %values: float32[1,4,8,5] = CONCATENATION(%past_v, %v) {{axis: 2}}
      %l: {LOGITS} = BATCH_MATMUL(%q, %keys) {{adj_y: true}}
      %s: int32[4] = SHAPE(%l) {{out_type: 2}}
      %z: {LOGITS} = FILL(%s, float32(0.0))
      %m: {LOGITS} = ADD(%l, %z)""",
        softmax=f"  %p: {LOGITS} = SOFTMAX(%m) {{beta: 1.0}}",
        values="  %o: float32[1,4,6,5] = BATCH_MATMUL(%p, %values)",
        inputs=", %past_k: float32[1,4,8,5], %past_v: float32[1,4,8,5]",
    )
)
SELECTED = """
    subgraph main (%x: float32[?,4]) {
      %measured: float32[?,4] = NEG(%x)
      %s: int32[2] = SHAPE(%measured) {out_type: 2}
      %e: bool[2] = EQUAL(%s, int32{2, 5})
      %c: int32[2,2] = SELECT(%e, int32[2,2]{1, 2, 3, 4}, int32[2,2]{10, 20, 30, 40})
      %f: float32[2,2] = CAST(%c) {in_data_type: 2}
      %n: float32[] = SUM(%f, int32{0, 1}) {keep_dims: false}
      %w: float32[2] = SUM(%f, int32{0}) {keep_dims: false}
      %rows: int32[], %columns: int32[] = UNPACK(%s) {num: 2}
      %to: int32[1] = PACK(%rows) {values_count: 1}
      %z: float32[?] = FILL(%to, %n)
      %m: float32[?,4] = MUL(%x, %n)
      return %m, %z, %w
    }
    """
EMPTY = """
    subgraph main (%x: float32[?,4]) {
      %s: int32[2] = SHAPE(%x) {out_type: 2}
      %e: int32[0] = STRIDED_SLICE(%s, int32{0}, int32{0}, int32{1})
      %f: int32[0] = RESHAPE(%e, int32{-1})
      %p: int32[1] = REDUCE_PROD(%f, int32{0}) {keep_dims: true}
      %to: int32[3] = CONCATENATION(%p, %f, %s) {axis: 0}
      %r: float32[1,?,4] = RESHAPE(%x, %to)
      return %r
    }
    """


def qkv(rows: int, keys: int, batch: int = 1) -> dict[str, tuple[int, ...]]:
    return {"q": (batch, 4, rows, 5), **dict.fromkeys("kv", (batch, 4, keys, 5))}


PAST = dict.fromkeys(("past_k", "past_v"), (1, 4, 6, 5))
MODELS = {
    "lengths": (SCALED, qkv(1, 40)),
    "batch and lengths": (BATCHED, qkv(3, 17, batch=2)),
    "caches that grow": (GROWN, {**qkv(5, 5), **PAST}),
    "rows selected, sizes unpacked": (SELECTED, {"x": (2, 4)}),
    "a vector of no sizes": (EMPTY, {"x": (3, 4)}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_of_given_shapes_is_static_and_computes_what_the_open_one_does_at_these(
    case: str,
) -> None:
    text, shapes = MODELS[case]
    before = to_bytes(parse(text))
    result = convert(before, shapes=shapes, require_all=True)
    (graph,) = result.model.subgraphs
    assert infer_shapes(result.model) == []
    assert not any(tensor.shape_signature for tensor in graph.tensors)
    assert "SHAPE" not in {operator.name for operator in graph.operators}
    made = [tensor for operator in graph.operators for tensor in operator.outputs]
    assert all(tensor.consumers or graph.is_output(tensor) for tensor in made)
    after = to_bytes(result.model)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    with Worker() as worker:
        (described,) = describe(load(after)).values()
        old, new = (list(worker.run(model, None, inputs).values()) for model in (before, after))
    assert {info.name: info.declared for info in described.inputs} == shapes
    assert [array.shape for array in new] == [tensor.shape for tensor in graph.outputs]
    assert [array.tobytes() for array in old] == [array.tobytes() for array in new]


def test_a_value_that_is_folded_wrongly_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    text, shapes = MODELS["rows selected, sizes unpacked"]
    monkeypatch.setitem(FOLDERS, "SELECT", lambda _, shapes: np.zeros(shapes[0], np.int64))
    with pytest.raises(UnverifiedChangeError, match="a folded tensor of shape"):
        convert(parse(text), shapes=shapes)


def test_attention_of_open_lengths_stays_and_the_reason_says_what_to_give() -> None:
    (site,) = convert(to_bytes(parse(BATCHED)), dry_run=True).sites
    assert (site.status, site.why) == ("skipped", "open-lengths")
    assert "give --shape q=?,4,?,5 --shape k=?,4,?,5 --shape v=?,4,?,5" in site.reason


def test_lengths_that_follow_from_data_stay_open() -> None:
    model = parse("""
    subgraph main (%x: int32[?], %q: float32[1,4,1,5]) {
      %w: int64[?,1] = WHERE(%x)
      %s: int32[2] = SHAPE(%w) {out_type: 2}
      %n: int32[1] = SLICE(%s, int32{0}, int32{1})
      %to: int32[4] = CONCATENATION(int32{1, 4}, %n, int32{5}) {axis: 0}
      %k: float32[1,4,?,5] = BROADCAST_TO(%q, %to)
      %l: float32[1,4,1,?] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,4,1,?] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[1,4,1,5] = BATCH_MATMUL(%p, %k)
      %r: float32[1,1,20] = RESHAPE(%o, int32{1, 1, 20}) {new_shape: [1, 1, 20]}
      return %r
    }
    """)
    result = convert(model, shapes={"x": (9,)})
    assert [tensor.shape_signature for tensor in model.subgraphs[0].inputs] == [None, None]
    (site,) = result.sites
    assert site.why == "open-lengths"
    assert "they follow from data" in site.reason


TWICE = """
    subgraph a (%x: float32[?,4], %mask: float32[?,4]) {
      %y: float32[?,4] = ADD(%x, %mask)
      return %y
    }
    subgraph b (%x: float32[?,4]) {
      %y: float32[?,4] = STABLEHLO_COMPOSITE(%x) {name: 'both', decomposition_subgraph_index: 3}
      return %y
    }
    subgraph c (%x: float32[2,4]) {
      %y: float32[2,4] = STABLEHLO_COMPOSITE(%x) {name: 'both', decomposition_subgraph_index: 3}
      return %y
    }
    subgraph body (%x: float32[?,4]) {
      %s: int32[2] = SHAPE(%x) {out_type: 2}
      %z: float32[?,4] = FILL(%s, float32(2.0))
      %y: float32[?,4] = MUL(%x, %z)
      return %y
    }
    signature first = #0 (x=%x, mask=%mask) -> (y=%y)
    signature second = #1 (x=%x) -> (y=%y)
    signature third = #2 (x=%x) -> (y=%y)
    """


def inputs_of(
    shapes: dict[str, tuple[int, ...]], text: str = TWICE
) -> dict[str, list[tuple[int, ...]]]:
    """What `convert` makes of the inputs, by signature."""
    model = parse(text)
    convert(model, shapes=shapes)
    given = dict(model.inputs())
    return {
        name: [one.shape_signature or one.shape for one in given[name].values()] for name in given
    }


@pytest.mark.parametrize(("given", "first", "second"), [
    ({"first/x": (2, 4), "mask": (2, 4)}, (2, 4), (-1, 4)),
    ({"second/x": (3, 4), "first/x": (2, 4), "mask": (2, 4)}, (2, 4), (3, 4)),
    ({"x": (2, 4), "second/x": (3, 4), "mask": (2, 4)}, (2, 4), (3, 4)),
    ({"x": (2, 4), "mask": (2, 4)}, (2, 4), (2, 4)),
])  # fmt: skip
def test_a_name_is_that_of_all_signatures_or_of_the_one_in_front_of_it(
    given: dict[str, tuple[int, ...]], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    assert inputs_of(given) == {"first": [first] * 2, "second": [second], "third": [(2, 4)]}


def test_a_subgraph_whose_callers_disagree_stays_open() -> None:
    model = parse(TWICE)
    convert(model, shapes={"second/x": (3, 4)})
    body = model.subgraphs[3]
    assert body.inputs[0].shape_signature == (-1, 4)
    assert "SHAPE" in {operator.name for operator in body.operators}
    convert(model := parse(TWICE), shapes={"second/x": (2, 4)})
    assert [operator.name for operator in model.subgraphs[3].operators] == ["FILL", "MUL"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"y": (2, 4)}, "input 'y' does not exist"),
    ({"mask": (2,)}, r"'first/mask' takes the shape \?,4 \(\? from 1 to 2147483647\), got 2"),
    ({"mask": 3}, "'first/mask' .* got 3"),
    ({"second/x": (2, 5)}, "'second/x' .* got 2,5"),
    ({"x": (3, 4)}, "'third/x' .* got 3,4"),
    ({"second/x": (0, 4)}, "'second/x' .* got 0,4"),
    ({"second/x": (1 << 31, 4)}, "got 2147483648,4"),
    ({"second/x": ("3", 4)}, "got 3,4"),
    ({"first/x": (2, 4)}, r"'first' .* add --shape mask=\?,4"),
    ({"first/x": (2, 4), "mask": (3, 4)}, r"subgraph 'first', operator 0 \(ADD\)"),
]


def test_signatures_of_one_subgraph_get_one_shape() -> None:
    alias = "signature fourth = #1 (z=%x) -> (y=%y)"
    given = {"second/x": (3, 4), "fourth/z": (2, 4)}
    with pytest.raises(UsageError, match="input 'fourth/z' is shared by two signatures"):
        inputs_of(given, TWICE + alias)


@pytest.mark.parametrize(("shapes", "reason"), REFUSED)
def test_a_shape_that_does_not_fit_is_refused_by_name_and_axis(
    shapes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        inputs_of(shapes)


def test_commands_say_that_lengths_are_open_and_take_shapes(
    tmp_path: Path, capsys: Captured
) -> None:
    file, output = tmp_path / "open.tflite", tmp_path / "open.opt.tflite"
    file.write_bytes(to_bytes(parse(SCALED)))
    assert inspect(file).attention == []
    assert "--shape q=1,4,?,5" in run(capsys, "inspect", file).out
    shapes = [f"--shape={name}={','.join(map(str, shape))}" for name, shape in qkv(3, 7).items()]
    shown = run(capsys, "inspect", file, *shapes).out
    assert "T=3, 7 keys" in shown
    assert "would be converted" in shown
    done = run(capsys, "convert", file, *shapes)
    assert (done.code, "1 of 1" in done.out) == (0, True)
    assert [argument.shape for argument in inspect(output).signatures[0].inputs] == list(
        qkv(3, 7).values()
    )
    assert "Equal" in run(capsys, "compare", file, output).out
    assert run(capsys, "convert", file, "--shape", "=1", "--force").code == 2


def test_inspect_leaves_the_caller_s_model_open() -> None:
    model = parse(SCALED)
    assert inspect(model, shapes=qkv(3, 7)).attention[0].key_lengths == (7,)
    assert inspect(model).attention == []


@pytest.mark.parametrize("shapes", [None, qkv(3, 7)])
def test_compare_says_at_which_size_it_ran_open_lengths(
    shapes: dict[str, tuple[int, ...]] | None,
) -> None:
    models = (parse(SCALED.replace("(0.5)", f"({scale})")) for scale in (0.5, 2.0))
    report = compare(*map(to_bytes, models), shapes=shapes)
    # Over one key every probability is 1, whatever the logits are.
    assert report.bitwise == (shapes is None)
    size = [1, 4, 1, 5] if shapes is None else [1, 4, 3, 5]
    said = f"open lengths were run at one size only (--shape gives others): main/q {size}"
    assert said in report.notes()[0]


HALVED = attention_text(
    scores=f"""  %half: float32[1,4,6,5] = MUL(%q, float32(0.5))
  %l: {LOGITS} = BATCH_MATMUL(%half, %k) {{adj_y: true}}"""
)
STATIC_INSIDE = HALVED.replace("%q: float32[1,4,6", "%q: float32[1,4,?").replace(
    "{1, 6,", "{1, -1,"
)


@pytest.mark.parametrize("half", ["MUL(%q, float32(0.5))", "BITCAST(%q)"])
def test_sizes_on_record_behind_an_open_length_are_not_believed(half: str) -> None:
    """LiteRT computes every shape from its inputs, whatever sizes the file records behind them."""
    model = parse(STATIC_INSIDE.replace("MUL(%q, float32(0.5))", half))
    before = to_bytes(model)
    (site,) = convert(model, verify="none").sites
    assert (site.status, site.why) == ("skipped", "invalid-model")
    assert to_bytes(model) == before
    if "MUL" in half:
        (site,) = convert(model, shapes={"q": (1, 4, 3, 5)}).sites
        assert site.status is Status.CONVERTED, site.reason
        assert model.subgraphs[0].outputs[0].shape == (1, 3, 20)
