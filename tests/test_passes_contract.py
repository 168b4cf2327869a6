"""A pass is a transaction per site: what fails a check leaves the graph bit for bit as it was, the others go on."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from pass_runs import Says, convert_text, run, statuses

from edge_opt.attention.refusal import Refusal
from edge_opt.ir import Constants, DType, Metadata, Model, Operator, Quantization, Tensor, to_bytes
from edge_opt.ir.extract import cut_out
from edge_opt.ir.graph import Buffer
from edge_opt.ir.text import parse, to_text
from edge_opt.passes import PASSES, Context, Demand, Pass, Status, run_pass
from edge_opt.passes.contract import BrokenFrameError, Site, SkippedSite
from edge_opt.passes.frame import frame_violation
from edge_opt.passes.rewrite import Rewrite, commit, remove_dead, shape_violation
from edge_opt.passes.share import share_equal
from edge_opt.schema.data import Data
from edge_opt.schema.table import new_table
from edge_opt.targets import Target, load_target

CHAIN = """\
subgraph main (%x: float32[4], %o: float32[4]) {
  %a: float32[4] = ABS(%x)
  %b: float32[4] = NEG(%a)
  %other: float32[4] = EXP(%o)
  %c: float32[4] = ABS(%b)
  %y: float32[4] = NEG(%c)
  return %y, %other
}
"""


def graph_of(text: str) -> tuple[Model, dict[str, Tensor], dict[str, Operator]]:
    """A model, its tensors by name, and its operators by the name of what they define."""
    model = parse(text)
    graph = model.subgraphs[0]
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    return model, tensors, {operator.output.name: operator for operator in graph.operators}


def fresh(name: str, shape: tuple[int, ...] = (4,)) -> Tensor:
    return Tensor(name, shape, DType.FLOAT32)


def op(model: Model, name: str, inputs: Iterable[Tensor], output: Tensor) -> Operator:
    return Operator(model.operator_code(name), tuple(inputs), [output])


class Double(Pass):
    """Test pass: NEG(ABS(x)) becomes SQRT(SQUARE(x)) of another sign or whatever `make` says."""

    name = "double"
    summary = "for tests"
    demand = Demand("relative", 0.5)

    def __init__(
        self, make: Callable[[Context, Operator, Operator], Rewrite | Refusal] | None = None
    ) -> None:
        self._make = make or self._replace

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        for last in context.subgraph.operators:
            first = None if last.inputs[0] is None else last.input(0).producer
            if last.name == "NEG" and first is not None and first.name == "ABS":
                yield Site(last, lambda first=first, last=last: self._make(context, first, last))  # type: ignore[misc]
            elif last.name == "EXP":
                yield SkippedSite(last, "not a NEG")

    @staticmethod
    def _replace(context: Context, first: Operator, last: Operator) -> Rewrite:
        middle = fresh(f"{last.output.name}/square")
        new = (
            op(context.model, "SQUARE", [first.input(0)], middle),
            op(context.model, "SQRT", [middle], last.output),
        )
        return Rewrite(context.subgraph, (first, last), new, last)


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
    model, reports = convert_text(CHAIN, Double(lambda *_: Refusal("no", None, None, "yes", "no")))
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


# The frame rule


def rewrite_of(change: Callable[[Model, dict[str, Tensor], dict[str, Operator]], Rewrite]) -> str | None:
    model, tensors, operators = graph_of(CHAIN)
    before = to_text(model)
    violation = frame_violation(change(model, tensors, operators))
    assert to_text(model) == before
    return violation


def replacing(
    model: Model, old: Iterable[Operator], *new: Operator, anchor: Operator | None = None
) -> Rewrite:
    chosen = tuple(old)
    return Rewrite(model.subgraphs[0], chosen, new, anchor or chosen[-1])


def test_a_rewrite_within_its_frame() -> None:
    assert rewrite_of(lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]))) is None


def test_a_rewrite_may_read_new_constants() -> None:
    def change(model: Model, t: dict[str, Tensor], o: dict[str, Operator]) -> Rewrite:
        two = Constants(model).make("two", np.array(2, np.float32), DType.FLOAT32)
        return replacing(model, [o["a"], o["b"]], op(model, "MUL", [t["x"], two], t["b"]))

    assert rewrite_of(change) is None


def test_a_rewrite_may_keep_old_operators() -> None:
    def change(model: Model, t: dict[str, Tensor], o: dict[str, Operator]) -> Rewrite:
        return replacing(model, [o["a"], o["b"]], o["a"], op(model, "NEG", [t["a"]], t["b"]))

    assert rewrite_of(change) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["o"]], t["b"])),
            "the new region reads 'o', which the old one did not",
            id="reads another input",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["c"]], t["b"])),
            "the new region reads 'c', which the old one did not",
            id="reads a later tensor",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["a"]], t["b"])),
            "the new region reads 'a', which the old one did not",
            id="reads what it removes",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], fresh("b"))),
            "the new region leaves 'b' undefined",
            id="defines another tensor of that name",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["c"], o["y"]]),
            "the new region leaves 'y' undefined",
            id="drops a graph output",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["b"])
            ),
            "the new region defines 'b' twice",
            id="defines twice",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["other"])
            ),
            "the new region defines 'other', which is not the old one's",
            id="defines somebody else's",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["o"])
            ),
            "the new region defines 'o', which is not the old one's",
            id="defines a graph input",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["a"], o["b"]], op(m, "ABS", [late := fresh("late")], t["b"]), op(m, "NEG", [t["x"]], late)
            ),
            "the new region reads 'late' before defining it",
            id="out of order",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["a"], o["b"]], op(m, "ABS", [loop := fresh("loop")], t["b"]), op(m, "NEG", [t["b"]], loop)
            ),
            "the new region reads 'loop' before defining it",
            id="cyclic",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), anchor=o["other"]),
            "the new region is to stand at 'EXP', which is not part of the old one",
            id="stands elsewhere",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), anchor=o["a"]),
            "the old region goes on behind 'a', where the new one is to stand",
            id="stands too early",
        ),
        pytest.param(
            lambda m, t, o: replacing(
                m, [o["b"], o["c"], o["y"]], op(m, "ABS", [t["a"]], t["y"]), o["other"]
            ),
            "the operator EXP that defines 'other' belongs to the graph already",
            id="takes in an operator of others",
        ),
        pytest.param(
            lambda m, t, o: replacing(m, [op(m, "ABS", [t["x"]], fresh("n")), o["b"]], op(m, "NEG", [t["x"]], t["b"])),
            "the operator ABS that defines 'n' is not in the graph any more",
            id="replaces what is gone",
        ),
    ],
)  # fmt: skip
def test_a_rewrite_outside_its_frame(
    change: Callable[[Model, dict[str, Tensor], dict[str, Operator]], Rewrite], reason: str
) -> None:
    assert rewrite_of(change) == reason


TWO_RESULTS = """\
subgraph main (%x: float32[4]) {
  %a: float32[4] = ABS(%x)
  %reader: float32[4] = EXP(%a)
  %b: float32[4] = NEG(%a)
  return %reader, %b
}
"""


def test_a_result_that_others_read_before_the_anchor_must_stay_where_it_is() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    new = (op(model, "SQUARE", [t["x"]], t["a"]), op(model, "NEG", [t["a"]], t["b"]))
    moved = replacing(model, [o["a"], o["b"]], *new)
    assert frame_violation(moved) == "the new region defines 'a' behind operators that may read it"
    kept = replacing(model, [o["a"], o["b"]], o["a"], new[1])
    assert frame_violation(kept) is None


def test_an_operator_that_stays_cannot_read_what_is_new() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    text = TWO_RESULTS.replace("return %reader, %b", "return %reader, %b, %a")
    model, t, o = graph_of(text)
    renewed = op(model, "SQUARE", [t["x"]], t["a"])
    listed_first = replacing(
        model, [o["a"], o["reader"], o["b"]], renewed, o["reader"], op(model, "NEG", [t["a"]], t["b"])
    )
    assert frame_violation(listed_first) == "the new region defines 'a' behind operators that may read it"


def test_a_constant_is_defined_by_nobody() -> None:
    def change(model: Model, t: dict[str, Tensor], o: dict[str, Operator]) -> Rewrite:
        two = Constants(model).make("two", np.array(2, np.float32), DType.FLOAT32)
        defining = op(model, "ABS", [t["x"]], two)
        return replacing(model, [o["a"], o["b"]], defining, op(model, "MUL", [t["x"], two], t["b"]))

    assert rewrite_of(change) == "the new region defines the constant 'two'"


# Changes outside a rewrite


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda c, f, s: setattr(s.output, "name", "renamed"), "the tensor 'renamed' has another name"),
        (lambda c, f, s: setattr(f.input(0), "quantization", Quantization.affine(1.0)), "the tensor 'x' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "shape", (2, 2)), "the tensor 'o' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "dtype", DType.INT32), "the tensor 'o' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "buffer", Buffer()), "the tensor 'o' has another"),
        (lambda c, f, s: c.subgraph.outputs.reverse(), "the graph's inputs, outputs or signatures are others"),
        (lambda c, f, s: c.subgraph.inputs.pop(), "the graph's inputs, outputs or signatures are others"),
        (lambda c, f, s: c.subgraph.set_input(f, 0, c.subgraph.inputs[1]), "ABS that defines 'a' has other inputs"),
        (lambda c, f, s: c.subgraph.remove(list(c.subgraph.operators)[2]), "EXP that defines 'other' is gone"),
        (lambda c, f, s: c.subgraph.append(op(c.model, "ABS", [f.input(0)], fresh("n"))), "that defines 'n' is new"),
        (lambda c, f, s: setattr(f, "options", new_table("AbsOptions")), "ABS that defines 'a' has other"),
    ],
    ids=[
        "name", "quantization", "shape", "type", "bytes", "outputs", "inputs", "operand", "removed", "added", "options",
    ],
)  # fmt: skip
@pytest.mark.parametrize("holds", [True, False])
def test_a_pass_that_changes_the_graph_by_the_way_is_stopped(
    harm: Callable[[Context, Operator, Operator], object], found: str, holds: bool
) -> None:
    """The proof cannot see it: it runs both regions as they then are."""

    def make(context: Context, first: Operator, last: Operator) -> Rewrite | Refusal:
        if first.output.name != "a":
            return Refusal("only the first")
        rewrite = Double._replace(context, first, last)
        harm(context, first, last)
        return rewrite

    with pytest.raises(BrokenFrameError, match=found) as caught:
        convert_text(CHAIN, Double(make), prover=Says(holds))
    assert "--skip double" in str(caught.value)


def test_options_that_old_and_new_operators_share_may_not_be_edited() -> None:
    text = CHAIN.replace("NEG(%c)", "SOFTMAX(%c) {beta: 1.0}")

    class Sharp(Pass):
        name = "sharp"
        summary = "for tests"

        def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
            for operator in context.subgraph.operators:
                if operator.name == "SOFTMAX":
                    yield Site(operator, lambda operator=operator: self._build(context, operator))  # type: ignore[misc]

        @staticmethod
        def _build(context: Context, operator: Operator) -> Rewrite:
            assert operator.options is not None
            operator.options.set("beta", 2.0)
            new = Operator(operator.code, operator.inputs, operator.outputs, operator.options)
            return Rewrite(context.subgraph, (operator,), (new,), operator)

    with pytest.raises(
        BrokenFrameError, match="SOFTMAX that defines 'y' has other inputs, outputs or options"
    ):
        convert_text(text, Sharp())


def test_signatures_may_not_be_edited() -> None:
    model = parse("signature run = #0 (x=%x, o=%o) -> (y=%y, other=%other)\n" + CHAIN)

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        context.model.signatures[0].outputs.popitem()
        return Double._replace(context, first, last)

    with pytest.raises(BrokenFrameError, match="signatures are others"):
        run(model, Double(make))


# Shapes


def test_derived_shapes_are_compared_with_the_recorded_ones() -> None:
    _, t, o = graph_of(CHAIN)
    assert shape_violation(o.values()) is None
    t["b"].shape = (2, 2)
    assert shape_violation([o["b"]]) == "NEG 'b': derived shape [4], recorded [2, 2]"
    assert shape_violation([o["a"]]) is None


def test_operands_that_do_not_fit_are_named() -> None:
    model, t, _ = graph_of(CHAIN)
    clash = op(model, "ADD", [t["x"], fresh("five", (5,))], fresh("sum"))
    violation = shape_violation([clash])
    assert violation is not None
    assert "ADD" in violation
    assert "4" in violation
    assert "5" in violation


# Committing


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
    assert remove_dead(graph, staying) == 0, "the other result reads it"
    graph.remove(o["reader"])
    graph.outputs = [t["b"]]
    assert remove_dead(graph, staying) == 1
    assert [operator.output.name for operator in graph.operators] == ["b"]


def test_removing_the_dead_reaches_what_only_they_needed() -> None:
    model, t, o = graph_of(CHAIN)
    graph = model.subgraphs[0]
    graph.outputs = [t["other"]]
    assert remove_dead(graph, [o["y"], o["y"]]) == 4
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
        graph.insert_before(next(graph.operators), op(model, "MUL", [x, c], fresh(f"m{i}")))
        for i, c in enumerate(constants)
    ]
    readers = [graph.append(op(model, "EXP", [m.output], fresh(f"r{i}"))) for i, m in enumerate(added)]
    first = next(operator for operator in graph.operators if operator in added[:2])
    assert share_equal(graph, added) == 1
    assert readers[0].input(0) is readers[1].input(0) is first.output
    assert readers[2].input(0) is added[2].output
    assert share_equal(graph, [*added, *readers][2:]) == 1, "what read equal results is equal in turn"


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
    assert share_equal(graph, made) == 0
    graph.outputs.append(twin.output)
    assert share_equal(graph, [*made, twin]) == 0, "a graph output must stay defined"
    graph.outputs.pop()
    assert share_equal(graph, [*made, twin]) == 1


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


def test_inputs_and_outputs_of_a_region_are_what_crosses_its_border() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    rewrite = replacing(model, [o["a"], o["b"]])
    assert rewrite.inputs() == (t["x"],)
    assert rewrite.outputs() == (t["a"], t["b"])
    assert replacing(model, [o["a"], o["reader"], o["b"]]).outputs() == (t["reader"], t["b"])
