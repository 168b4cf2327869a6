"""Two models on the same inputs, signature by signature: what differs, and where it begins."""

import json
import math
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import proof_models as models
import pytest
from cli_runs import DEMO, QUANTIZED, Captured, Patch, run, written
from literals import literal
from stateful_models import moving, reading, stateful, writing

from edge_opt import convert, load
from edge_opt.base.errors import UsageError
from edge_opt.comparison import compare as comparing
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import FirstDifference
from edge_opt.comparison.golden import check, record
from edge_opt.comparison.pairing import orders
from edge_opt.ir import Constants, DType, Model, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeRefused
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo
from edge_opt.testing import assert_equivalent

TABLE = np.random.default_rng(0).standard_normal((1000, 4)).astype(np.float32)


PAIR = models.projection(), models.projection(off=0.5)


def two(first: str, second: str, *, outputs: str = "z") -> bytes:
    """Two signatures that add; their keys and the output's name can be chosen."""
    kind = "float32[1,4]"
    graph = f"subgraph main (%x: {kind}, %y: {kind}) {{ %z: {kind} = ADD(%x, %y) return %z }}\n"
    keys = (
        f"signature {key} = #{at} (x=%x, y=%y) -> ({outputs}=%z)\n"
        for at, key in enumerate((first, second))
    )
    return models.written("".join(keys) + 2 * graph, key="")


def test_one_changed_weight_is_found_and_placed_and_tolerances_decide_what_is_equal() -> None:
    report = compare(*PAIR)
    (output,) = report.signatures[0].outputs
    assert not report
    assert (output.differing, output.worst and output.worst[1]) == (3, 7)
    assert "output 'logits': 3 of 36 elements differ" in report.summary()
    other = compare(*PAIR, seed=1)
    assert compare(*PAIR).to_dict() == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert other.signatures != report.signatures
    report = compare(PAIR[0], models.projection(off=1e-4), atol=1e-2)
    assert (report.equal, report.bitwise, report.first_difference) == (True, False, None)
    assert "equal within atol=0.01" in report.summary()


def test_what_only_one_model_has_is_a_difference(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tflite", tmp_path / "other.tflite"
    one.write_bytes(two("prefill", "decode"))
    other.write_bytes(two("prefill", "verify"))
    report = compare(one, other)
    assert not report
    reasons = {s.name: s.reason for s in report.signatures}
    assert reasons == {"prefill": "", "decode": f"only in {one}", "verify": f"only in {other}"}
    assert compare(one, other, signatures="pre*").bitwise
    report = compare(two("a", "b"), two("a", "b", outputs="w"))
    assert not report
    assert [o.reason for o in report.signatures[0].outputs] == ["only in <a>", "only in <b>"]
    assert not compare(two("a", "b"), two("c", "d")).equal


def test_other_inputs_and_quantizations_are_differences() -> None:
    (signature,) = compare(models.adder(shape=(1, 4)), models.adder(shape=(1, 5))).signatures
    assert "input 'x' has shape (1, 4) in a, (1, 5) in b" in signature.reason
    (signature,) = compare(models.adder(), models.requantized()).signatures
    assert "only in" in signature.reason
    report = compare(models.requantized(scale=0.5), models.requantized(scale=0.25), atol=1e6)
    assert not report
    assert "scale 0.5, zero point 0 in a, scale 0.25, zero point 0 in b" in report.summary()


RESHAPED = "subgraph main (%x: int8[2] ONE) { %y: int8[2] ONE = RESHAPE(%x, int32{2}) return %y }"


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        ("q(0.1, 0)", "q(0.1, 5)", "scale 0.1, zero point 0 in a, scale 0.1, zero point 5 in b"),
        ("q(0.1, 0)", "", "scale 0.1, zero point 0 in a, no scale in b"),
        (
            "q([0.1, 0.2], [0, 0], axis 0)",
            "q([0.1, 0.3], [0, 0], axis 0)",
            "scales along an axis, which differ between a and b",
        ),
    ],
)
def test_codes_that_mean_other_numbers_are_a_difference(
    one: str, other: str, how: str, tmp_path: Path
) -> None:
    one, other = (models.written(RESHAPED.replace("ONE", each)) for each in (one, other))
    said = f"input 'x' has {how}"
    golden = record(one, tmp_path / "g.npz")
    for report in (compare(one, other), check(other, golden)):
        assert not report
        assert not report.bitwise
        assert said in report.summary()
    report = compare(one, other)
    assert report.measured, "outputs are compared nevertheless"
    assert report.signatures[0].outputs[0].reason == how


TYPES = {
    ("int32", "int64"): "int32 in a, int64 in b",
    ("float32", "int32"): "float32 in a, int32 in b",
    ("float32", "float16"): "the same numbers, but float32 in a, float16 in b",
}


@pytest.mark.parametrize("types", TYPES)
def test_an_output_of_another_type_is_a_difference_unless_both_are_real_and_may_differ(
    types: tuple[str, str], tmp_path: Path
) -> None:
    one, other = (
        models.written(f"subgraph main (%x: int8[8]) {{ %y: {kind}[8] = CAST(%x) return %y }}")
        for kind in types
    )
    report = compare(one, other)
    assert not report
    assert not report.bitwise
    assert TYPES[types] in report.summary()
    assert not check(other, record(one, tmp_path / "g.npz"))
    assert f"(first: main/y, {types[0]} in a, {types[1]} in b)" in "".join(report.notes())
    assert compare(one, other, atol=1e-3).equal == ("float16" in types)


@pytest.mark.parametrize("kind", ["int4", "uint4", "bfloat16"])
def test_an_input_of_a_type_that_numpy_lacks_is_refused_by_its_name(kind: str) -> None:
    to = "int32{4}) {new_shape: [4]}"
    text = f"subgraph main (%x: {kind}[1,4]) {{ %y: {kind}[4] = RESHAPE(%x, {to} return %y }}"
    one = models.written(text)
    with pytest.raises(
        RuntimeRefused, match="draws no numbers for input 'x': numpy lacks its type"
    ):
        compare(one, one)


def test_models_without_signatures_are_compared_by_position() -> None:
    kind = "float32[2,4]"
    text = f"subgraph main (%p: {kind}, %q: {kind}) {{ %r: {kind} = ADD(%p, %q) return %r }}"
    report = compare(models.adder(key=""), models.written(text, key=""))
    assert report.bitwise
    assert [(s.name, [o.name for o in s.outputs]) for s in report.signatures] == [("main", ["z"])]


def test_a_float_model_and_a_quantized_one_are_compared_as_real_numbers() -> None:
    plain, coded = (
        models.written(f"subgraph main (%x: {kind}) {{ %z: {kind} = RELU(%x) return %z }}")
        for kind in ("float32[1,64]", "int8[1,64] q(0.05, 0)")
    )
    report = compare(plain, coded, atol=0.0251)
    assert (report.equal, report.bitwise) == (True, False)


FLOATS = {
    "a smaller range": ("RELU(%x)", "RELU6(%x)"),
    "large numbers": ("MINIMUM(%x, float32(1000.0))", "MINIMUM(%x, float32(6.0))"),
    "large negative numbers": ("MAXIMUM(%x, float32(-1000.0))", "MAXIMUM(%x, float32(-10.0))"),
}


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.parametrize("shape", ["", "1", "1,4"])
def test_floats_are_also_large_and_of_either_sign(case: str, shape: str) -> None:
    kind = f"float32[{shape}]"
    one, other = (
        models.written(f"subgraph main (%x: {kind}) {{ %y: {kind} = {body} return %y }}")
        for body in FLOATS[case]
    )
    assert not compare(one, other)


def test_figures_of_models_that_round_differently_are_those_of_ordinary_numbers() -> None:
    text = "subgraph main (%x: float32[4]) { %y: float32[4] = MUL(%x, float32(NUMBER)) return %y }"
    one, other = (models.written(text.replace("NUMBER", number)) for number in ("1.5", "1.5001"))
    report = compare(one, other, atol=1e-3)
    assert report.equal
    assert report.signatures[0].outputs[0].elements == 4
    overflowing = models.written(
        "subgraph main (%x: float32[64]) { %e: float32[64] = EXP(%x) %y: float32[64] = SUB(%e, %e) return %y }"
    )
    report = compare(overflowing, overflowing)
    assert report.bitwise
    assert report.signatures[0].outputs[0].finite < 128, "NaN equals NaN"


def test_models_take_turns_and_progress_ends(monkeypatch: Patch, tmp_path: Path) -> None:
    order, told = [], list[tuple[int, int]]()
    run_calls = Worker.run_calls

    def noted(self: Worker, model: Any, calls: Any, *rest: Any) -> Any:
        order.extend((model == one, signature) for signature, _ in calls)
        return run_calls(self, model, calls, *rest)

    one, other = tmp_path / "one.tflite", tmp_path / "other.tflite"
    one.write_bytes(two("prefill", "decode"))
    other.write_bytes(two("decode", "prefill"))
    monkeypatch.setattr(Worker, "run_calls", noted)
    assert compare(one, other, progress=lambda _, *step: told.append(step)).bitwise
    sides = [(True, "prefill"), (False, "prefill"), (True, "decode"), (False, "decode")]
    assert order == [each for each in sides for _ in range(2)], "ordinary and large numbers"
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"on": "gpu"}, {"seed": -1}, {"atol": -1.0}, {"rtol": math.nan}, {"signatures": ["nope"]},
        {"shapes": {"nope": [1]}},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_without_meaning_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        compare(models.adder(), models.adder(), **options)
    if options.keys() & {"seed", "atol", "rtol"}:
        with pytest.raises(UsageError, match=f"{next(iter(options))} is .*, expected"):
            record(models.adder(), "golden.npz", **options)


def test_assert_equivalent_reads_like_a_test_failure(tmp_path: Path) -> None:
    for name, content in zip("ab", PAIR, strict=True):
        (tmp_path / name).write_bytes(content)
    a, b = tmp_path / "a", tmp_path / "b"
    assert assert_equivalent(a, a, on="reference").bitwise
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(a, b)
    expected = f"'{b}' differs from '{a}':\n  signature 'main', output 'logits': 3 of 36"
    assert str(caught.value).startswith(expected)
    assert assert_equivalent(a, b, atol=10).equal


def lookup(table: np.ndarray) -> bytes:
    """Numbers that are not yet indices: `CAST`, `RESHAPE`, then a row of the table for each."""
    text = f"""subgraph main (%ids: int64[1,16]) {{
      %narrow: int32[1,16] = CAST(%ids)
      %flat: int32[16] = RESHAPE(%narrow, int32{{16}}) {{new_shape: [16]}}
      %y: float32[16,{table.shape[1]}] = EMBEDDING_LOOKUP(%flat, {literal(table)})
      return %y
    }}"""
    return models.written(text, key="")


def test_rows_far_down_a_table_are_read_and_none_beyond_the_shorter_one(tmp_path: Path) -> None:
    cut = lookup(np.where(np.arange(1000)[:, None] < 128, TABLE, np.float32(0)))
    assert not compare(lookup(TABLE), cut)
    assert compare(lookup(TABLE), lookup(TABLE[:200])).bitwise
    assert compare(lookup(TABLE[:200]), lookup(TABLE)).bitwise
    golden = record(lookup(TABLE), tmp_path / "g.npz")
    assert (check(lookup(TABLE), golden).equal, check(cut, golden).equal) == (True, False)


REMEMBERING = """
subgraph main (%x: float32[4]) {
  CALL_ONCE() {init_subgraph_index: 1}
  %h: resource[] = VAR_HANDLE() {container: '', shared_name: 's'}
  %before: float32[4] = READ_VARIABLE(%h)
  %out: float32[4] = ABS(%before)
  %later: float32[4] = STORED(%x)
  ASSIGN_VARIABLE(%h, %later)
  return %out
}
subgraph init () {
  %h: resource[] = VAR_HANDLE() {container: '', shared_name: 's'}
  ASSIGN_VARIABLE(%h, float32[4]{splat 0.0})
  return
}
"""


def test_models_that_keep_state_are_run_again_with_it() -> None:
    """The first run reads what the variable holds at first, whatever is stored then."""
    one, other = (to_bytes(parse(REMEMBERING.replace("STORED", name))) for name in ("ABS", "EXP"))
    report = compare(one, other)
    assert not report
    assert report.signatures[0].outputs[0].elements == 8 * 4, "every call counts"
    assert "an earlier call, also of another signature" in report.first_difference.reason
    assert compare(one, one).bitwise


CHAIN = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,8]) {{
{lines}
  return %y
}}
"""


def located(a: Any, b: Any) -> FirstDifference:
    report = compare(a, b)
    assert not report
    return report.first_difference


def chain(length: int, wrong: int | None = None) -> Model:
    """x + 1 + 1 + ... with one link that adds more."""
    names = ["x", *(f"t{place}" for place in range(1, length)), "y"]
    lines = [
        f"  %{after}: float32[1,8] = ADD(%{before}, float32({1.5 if place == wrong else 1.0}))"
        for place, (before, after) in enumerate(pairwise(names))
    ]
    return parse(CHAIN.format(lines="\n".join(lines)))


@pytest.mark.parametrize(("path", "block"), [(DEMO, 0), (QUANTIZED, 2)], ids=["float32", "int16"])
def test_swapped_heads_are_found_in_their_block(path: Path, block: int) -> None:
    model = load(path)
    convert(model, verify="none")
    graph = dict(model.entry_points())["decode"]
    joins = [
        op for op in graph.operators if op.name == "CONCATENATION" and "head_0" in op.input(0).name
    ]
    merge = [op for op in joins if len(op.inputs) == 4][block]
    first, second = merge.input(0), merge.input(1)
    graph.set_input(merge, 0, second)
    graph.set_input(merge, 1, first)
    found = located(path, model)
    assert (found.signature, found.reason) == ("decode", "")
    assert f"kv_cache_k_{block}" in "".join(found.equal_before)
    softmaxes = [
        sum("SOFTMAX" in line for line in side) for side in (found.operators_a, found.operators_b)
    ]
    assert softmaxes == [1, 4]
    assert found.names[found.short_name] == found.tensor
    assert all(found.short_name in lines[-1] for lines in (found.operators_a, found.operators_b))


@pytest.mark.parametrize("wrong", [0, 20, 39])
def test_tensors_are_looked_at_in_order_as_many_as_fit_into_memory(
    wrong: int, monkeypatch: Patch
) -> None:
    """Each has 32 bytes in either of two runs."""
    looked: list[int] = []
    run_calls = Worker.run_calls

    def counted(self: Worker, model: Any, *rest: Any) -> Any:
        looked.append(len(load(model).subgraphs[0].outputs))
        return run_calls(self, model, *rest)

    monkeypatch.setattr(Worker, "run_calls", counted)
    for most, batches in (
        (1 << 20, [40]),
        (3 * 64, [3] * (wrong // 3) + [min(3, 40 - wrong // 3 * 3)]),
        (1, [1] * (wrong + 1)),
    ):
        looked.clear()
        monkeypatch.setattr(comparing, "_MOST_BYTES", most)
        found = located(chain(40), chain(40, wrong))
        assert found.tensor == ("y" if wrong == 39 else f"t{wrong + 1}")
        assert looked == [1, 1, *(count for count in batches for _ in "ab")]
    for operators, more in ((found.operators_a, 1.0), (found.operators_b, 1.5)):
        line = f"{found.short_name}: float32[1,8] = ADD({found.equal_before[0]}, float32({more}))"
        assert operators == (line,)


def test_a_branch_that_differs_early_is_found_between_equal_tensors() -> None:
    def model(value: str) -> Model:
        lines = ["  %early: float32[1,8] = MUL(%x, float32(2.0))"]
        lines += [f"  %side: float32[1,8] = ADD(%early, float32({value}))"]
        names = ["early", *(f"t{place}" for place in range(40))]
        lines += [f"  %{after}: float32[1,8] = ABS(%{before})" for before, after in pairwise(names)]
        return parse(
            CHAIN.format(lines="\n".join([*lines, "  %y: float32[1,8] = ADD(%t39, %side)"]))
        )

    found = located(model("1.0"), model("3.0"))
    assert found.tensor == "side"
    assert [found.names[name] for name in found.equal_before] == ["early"]


def test_models_without_common_names_or_signatures_are_shown_whole() -> None:
    given = [chain(3), chain(3, wrong=1)]
    for model in given:
        model.signatures.clear()
    for tensor in given[1].subgraphs[0].tensors:
        tensor.name = f"other_{tensor.name}"
    found = located(*given)
    assert "no tensor names in common" in found.reason
    assert (found.tensor, found.names[found.short_name], found.equal_before) == ("y", "y", ("%x",))
    assert (len(found.operators_a), len(found.operators_b)) == (3, 3)


def test_a_name_that_one_model_has_twice_pairs_no_tensors() -> None:
    one, other = chain(4), chain(4, wrong=3)
    for model, twice in ((one, ("t1", "t3")), (other, ("t1",))):
        for tensor in model.subgraphs[0].tensors:
            tensor.name = "t" if tensor.name in twice else tensor.name
    found = located(one, other)
    assert (found.tensor, [found.names[name] for name in found.equal_before]) == ("y", ["t2"])


def test_a_changed_weight_is_named() -> None:
    plain = "  %h: float32[1,8] = ABS(%x)\n  %y: float32[1,8] = MUL(%h, %h)"
    models = [parse(CHAIN.format(lines=plain)) for _ in range(2)]
    for model, value in zip(models, (0.25, 0.5), strict=True):
        graph = model.subgraphs[0]
        weight = Constants(model).make("weight", np.full((1, 8), value, np.float32), DType.FLOAT32)
        graph.set_input(graph.operators[-1], 1, graph.add_tensor(weight))
    found = located(*models)
    assert (found.tensor, found.constants) == ("y", ("weight",))


def test_a_search_that_finds_nothing_or_fails_leaves_the_comparison(monkeypatch: Patch) -> None:
    assert compare(chain(4), chain(4, wrong=2), locate=False).first_difference is None
    with monkeypatch.context() as patch:
        patch.setattr(comparing._Search, "look", lambda self, places: None)
        found = located(chain(4), chain(4, wrong=2))
    assert found.reason.startswith("no tensor differs if it is made an output")
    assert (found.tensor, found.figures) == ("", None)

    def fail(*_: object) -> None:
        raise RuntimeCrashed("the runtime's process ended with signal 11")

    monkeypatch.setattr(comparing, "first_difference", fail)
    found = located(chain(4), chain(4, wrong=2))
    assert "signal 11" in found.reason
    assert found.figures is None


def test_the_command_shows_both_sides_and_no_list_of_scales(
    tmp_path: Path, capsys: Captured
) -> None:
    scales, zeros = ", ".join(["0.5"] * 9), ", ".join(["0"] * 9)
    weight = f"int8[9,8]{{splat 2}} q([{scales}], [{zeros}], axis 0)"
    lines = f"  %h: float32[1,8] = ABS(%x)\n  %y: float32[1,9] = FULLY_CONNECTED(%h, {weight})"
    plain = CHAIN.format(lines=lines)
    a = written(tmp_path, plain, "a.tflite")
    b = written(tmp_path, plain.replace("splat 2", "splat 3"), "b.tflite")
    ran = run(capsys, "compare", a, b)
    assert ran.code == 1
    shown = [line.strip() for line in ran.out.splitlines()]
    product = "%1: float32[1,9] = FULLY_CONNECTED(%0, int8[9,8]{splat SPLAT} q(9 scales, axis 0))"
    sides = {product.replace("SPLAT", value) for value in "23"}
    assert {"equal before it: %0", "%0 is 'h'"} | sides <= set(shown)
    said = run(capsys, "compare", a, b, "--json").json["first_difference"]
    assert (said["signature"], said["tensor"], said["equal_before"]) == ("main", "y", ["%0"])
    assert run(capsys, "compare", a, a, "--json").json["first_difference"] is None


STATES = {
    "written later, read earlier": (lambda f: (reading(0), writing(0, f)), 1, "s0"),
    "read as written": (lambda f: (writing(0, f), reading(0)), 1, "s1"),
    "cleared in between": (lambda f: (reading(0, f), writing(0), writing(0, 0.0)), 1, "s0"),
    "cleared in between, in another order": (
        lambda f: (writing(0, 0.0), writing(0), reading(0, f)), 1, "s2",
    ),
    "through three variables backwards": (
        lambda f: (reading(2), moving(1, 2), moving(0, 1), writing(0, f)), 3, "s0",
    ),
    "in one signature only": (
        lambda f: ("\n".join([reading(3), *(f"  %m{a}: float32[4] = READ_VARIABLE(%v{a})\n"
        f"  ASSIGN_VARIABLE(%v{a + 1}, %m{a})" for a in (2, 1, 0)),
        f"  %w: float32[4] = MUL(%x, float32({f}))\n  ASSIGN_VARIABLE(%v0, %w)"]),), 4, "s0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_state_that_one_signature_writes_and_another_reads_is_compared(
    case: str, tmp_path: Path
) -> None:
    bodies, variables, where = STATES[case]
    one, other = (stateful(*bodies(factor), variables=variables) for factor in (1.0, 3.0))
    report = compare(one, other)
    assert [signature.name for signature in report.signatures if not signature.equal] == [where]
    assert "an earlier call, also of another signature" in report.first_difference.reason
    assert any(
        "may depend on earlier calls or on random numbers" in note for note in report.notes()
    )
    assert compare(one, one).bitwise
    golden = record(one, tmp_path / "g.npz")
    assert check(one, golden).bitwise
    assert not check(other, golden)


def test_a_model_that_keeps_state_is_not_one_that_does_not(tmp_path: Path) -> None:
    plain = "  %y: float32[4] = ABS(%x)"
    keeping = (
        "  %r: float32[4] = READ_VARIABLE(%v0)\n  ASSIGN_VARIABLE(%v0, %x)\n"
        "  %p: float32[4] = ABS(%x)\n  %y: float32[4] = ADD(%p, %r)"
    )
    one, other = stateful(plain, variables=0), stateful(keeping)
    assert not compare(one, other)
    assert not compare(other, one)
    assert "record it again" in check(other, record(one, tmp_path / "g.npz")).summary()
    assert not check(one, record(other, tmp_path / "h.npz"))


def test_each_signature_with_state_follows_each_and_is_called_eight_times_or_more() -> None:
    for count in range(1, 12):
        names = [f"s{place}" for place in range(count)]
        (turns,) = orders([SignatureInfo(name, (), (), keeps_state=True) for name in names])
        order = [turn.name for turn in turns]
        assert set(pairwise([*order, *order[:1]])) == {*product(names, names)}
        assert min(Counter(order).values()) >= 8
