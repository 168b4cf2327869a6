"""A pass is a transaction per site: what fails a check leaves the graph bit for bit as it was, the others go on."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import page_reasons
import pytest
from pass_runs import INLINING, Says, convert_text, refusal, run, statuses
from toy_passes import CHAIN, Double, fresh, graph_of, op, replacing

from edge_opt.conversion import convert
from edge_opt.ir import Constants, DType, Model, Operator, Quantization, Tensor, same_type, to_bytes
from edge_opt.ir.graph import Buffer
from edge_opt.ir.parse import parse
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.passes import Context, Pass, Rewrite, Site, Within, run_pass
from edge_opt.passes.merging import merge_equal
from edge_opt.schema.data import Data
from edge_opt.schema.table import TABLES, UNIONS, FieldSpec, Table, new_table
from edge_opt.targets import Target, load_target
from edge_opt.verification.audit import Audit, UnverifiedChangeError
from edge_opt.verification.frame import check_frame
from edge_opt.verification.rewrite import remove_dead

CONVERTER = Path(__file__).parent.parent / "converter"


def test_every_site_gets_a_verdict_in_execution_order() -> None:
    told = []
    model = parse(CHAIN)
    graph = model.subgraphs[0]
    context = Context(
        model, graph, "main", load_target("generic"), Constants(model), None, told.append
    )
    reports = run_pass(Double(), context)
    assert told == reports
    verdicts = [f"{r.pass_name} {r.signature} {r.index} {r.operator} {r.status}" for r in reports]
    assert verdicts == [
        f"double main {end}" for end in ("0 b converted", "1 other skipped", "2 y converted")
    ]
    made = [operator.output.name for operator in graph.operators]
    assert made == ["b/square", "b", "other", "y/square", "y"]


def test_a_failed_proof_rolls_back_that_site_alone() -> None:
    verifier = Says(False, True)
    model, reports = convert_text(CHAIN, Double(), verifier=verifier)
    assert statuses(reports) == ["reverted", "skipped", "converted"]
    assert reports[0].why == "different"
    assert [demand for _, demand in verifier.asked] == [Within(0.5)] * 2
    assert to_text(model) == CHAIN.replace(
        "  %c: float32[4] = ABS(%b)\n  %y: float32[4] = NEG(%c)\n",
        "  %y/square: float32[4] = SQUARE(%b)\n  %y: float32[4] = SQRT(%y/square)\n",
    )


def refuse(*_: object) -> Rewrite:
    raise RefusedError(Why.PATTERN, "no", None, None, "yes", "no")


def of_another_shape(context: Context, first: Operator, last: Operator) -> Rewrite:
    rewrite = Double.replaced(context, first, last)
    rewrite.new[0].output.shape = (5,)
    return rewrite


def crash(*_: object) -> Rewrite:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("make", "target", "status", "why"),
    [
        (refuse, {}, "skipped", "pattern"),
        (crash, {}, "reverted", "bug"),
        (of_another_shape, {}, "reverted", "invalid-model"),
        (None, {"refused_operators": ("SQUARE",)}, "reverted", "target"),
    ],
)
def test_what_cannot_be_rewritten_stays(
    make: Any, target: dict[str, Any], status: str, why: str
) -> None:
    """Not even an operator code or a constant stays behind."""
    verifier = Says(True)
    model, reports = convert_text(
        CHAIN, Double(make), target=Target("t", "", **target), verifier=verifier
    )
    assert statuses(reports) == [status, "skipped", status]
    assert (reports[0].why, reports[0].is_bug) == (why, make is crash)
    assert verifier.asked == []
    assert to_bytes(model) == to_bytes(parse(CHAIN))


class InTurn(Double):
    """Offers a refused rewrite, one of another shape, and the right one."""

    def sites(self, context: Context) -> Iterable[Site]:
        first, last = context.subgraph.operators[:2]
        shape = partial(of_another_shape, context, first, last)
        right = partial(self._make, context, first, last)
        yield Site(last, refuse, {"other": shape, "right": right})


def test_the_next_form_is_tried_where_one_fails_and_the_report_says_so() -> None:
    _, (site,) = convert_text(CHAIN, InTurn(), verifier=Says(True))
    assert (site.status, site.why) == ("converted", "")
    assert site.note == "in form 'right', because the target's form failed"
    assert [reason.split(" ")[0] for reason in site.to_dict()["failed"]] == ["no", "SQUARE"]


def test_where_all_forms_fail_the_first_reason_counts() -> None:
    model, (site,) = convert_text(CHAIN, InTurn(), verifier=Says(False))
    assert (site.status, site.why) == ("skipped", "pattern")
    assert site.reason == "no (expected yes, found no)"
    assert site.proof is None
    assert to_bytes(model) == to_bytes(parse(CHAIN))


def test_a_bug_in_one_form_is_told_and_no_other_tried() -> None:
    _, (site,) = convert_text(CHAIN, InTurn(crash), verifier=Says(True))
    assert (site.status, site.why) == ("reverted", "bug")


class Stumbles(Double):
    def sites(self, context: Context) -> Iterable[Site]:
        raise ValueError(context.signature)


@pytest.mark.parametrize(
    ("text", "told"),
    [(CHAIN, ["bug"]), ("subgraph main (%x: float32[2]) {\n  return %x\n}\n", [])],
    ids=["operators", "none"],
)
def test_a_search_that_fails_is_a_bug_at_the_last_operator(text: str, told: list[str]) -> None:
    _, reports = convert_text(text, Stumbles())
    assert [report.why for report in reports] == told


@pytest.mark.parametrize(("scale", "status"), [(0.25, "converted"), (0.26, "reverted")])
def test_a_new_scale_is_reverted_though_the_proof_holds(scale: float, status: str) -> None:
    """One code in millions may differ, which no run shows."""
    text = CHAIN.replace("%x: float32[4]", "%x: int8[4] q(0.25, 0)")
    for name in "abcy":
        text = text.replace(f"%{name}: float32[4]", f"%{name}: int8[4] q(0.25, 0)")

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        middle = Tensor("m", (4,), DType.INT8, quantization=Quantization.affine(scale))
        new = (
            op(context.model, "NEG", [first.input(0)], middle),
            op(context.model, "ABS", [middle], last.output),
        )
        return replacing(context.model, [first, last], *new)

    _, reports = convert_text(text, Double(make), verifier=Says(True))
    assert statuses(reports) == [status, "skipped", status]
    wanted = "" if status == "converted" else "quantization"
    assert {report.why for report in reports[::2]} == {wanted}


def test_a_place_of_open_lengths_is_never_settled() -> None:
    class Settled(Double):
        def sites(self, context: Context) -> Iterable[Site]:
            return [
                Site(
                    context.subgraph.operators[0],
                    reason=Reason(Why.NO_GAIN, ""),
                    is_settled=True,
                )
            ]

    _, (closed,) = convert_text(CHAIN, Settled())
    _, (opened,) = convert_text(CHAIN.replace("[4]", "[?]"), Settled())
    assert (closed.why, closed.status) == ("no-gain", "nothing to do")
    assert (opened.why, opened.status) == ("open-lengths", "skipped")


def test_reports_say_everything_as_plain_data() -> None:
    _, reports = convert_text(CHAIN, Double(), verifier=Says(True))
    report = reports[0].to_dict()
    proof = report.pop("proof")
    names = {
        "pass": "double",
        "signature": "main",
        "operator": "b",
        "index": 0,
        "status": "converted",
    }
    assert report.pop("failed") == []
    assert report == names | dict.fromkeys(("reason", "why", "note", "heads", "kv_heads"))
    given = {"check": "relative 0.5", "bitwise": True, "max_abs": 0.0, "note": None}
    assert proof | given == proof


def two(model: Model) -> Tensor:
    return Constants(model).make("two", np.array(2, np.float32), DType.FLOAT32)


def blockwise(model: Model) -> Tensor:
    weights = two(model)
    table = new_table("QuantizationParameters")
    table.set("details", new_table("BlockwiseQuantization", scales=3, block_size=32))
    weights.quantization = Quantization(table)
    return weights


def rewritten(
    model: Model, tensors: dict[str, Tensor], operators: dict[str, Operator], text: str
) -> Rewrite:
    """`a b: b=NEG(x)` replaces the operators that define a and b; other names are operators or new tensors."""
    made = (
        {"two": two(model), "blocks": blockwise(model)} if "two" in text or "blocks" in text else {}
    )
    known, (old, _, new) = {**tensors, **made}, text.partition(":")
    ops = [operators[name] for name in re.findall(r"keep (\w+)", new)]
    for output, name, inputs in re.findall(r"(\w+)=(\w+)\(([\w,]*)\)|$", new):
        read = [known.setdefault(one, fresh(one)) for one in inputs.split(",") if one]
        ops += [op(model, name, read, known.setdefault(output, fresh(output)))] if name else []
    replaced = [
        operators.get(name) or op(model, "ABS", [tensors["x"]], fresh(name)) for name in old.split()
    ]
    return replacing(model, replaced, *ops)


FRAMES = {
    "a b: b=NEG(x)": "",
    "a b: b=MUL(x,two)": "",
    "a b: keep a b=NEG(a)": "",
    "a b: b=MUL(x,blocks)": "quantization 'two'",
    "a b: b=NEG(o)": "frame 'o'",
    "a b: b=NEG(c)": "frame 'c'",
    "a b: b=NEG(a)": "frame 'a'",
    "a b: other_b=NEG(x)": "frame 'b'",
    "c y:": "frame 'y'",
    "a b: b=NEG(x) b=ABS(x)": "frame 'b'",
    "a b: b=NEG(x) other=ABS(x)": "frame 'other'",
    "a b: b=NEG(x) o=ABS(x)": "frame 'o'",
    "a b: two=ABS(x) b=MUL(x,two)": "frame 'two'",
    "a b: b=ABS(loop) loop=NEG(b)": "invalid-model ABS",
    "b c y: y=ABS(a) keep other": "frame 'other'",
    "n b: b=NEG(x)": "frame 'n'",
}
"""Rewrites, and the kind of a refusal with the tensor or operator that it names."""


@pytest.mark.parametrize(("text", "refused"), FRAMES.items())
def test_the_frame_of_a_rewrite(text: str, refused: str) -> None:
    model, tensors, operators = graph_of(CHAIN)
    before = to_text(model)
    reason = refusal(check_frame, rewritten(model, tensors, operators, text))
    why, _, named = refused.partition(" ")
    assert (reason.why if reason else "") == why
    assert named in str(reason)
    assert to_text(model) == before


@pytest.mark.parametrize("read", ["%other", "%other, %c"])
def test_a_region_whose_new_results_nobody_reads_cannot_be_verified(read: str) -> None:
    model, t, o = graph_of(CHAIN.replace("return %y, %other", f"return {read}"))
    unread = replacing(model, [o["c"], o["y"]], o["c"], op(model, "ABS", [t["b"]], t["y"]))
    assert refusal(check_frame, unread).why == "frame"


def test_removing_the_dead_reaches_what_only_they_needed() -> None:
    model, t, o = graph_of(CHAIN)
    graph = model.subgraphs[0]
    graph.outputs = [t["other"]]
    remove_dead(graph, [o["y"], o["y"]])
    assert [operator.output.name for operator in graph.operators] == ["other"]


def merged(model: Model, added: list[Operator]) -> int:
    """How many of the added operators go because others are equal."""
    (graph,), before = model.subgraphs, len(model.subgraphs[0])
    merge_equal(graph, added)
    return before - len(graph)


def test_equal_operators_that_rewrites_added_are_merged() -> None:
    model = parse(CHAIN)
    graph = model.subgraphs[0]
    numbers = [np.float32(2 if i < 2 else 3).tobytes() for i in range(3)]
    constants = [Tensor("c", (), DType.FLOAT32, buffer=Buffer(Data(number))) for number in numbers]
    added = [graph.append(op(model, "MUL", [graph.inputs[0], c], fresh("m"))) for c in constants]
    readers = [graph.append(op(model, "EXP", [m.output], fresh("r"))) for m in added]
    assert merged(model, added) == 1
    assert readers[0].input(0) is readers[1].input(0) is added[0].output
    assert readers[2].input(0) is added[2].output
    assert merged(model, [*added[::2], *readers]) == 1, "what read equal results is equal in turn"


def test_operators_that_differ_in_options_or_result_or_are_not_added_are_not_merged() -> None:
    model, t, _ = graph_of(CHAIN)
    graph = model.subgraphs[0]

    def softmax(output: Tensor, beta: float = 1.0) -> Operator:
        return graph.append(model.new_operator("SOFTMAX", [t["x"]], [output], beta=beta))

    scales = Quantization.affine(0.25, -128), Quantization.affine(0.5, -128)
    codes = [Tensor("i", (4,), DType.INT8, quantization=scale) for scale in scales]
    made = [softmax(fresh("p")), softmax(fresh("q"), 2.0), *map(softmax, codes)]
    twin = softmax(fresh("twin"))
    assert merged(model, made) == 0
    graph.outputs.append(twin.output)
    assert merged(model, [*made, twin]) == 0, "a graph output must stay defined"
    graph.outputs.pop()
    assert merged(model, [*made, twin]) == 1


def sparse(*indices: int) -> Table:
    """The fields of a weight `[4, 4]` with one number in each row, at these columns."""
    rows = new_table("DimensionMetadata", dense_size=4)
    positions = (
        new_table("Uint8Vector", values=values) for values in ([0, 1, 2, 3, 4], list(indices))
    )
    parts = dict(zip(("array_segments", "array_indices"), positions, strict=True))
    places = new_table(
        "SparsityParameters", dim_metadata=[rows, new_table("DimensionMetadata", format=1, **parts)]
    )
    return new_table("Tensor", sparsity=places)


def test_products_with_sparse_weights_are_merged_only_if_the_numbers_have_equal_places() -> None:
    model = parse("subgraph main (%x: float32[2,4]) { %y: float32[2,4] = ABS(%x) return %y }")
    graph, numbers = model.subgraphs[0], Buffer(Data(np.arange(4, dtype=np.float32).tobytes()))
    made = []
    for table in (sparse(0, 1, 2, 3), sparse(1, 0, 2, 3), sparse(0, 1, 2, 3)):
        weight = Tensor("w", (4, 4), DType.FLOAT32, buffer=numbers, table=table)
        result = Tensor("p", (2, 4), DType.FLOAT32)
        made.append(
            graph.append(
                model.new_operator("FULLY_CONNECTED", [graph.inputs[0], weight, None], [result])
            )
        )
    assert merged(model, made) == 1
    assert [operator.subgraph is graph for operator in made] == [True, True, False]


def test_operators_are_merged_only_if_intermediates_and_all_fields_of_their_tables_agree() -> None:
    model, t, _ = graph_of(CHAIN)
    graph, code = model.subgraphs[0], model.operator_code("SOFTMAX")
    made = []
    for scale, changes in ((0.5, [False]), (0.25, [False]), (0.5, [True]), (0.5, [False])):
        between = Tensor("between", (4,), DType.INT8, quantization=Quantization.affine(scale))
        table = new_table("Operator", mutating_variable_inputs=changes)
        made.append(graph.append(Operator(code, [t["x"]], [fresh("p")], None, table, [between])))
    assert merged(model, made) == 1
    assert [operator.subgraph is graph for operator in made] == [True, True, True, False]


# What changes no number, and what the file repeats elsewhere.
_MEANINGLESS = {
    "Tensor": {
        "name",
        "buffer",
        "shape",
        "type",
        "quantization",
        "is_variable",
        "shape_signature",
        "has_rank",
    },
    "QuantizationParameters": {"min", "max", "details_type"},
}
FIELDS = [
    pytest.param(kind, field, id=f"{kind}.{field.name}")
    for kind, meaningless in _MEANINGLESS.items()
    for field in TABLES[kind].fields
    if field.name not in meaningless
]


def filled(field: FieldSpec) -> Any:
    """A value that is no default."""
    if field.kind in ("scalar", "scalars"):
        return 1 if field.kind == "scalar" else [3]
    element = next(iter(UNIONS[field.element].values())) if field.kind == "union" else field.element
    inner = TABLES[element].fields[0]
    table = new_table(element, **{inner.name: filled(inner)})
    return [table] if field.kind == "tables" else table


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_equal_bytes_are_another_constant_if_any_other_field_differs(
    kind: str, field: FieldSpec
) -> None:
    """Fields of newer schemas, too."""
    scales = new_table("QuantizationParameters", scale=[0.5, 0.25], zero_point=[0, 0])
    tensors = []
    for own in ({}, {field.name: filled(field)}, {field.name: filled(field)}):
        table = new_table("Tensor", **(own if kind == "Tensor" else {}))
        parameters = scales.copy()
        for name, value in own.items() if kind != "Tensor" else ():
            parameters.set(name, value)
        tensors.append(
            Tensor("c", (2, 2), DType.INT8, quantization=Quantization(parameters), table=table)
        )
    assert not same_type(*tensors[:2])
    assert same_type(*tensors[1:])


@pytest.mark.parametrize("name", ["min", "max"])
def test_calibrated_ranges_and_names_do_not_tell_constants_apart(name: str) -> None:
    table = new_table("QuantizationParameters", **{name: [1.0]})
    plain = Tensor("a", (2,), DType.FLOAT32, table=new_table("Tensor", name="a", has_rank=True))
    assert same_type(plain, Tensor("b", (2,), DType.FLOAT32, quantization=Quantization(table)))


def test_what_reads_state_draws_numbers_or_calls_a_subgraph_equals_nothing() -> None:
    """Between two equal reads there may be a write."""
    model, t, _ = graph_of(CHAIN)
    graph = model.subgraphs[0]
    handle = Tensor("handle", (), DType.RESOURCE)
    state = Tensor("state", (4,), DType.FLOAT32, is_variable=True)
    for name, inputs, options in (
        ("READ_VARIABLE", [handle], None),
        ("RANDOM_UNIFORM", [t["x"]], None),
        ("CALL", [t["x"]], new_table("CallOptions", subgraph=0)),
        ("CUSTOM", [t["x"]], None),
        ("ADD", [t["x"], state], None),
    ):
        code = model.operator_code(name)
        twins = [
            graph.append(Operator(code, inputs, [fresh(f"{name}{i}")], options)) for i in range(2)
        ]
        assert merged(model, twins) == 0, name


def test_dead_operators_that_change_state_stay() -> None:
    model, t, _ = graph_of(CHAIN)
    handle = Tensor("handle", (), DType.RESOURCE)
    graph, body = model.subgraphs[0], parse(CHAIN).subgraphs[0]
    model.subgraphs.append(body)
    options = new_table("CallOptions", subgraph=1)
    call = graph.append(Operator(model.operator_code("CALL"), [t["x"]], [fresh("called")], options))
    assign = model.operator_code("ASSIGN_VARIABLE")
    direct = graph.append(Operator(assign, [handle, t["x"]], []))
    inside = body.append(Operator(assign, [handle, body.inputs[0]], []))
    remove_dead(graph, [direct, call], model.subgraphs)
    body.remove(inside)
    remove_dead(graph, [call])
    assert {direct, call} <= {*graph.operators}, "nothing is known of what it calls"
    remove_dead(graph, [call], model.subgraphs)
    assert call not in graph.operators, "now its body only computes"


HARMS: dict[str, tuple[Callable[[Context, Operator], object], str]] = {
    "quantization": (lambda c, f: setattr(f.input(0), "quantization", Quantization.affine(1.0)), "'a'"),
    "shape": (lambda c, f: setattr(c.subgraph.tensors[1], "shape", (2, 2)), "'other'"),
    "type": (lambda c, f: setattr(c.subgraph.tensors[1], "dtype", DType.INT32), "'other'"),
    "outputs": (lambda c, f: c.subgraph.outputs.reverse(), "outputs"),
    "inputs": (lambda c, f: c.subgraph.inputs.pop(), "inputs"),
    "signature": (lambda c, f: c.model.signatures[0].outputs.popitem(), "signatures"),
    "operand": (lambda c, f: c.subgraph.set_input(f, 0, c.subgraph.inputs[1]), "'a'"),
    "added": (lambda c, f: c.subgraph.append(op(c.model, "ABS", [f.input(0)], fresh("n"))), "'n'"),
    "an effect": (lambda c, f: c.subgraph.remove(c.subgraph.operators[-1]), "side effects"),
    "options": (lambda c, f: c.subgraph.operators[2].options.set("beta", 2.0), "'other'"),  # type: ignore[union-attr]
    "the numbers of a scale": (
        lambda c, f: setattr(c.subgraph.tensors[1].quantization, "scale", np.array([0.25], "f4")), "'other'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "named"), HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("holds", [True, False])
def test_a_pass_that_changes_more_is_stopped(
    harm: Callable[[Context, Operator], object], named: str, holds: bool
) -> None:
    """The proof cannot see it: it runs both regions as they then are."""

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        if first.output.name != "a":
            raise RefusedError(Why.PATTERN, "only the first")
        rewrite = Double.replaced(context, first, last)
        harm(context, first)
        return rewrite

    text = CHAIN.replace("%o: float32[4]", "%o: float32[4] q(0.5, 0)")
    text = text.replace("EXP(%o)", "SOFTMAX(%o) {beta: 1.0}")
    text = text.replace("  return", "  %e: float32[4] = CUSTOM 'print' (%o)\n  return")
    model = parse("signature run = #0 (x=%x, o=%o) -> (y=%y, other=%other)\n" + text)
    with pytest.raises(UnverifiedChangeError, match=named):
        run(model, Double(make), verifier=Says(holds))


def test_options_that_are_changed_after_the_proof_are_noticed() -> None:
    """Those of a new operator, and those that only the kernel of an old one understands."""

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        new = context.model.new_operator("SOFTMAX", [first.input(0)], last.outputs, beta=1.0)
        return replacing(context.model, [first, last], new)

    model = parse(CHAIN.replace("EXP(%o)", "CUSTOM 'mine' (%o)"))
    graph = model.subgraphs[0]
    custom = next(operator for operator in graph if operator.name == "CUSTOM")
    custom.table = new_table("Operator", custom_options=np.array([1], np.uint8))
    audit = Audit(model)
    facts = load_target("generic"), Constants(model), Says(True)
    context = Context(model, graph, "main", *facts, audit=audit)
    assert statuses(run_pass(Double(make), context)) == ["converted", "converted"]
    softmax = next(operator for operator in graph if operator.name == "SOFTMAX")
    other = np.array([2], np.uint8)
    for table, name, value, named in (
        (softmax.options, "beta", 2.0, "'b'"),
        (custom.table, "custom_options", other, "'other'"),
    ):
        audit.check()
        before = table.get(name)
        table.set(name, value)
        with pytest.raises(UnverifiedChangeError, match=named):
            audit.check()
        table.set(name, before)


CALLS = """\
subgraph main (%x: float32[4]) {
  %c: float32[4] = STABLEHLO_COMPOSITE(%x) {name: 'mine', decomposition_subgraph_index: 1}
  %y: float32[4] = NEG(%c)
  %z: float32[4] = MAXIMUM(%c, %x)
  return %y, %z
}
subgraph body (%i: float32[4]) {
  %s: float32[4] = SQUARE(%i)
  %o: float32[4] = SQRT(%s)
  return %o
}
"""


def _another_result(context: Context) -> None:
    (body,) = context.model.subgraphs[1:]
    body.outputs[:] = [body.operators[0].output]


class Spoils(Pass):
    """Test pass: has no site, but changes something while it looks for one."""

    name = "spoils"
    summary = "for tests"

    def __init__(self, harm: Callable[[Context], object]) -> None:
        self._harm = harm

    def sites(self, context: Context) -> Iterable[Site]:
        self._harm(context)
        return ()


@pytest.mark.parametrize(
    "harm",
    [
        lambda c: setattr(c.model.subgraphs[1].operators[0], "code", c.model.operator_code("EXP")),
        _another_result,
    ],
    ids=["an operator", "a result"],
)
@pytest.mark.parametrize("later", [(), ("inline_composites",)], ids=["stays", "is opened later"])
def test_a_changed_body_is_noticed_though_a_later_pass_opens_it(
    harm: Callable[[Context], object], later: tuple[str, ...]
) -> None:
    """The verification compares with the body as it then is, and no operator of it is left in the end."""
    with pytest.raises(UnverifiedChangeError):
        convert(parse(CALLS), passes=[Spoils(harm), *later], target=INLINING, verify="none")


TRIPLE = """\
subgraph main (%x: float32[4]) {
  %a: float32[4] = ABS(%x)
  %b: float32[4] = NEG(%a)
  %c: float32[4] = ABS(%x)
  %d: float32[4] = NEG(%c)
  %e: float32[4] = ABS(%x)
  %f: float32[4] = NEG(%e)
  %sum: float32[4] = ADD(%b, %d)
  return %sum, %f
}
"""


def test_an_operator_that_changed_before_its_twin_took_its_place_is_noticed() -> None:
    """It is gone in the end."""
    betas = {"b": 1.0, "d": 2.0}

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        name = last.output.name
        if name == "f":
            made = next(one for one in context.subgraph if one.outputs[0].name == "d")
            made.options = new_table("SoftmaxOptions", beta=betas["b"])
            raise RefusedError(Why.PATTERN, "not this one")
        new = context.model.new_operator(
            "SOFTMAX", [first.input(0)], last.outputs, beta=betas[name]
        )
        return replacing(context.model, [first, last], new)

    with pytest.raises(UnverifiedChangeError, match="'d'"):
        run(parse(TRIPLE), Double(make), verifier=Says(True))


def test_an_operator_that_died_with_its_body_does_not_disturb_the_audit() -> None:
    """Its index is then that of another subgraph, or of none."""

    class Apart(Pass):
        name = "apart"
        summary = "for tests"

        def sites(self, context: Context) -> Iterable[Site]:
            call, negative, greater = context.subgraph.operators
            (x,) = context.subgraph.inputs
            new = [
                op(context.model, name, [x], old.output)
                for name, old in (("ABS", negative), ("EXP", greater))
            ]
            yield Site(negative, lambda: context.rewrite([call, negative], [new[0]]))
            yield Site(greater, lambda: context.rewrite([greater], [new[1]]))

    model = parse(CALLS)
    result = convert(model, passes=[Apart()], verify="none")
    assert statuses(result.sites) == ["converted", "converted"]
    assert len(model.subgraphs) == 1


def test_a_site_with_a_reason_is_skipped_whatever_it_could_build() -> None:
    class Never(Double):
        def sites(self, context: Context) -> Iterable[Site]:
            for site in super().sites(context):
                yield replace(site, reason=Reason(Why.PATTERN, "not this one"))

    assert {*statuses(run(parse(CHAIN), Never()))} == {"skipped"}


def test_every_kind_of_reason_has_a_meaning_and_is_given_somewhere() -> None:
    kinds = [kind.name for kind in Why]
    assert list(page_reasons.meanings()) == kinds
    sources = [path for path in CONVERTER.rglob("*.py") if path.name != "refusal.py"]
    given = {name for path in sources for name in re.findall(r"\bWhy\.([A-Z_]+)", path.read_text())}
    assert given == set(kinds)


def test_a_call_on_state_is_missed_although_one_of_the_same_body_is_pure() -> None:
    model, tensors, _ = graph_of(CHAIN)
    graph = model.subgraphs[0]
    model.subgraphs.append(parse(CHAIN).subgraphs[0])
    state = Tensor("state", (4,), DType.FLOAT32, is_variable=True)
    code = model.operator_code("CALL")
    options = new_table("CallOptions", subgraph=1)
    graph.append(Operator(code, [tensors["x"], tensors["o"]], [fresh("a"), fresh("b")], options))
    changing = Operator(code, [tensors["x"], state], [fresh("c"), fresh("d")], options)
    graph.append(changing)
    audit = Audit(model)
    graph.remove(changing)
    with pytest.raises(UnverifiedChangeError, match="side effects"):
        audit.check()
