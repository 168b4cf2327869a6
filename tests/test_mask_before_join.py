"""mask_before_join: the mask is added to each part of the logits before they are joined, bit for bit."""

import re

import pytest
from fault_graphs import JOINED_LOGITS
from pass_runs import changed, convert_text, names, only, reread, run, statuses

from edge_opt.ir.parse import parse
from edge_opt.ir.text import to_text
from edge_opt.targets import Target, load_target
from edge_opt.verification.examine import Verifier

TARGET = Target("parts", "", mask_before_join=True)
FLOAT = """\
subgraph main (%q: float32[1,1,3,4], %k1: float32[1,1,4,5], %k2: float32[1,1,4,3], %mask: float32[1,1,3,8]) {
  %old: float32[1,1,3,5] = BATCH_MATMUL(%q, %k1)
  %new: float32[1,1,3,3] = BATCH_MATMUL(%q, %k2)
  %logits: float32[1,1,3,8] = CONCATENATION(%old, %new) {axis: -1}
  %masked: float32[1,1,3,8] = ADD(%mask, %logits)
  %p: float32[1,1,3,8] = SOFTMAX(%masked) {beta: 1.0}
  return %p
}
"""


@pytest.mark.parametrize("text", [JOINED_LOGITS, FLOAT], ids=["int16", "float32"])
def test_each_part_gets_its_columns_of_the_mask_and_every_bit_stays(
    text: str, verifier: Verifier
) -> None:
    model, report = only(text, "mask_before_join", target=TARGET, verifier=verifier)
    assert (report.status, report.proof and report.proof.max_abs) == ("converted", 0.0)
    kinds = [
        "BATCH_MATMUL",
        "BATCH_MATMUL",
        "SLICE",
        "SLICE",
        "ADD",
        "ADD",
        "CONCATENATION",
        "SOFTMAX",
    ]
    assert names(reread(model)) == kinds


def test_operands_keep_their_places_parts_their_widths_and_a_mask_is_cut_once_for_all_that_read_it() -> (
    None
):
    head = FLOAT[FLOAT.index("  %logits") : FLOAT.index("  return")]
    second = re.sub("%(logits|masked|p)\\b", r"%\g<1>2", head)
    text = FLOAT.replace("  return %p", f"{second}  return %p, %p2")
    model, reports = convert_text(text, "mask_before_join", target=TARGET)
    made = to_text(model)
    assert (len(reports), names(model).count("SLICE")) == (2, 2)
    assert names(model).count("ADD") == 2, "both join the same parts"
    assert "SLICE(%mask, int32{0, 0, 0, 0}, int32{1, 1, 3, 5})" in made
    assert "SLICE(%mask, int32{0, 0, 0, 5}, int32{1, 1, 3, 3})" in made
    assert "ADD(%mask/columns, %old)" in made


COLUMNS = f"int16[1,1,4,12] q({[0.003] * 12}, {[0] * 12}, axis 3)"
OTHERS = {
    "another scale": "%logits: int16[1,1,4,12] q(0.0005, 0) -> %logits: int16[1,1,4,12] q(0.0006, 0)",
    "joined logits are an output": "return %p -> return %p, %logits",
    "no SOFTMAX": "SOFTMAX(%masked) {beta: 1.0} -> LOGISTIC(%masked)",
    "no mask": "ADD(%logits, %mask) -> ADD(%logits, %logits)",
    "no addition": "ADD(%logits, %mask) -> MUL(%logits, %mask)",
    "an activation fused into the join": "{axis: 3} -> {axis: 3, fused_activation_function: 1}",
    "rows that are joined": "{axis: 3} -> {axis: 2}",
    "a scale for each column of the mask": f"%mask: int16[1,1,4,12] q(0.003, 0) -> %mask: {COLUMNS}",
    "a scale for each column of the sum": f"%masked: int16[1,1,4,12] q(0.0031, 0) -> %masked: {COLUMNS}",
    "one column for all": "%mask: int16[1,1,4,12] -> %mask: int16[1,1,4,1]",
    "no products": "= CONCATENATION(%old, %new) -> = CONCATENATION(%q, %q)",
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_something_else_is_left_alone(case: str) -> None:
    text = changed(JOINED_LOGITS, OTHERS[case])
    _, reports = convert_text(text, "mask_before_join", target=TARGET)
    assert reports == []


@pytest.mark.parametrize(
    ("shape", "heads", "cached", "count"),
    [
        *(("3,8", 1, 5, 1), ("1,3,8", 1, 5, 1), ("1,8", 1, 5, 0), ("8", 1, 5, 0)),
        *(("1,1,3,8", 2, 5, 0), ("1,2,3,8", 2, 5, 1), ("1,1,3,8", 1, 4, 0)),
    ],
)
def test_only_leading_axes_of_one_may_be_left_out_and_the_cache_must_hold_more_keys_than_are_new(
    shape: str, heads: int, cached: int, count: int, verifier: Verifier
) -> None:
    text = re.sub("[53]\\]", lambda found: f"{cached if found[0] == '5]' else 8 - cached}]", FLOAT)
    text = text.replace("[1,1,", f"[1,{heads},")
    text = text.replace(f"%mask: float32[1,{heads},3,8]", f"%mask: float32[{shape}]")
    _, reports = convert_text(text, "mask_before_join", target=TARGET, verifier=verifier)
    assert statuses(reports) == ["converted"] * count


def test_only_targets_that_ask_for_it_get_it() -> None:
    assert run(parse(FLOAT), "mask_before_join", target=load_target("generic")) == []
    assert len(run(parse(FLOAT), "mask_before_join", target=load_target("qualcomm-htp"))) == 1


def test_operators_without_results_are_passed_over() -> None:
    variable = (
        '  %h: resource[] = VAR_HANDLE() {shared_name: "v"}\n  ASSIGN_VARIABLE(%h, %logits)\n'
    )
    text = FLOAT.replace("  %masked", f"{variable}  %masked")
    assert run(parse(text), "mask_before_join", target=TARGET) == []
