"""A softmax masked by SELECT gets one additive mask: where that is exact, where it is refused, what is measured."""

from pathlib import Path

import numpy as np
import pytest
from pass_runs import Says, convert_text, count, names, reread, rewrites_of, run, statuses
from text_parser import parse

from edge_opt.ir import DType, Model, Quantization, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.passes import MaskedRows, SiteReport, mask_to_add
from edge_opt.passes.mask_to_add import ABSORBING
from edge_opt.proof.regions import RegionProver
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.pair import Outcome, OutputProof
from edge_opt.runtime.runner import Worker
from edge_opt.targets import Target

PAGE = (Path(__file__).parent.parent / "testdata" / "reference_select.txt").read_text()

T, N, S = 6, 2, 10


def block(
    *mask: str,
    given: str = f"%mask: float32[1,{T},{S}]",
    select: str = "SELECT_V2(%open, %x, float32(-1e+09))",
    dtype: str = "float32",
    path: str = "",
    last: str = "%masked",
    out: str = "%p",
) -> str:
    """Logits `%x`, the operators that make `%open`, the SELECT, what lies behind it, the SOFTMAX."""
    made = "".join(f"  {line}\n" for line in mask)
    probabilities = {
        "float32": "float32[]",
        "int16": "int16[] q(3.0517578e-05, 0)",
        "int8": "int8[] q(0.00390625, -128)",
    }
    kind = dtype.split("[", maxsplit=1)[0]
    shape = f"[1,{N},{T},{S}]"
    result = probabilities[kind].replace("[]", shape)
    typed = dtype.replace("[]", shape) if "[]" in dtype else f"{dtype}{shape}"
    return f"""\
subgraph main ({given}, %x: {typed}) {{
{made}  %masked: {typed} = {select}
{path}  %p: {result} = SOFTMAX({last}) {{beta: 1.0}}
  return {out}
}}
"""


BOOL = f"%open: bool[1,1,{T},{S}]"
NEW_SHAPE = f"{{new_shape: [1, 1, {T}, {S}]}}"
RESHAPED = f"%mask4: float32[1,1,{T},{S}] = RESHAPE(%mask, int32{{1, 1, {T}, {S}}}) {NEW_SHAPE}"
OPEN = f"%open: bool[1,1,{T},{S}] = NOT_EQUAL(%mask4, float32(0.0))"


def converted(
    text: str,
    prover: RegionProver | Says | None = None,
    target: Target | None = None,
    *,
    status: str = "converted",
) -> tuple[Model, SiteReport]:
    """The model, and the report of its only site; what does not end as converted leaves it as it was."""
    model, (report,) = convert_text(text, "mask_to_add", prover=prover, target=target)
    assert str(report.status) == status, report.reason
    if status == "converted":
        assert report.reason == ""
    else:
        assert to_text(model) == to_text(parse(text))
    return model, report


def proved(text: str, prover: RegionProver) -> Model:
    """The converted model, after its proof: the same bits, also in rows that are masked everywhere."""
    model, report = converted(text, prover)
    assert report.proof is not None
    assert (str(report.proof.demand), report.proof.bitwise) == ("bitwise", True)
    assert report.proof.fully_masked_rows_max_abs == 0.0
    assert not {"SELECT", "SELECT_V2", "NOT_EQUAL"} & set(names(model))
    return model


# Golden


def test_reshape_not_equal_select_becomes_equal_cast_mul_and_add(prover: RegionProver) -> None:
    assert (
        to_text(proved(block(RESHAPED, OPEN), prover))
        == f"""\
subgraph main (%mask: float32[1,{T},{S}], %x: float32[1,{N},{T},{S}]) {{
  %open/masked: bool[1,{T},{S}] = EQUAL(%mask, float32(0.0))
  %open/number: float32[1,{T},{S}] = CAST(%open/masked) {{in_data_type: 6}}
  %open/additive: float32[1,{T},{S}] = MUL(%open/number, float32(-1.2676506e+30))
  %open/additive/reshaped: float32[1,1,{T},{S}] = RESHAPE(%open/additive, int32{{1, 1, {T}, {S}}}) {NEW_SHAPE}
  %masked/masked: float32[1,{N},{T},{S}] = ADD(%x, %open/additive/reshaped)
  %p: float32[1,{N},{T},{S}] = SOFTMAX(%masked/masked) {{beta: 1.0}}
  return %p
}}
"""
    )


def test_on_the_pages_graph_one_mask_feeds_every_block(prover: RegionProver) -> None:
    model, reports = convert_text(PAGE, "mask_to_add", prover=prover)
    assert statuses(reports) == ["converted"] * 3
    found = names(model)
    assert {name: found.count(name) for name in ("SELECT_V2", "NOT_EQUAL", "EQUAL", "CAST", "ADD")} == {
        "SELECT_V2": 0, "NOT_EQUAL": 0, "EQUAL": 1, "CAST": 1, "ADD": 3,
    }  # fmt: skip
    masks = {id(op.input(1)) for op in model.subgraphs[0].operators if op.name == "ADD"}
    assert len(masks) == 1


def test_on_the_pages_graph_heads_then_share_that_mask_at_rank_3(prover: RegionProver) -> None:
    model, reports = convert_text(PAGE, "mask_to_add", "mha_to_sha", prover=prover)
    assert statuses(reports) == ["converted"] * 6
    operators = list(model.subgraphs[0].operators)
    adds = [op for op in operators if op.name == "ADD"]
    assert len(adds) == 12
    (mask,) = {op.input(1) for op in adds}
    assert mask.producer is not None
    assert [(op.name, op.output.shape) for op in operators[:3]] == [
        ("EQUAL", (1, 16, 64)), ("CAST", (1, 16, 64)), ("MUL", (1, 16, 64)),
    ]  # fmt: skip
    assert mask.producer is operators[2]
    assert {len(op.input(0).shape) for op in operators if op.name == "SOFTMAX"} == {3}
    assert (names(model).count("UNPACK"), names(model).count("PACK")) == (9, 3)
    assert not {"RESHAPE", "SELECT_V2", "NOT_EQUAL"} & set(names(model))


def test_a_converted_model_stays_as_it_is() -> None:
    model, _ = convert_text(PAGE, "mask_to_add")
    text = to_text(model)
    again, reports = convert_text(text, "mask_to_add", "quantized_mask")
    assert reports == []
    assert to_text(again) == text


def test_the_file_reads_back_and_lists_only_what_is_used() -> None:
    model, _ = convert_text(PAGE, "mask_to_add")
    again = reread(model)
    assert to_text(again) == to_text(model)
    assert {code.name for code in again.operator_codes} >= {"EQUAL", "CAST", "ADD"}


# What makes the condition


CONDITIONS = {
    "not_equal": (RESHAPED, OPEN),
    "not_equal, constant first": (RESHAPED, OPEN.replace("%mask4, float32(0.0)", "float32(0.0), %mask4")),
    "not_equal without reshape": (f"%open: bool[1,{T},{S}] = NOT_EQUAL(%mask, float32(0.0))",),
    "constant of many axes": (RESHAPED, OPEN.replace("float32(0.0)", "float32[1,1,1,1]{0.0}")),
    "equal to one": (RESHAPED, f"%open: bool[1,1,{T},{S}] = EQUAL(%mask4, float32(1.0))"),
    "not of equal": (
        RESHAPED,
        f"%closed: bool[1,1,{T},{S}] = EQUAL(%mask4, float32(0.0))",
        f"%open: bool[1,1,{T},{S}] = LOGICAL_NOT(%closed)",
    ),
    "greater": (RESHAPED, f"%open: bool[1,1,{T},{S}] = GREATER(%mask4, float32(0.5))"),
    "and": (
        RESHAPED,
        f"%one: bool[1,1,{T},{S}] = NOT_EQUAL(%mask4, float32(0.0))",
        f"%other: bool[1,1,{T},{S}] = GREATER(%mask4, float32(-1.0))",
        f"%open: bool[1,1,{T},{S}] = LOGICAL_AND(%one, %other)",
    ),
}
EMITTED = {
    "not_equal": "EQUAL",
    "not_equal, constant first": "EQUAL",
    "not_equal without reshape": "EQUAL",
    "constant of many axes": "EQUAL",
    "equal to one": "NOT_EQUAL",
    "not of equal": None,
    "greater": "LOGICAL_NOT",
    "and": "LOGICAL_NOT",
}


@pytest.mark.parametrize("polarity", ["open", "closed"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_of_either_polarity(condition: str, polarity: str, prover: RegionProver) -> None:
    select = "SELECT_V2(%open, %x, float32(-1e+09))"
    made = list(CONDITIONS[condition])
    if polarity == "closed":
        select = "SELECT_V2(%open, float32(-1e+09), %x)"
        if "NOT_EQUAL" in made[-1]:
            made[-1] = made[-1].replace("NOT_EQUAL", "EQUAL")
        elif "EQUAL" in made[-1]:
            made[-1] = made[-1].replace("EQUAL", "NOT_EQUAL")
    text = block(*made, select=select)
    model, _ = converted(text, prover)
    assert not {"SELECT", "SELECT_V2"} & set(names(model))
    if polarity == "open" and EMITTED[condition]:
        assert EMITTED[condition] in names(model)
    assert count(model, "ADD") == count(model, "MUL") == count(model, "CAST") == 1


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize(("rows", "form"), [(1, "[{b},{s}]"), (4, "[{b},{t},{s}]")])
def test_rows_of_a_padding_mask_are_the_batch(batch: int, rows: int, form: str, prover: RegionProver) -> None:
    """`[B, S]` with B a divisor of T, or `[B, T, S]`: which rows of the result a closed row of the mask closes."""
    given = form.format(b=batch, t=4, s=S)
    model, report = converted(
        f"""
        subgraph main (%mask: float32{given}, %x: float32[{batch},{N},4,{S}]) {{
          %wide: float32[{batch},1,{rows},{S}] = RESHAPE(%mask, int32{{{batch}, 1, {rows}, {S}}})
          %open: bool[{batch},1,{rows},{S}] = NOT_EQUAL(%wide, float32(0.0))
          %masked: float32[{batch},{N},4,{S}] = SELECT_V2(%open, %x, float32(-1e+09))
          %p: float32[{batch},{N},4,{S}] = SOFTMAX(%masked) {{beta: 1.0}}
          return %p
        }}
        """,
        prover,
    )
    assert report.proof is not None
    assert report.proof.bitwise
    # Of every mask a row was closed, and its rows were measured apart.
    assert report.proof.fully_masked_rows_max_abs == 0.0
    assert "SELECT_V2" not in names(model)


@pytest.mark.parametrize("shape", [f"[1,1,{T},{S}]", f"[1,{N},{T},{S}]", f"[{T},{S}]", f"[1,1,1,{S}]"])
@pytest.mark.parametrize("polarity", ["open", "closed"])
def test_a_boolean_graph_input_of_any_shape(shape: str, polarity: str, prover: RegionProver) -> None:
    operands = ("%x", "float32(-1e+09)") if polarity == "open" else ("float32(-1e+09)", "%x")
    text = block(given=f"%open: bool{shape}", select=f"SELECT_V2(%open, {operands[0]}, {operands[1]})")
    model, _ = converted(text, prover)
    assert names(model) == (["LOGICAL_NOT"] if polarity == "open" else []) + ["CAST", "MUL", "ADD", "SOFTMAX"]


COMPARED = f"%open: bool[1,1,{T},{S}] = NOT_EQUAL(%mask, {{}}({{}}))"
LEGAL = {
    "a negated input": block(f"{BOOL} = LOGICAL_NOT(%closed)", given=BOOL.replace("open", "closed")),
    "int32": block(COMPARED.format("int32", 0), given=f"%mask: int32[1,1,{T},{S}]"),
    "int64": block(COMPARED.format("int64", 0), given=f"%mask: int64[1,1,{T},{S}]"),
    "float32": block(COMPARED.format("float32", "0.0"), given=f"%mask: float32[1,1,{T},{S}]"),
    "SELECT of version 1, with a condition of the result's shape": block(
        given=f"%open: bool[1,{N},{T},{S}]",
        select=f"SELECT(%open, %x, float32[1,{N},{T},{S}]{{splat -1e+09}})",
    ),
}


@pytest.mark.parametrize("case", LEGAL)
def test_masks_of_any_type_and_either_select(case: str, prover: RegionProver) -> None:
    model = proved(LEGAL[case], prover)
    if case == "a negated input":
        assert names(model) == ["CAST", "MUL", "ADD", "SOFTMAX"], "it is used as it is"


def test_a_comparison_of_two_masks_is_taken_as_it_is(prover: RegionProver) -> None:
    mask = f"%open: bool[1,1,{T},{S}] = EQUAL(%ids, %others)"
    model, _ = converted(block(mask, given=f"%ids: int32[1,1,{T},1], %others: int32[1,1,1,{S}]"), prover)
    assert names(model) == ["EQUAL", "LOGICAL_NOT", "CAST", "MUL", "ADD", "SOFTMAX"]


def test_what_others_read_of_the_condition_stays() -> None:
    text = block(RESHAPED, OPEN, out="%p, %open")
    model, _ = converted(text)
    assert names(model) == ["RESHAPE", "NOT_EQUAL", "EQUAL", "CAST", "MUL", "RESHAPE", "ADD", "SOFTMAX"]


@pytest.mark.parametrize(
    ("shape", "operator"),
    [
        (
            f"[1,1,{N * T},{S}]",
            f"RESHAPE(%masked, int32{{1, 1, {N * T}, {S}}}) {{new_shape: [1, 1, {N * T}, {S}]}}",
        ),
        (f"[{N},{T},{S}]", "SQUEEZE(%masked) {squeeze_dims: [0]}"),
    ],
)
def test_rearrangements_between_select_and_softmax_are_kept(
    shape: str, operator: str, prover: RegionProver
) -> None:
    text = block(RESHAPED, OPEN, path=f"  %r: float32{shape} = {operator}\n", last="%r")
    model = proved(text.replace(f"%p: float32[1,{N},{T},{S}]", f"%p: float32{shape}"), prover)
    assert names(model)[-3:] == ["ADD", operator.partition("(")[0], "SOFTMAX"]


# The constant


HALF = Target("npu", "", mask_constant=-65472.0)


def added(model: Model) -> float:
    """What the mask is where it hides."""
    return float(next(op for op in model.subgraphs[0].operators if op.name == "MUL").input(1).array())


@pytest.mark.parametrize("constant", ["-1e+09", "-3.4028235e+38", "-65504.0", "-10000.0", "-1128.0"])
@pytest.mark.parametrize("full", [False, True], ids=["scalar", "full"])
def test_every_logit_vanishes_in_what_is_added(constant: str, full: bool, prover: RegionProver) -> None:
    shape = f"[1,{N},{T},{S}]"
    tensor = f"float32{shape}{{splat {constant}}}" if full else f"float32({constant})"
    model = proved(block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, {tensor})"), prover)
    assert added(model) == ABSORBING
    logits = np.array([-3.7e22, -1e9, -1.0, 0.0, 1000.0, 3.7e22], np.float32)
    assert (logits + np.float32(ABSORBING) == np.float32(ABSORBING)).all()


OTHER_MASKS = {
    "select": f"%other: float32[1,{N},{T},{S}] = SELECT_V2(%mask, %x, float32(-1e+09))",
    "add": f"""%number: float32[1,1,{T},{S}] = CAST(%mask)
  %times: float32[1,1,{T},{S}] = MUL(%number, float32(-1e+09))
  %other: float32[1,{N},{T},{S}] = ADD(%x, %times)""",
}


@pytest.mark.parametrize("other", OTHER_MASKS)
def test_rows_that_two_masks_close_together_are_told_of(other: str, prover: RegionProver) -> None:
    """Each mask leaves half of every row open. No proof sees it, for the other mask is outside of the region."""
    given = f"{BOOL}, %mask: bool[1,1,{T},{S}]"
    text = block(OTHER_MASKS[other], given=given, select="SELECT_V2(%open, %other, float32(-1e+09))")
    model, report = converted(text, prover)
    assert report.note.startswith("rows that only this mask and another one (-1e+09) close together change; ")
    assert report.proof is not None
    assert str(report.proof.demand) == "relative 1e-06"
    left = np.broadcast_to(np.arange(S) < S // 2, (1, 1, T, S))
    first = left if other == "select" else ~left
    values = {
        "open": ~left,
        "mask": first,
        "x": np.random.default_rng(0).normal(size=(1, N, T, S)).astype("f4"),
    }
    with Worker() as worker:
        before, after = (worker.run(to_bytes(one), None, values)["p"] for one in (parse(text), model))
    assert before.max() < after.max()
    assert not report.note.startswith(converted(block(RESHAPED, OPEN))[1].note)


def test_a_float_input_that_is_added_may_be_another_mask(prover: RegionProver) -> None:
    """As Hugging Face exports it: a causal mask by SELECT, and padding that the caller gives."""
    given = f"{BOOL}, %padding: float32[1,1,{T},{S}]"
    other = f"%other: float32[1,{N},{T},{S}] = ADD(%x, %padding)"
    _, report = converted(
        block(other, given=given, select="SELECT_V2(%open, %other, float32(-1e+09))"), prover
    )
    assert report.note.startswith(
        "rows that only this mask and another one (input 'padding') close together change; "
    )
    assert report.proof is not None
    assert report.proof.demand.kind == "relative"
    assert "close together" not in converted(block(RESHAPED, OPEN), prover)[1].note


@pytest.mark.parametrize(("constant", "bound"), [("-2000.0", "-1896"), ("-3.4028235e+38", "")])
def test_a_constant_above_the_lowest_logits_is_equal_under_a_condition_that_the_note_names(
    constant: str, bound: str, prover: RegionProver
) -> None:
    model, report = converted(
        block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, float32({constant}))"), prover
    )
    assert (f"equal where the largest open logit of a row is above {bound}" in report.note) is bool(bound)
    mask = np.tile(np.arange(S) == 0, (1, 1, T, 1)).reshape(
        parse(block(RESHAPED, OPEN)).subgraphs[0].inputs[0].shape
    )
    logits = np.full((1, N, T, S), -2100, np.float32)
    values = {"mask": mask.astype("f4"), "x": logits}
    text = block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, float32({constant}))")
    with Worker() as worker:
        before, after = (worker.run(to_bytes(one), None, values)["p"] for one in (parse(text), model))
    assert np.array_equal(before, after) is not bool(bound)


def test_what_is_added_overflows_with_no_other_mask() -> None:
    """Logits that another mask has closed may lie at the lowest number: their sum must stay one."""
    lowest = np.finfo(np.float32).min
    assert np.float32(lowest) + np.float32(ABSORBING) == lowest
    assert np.isfinite(np.float32(ABSORBING) + np.float32(ABSORBING))


def test_an_infinite_constant_becomes_finite_and_rows_without_a_number_uniform(prover: RegionProver) -> None:
    """`-inf * 0` is NaN, and so was a row that is masked everywhere."""
    model, report = converted(block(RESHAPED, OPEN, select="SELECT_V2(%open, %x, float32(-inf))"), prover)
    assert added(model) == ABSORBING
    assert report.proof is not None
    assert report.proof.max_abs == 0.0
    assert report.proof.fully_masked_rows_max_abs == np.inf


@pytest.mark.parametrize(
    ("constant", "expected"),
    [("-inf", -65472.0), ("-1e+09", -65472.0), ("-65504.0", -65472.0), ("-10000.0", -10000.0)],
)
def test_a_target_that_computes_in_float16_gets_what_float16_holds(
    constant: str, expected: float, prover: RegionProver
) -> None:
    text = block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, float32({constant}))")
    model, report = converted(text, prover, HALF)
    assert added(model) == expected
    bound = "; equal where the largest open logit of a row is above -9896"
    told = bound if expected == float(constant) else f"the mask constant {float(constant):g} becomes -65472; "
    assert told in report.note
    assert f"no masked logit is {-expected - 104:g} or more above the largest open one" in report.note
    assert report.proof is not None
    assert str(report.proof.demand) == "relative 1e-06"


def test_a_target_that_takes_lower_constants_gets_the_exact_one() -> None:
    model, report = converted(block(RESHAPED, OPEN), target=Target("npu", "", mask_constant=-3e38))
    assert added(model) == ABSORBING
    assert report.note.startswith(
        "the mask constant -1e+09 becomes -1.26765e+30; for a compiler that computes in float16"
    )


def test_a_target_cannot_ask_for_a_mask_that_does_not_hide() -> None:
    text = block(RESHAPED, OPEN)
    _, report = converted(text, target=Target("npu", "", mask_constant=-100.0), status="skipped")
    assert report.reason == (
        "target 'npu' wants a mask constant too close to the logits for an ADD to hide them (expected at most -1128, "
        "found -100), at SELECT_V2"
    )
    assert str(converted(text, target=Target("npu", "", mask_constant=-1128.0))[1].status) == "converted"


REFUSED = {
    "-10": (
        block(RESHAPED, OPEN, select="SELECT_V2(%open, %x, float32(-10.0))"),
        "the mask constant is too close to the logits for an ADD to hide them (expected at most -1128, found -10)",
    ),
    "-50": (block(RESHAPED, OPEN, select="SELECT_V2(%open, float32(-50.0), %x)"), "found -50), at SELECT_V2"),
    "positive": (block(RESHAPED, OPEN, select="SELECT_V2(%open, %x, float32(1e+09))"), "found 1e+09), at SELECT_V2"),
    "nan": (block(RESHAPED, OPEN, select="SELECT_V2(%open, %x, float32(nan))"), "no operand of the SELECT is one"),
    "not uniform": (
        block(RESHAPED, OPEN, select=f"SELECT_V2(%open, %x, float32{{{', '.join(['-1e+09'] * (S - 1))}, -1e+10}})"),
        "no operand of the SELECT is one constant, at SELECT_V2",
    ),
    "no constant": (
        block(given=f"{BOOL}, %low: float32[1]", select="SELECT_V2(%open, %x, %low)"),
        "no operand of the SELECT is one constant, at SELECT_V2, tensor 'low'",
    ),
    "read elsewhere": (
        block(RESHAPED, OPEN, out="%p, %masked"),
        "the masked logits are read elsewhere too, at SELECT_V2, tensor 'masked'",
    ),
    "read by another": (
        block(RESHAPED, OPEN, path=f"  %e: float32[1,{N},{T},{S}] = EXP(%masked)\n", out="%p, %e"),
        "the masked logits are read elsewhere too, at SELECT_V2, tensor 'masked'",
    ),
    "whole rows": (
        block(given="%open: bool[1]", select=f"SELECT(%open, %x, float32[1,{N},{T},{S}]{{splat -1e+09}})"),
        "SELECT's condition chooses whole rows, at SELECT, tensor 'open'",
    ),
    "other type": (
        block(given=f"{BOOL}, %i: int16[1,{N},{T},{S}]", select="SELECT_V2(%open, %i, float32(-1e+09))"),
        "SELECT's operands and result differ in type, at SELECT_V2, tensor 'i'",
    ),
    "infinite logits": (
        block(
            f"%other: float32[1,{N},{T},{S}] = SELECT_V2(%first, %x, float32(-inf))",
            given=f"{BOOL}, %first: bool[1,1,{T},{S}]",
            select="SELECT_V2(%open, %other, float32(-1e+09))",
        ),
        "another mask has put -inf into the logits, which SELECT hides and ADD does not, at SELECT_V2, tensor 'other'",
    ),
    "no quantization": (
        block(given=BOOL, dtype="int16", select="SELECT_V2(%open, %x, int16(-32768))"),
        "logits are neither float nor quantized, at SELECT_V2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_add_cannot_do_is_refused_with_the_reason(case: str) -> None:
    text, reason = REFUSED[case]
    _, report = converted(text, Says(True), status="skipped")
    assert reason in report.reason


def test_logits_that_the_select_broadcasts_are_refused() -> None:
    text = block(RESHAPED, OPEN).replace(f"%x: float32[1,{N},{T},{S}])", f"%x: float32[1,{N},1,{S}])")
    _, report = converted(text, status="skipped")
    shapes = f"(expected [1, {N}, {T}, {S}], found [1, {N}, 1, {S}])"
    assert report.reason == f"the SELECT broadcasts its logits {shapes}, at SELECT_V2, tensor 'x'"


def test_a_softmax_without_a_select_is_no_site() -> None:
    text = f"subgraph main (%x: float32[1,{S}]) {{\n  %p: float32[1,{S}] = SOFTMAX(%x)\n  return %p\n}}\n"
    assert convert_text(text, "mask_to_add")[1] == []


# Rows that are masked everywhere


def test_rows_that_are_masked_everywhere_are_measured_where_the_target_wants_a_smaller_constant(
    prover: RegionProver,
) -> None:
    """SELECT gives the uniform distribution there, ADD the unmasked one."""
    _, report = converted(block(RESHAPED, OPEN), prover, HALF)
    assert report.proof is not None
    assert report.proof.max_abs == 0.0
    assert report.proof.fully_masked_rows_max_abs is not None
    assert report.proof.fully_masked_rows_max_abs > 0.01
    assert report.proof.bitwise is False
    assert report.to_dict()["proof"]["fully_masked_rows_max_abs"] > 0.01


@pytest.mark.parametrize("rows", [1, T])
def test_a_constant_in_which_logits_do_not_vanish_fails_the_proof(
    rows: int, prover: RegionProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one query row too, where nothing but a closed row shows it."""
    monkeypatch.setattr(mask_to_add, "ABSORBING", -1e4)
    text = block(RESHAPED, OPEN).replace(f",{T},", f",{rows},").replace(f", {T},", f", {rows},")
    _, report = converted(text, prover, status="rolled-back")
    assert "demanded bitwise" in report.reason
    assert ("in rows masked everywhere" in report.reason) == (rows > 1)


def test_kernels_that_round_by_row_count_must_agree_in_closed_rows_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the reference kernels give the same bits, others may be off by 1e-6, in every row."""
    ones = np.ones(4, np.float32)
    same, near, far = (measure(ones, other) for other in (ones, ones + np.float32(1e-7), ones * 2))
    for closed, status in ((near, "converted"), (far, "rolled-back")):
        outputs = {"xnnpack": (OutputProof(0, near, closed),), "reference": (OutputProof(0, same, same),)}
        monkeypatch.setattr(Worker, "prove", lambda *_, outputs=outputs, **__: Outcome(outputs))
        text = block(RESHAPED, OPEN).replace("beta: 1.0", "beta: 2.0")
        converted(text, RegionProver(), status=status)


def test_with_one_query_row_there_is_no_masked_row_to_set_apart(prover: RegionProver) -> None:
    text = block(RESHAPED, OPEN).replace(f",{T},", ",1,").replace(f", {T},", ", 1,")
    _, report = converted(text, prover)
    assert report.proof is not None
    assert report.proof.fully_masked_rows_max_abs is None


def test_a_wrong_polarity_fails_the_proof(prover: RegionProver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_to_add, "_COMPLEMENT", {"NOT_EQUAL": "NOT_EQUAL", "EQUAL": "EQUAL"})
    text = block(RESHAPED, OPEN)
    _, report = converted(text, prover, status="rolled-back")
    assert "the new region differs" in report.reason


# Quantized


def quantized(
    dtype: str = "int16", scale: str = "0.05", code: int = -32768, zero: int = 0, *, x: str | None = None
) -> str:
    kind = f"{dtype}[] q({scale}, {zero})"
    text = block(given=BOOL, dtype=kind, select=f"SELECT_V2(%open, %x, {dtype}({code}) q({scale}, {zero}))")
    logits = f"%x: {dtype}[1,{N},{T},{S}] q("
    return text.replace(f"{logits}{scale}", f"{logits}{x or scale}")


def test_a_quantized_mask_is_one_select_between_two_constants_of_its_type() -> None:
    model, report = converted(quantized())
    assert report.note == ""
    assert (
        to_text(model)
        == f"""\
subgraph main (%open: bool[1,1,{T},{S}], %x: int16[1,{N},{T},{S}] q(0.05, 0)) {{
  %open/additive: int16[1,1,{T},{S}] q(0.1, 0) = SELECT_V2(%open, int16(0) q(0.1, 0), int16(-32768) q(0.1, 0))
  %masked/masked: int16[1,{N},{T},{S}] q(0.05, 0) = ADD(%x, %open/additive) {{pot_scale_int16: false}}
  %p: int16[1,{N},{T},{S}] q(3.0517578e-05, 0) = SOFTMAX(%masked/masked) {{beta: 1.0}}
  return %p
}}
"""
    )
    add = next(op for op in model.subgraphs[0].operators if op.name == "ADD")
    assert add.code.version == 3


@pytest.mark.parametrize(
    "text",
    [
        quantized(),
        quantized(scale="0.0625"),
        quantized(scale="0.3", code=-30000),
        quantized("int8", "16.0", -128, 0),
        quantized("int8", "8.0", -128, 100),
        quantized().replace("%x, int16(-32768) q(0.05, 0))", "int16(-32768) q(0.05, 0), %x)"),
    ],
    ids=["int16", "power of two", "not the lowest", "int8", "int8 with zero point", "other polarity"],
)  # fmt: skip
def test_quantized_masks_of_equal_scales_give_the_same_codes(text: str, prover: RegionProver) -> None:
    model, report = converted(text, prover)
    assert report.proof is not None
    assert (str(report.proof.demand), report.proof.steps) == ("bitwise", 0)
    assert report.proof.fully_masked_rows_max_abs == 0.0
    assert names(model) == ["SELECT_V2", "ADD", "SOFTMAX"]


def test_logits_of_another_scale_are_left_to_the_proof(prover: RegionProver) -> None:
    """SELECT copies codes whatever the scales say, ADD does not."""
    text = quantized(x="0.04")
    _, report = converted(text, prover, status="rolled-back")
    assert "demanded bitwise" in report.reason


@pytest.mark.parametrize(("scale", "code", "found"), [("0.003", -32768, "-98.304"), ("0.05", -10000, "-500")])
def test_a_quantized_constant_is_judged_by_the_number_it_stands_for(
    scale: str, code: int, found: str
) -> None:
    _, report = converted(quantized(scale=scale, code=code), status="skipped")
    assert f"found {found})" in report.reason


def test_quantized_masks_are_shared_by_blocks_and_stay_when_run_again(prover: RegionProver) -> None:
    one = quantized()
    twice = one.replace("%x: int16", "%x2: int16[1,2,6,10] q(0.05, 0), %x: int16").replace(
        "  return %p\n",
        f"  %masked2: int16[1,{N},{T},{S}] q(0.05, 0) = SELECT_V2(%open, %x2, int16(-32768) q(0.05, 0))\n"
        f"  %p2: int16[1,{N},{T},{S}] q(3.0517578e-05, 0) = SOFTMAX(%masked2) {{beta: 1.0}}\n  return %p, %p2\n",
    )
    model, reports = convert_text(twice, "mask_to_add", prover=prover)
    assert statuses(reports) == ["converted", "converted"]
    assert names(model) == ["SELECT_V2", "ADD", "SOFTMAX", "ADD", "SOFTMAX"]
    text = to_text(model)
    assert run(model, "mask_to_add", "quantized_mask") == []
    assert to_text(model) == text


@pytest.mark.parametrize("rows", [1, T])
def test_a_quantized_mask_that_does_not_always_clip_fails_the_proof(
    rows: int, prover: RegionProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the logits' range hides them in every row with an open entry."""
    parameters = Quantization.affine
    monkeypatch.setattr(Quantization, "affine", lambda scale, zero: parameters(scale / 4, zero))
    text = quantized().replace(f",{T},", f",{rows},")
    _, report = converted(text, prover, status="rolled-back")
    assert "demanded bitwise" in report.reason


@pytest.mark.parametrize("zero", [128, -129, 300])
def test_a_zero_point_that_the_type_cannot_hold_is_refused(zero: int) -> None:
    _, report = converted(quantized("int8", "16.0", -128, zero), status="skipped")
    assert report.reason.startswith("logits are neither float nor quantized")


def test_constants_are_made_in_the_logits_type() -> None:
    text = block(given=BOOL).replace("-1e+09", "-60000.0").replace("float32", "float16")
    model, _ = converted(text)
    multiply = next(op for op in model.subgraphs[0].operators if op.name == "MUL")
    assert multiply.input(1).dtype is DType.FLOAT16
    assert np.isfinite(multiply.input(1).array())
    cast = next(op for op in model.subgraphs[0].operators if op.name == "CAST")
    assert (cast.code.version, cast.output.dtype) == (5, DType.FLOAT16)


INT8 = "%m: int8[1,1,4,4] q(0.5, 3)"


@pytest.mark.parametrize(
    ("given", "condition", "closed", "opened"),
    [
        (INT8, "NOT_EQUAL(%m, int8(5) q(0.5, 3))", 1.0, 0.0),
        (INT8, "NOT_EQUAL(%m, int8(3) q(0.5, 3))", 0.0, 1.0),
        (INT8, "NOT_EQUAL(%m, int8(-1) q(0.5, 3))", -2.0, 0.0),
        ("%m: bool[1,1,4,4]", "LOGICAL_NOT(%m)", 1.0, 0.0),
        ("%open: bool[1,1,4,4]", "", 0.0, 1.0),
    ],
)
@pytest.mark.parametrize("operands", ["%x, float32(-1e+09)", "float32(-1e+09), %x"], ids=["open", "closed"])
def test_what_closes_an_entry_of_the_mask_and_what_opens_it(
    given: str, condition: str, closed: float, opened: float, operands: str
) -> None:
    """A quantized number that is compared with stands for a real one."""
    line = f"%open: bool[1,1,4,4] = {condition}\n" if condition else ""
    model = parse(f"""subgraph main ({given}, %x: float32[1,1,4,4]) {{
      {line}%masked: float32[1,1,4,4] = SELECT_V2(%open, {operands})
      %p: float32[1,1,4,4] = SOFTMAX(%masked)
      return %p }}""")
    (rewrite,) = rewrites_of("mask_to_add", model)
    assert rewrite.mask is not None
    values = (rewrite.mask.masked, rewrite.mask.opened)
    assert values == ((closed, opened) if operands.startswith("%x") else (opened, closed))


def test_what_changes_in_masked_rows_is_told_with_the_number_of_sites() -> None:
    said = [str(MaskedRows(sites, 0.5, ("a",))) for sites in (1, 2)]
    assert said == [
        "rows that are masked everywhere change by up to 0.5 (1 site of a)",
        "rows that are masked everywhere change by up to 0.5 (2 sites of a)",
    ]


@pytest.mark.parametrize(
    ("kind", "addable"),
    [
        ("int8[2,3] q(0.5, 1)", True),
        ("int8[2,3] q([0.5, 0.25], [0, 0])", False),
        ("int8[2,3]", False),
        ("bool[2,3]", False),
    ],
)
def test_integer_logits_need_one_scale_to_be_added_to(kind: str, addable: bool) -> None:
    (tensor,) = parse(f"subgraph main (%x: {kind}) {{ return %x }}").subgraphs[0].inputs
    assert mask_to_add._addable(tensor) == addable
