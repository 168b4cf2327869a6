"""A pass is a transaction per site: what fails a check leaves the graph bit for bit as it was, the others go on."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from pass_runs import Says, convert_text, refusal, run, statuses
from text_parser import parse
from toy_passes import CHAIN, TWO_RESULTS, Double, fresh, graph_of, op, replacing

from edge_opt.ir import (
    Constants,
    DType,
    Metadata,
    Operator,
    OperatorCode,
    Quantization,
    Subgraph,
    Tensor,
    to_bytes,
)
from edge_opt.ir.graph import Buffer
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.text import to_text
from edge_opt.ir.walk import cut_out
from edge_opt.passes import PASSES, Context, Demand, Pass, Status, run_pass
from edge_opt.passes.contract import Ran, Site, SkippedSite
from edge_opt.passes.rewrite import (
    Rewrite,
    check_shapes,
    check_versions,
    commit,
    remove_dead,
    share_equal,
)
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table
from edge_opt.targets import Target, load_target

# The transaction


def test_every_site_gets_a_verdict_in_execution_order() -> None:
    told = []
    model = parse(CHAIN)
    graph = model.subgraphs[0]
    context = Context(model, graph, "main", load_target("generic"), Constants(model), None, told.append)
    reports = run_pass(Double(), context)
    assert told == reports
    assert [(r.index, r.operator, str(r.status)) for r in reports] == [
        (0, "b", "converted"),
        (1, "other", "skipped"),
        (2, "y", "converted"),
    ]
    assert {(r.pass_name, r.signature) for r in reports} == {("double", "main")}
    assert [operator.output.name for operator in graph.operators] == [
        "b/square",
        "b",
        "other",
        "y/square",
        "y",
    ]


def test_a_failed_proof_rolls_back_that_site_alone() -> None:
    prover = Says(False, True)
    model, reports = convert_text(CHAIN, Double(), prover=prover)
    assert statuses(reports) == ["rolled-back", "skipped", "converted"]
    assert reports[0].reason == "it differs"
    assert [demand for _, demand in prover.asked] == [Demand("relative", 0.5)] * 2
    assert to_text(model) == CHAIN.replace(
        "  %c: float32[4] = ABS(%b)\n  %y: float32[4] = NEG(%c)\n",
        "  %y/square: float32[4] = SQUARE(%b)\n  %y: float32[4] = SQRT(%y/square)\n",
    )


def test_a_site_may_demand_something_else_than_its_pass() -> None:
    prover = Says(True)

    class Strict(Double):
        def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
            for site in super().sites(context):
                if isinstance(site, Site):
                    yield Site(site.operator, site.build, demand=Demand("bitwise"))

    convert_text(CHAIN, Strict(), prover=prover)
    assert {demand for _, demand in prover.asked} == {Demand("bitwise")}


def test_a_match_that_turns_out_impossible_is_skipped_with_its_reason() -> None:
    def refuse(*_: object) -> Rewrite:
        raise RefusedError("no", None, None, "yes", "no")

    model, reports = convert_text(CHAIN, Double(refuse))
    assert statuses(reports) == ["skipped"] * 3
    assert reports[0].reason == "no (expected yes, found no)"
    assert to_text(model) == CHAIN


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("t", "", refused_operators=("SQUARE",)), "target 't' does not take SQUARE"),
        (Target("t", "", largest_rank=0), "target 't' takes rank 0 at most, 'b/square' has 1"),
    ],
)
def test_what_the_target_cannot_take_is_rolled_back(target: Target, reason: str) -> None:
    prover = Says(True)
    model, reports = convert_text(CHAIN, Double(), target=target, prover=prover)
    assert statuses(reports) == ["rolled-back", "skipped", "rolled-back"]
    assert reports[0].reason == reason
    assert prover.asked == [], "what is refused anyway is not run"
    assert to_text(model) == CHAIN


def test_sites_that_fail_leave_the_file_byte_for_byte_as_it_was() -> None:
    """Not even an operator code or a constant stays behind."""
    untouched = to_bytes(parse(CHAIN))
    model, reports = convert_text(CHAIN, Double(), prover=Says(False))
    assert Status.CONVERTED not in {report.status for report in reports}
    assert to_bytes(model) == untouched


def test_a_wrong_shape_is_rolled_back_before_anything_runs() -> None:
    def wrong(context: Context, first: Operator, last: Operator) -> Rewrite:
        rewrite = Double._replace(context, first, last)
        rewrite.new[0].output.shape = (5,)
        return rewrite

    prover = Says(True)
    model, reports = convert_text(CHAIN, Double(wrong), prover=prover)
    assert statuses(reports) == ["rolled-back", "skipped", "rolled-back"]
    assert reports[0].reason == "SQUARE 'b/square': derived shape [4], recorded [5]"
    assert prover.asked == []
    assert to_text(model) == CHAIN


def test_a_model_that_orders_operators_by_index_is_frozen() -> None:
    model = parse(CHAIN)
    model.metadata.append(Metadata("model_control_dependencies", Buffer()))
    reports = run(model, Double())
    assert statuses(reports) == ["skipped"] * 3
    assert "model_control_dependencies" in reports[0].reason
    assert reports[1].reason == "not a NEG"
    assert to_text(model) == CHAIN


def test_reports_say_everything_as_plain_data() -> None:
    _, reports = convert_text(CHAIN, Double(), prover=Says(True))
    assert reports[0].to_dict() == {
        "pass": "double",
        "signature": "main",
        "index": 0,
        "status": "converted",
        "reason": None,
        "note": None,
        "heads": None,
        "kv_heads": None,
        "operator": "b",
        "proof": {
            "demand": "relative 0.5",
            "bitwise": True,
            "max_abs": 0.0,
            "steps": None,
            "fully_masked_rows_max_abs": None,
            "note": None,
            "repeated": False,
            "ran": [],
            "extremes": False,
        },
    }


def test_the_passes_are_named_as_their_table_says() -> None:
    assert list(PASSES) == [chosen.name for chosen in PASSES.values()]
    assert all(chosen.summary and not chosen.summary.endswith(".") for chosen in PASSES.values())


SHARED = """\
subgraph main (%x: float32[4]) {
  %a: float32[4] = ABS(%x)
  %b: float32[4] = NEG(%a)
  %c: float32[4] = ADD(%a, %x)
  return %b, %c
}
"""


class Dropping(Pass):
    """Test pass: NEG keeps the ABS that ADD still reads; ADD, if asked for, then reads it no more."""

    name = "dropping"
    summary = "for tests"

    def __init__(self, *wanted: str) -> None:
        self._wanted = wanted

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        for last in context.subgraph.operators:
            if last.name in self._wanted:
                yield Site(last, lambda last=last: self._build(context, last))  # type: ignore[misc]

    @staticmethod
    def _build(context: Context, last: Operator) -> Rewrite:
        (x,) = context.subgraph.inputs
        made = op(context.model, "EXP", [x], last.output)
        first = last.input(0).producer
        assert first is not None
        if last.name == "NEG":
            return Rewrite(context.subgraph, (first, last), (first, made), last)
        return Rewrite(context.subgraph, (last,), (made,), last)


def test_what_stayed_for_another_site_goes_when_that_one_is_done() -> None:
    model, reports = convert_text(SHARED, Dropping("NEG", "ADD"))
    assert statuses(reports) == ["converted", "converted"]
    assert [each.name for each in model.subgraphs[0].operators] == ["EXP", "EXP"]


def test_what_stayed_for_another_site_stays_while_that_one_needs_it() -> None:
    model, reports = convert_text(SHARED, Dropping("NEG"))
    assert statuses(reports) == ["converted"]
    assert [each.name for each in model.subgraphs[0].operators] == ["ABS", "EXP", "ADD"]


# Shapes


def test_derived_shapes_are_compared_with_the_recorded_ones() -> None:
    _, t, o = graph_of(CHAIN)
    assert refusal(check_shapes, o.values()) is None
    t["b"].shape = (2, 2)
    assert refusal(check_shapes, [o["b"]]) == "NEG 'b': derived shape [4], recorded [2, 2]"
    assert refusal(check_shapes, [o["a"]]) is None


def test_operands_that_do_not_fit_are_named() -> None:
    model, t, _ = graph_of(CHAIN)
    clash = op(model, "ADD", [t["x"], fresh("five", (5,))], fresh("sum"))
    violation = refusal(check_shapes, [clash])
    assert violation is not None
    assert "ADD" in violation
    assert "4" in violation
    assert "5" in violation


# Committing


def removed(clean: Any, graph: Subgraph, *given: Any) -> int:
    """How many operators go."""
    before = len(graph)
    clean(graph, *given)
    return before - len(graph)


def test_committing_puts_the_new_operators_where_the_anchor_was() -> None:
    model, t, o = graph_of(CHAIN)
    square = op(model, "SQUARE", [t["x"]], fresh("s"))
    new = [square, op(model, "SQRT", [square.output], t["b"])]
    staying = commit(replacing(model, [o["a"], o["b"]], *new))
    assert staying == []
    graph = model.subgraphs[0]
    assert [operator.output.name for operator in graph.operators] == ["s", "b", "other", "c", "y"]
    assert graph.tensors[-1] is new[0].output
    assert o["a"].subgraph is None
    assert t["b"].producer is new[1]


def test_operators_that_stay_keep_their_place_and_go_when_the_last_rewrite_is_done() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    staying = commit(replacing(model, [o["a"], o["b"]], o["a"], op(model, "NEG", [t["x"]], t["b"])))
    assert staying == [o["a"]]
    graph = model.subgraphs[0]
    assert [operator.output.name for operator in graph.operators] == ["a", "reader", "b"]
    assert removed(remove_dead, graph, staying) == 0, "the other result reads it"
    graph.remove(o["reader"])
    graph.outputs = [t["b"]]
    assert removed(remove_dead, graph, staying) == 1
    assert [operator.output.name for operator in graph.operators] == ["b"]


def test_removing_the_dead_reaches_what_only_they_needed() -> None:
    model, t, o = graph_of(CHAIN)
    graph = model.subgraphs[0]
    graph.outputs = [t["other"]]
    assert removed(remove_dead, graph, [o["y"], o["y"]]) == 4
    assert [operator.output.name for operator in graph.operators] == ["other"]


# Equal operators


def test_equal_operators_that_rewrites_added_are_merged() -> None:
    model = parse(CHAIN)
    graph = model.subgraphs[0]
    x = graph.inputs[0]
    constants = [
        Tensor(f"c{i}", (), DType.FLOAT32, buffer=Buffer(_data(2.0 if i < 2 else 3.0))) for i in range(3)
    ]
    added = [
        graph.insert_before(graph.operators[0], op(model, "MUL", [x, c], fresh(f"m{i}")))
        for i, c in enumerate(constants)
    ]
    readers = [graph.append(op(model, "EXP", [m.output], fresh(f"r{i}"))) for i, m in enumerate(added)]
    first = next(operator for operator in graph.operators if operator in added[:2])
    assert removed(share_equal, graph, added) == 1
    assert readers[0].input(0) is readers[1].input(0) is first.output
    assert readers[2].input(0) is added[2].output
    assert removed(share_equal, graph, [*added, *readers][2:]) == 1, (
        "what read equal results is equal in turn"
    )


def test_operators_that_differ_in_options_result_or_not_added_are_not_merged() -> None:
    model, t, _ = graph_of(CHAIN)
    graph = model.subgraphs[0]
    code = model.operator_code("SOFTMAX")
    made = [
        graph.append(Operator(code, [t["x"]], [output], new_table("SoftmaxOptions", beta=beta)))
        for output, beta in (
            (fresh("p"), 1.0),
            (fresh("q"), 2.0),
            (Tensor("i", (4,), DType.INT8, quantization=Quantization.affine(1 / 256, -128)), 1.0),
            (Tensor("j", (4,), DType.INT8, quantization=Quantization.affine(1 / 128, -128)), 1.0),
        )
    ]
    twin = graph.append(Operator(code, [t["x"]], [fresh("twin")], new_table("SoftmaxOptions", beta=1.0)))
    assert removed(share_equal, graph, made) == 0
    graph.outputs.append(twin.output)
    assert removed(share_equal, graph, [*made, twin]) == 0, "a graph output must stay defined"
    graph.outputs.pop()
    assert removed(share_equal, graph, [*made, twin]) == 1


def test_what_reads_state_draws_numbers_or_calls_a_subgraph_equals_nothing() -> None:
    """Between two equal reads there may be a write; no proof runs after the merging."""
    model, t, _ = graph_of(CHAIN)
    graph = model.subgraphs[0]
    handle = Tensor("handle", (), DType.RESOURCE)
    state = Tensor("state", (4,), DType.FLOAT32, is_variable=True)
    call = new_table("CallOptions", subgraph=0)
    for name, inputs, options in (
        ("READ_VARIABLE", [handle], None),
        ("RANDOM_UNIFORM", [t["x"]], None),
        ("CALL", [t["x"]], call),
        ("CUSTOM", [t["x"]], None),
        ("ADD", [t["x"], state], None),
    ):
        code = model.operator_code(name)
        twins = [graph.append(Operator(code, inputs, [fresh(f"{name}{i}")], options)) for i in range(2)]
        assert removed(share_equal, graph, twins) == 0, name


def test_dead_operators_that_change_state_stay() -> None:
    model, t, _ = graph_of(CHAIN)
    handle = Tensor("handle", (), DType.RESOURCE)
    graph = model.subgraphs[0]
    body = parse(CHAIN).subgraphs[0]
    model.subgraphs.append(body)
    call = Operator(
        model.operator_code("CALL"), [t["x"]], [fresh("called")], new_table("CallOptions", subgraph=1)
    )
    graph.append(call)
    assign = model.operator_code("ASSIGN_VARIABLE")
    direct = graph.append(Operator(assign, [handle, t["x"]], []))
    inside = body.append(Operator(assign, [handle, body.inputs[0]], []))
    assert removed(remove_dead, graph, [direct, call], model.subgraphs) == 0
    body.remove(inside)
    assert removed(remove_dead, graph, [call]) == 0, "nothing is known of what it calls"
    assert removed(remove_dead, graph, [call], model.subgraphs) == 1, "now its body only computes"


def _data(value: float) -> "Data":
    return Data(np.array(value, np.float32).tobytes())


# Cutting out


def test_a_region_alone_is_a_model_whose_names_say_nothing() -> None:
    model, t, o = graph_of(CHAIN)
    first = replacing(model, [o["a"], o["b"]])
    second = replacing(model, [o["c"], o["y"]])
    models = [cut_out(model, r.old, r.inputs(), r.outputs()) for r in (first, second)]
    assert to_bytes(models[0]) == to_bytes(models[1]), "equal regions are proved once"
    assert to_text(models[0]) == (
        "subgraph region (%0: float32[4]) {\n"
        "  %1: float32[4] = ABS(%0)\n"
        "  %2: float32[4] = NEG(%1)\n"
        "  return %2\n}\n"
    )
    assert [tensor.name for tensor in t.values()] == ["x", "o", "a", "b", "other", "c", "y"]


def test_a_region_is_the_same_wherever_what_it_calls_stands() -> None:
    """Or every layer of a target that makes composites would be proved twice: as expected, and as it then is."""
    body = "subgraph {} (%p: float32[4]) {{ %q: float32[4] = ABS(%p) return %q }}\n"
    call = "%{1}: float32[4] = STABLEHLO_COMPOSITE(%{0}) {{name: 'n', decomposition_subgraph_index: {2}}}\n"
    main = (
        "subgraph main (%x: float32[4]) {\n"
        + call.format("x", "y", 1)
        + call.format("y", "z", 2)
        + "return %z }\n"
    )
    model = parse(main + body.format("one") + body.format("two"))
    first, second = model.subgraphs[0].operators
    regions = [cut_out(model, [call], [call.input(0)], call.outputs) for call in (first, second)]
    assert to_bytes(regions[0]) == to_bytes(regions[1])


def test_inputs_and_outputs_of_a_region_are_what_crosses_its_border() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    rewrite = replacing(model, [o["a"], o["b"]])
    assert rewrite.inputs() == (t["x"],)
    assert rewrite.outputs() == (t["a"], t["b"])
    assert replacing(model, [o["a"], o["reader"], o["b"]]).outputs() == (t["reader"], t["b"])


def test_a_proof_tells_which_rows_it_ran() -> None:
    assert Ran("xnnpack").to_dict() == {"kernels": "xnnpack", "rows": None, "of": None}
    assert Ran("reference", (0, 3), 8).to_dict() == {"kernels": "reference", "rows": [0, 3], "of": 8}


def test_a_new_operator_carries_the_version_that_its_types_need_or_that_of_an_old_one() -> None:
    model = parse("""subgraph main (%x: int16[1,4] q(0.5, 0)) {
      %y: int16[1,2] q(0.5, 0) = SLICE(%x, int32{0, 1}, int32{1, 2})
      return %y
    }""")
    (old,) = model.subgraphs[0].operators
    own = OperatorCode(old.code.builtin, 1)
    for code, reason in (
        (own, "SLICE 'y': its types need version 4, it has 1"),
        (OperatorCode(old.code.builtin, 4), None),
        (old.code, None),
    ):
        new = Operator(code, old.inputs, old.outputs, old.options)
        assert refusal(check_versions, Rewrite(model.subgraphs[0], (old,), (new,), old)) == reason


@pytest.mark.parametrize("holds", [True, False])
def test_a_site_where_something_was_tried_is_not_settled(holds: bool) -> None:
    _, reports = convert_text(CHAIN, Double(), prover=Says(holds))
    tried = {report.status for report in reports if not report.settled}
    assert tried >= {Status.CONVERTED if holds else Status.ROLLED_BACK}
