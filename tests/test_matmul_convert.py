"""BATCH_MATMUL -> QUANTIZE becomes one BATCH_MATMUL: where it is legal, how far results move, what was clipped."""

import pytest
from pass_runs import Says, convert_text, only, reread, run, statuses

from edge_opt.ir.parse import parse
from edge_opt.ir.text import graphs_text as to_text
from edge_opt.passes import Rewrite, Steps
from edge_opt.verification.examine import Verifier

# The page's graph of prefill: two products, one of them converted, joined.
PREFILL = """\
subgraph main (%q: int16[1,1,8,16] q(0.001, 0), %k: int16[1,1,32,16] q(0.001, 0), %ks: int16[1,1,8,16] q(0.001, 0)) {
  %matmul1: int16[1,1,8,32] q(5e-05, 0) = BATCH_MATMUL(%q, %k) {adj_y: true}
  %matmul2: int16[1,1,8,8] q(4e-05, 0) = BATCH_MATMUL(%q, %ks) {adj_y: true}
  %convert: int16[1,1,8,32] q(4e-05, 0) = QUANTIZE(%matmul1)
  %concat: int16[1,1,8,40] q(4e-05, 0) = CONCATENATION(%convert, %matmul2) {axis: 3}
  return %concat
}
"""
SCALES = [
    (5e-05, 4e-05),
    (4e-05, 5e-05),
    (3e-05, 1e-04),
    (1e-04, 3.3e-05),
    (2e-04, 1e-04),
    (7e-04, 1e-04),
]
CLIPPED = "the product 'p' was clipped to {}; values beyond are now kept"


def pair(
    between: str,
    result: str,
    *,
    left: str = "int16",
    right: str = "",
    more: str = "",
    out: str = "%y",
) -> str:
    """One product and its QUANTIZE."""
    scale = {"int16": "q(0.001, 0)", "int8": "q(0.05, -3)"}
    right = right or left
    return f"""\
subgraph main (%a: {left}[1,8,16] {scale[left]}, %b: {right}[1,32,16] {scale[right]}) {{
  %p: {between.replace("[]", "[1,8,32]")} = BATCH_MATMUL(%a, %b) {{adj_y: true}}
  %y: {result.replace("[]", "[1,8,32]")} = QUANTIZE(%p)
{more}  return {out}
}}
"""


PLAIN = pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 0)")


def test_the_pages_graph_of_prefill_is_rewritten_once(verifier: Verifier) -> None:
    model, reports = convert_text(PREFILL, "matmul_convert", verifier=verifier)
    assert statuses(reports) == ["converted"]
    first, product, other, convert, *rest = PREFILL.splitlines()
    fused_product = convert.partition("=")[0] + "=" + product.partition("=")[2]
    assert to_text(model).splitlines() == [first, other, fused_product, *rest]
    assert run(model, "matmul_convert") == []
    products = [op for op in reread(model).subgraphs[0].operators if op.name == "BATCH_MATMUL"]
    assert [op.code.version for op in products] == [3, 3], (
        "also the new one has the version that int16 needs"
    )


WHOLE = "int16 needs zero point 0 (expected 0, found 5), at QUANTIZE, tensor 'y'"
ILLEGAL = {
    "int16 to int8": (pair("int16[] q(5e-05, 0)", "int8[] q(0.01, 0)"), "int16, int16, found int8"),
    "int8 to int16": (pair("int8[] q(0.5, 0)", "int16[] q(0.01, 0)", left="int8"), "int8, int8, found int16"),
    "operands of two types": (
        pair("int16[] q(0.5, 0)", "int16[] q(0.01, 0)", right="int8"), "int16, int8, found int16"
    ),
    "zero point of the result": (pair("int16[] q(5e-05, 0)", "int16[] q(4e-05, 5)"), WHOLE),
    "zero point of the product": (pair("int16[] q(5e-05, -2)", "int16[] q(4e-05, 0)"), "found -2"),
    "per axis": (
        pair("int16[] q(5e-05, 0)", f"int16[] q([{', '.join(['4e-05'] * 32)}], [{', '.join('0' * 32)}], axis 2)"),
        "one scale",
    ),
    "scale 0": (pair("int16[] q(5e-05, 0)", "int16[] q(0.0, 0)"), "one scale"),
    "no scale": (pair("int16[] q(5e-05, 0)", "int16[]"), "one scale"),
    "read twice": (PLAIN.replace("  return %y", "  %z: int16[1,8,32] q(5e-05, 0) = ABS(%p)\n  return %y, %z"), "'p'"),
    "graph output": (PLAIN.replace("return %y", "return %y, %p"), "'p'"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "named"), ILLEGAL.values(), ids=ILLEGAL)
def test_what_is_not_legal_is_left_with_its_reason(text: str, named: str) -> None:
    model, report = only(text, "matmul_convert", verifier=Says(True))
    assert report.why == ("shared-result" if named == "'p'" else "quantization")
    assert named in report.reason
    assert to_text(model) == to_text(parse(text))


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


@pytest.mark.parametrize(("before", "after"), SCALES)
@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_results_move_by_one_step(
    dtype: str, before: float, after: float, verifier: Verifier
) -> None:
    """Rounding once instead of twice, on both kernel sets; int16 is held to one step more."""
    points = (0, 0) if dtype == "int16" else (4, -7)
    if dtype == "int8":
        before, after = before * 1e4, after * 1e4
    kinds = [
        f"{dtype}[] q({scale}, {zero})" for scale, zero in zip((before, after), points, strict=True)
    ]
    _, report = only(pair(*kinds, left=dtype), "matmul_convert", verifier=verifier)
    assert report.status == "converted", report.reason
    assert {ran.kernels for ran in report.proof.ran} == {"xnnpack", "reference"}
    steps = report.proof.check.count - (dtype == "int16")
    assert steps * after <= max(before, after) * (1 + 1e-6) < (steps + 1) * after


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (pair("int16[] q(1e-05, 0)", "int16[] q(0.0001, 0)"), CLIPPED.format("-0.3277 .. 0.3277")),
        (
            pair("int8[] q(0.001, 0)", "int8[] q(0.01, 0)", left="int8"),
            CLIPPED.format("-0.128 .. 0.127"),
        ),
        (pair("int8[] q(0.1, -128)", "int8[] q(0.2, 0)", left="int8"), CLIPPED.format("0 .. 25.5")),
        (PLAIN, ""),
        (pair("int8[] q(0.1, 3)", "int8[] q(0.1, 3)", left="int8"), ""),
        (pair("int16[] q(0.1, 0)", "int16[] q(0.15, 0)"), CLIPPED.format("-3277 .. 3277")),
        (
            pair("int8[] q(0.084268488, 0)", "int8[] q(0.046992115, 127)", left="int8"),
            CLIPPED.format("-10.79 .. 10.7"),
        ),
    ],
    ids=[
        "int16",
        "int8",
        "positive only",
        "wide",
        "equal",
        "beyond all products",
        "at an end that kernels round to the next code",
    ],
)
def test_what_was_clipped_is_told_and_fails_no_proof(
    text: str, note: str, verifier: Verifier
) -> None:
    for each in (None, verifier):
        _, report = only(text, "matmul_convert", verifier=each)
        assert (report.status, report.note) == ("converted", note)
    assert report.proof is not None
    assert not note or (report.proof.steps or 0) <= 1


@pytest.mark.parametrize("turn", [400, 16000])
def test_values_that_turn_back_beyond_the_clipped_range_are_found(
    turn: int, verifier: Verifier
) -> None:
    """Inputs that stay inside cannot show it."""
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
    narrow, wide, back, least = graph.operators
    graph.remove(back)
    graph.remove(least)
    least.outputs = wide.outputs
    rewrite = Rewrite(model, graph, (narrow, wide), (back, least))
    proof = verifier.verify(rewrite, Steps(1, clipped=(-328, 328)))
    assert not proof.holds
