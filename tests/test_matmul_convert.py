"""BATCH_MATMUL -> QUANTIZE becomes one BATCH_MATMUL: where it is legal, how far results move, what was clipped."""

from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from pass_runs import Says, convert_text, count, names, reread, statuses
from text_parser import parse

from edge_opt.ir import Model, Operator, to_bytes
from edge_opt.ir.text import to_text
from edge_opt.passes import Demand, SiteReport, matmul_convert
from edge_opt.passes.rewrite import Rewrite
from edge_opt.proof.regions import RegionProver

# The page's graph: two products, one of them converted, joined.
PREFILL = """\
subgraph main (%q: int16[1,1,8,16] q(0.001, 0), %k: int16[1,1,32,16] q(0.001, 0), %ks: int16[1,1,8,16] q(0.001, 0)) {
  %matmul1: int16[1,1,8,32] q(5e-05, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %matmul2: int16[1,1,8,8] q(4e-05, 0) = BATCH_MATMUL(%q, %ks) {adj_y: true}
  %convert: int16[1,1,8,32] q(4e-05, 0) = QUANTIZE(%matmul1)
  %concat: int16[1,1,8,40] q(4e-05, 0) = CONCATENATION(%convert, %matmul2) {axis: 3}
  return %concat
}
"""
PREFILL_AFTER = """\
subgraph main (%q: int16[1,1,8,16] q(0.001, 0), %k: int16[1,1,32,16] q(0.001, 0), %ks: int16[1,1,8,16] q(0.001, 0)) {
  %matmul2: int16[1,1,8,8] q(4e-05, 0) = BATCH_MATMUL(%q, %ks) {adj_y: true}
  %convert: int16[1,1,8,32] q(4e-05, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %concat: int16[1,1,8,40] q(4e-05, 0) = CONCATENATION(%convert, %matmul2) {axis: 3}
  return %concat
}
"""
# One product, converted and joined to what was there.
DECODE = """\
subgraph main (%q: int16[1,1,4,16] q(0.001, 0), %k: int16[1,1,32,16] q(0.001, 0), %logits: int16[1,1,4,1] q(4e-05, 0)) {
  %matmul1: int16[1,1,4,32] q(5e-05, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %convert: int16[1,1,4,32] q(4e-05, 0) = QUANTIZE(%matmul1)
  %concat: int16[1,1,4,33] q(4e-05, 0) = CONCATENATION(%convert, %logits) {axis: 3}
  return %concat
}
"""
DECODE_AFTER = """\
subgraph main (%q: int16[1,1,4,16] q(0.001, 0), %k: int16[1,1,32,16] q(0.001, 0), %logits: int16[1,1,4,1] q(4e-05, 0)) {
  %convert: int16[1,1,4,32] q(4e-05, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %concat: int16[1,1,4,33] q(4e-05, 0) = CONCATENATION(%convert, %logits) {axis: 3}
  return %concat
}
"""


def pair(
    between: str, result: str, *, left: str = "int16", right: str = "int16", more: str = "", out: str = "%y"
) -> str:
    """One product and its QUANTIZE."""
    scale = {"int16": "q(0.001, 0)", "int8": "q(0.05, -3)"}
    return f"""\
subgraph main (%a: {left}[1,8,16] {scale[left]}, %b: {right}[1,32,16] {scale[right]}) {{
  %p: {between.replace("[]", "[1,8,32]")} = BATCH_MATMUL(%a, %b) {{adj_y: true}}
  %y: {result.replace("[]", "[1,8,32]")} = QUANTIZE(%p)
{more}  return {out}
}}
"""


def fused(text: str, prover: Any = None) -> tuple[Model, SiteReport]:
    model, reports = convert_text(text, "matmul_convert", prover=prover)
    (report,) = reports
    return model, report


# Golden


@pytest.mark.parametrize(("before", "after"), [(PREFILL, PREFILL_AFTER), (DECODE, DECODE_AFTER)])
def test_the_pages_graphs_of_prefill_and_decode(before: str, after: str, prover: RegionProver) -> None:
    model, reports = convert_text(before, "matmul_convert", prover=prover)
    assert statuses(reports) == ["converted"]
    assert to_text(model) == after


def test_both_products_converted(prover: RegionProver) -> None:
    both = PREFILL.replace("q(4e-05, 0) = BATCH_MATMUL(%q, %ks)", "q(6e-05, 0) = BATCH_MATMUL(%q, %ks)")
    both = both.replace(
        "  %concat:", "  %convert2: int16[1,1,8,8] q(4e-05, 0) = QUANTIZE(%matmul2)\n  %concat:"
    ).replace("(%convert, %matmul2)", "(%convert, %convert2)")
    model, reports = convert_text(both, "matmul_convert", prover=prover)
    assert statuses(reports) == ["converted", "converted"]
    assert names(model) == ["BATCH_MATMUL", "BATCH_MATMUL", "CONCATENATION"]


@pytest.mark.parametrize("consumer", ["", "  %z: int16[1,8,32] q(4e-05, 0) = RESHAPE(%y, int32{1, 8, 32})\n"])
def test_whatever_reads_the_result(consumer: str, prover: RegionProver) -> None:
    text = pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 0)", more=consumer, out="%z" if consumer else "%y")
    model, report = fused(text, prover)
    assert str(report.status) == "converted"
    assert count(model, "QUANTIZE") == 0


def test_a_converted_model_stays_as_it_is() -> None:
    model, _ = convert_text(PREFILL, "matmul_convert")
    text = to_text(model)
    again, reports = convert_text(text, "matmul_convert")
    assert reports == []
    assert to_text(again) == text


def test_the_new_operator_keeps_its_version_and_the_file_reads_back() -> None:
    model, _ = convert_text(PREFILL, "matmul_convert")
    versions = {c.name: c.version for c in reread(model).operator_codes if c.name == "BATCH_MATMUL"}
    assert versions == {"BATCH_MATMUL": 3}


# Legality


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            pair("int16[] q(5e-05, 0)", "int8[] q(0.01, 0)"),
            "the product must write its operands' type (expected int16, int16, found int8), at QUANTIZE, tensor 'y'",
            id="int16 to int8",
        ),
        pytest.param(
            pair("int8[] q(0.5, 0)", "int16[] q(0.01, 0)", left="int8", right="int8"),
            "the product must write its operands' type (expected int8, int8, found int16), at QUANTIZE, tensor 'y'",
            id="int8 to int16",
        ),
        pytest.param(
            pair("int16[] q(0.5, 0)", "int16[] q(0.01, 0)", left="int16", right="int8"),
            "the product must write its operands' type (expected int16, int8, found int16), at QUANTIZE, tensor 'y'",
            id="operands of two types",
        ),
        pytest.param(
            pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 5)"),
            "int16 needs zero point 0 (expected 0, found 5), at QUANTIZE, tensor 'y'",
            id="zero point of the result",
        ),
        pytest.param(
            pair("int16[] q(5e-05, -2)", "int16[] q(4e-05, 0)"),
            "int16 needs zero point 0 (expected 0, found -2), at BATCH_MATMUL, tensor 'p'",
            id="zero point of the product",
        ),
        pytest.param(
            pair("int16[] q(5e-05, 0)", f"int16[] q([{', '.join(['4e-05'] * 32)}], [{', '.join('0' * 32)}], axis 2)"),
            "product and result need one scale each, at QUANTIZE, tensor 'y'",
            id="per axis",
        ),
        pytest.param(
            pair("int16[] q(5e-05, 0)", "int16[] q(0.0, 0)"),
            "product and result need one scale each, at QUANTIZE, tensor 'y'",
            id="scale 0",
        ),
        pytest.param(
            pair("int16[] q(5e-05, 0)", "int16[]"),
            "product and result need one scale each, at QUANTIZE, tensor 'y'",
            id="no scale",
        ),
        pytest.param(
            pair(
                "int16[] q(5e-05, 0)", "int16[] q(4e-05, 0)", out="%y, %z",
                more="  %z: int16[1,8,32] q(5e-05, 0) = ABS(%p)\n",
            ),
            "the product is read elsewhere too, in its own quantization, at BATCH_MATMUL, tensor 'p'",
            id="read twice",
        ),
        pytest.param(
            pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 0)", out="%y, %p"),
            "the product is read elsewhere too, in its own quantization, at BATCH_MATMUL, tensor 'p'",
            id="graph output",
        ),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_left_with_its_reason(text: str, reason: str) -> None:
    model, report = fused(text, Says(True))
    assert (str(report.status), report.reason) == ("skipped", reason)
    assert to_text(model) == text


def test_other_conversions_are_no_sites() -> None:
    text = """\
subgraph main (%a: float32[4,4], %b: float32[4,4], %c: int16[4] q(0.1, 0)) {
  %p: float32[4,4] = BATCH_MATMUL(%a, %b)
  %y: int16[4,4] q(0.1, 0) = QUANTIZE(%p)
  %z: int16[4] q(0.2, 0) = QUANTIZE(%c)
  return %y, %z
}
"""
    assert convert_text(text, "matmul_convert")[1] == []


# How far results move


def outputs(
    model: Model, inputs: list[np.ndarray[Any, Any]], kernels: OpResolverType
) -> np.ndarray[Any, Any]:
    runtime = Interpreter(model_content=to_bytes(model), experimental_op_resolver_type=kernels)
    runtime.allocate_tensors()
    for detail, value in zip(runtime.get_input_details(), inputs, strict=True):
        runtime.set_tensor(detail["index"], value)
    runtime.invoke()
    return np.asarray(runtime.get_tensor(runtime.get_output_details()[0]["index"]))


KERNELS = pytest.mark.parametrize("kernels", [OpResolverType.BUILTIN, OpResolverType.BUILTIN_REF])
SCALES = [(5e-05, 4e-05), (4e-05, 5e-05), (3e-05, 1e-04), (1e-04, 3.3e-05), (2e-04, 1e-04), (1e-04, 1e-04)]


@KERNELS
@pytest.mark.parametrize(("before", "after"), SCALES)
@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_results_move_by_at_most_one_step_of_the_larger_scale(
    dtype: str, before: float, after: float, kernels: OpResolverType
) -> None:
    """Rounding once instead of twice; the operands are small enough for nothing to be clipped."""
    points = (0, 0) if dtype == "int16" else (4, -7)
    if dtype == "int8":
        before, after = before * 1e4, after * 1e4
    text = pair(
        f"{dtype}[] q({before}, {points[0]})", f"{dtype}[] q({after}, {points[1]})", left=dtype, right=dtype
    )
    model, report = fused(text)
    assert str(report.status) == "converted"
    draw = np.random.default_rng(1)
    size = 40 if dtype == "int8" else 300
    inputs = [draw.integers(-size, size, shape).astype(dtype) for shape in ((1, 8, 16), (1, 32, 16))]
    old, new = outputs(parse(text), inputs, kernels), outputs(model, inputs, kernels)
    steps = np.abs(old.astype(int) - new).max()
    assert steps * after <= max(before, after) * (1 + 1e-6)
    assert len(np.unique(old)) > 10, "or the test would say little"


@pytest.mark.parametrize(("before", "after"), SCALES)
def test_the_proof_demands_that_step_and_one_that_int16_kernels_lose(before: float, after: float) -> None:
    prover = Says(True)
    fused(pair(f"int16[] q({before}, 0)", f"int16[] q({after}, 0)"), prover)
    ((_, demand),) = prover.asked
    assert demand.kind == "steps"
    assert (demand.tolerance - 1) * after <= max(before, after) * (1 + 1e-6)
    assert demand.tolerance * after > max(before, after)


# What was clipped


def clipping(low: float = 1e-05, *, left: str = "int16") -> str:
    """The product's range is a tenth of the result's."""
    return pair(f"{left}[] q({low}, 0)", f"{left}[] q({low * 10:g}, 0)", left=left, right=left)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (clipping(), "the product 'p' was clipped to -0.3277 .. 0.3277; values beyond are kept now"),
        (
            pair("int8[] q(0.1, -128)", "int8[] q(0.2, 0)", left="int8", right="int8"),
            "the product 'p' was clipped to 0 .. 25.5; values beyond are kept now",
        ),
        (pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 0)"), ""),
        (pair("int8[] q(0.1, 3)", "int8[] q(0.1, 3)", left="int8", right="int8"), ""),
    ],
    ids=["narrow", "positive only", "wide", "equal"],
)
def test_the_report_says_what_was_clipped_even_without_a_proof(text: str, note: str) -> None:
    _, report = fused(text)
    assert (str(report.status), report.note) == ("converted", note)
    assert report.to_dict()["note"] == (note or None)


def test_what_was_clipped_is_told_in_the_codes_of_the_result() -> None:
    """-13.1 to 12.4 by a zero point of 3 is -124 to 131 by one of 7, of which int8 holds 127."""
    model = parse("""subgraph main (%p: int8[4] q(0.1, 3)) {
      %y: int8[4] q(0.1, 7) = QUANTIZE(%p)
      return %y
    }""")
    (convert,) = model.subgraphs[0].operators
    assert matmul_convert.clipped_codes(convert) == (-124, 127)


@pytest.mark.parametrize("text", [clipping(), clipping(0.001, left="int8")], ids=["int16", "int8"])
def test_clipped_values_do_not_fail_the_proof_and_are_counted_in_it(text: str, prover: RegionProver) -> None:
    _, report = fused(text, prover)
    assert (str(report.status), report.reason) == ("converted", "")
    assert report.proof is not None
    assert report.proof.steps is not None
    assert report.proof.steps <= 1
    assert report.proof.bitwise is False


def test_a_product_that_was_clipped_nowhere_is_proved_on_everything(prover: RegionProver) -> None:
    _, report = fused(pair("int16[] q(0.1, 0)", "int16[] q(0.15, 0)"), prover)
    assert str(report.status) == "converted"
    assert report.proof is not None
    assert report.proof.note == ""
    assert "was clipped to -3277 .. 3277" in report.note


def test_a_wrong_result_is_found_though_most_is_clipped(
    prover: RegionProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = matmul_convert._build

    def swapped(*arguments: Any) -> Any:
        rewrite = build(*arguments)
        rewrite.new[0].inputs = rewrite.new[0].inputs[::-1]
        return rewrite

    square = clipping().replace("[1,32,16]", "[1,8,16]").replace("[1,8,32]", "[1,8,8]")
    monkeypatch.setattr(matmul_convert, "_build", swapped)
    model, report = fused(square, prover)
    assert str(report.status) == "rolled-back"
    assert to_text(model) == to_text(parse(square))


@pytest.mark.parametrize("turn", [400, 16000])
def test_values_that_turn_back_only_beyond_the_clipped_range_are_found(
    turn: int, prover: RegionProver
) -> None:
    """Inputs that stay inside cannot show it: it takes a second run that goes beyond, to the ends of the type."""
    model = parse(f"""\
subgraph main (%x: int16[1,512] q(0.001, 0)) {{
  %c: int16[1,512] q(1e-05, 0) = QUANTIZE(%x)
  %y: int16[1,512] q(0.001, 0) = QUANTIZE(%c)
  %back: int16[1,512] q(0.001, 0) = SUB(int16({2 * turn}) q(0.001, 0), %x)
  %z: int16[1,512] q(0.001, 0) = MINIMUM(%x, %back)
  return %y, %z
}}
""")
    graph = model.subgraphs[0]
    old, (back, least) = list(graph.operators)[:2], list(graph.operators)[2:]
    graph.remove(back)
    graph.remove(least)
    choose = Operator(least.code, least.inputs, old[-1].outputs, least.options)
    rewrite = Rewrite(model, graph, tuple(old), (back, choose), clipped=(-328, 328))
    proof = prover.prove(rewrite, Demand("steps", 1))
    assert not proof.holds
    assert "steps short of where the old one was clipped" in proof.reason


def test_where_everything_is_clipped_nothing_is_claimed(prover: RegionProver) -> None:
    model = parse(clipping())
    graph = model.subgraphs[0]
    product, convert = graph.operators
    fused_product = Operator(product.code, product.inputs, convert.outputs, product.options)
    rewrite = Rewrite(model, graph, (product, convert), (fused_product,), clipped=(0, 0))
    proof = prover.prove(rewrite, Demand("steps", 1))
    assert (proof.holds, proof.reason) == (
        False,
        "every value is clipped inside the old region, so nothing can be compared",
    )
