"""A mask computed in integers from a boolean becomes one SELECT between its two values, bit for bit."""

from typing import Any

import pytest
from pass_runs import Says, convert_text, names, only, reread, run, statuses
from syrupy.assertion import SnapshotAssertion

from edge_opt.ir.parse import parse
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.verification.examine import Verifier

SHAPE = "[1,1,4,6]"

# The two orders in which quantizers leave the chain.
QUANTIZE_FIRST = (
    "%n: bool[] = LOGICAL_NOT(%open)",
    "%f: float32[] = CAST(%n) {in_data_type: 6}",
    "%q: {kind}[] q({unit}, {zero}) = QUANTIZE(%f)",
    "%mask: {kind}[] q({scale}, {result}) = MUL(%q, {kind}({factor}) q({step}, {shift}))",
)
MULTIPLY_FIRST = (
    "%n: bool[] = LOGICAL_NOT(%open)",
    "%f: float32[] = CAST(%n) {in_data_type: 6}",
    "%m: float32[] = MUL(%f, float32({real}))",
    "%mask: {kind}[] q({scale}, {result}) = QUANTIZE(%m)",
)
INT16 = {
    "kind": "int16", "unit": "3.051851e-05", "zero": 0, "scale": "0.00305176", "result": 0, "factor": -32768,
    "step": "0.00305176", "shift": 0, "real": "-100.0",
}  # fmt: skip
INT8 = {
    "kind": "int8", "unit": "0.003921569", "zero": -128, "scale": "0.39215687", "result": 127, "factor": -128,
    "step": "0.39215687", "shift": 127, "real": "-100.0",
}  # fmt: skip


def text_of(
    chain: tuple[str, ...], values: dict[str, Any], *, more: str = "", out: str = "%mask"
) -> str:
    lines = [
        line.replace("{in_data_type: 6}", "{{in_data_type: 6}}").format(**values) for line in chain
    ]
    inside = "".join(f"  {line.replace('[]', SHAPE)}\n" for line in lines)
    return f"subgraph main (%open: bool{SHAPE}) {{\n{inside}{more}  return {out}\n}}\n"


PLAIN = text_of(QUANTIZE_FIRST, INT16)
NEGATION = f"  %n: bool{SHAPE} = LOGICAL_NOT(%open)\n"
TWICE = f"{NEGATION}  %n2: bool{SHAPE} = LOGICAL_NOT(%n)\n"


@pytest.mark.parametrize("negations", [0, 1, 2])
@pytest.mark.parametrize("values", [INT16, INT8], ids=["int16", "int8"])
@pytest.mark.parametrize(
    "chain", [QUANTIZE_FIRST, MULTIPLY_FIRST], ids=["quantize first", "multiply first"]
)
def test_a_chain_becomes_one_select_and_every_bit_stays(
    chain: tuple[str, ...], values: dict[str, Any], negations: int, verifier: Verifier
) -> None:
    text = text_of(chain, values)
    if negations == 0:
        text = text.replace(NEGATION, "").replace("CAST(%n)", "CAST(%open)")
    if negations == 2:
        text = text.replace(NEGATION, TWICE).replace("CAST(%n)", "CAST(%n2)")
    model, report = only(text, "quantized_mask", verifier=verifier)
    assert report.status == "converted", report.reason
    assert (str(report.proof.check), report.proof.bitwise) == ("bitwise", True)
    assert {ran.kernels for ran in report.proof.ran} == {"xnnpack", "reference"}
    assert names(model) == ["SELECT_V2"]


def test_it_runs_once_and_the_result_is_as_drawn(snapshot: SnapshotAssertion) -> None:
    model, _ = only(PLAIN, "quantized_mask")
    text = to_text(model)
    assert text == to_text(reread(model)) == snapshot
    assert run(model, "quantized_mask", "mask_to_add") == []
    assert to_text(model) == text


def test_what_others_read_of_the_chain_stays_until_the_last_mask_frees_it(
    verifier: Verifier,
) -> None:
    model, report = only(
        text_of(QUANTIZE_FIRST, INT16, out="%mask, %f"), "quantized_mask", verifier=verifier
    )
    assert report.status == "converted"
    assert names(model) == ["LOGICAL_NOT", "CAST", "SELECT_V2"]
    more = f"  %other: int16{SHAPE} q(0.1, 0) = MUL(%q, int16(-100) q(0.01, 0))\n"
    text = text_of(QUANTIZE_FIRST, INT16, more=more, out="%mask, %other")
    model, reports = convert_text(text, "quantized_mask", verifier=verifier)
    assert statuses(reports) == ["converted", "converted"]
    assert names(model) == ["SELECT_V2", "SELECT_V2"]


NUMBER = "%f: float32[] = CAST(%open) {in_data_type: 6}"
OTHERS = {
    "float, as mask_to_add makes it": ("%open: bool[]", NUMBER, "%y: float32[] = MUL(%f, float32(-65472.0))"),
    "no boolean": ("%open: int8[] q(1.0, 0)", "%y: int8[] q(1.0, 0) = MUL(%open, int8(-100) q(1.0, 0))"),
    "no constant": (
        "%open: bool[], %s: float32[1]", NUMBER, "%m: float32[] = MUL(%f, %s)", "%y: int8[] q(1.0, 0) = QUANTIZE(%m)",
    ),
    "more than two values": (
        "%open: bool[]", NUMBER, "%m: float32[] = MUL(%f, float32{0.0, -1.0, -2.0, -3.0, -4.0, -5.0})",
        "%y: int8[] q(1.0, 0) = QUANTIZE(%m)",
    ),
    "something else in between": (
        "%open: bool[]", NUMBER, "%e: float32[] = EXP(%f)", "%m: float32[] = MUL(%e, float32(-1.0))",
        "%y: int8[] q(1.0, 0) = QUANTIZE(%m)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_graphs_are_no_sites(case: str) -> None:
    given, *lines = (line.replace("[]", SHAPE) for line in OTHERS[case])
    text = f"subgraph main ({given}) {{ {' '.join(lines)} return %y }}"
    model, reports = convert_text(text, "quantized_mask")
    assert reports == []
    assert to_text(model) == to_text(parse(text))


@pytest.mark.parametrize(
    ("old", "new", "why", "named"),
    [
        ("float32(-100.0)", "float32(-inf)", "mask", "found -inf"),
        ("float32(-100.0)", "float32(nan)", "mask", "found nan"),
        ("float32(-100.0)", "float32(1000000000.0)", "mask", "2^31"),
        ("float32(-100.0))", "float32(-100.0)) {fused_activation_function: 1}", "mask", "fused"),
        ("q(0.00305176, 0) = QUANTIZE", "q(0.0, 0) = QUANTIZE", "quantization", "QUANTIZE"),
    ],
    ids=["infinite", "nan", "beyond int32", "activation", "scale"],
)  # fmt: skip
def test_values_that_cannot_be_told_are_a_reason(old: str, new: str, why: str, named: str) -> None:
    text = text_of(MULTIPLY_FIRST, INT16).replace(old, new)
    model, report = only(text, "quantized_mask", verifier=Says(True))
    assert (report.status, report.why) == ("skipped", why)
    assert named in report.reason
    assert to_text(model) == text
