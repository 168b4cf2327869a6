"""The form `split-above`: queries are cut as far up as every head can be computed on its own, norms included."""

import pytest
from attention_checks import assert_same_bits, attention_text, convert
from pass_runs import Says, changed, refusal, run, statuses
from syrupy.assertion import SnapshotAssertion

from edge_opt.ir import Model, Operator, load, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.ir.text import subgraph_text, to_text
from edge_opt.shapes.inference import check_operators
from edge_opt.targets import Target

NORMED = """\
subgraph main (%x: float32[1,3,8], %k: float32[1,1,5,4], %v: float32[1,1,5,4]) {
  %a: float32[1,3,8] = ABS(%x)
  %f: float32[1,3,8] = FULLY_CONNECTED(%a, float32[8,8]{splat 0.5}, none) {keep_num_dims: true}
  %r: float32[1,3,2,4] = RESHAPE(%f, int32{1, 3, 2, 4}) {new_shape: [1, 3, 2, 4]}
  %t: float32[1,2,3,4] = TRANSPOSE(%r, int32{0, 2, 1, 3})
  %n: float32[1,2,3,4] = STABLEHLO_COMPOSITE(%t, float32{1.0, 2.0, 3.0, 4.0}) {name: 'test.norm', ATTRIBUTES}
  %q: float32[1,1,6,4] = RESHAPE(%n, int32{1, 1, 6, 4}) {new_shape: [1, 1, 6, 4]}
  %l: float32[1,1,6,5] = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: float32[1,1,6,5] = SOFTMAX(%l) {beta: 1.0}
  %h: float32[1,1,6,4] = BATCH_MATMUL(%p, %v)
  %b: float32[1,2,3,4] = RESHAPE(%h, int32{1, 2, 3, 4}) {new_shape: [1, 2, 3, 4]}
  %s: float32[1,3,2,4] = TRANSPOSE(%b, int32{0, 2, 1, 3})
  %out: float32[1,3,8] = RESHAPE(%s, int32{1, 3, 8}) {new_shape: [1, 3, 8]}
  return %out
}
subgraph norm (%y: float32[1,2,3,4], %w: float32[4]) {
  %e: float32[4] = EXP(%w)
  %sq: float32[1,2,3,4] = MUL(%y, %y)
  %m: float32[1,2,3] = MEAN(%sq, int32{3})
  %m1: float32[1,2,3,1] = RESHAPE(%m, int32{1, 2, 3, 1}) {new_shape: [1, 2, 3, 1]}
  %i: float32[1,2,3,1] = RSQRT(%m1)
  %u: float32[1,2,3,4] = MUL(%y, %i)
  %z: float32[1,2,3,4] = MUL(%u, %e)
  return %z
}
""".replace("ATTRIBUTES", "decomposition_subgraph_index: 1, composite_attributes: [0, 0, 1]")


def split_above(text: str) -> Model:
    """The model converted in this form, proved to be the same on both kernel sets."""
    before = to_bytes(parse(text))
    model = load(before)
    assert {*statuses(convert(model, "split-above"))} == {"converted"}
    for graph in model.subgraphs:
        assert refusal(check_operators, graph.operators, model.subgraphs) is None
    assert_same_bits(before, model)
    return model


def cut_at(model: Model) -> set[str]:
    """The tensors of the queries that are cut into heads."""
    return {
        operator.input(1).name
        for operator in model.subgraphs[0].operators
        if operator.name == "SPLIT"
    }


def composites(model: Model) -> list[Operator]:
    """The composites of the entry point."""
    return [op for op in model.subgraphs[0].operators if op.name == "STABLEHLO_COMPOSITE"]


def test_every_head_has_a_norm_and_a_body_of_its_own(snapshot: SnapshotAssertion) -> None:
    """LiteRT's compiler plugins take a body that two composites share for two."""
    model = split_above(NORMED)
    assert cut_at(model) == {"f"}
    assert [graph.name for graph in model.subgraphs] == ["main", "norm/head_0", "norm/head_1"]
    assert [op.option("decomposition_subgraph_index") for op in composites(model)] == [1, 2]
    assert subgraph_text(model.subgraphs[1]) == snapshot
    for composite in composites(model):
        assert composite.option("name") == "test.norm"
        assert composite.option("composite_attributes").tolist() == [0, 0, 1]


@pytest.mark.parametrize(("attributes", "cut"), [
    ("{epsilon: 0.5, axis: -1, kind: 'q', on: true, num_groups: 1}", "f"),
    ("{num_heads: 2}", "n"), ("{shape: [1, 2, 3, 4]}", "n"), ("[1, 2]", "n"),
])  # fmt: skip
def test_a_composite_with_an_attribute_that_may_count_heads_is_cut_behind_it(
    attributes: str, cut: str
) -> None:
    """A compiler that reads `num_heads` instead of the body would take the one head for two."""
    model = split_above(NORMED.replace("[0, 0, 1]", attributes))
    assert cut_at(model) == {cut}


def test_weights_that_differ_between_heads_are_cut_with_them() -> None:
    weights = "float32[1,2,1,4]{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}"
    text = NORMED.replace("float32{1.0, 2.0, 3.0, 4.0}", weights)
    for name in "we":
        text = text.replace(f"%{name}: float32[4]", f"%{name}: float32[1,2,1,4]")
    model = split_above(text)
    assert cut_at(model) == {"f"}
    assert [op.input(1).array().ravel().tolist() for op in composites(model)] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ]


def test_weights_that_a_body_multiplies_by_are_shared() -> None:
    text = NORMED.replace("float32{1.0, 2.0, 3.0, 4.0}", "float32[1,1,4,4]{splat 0.5}")
    body = text[text.index("  %e: float32[4]") :]
    model = split_above(
        text.replace(
            body, "  %z: float32[1,2,3,4] = BATCH_MATMUL(%y, %w)\n  return %z\n}\n"
        ).replace("%w: float32[4]", "%w: float32[1,1,4,4]")
    )
    assert cut_at(model) == {"f"}
    assert len(composites(model)) == 2


def test_a_body_of_which_one_head_leaves_nothing_still_defines_its_result() -> None:
    text = NORMED[: NORMED.index("subgraph norm")].replace(
        "float32{1.0, 2.0, 3.0, 4.0}) {name", ") {name"
    )
    text = text.replace("COMPOSITE(%t, )", "COMPOSITE(%t)")
    same = "%z: float32[1,2,3,4] = TRANSPOSE(%y, int32{0, 1, 2, 3})"
    model = split_above(
        f"{text}subgraph norm (%y: float32[1,2,3,4]) {{\n  {same}\n  return %z\n}}\n"
    )
    assert cut_at(model) == {"f"}
    assert [op.name for op in model.subgraphs[1].operators] == ["RESHAPE"]


OVER_HEADS = [
    "%m: float32[1,2,3] = MEAN(%sq, int32{3}) -> %m: float32[1,3,4] = MEAN(%sq, int32{1})",
    "%m1: float32[1,2,3,1] -> %m1: float32[1,1,3,4]",
    "int32{1, 2, 3, 1}) {new_shape: [1, 2, 3, 1]} -> int32{1, 1, 3, 4}) {new_shape: [1, 1, 3, 4]}",
    "%i: float32[1,2,3,1] = RSQRT(%m1) -> %i: float32[1,1,3,4] = RSQRT(%m1)",
]
CHANGES = {
    "mixes heads": OVER_HEADS,
    "differs between heads": ["MUL(%u, %e) -> MUL(%u, float32[1,2,1,1]{1.0, 2.0})"],
    "operator without a rule": ["MUL(%u, %e) -> CUMSUM(%u, int32(3))"],
    "another type": ["norm (%y: float32[1,2,3,4] -> norm (%y: float32[1,2,3,4] q(0.5, 0)"],
    "read elsewhere": ["return %out\n -> return %out, %n\n"],
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_norm_that_is_not_for_each_head_alone_stays_above_the_cut(case: str) -> None:
    model = split_above(changed(NORMED, *CHANGES[case]))
    assert cut_at(model) <= {"n", "q"}
    assert len(composites(model)) == 1
    assert [graph.name for graph in model.subgraphs] == ["main", "norm"]


def test_what_is_read_elsewhere_is_cut_where_that_is() -> None:
    """The unnormed query is a result of the graph: the norm is done per head, what makes its operand is not."""
    model = split_above(NORMED.replace("return %out\n", "return %out, %t\n"))
    assert cut_at(model) == {"t"}
    assert len(composites(model)) == 2


@pytest.mark.parametrize("holds", [True, False])
def test_bodies_stay_with_the_rewrite_that_is_kept_and_go_with_others(holds: bool) -> None:
    model = parse(NORMED)
    (report,) = run(
        model, "mha_to_sha", target=Target("t", "t", form="split-above"), verifier=Says(holds)
    )
    assert report.status == ("converted" if holds else "reverted")
    added = ["norm/head_0", "norm/head_1"] if holds else []
    assert [graph.name for graph in model.subgraphs] == ["main", "norm", *added]
    assert holds or to_text(model) == to_text(parse(NORMED))


def test_heads_are_cut_below_a_norm_that_fails_its_proof() -> None:
    model = parse(NORMED)
    (site,) = run(
        model, "mha_to_sha", target=Target("t", "t", form="split-above"), verifier=Says(False, True)
    )
    assert (site.note, site.failed) == (
        "in form 'split', because the target's form failed",
        ("it differs",),
    )
    assert cut_at(model) <= {"n", "q"}
    assert [graph.name for graph in model.subgraphs] == ["main", "norm"]


ROTATED = """\
subgraph main (%x: QUERY q(0.01, 0), %c: int16[1,1,1,4] q(0.01, 0), %k: KEYS q(0.01, 0), %v: KEYS q(0.01, 0)) {
  %z: int16[1,2,1,4] q(0.02, 0) = QUANTIZE(%x)
  %a: int16[1,2,1,4] q(0.03, 0) = MUL(%z, %c)
  %s0: int16[1,2,1,2] q(0.02, 0), %s1: int16[1,2,1,2] q(0.02, 0) = SPLIT(int32(3), %z) {num_splits: 2}
  %j: int16[1,2,1,4] q(0.02, 0) = CONCATENATION(%s1, %s0) {axis: 3}
  %e: int16[1,2,1,4] q(0.03, 0) = MUL(%j, %c)
  %r: int16[1,2,1,4] q(0.04, 0) = ADD(%a, %e)
  %q: int16[1,1,2,4] q(0.04, 0) = RESHAPE(%r, int32{1, 1, 2, 4}) {new_shape: [1, 1, 2, 4]}
  %l: int16[1,1,2,5] q(0.001, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %p: int16[1,1,2,5] q(3.0517578e-05, 0) = SOFTMAX(%l) {beta: 1.0}
  %h: int16[1,1,2,4] q(0.01, 0) = BATCH_MATMUL(%p, %v)
  %out: int16[1,1,8] q(0.01, 0) = RESHAPE(%h, int32{1, 1, 8}) {new_shape: [1, 1, 8]}
  return %out
}
""".replace("QUERY", "int16[1,2,1,4]").replace("KEYS", "int16[1,1,5,4]")


def test_a_query_that_rope_reads_several_times_is_made_once_per_head() -> None:
    """Decode, int16: two readers and a SPLIT of two results come together above the cut."""
    model = split_above(ROTATED)
    assert cut_at(model) == {"x", "z/head_0", "z/head_1"}
    names = [op.name for op in model.subgraphs[0].operators]
    assert [names.count(name) for name in ("QUANTIZE", "SPLIT", "CONCATENATION", "ADD")] == [
        2,
        3,
        3,
        2,
    ]


def test_a_tensor_whose_readers_have_the_heads_on_different_axes_is_not_made_per_head() -> None:
    scores = """  %z: float32[1,4,4,5] = ABS(%q)
      %t0: float32[1,4,4,5] = TRANSPOSE(%z, int32{0, 2, 1, 3})
      %s: float32[1,4,4,5] = ADD(%z, %t0)
      %l: float32[1,4,4,8] = BATCH_MATMUL(%s, %k) {adj_y: true}"""
    text = attention_text(scores=scores).replace("6", "4")
    assert cut_at(split_above(text)) == {"z", "k", "v"}


def test_weights_with_a_scale_for_each_column_are_not_cut() -> None:
    """What is made of them is."""
    scales = ", ".join(f"0.{column}" for column in range(1, 9))
    weights = f"int8[1,1,8]{{splat 3}} q([{scales}], [{', '.join('0' * 8)}], axis 2)"
    made = f"%w: float32[1,1,8] = DEQUANTIZE({weights})\n  %g: float32[1,3,8] = MUL(%f, %w)\n  %r:"
    assert "w" in cut_at(
        split_above(NORMED.replace("RESHAPE(%f,", "RESHAPE(%g,").replace("  %r:", made))
    )
