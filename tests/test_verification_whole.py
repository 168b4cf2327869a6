"""`convert --verify full`: how equal the whole models must be follows from what the rewrites demanded of regions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, QUANTIZED, Captured, Patch, run
from proof_models import tensor

from edge_opt import convert, load
from edge_opt.comparison.findings import SignatureComparison, measured
from edge_opt.conversion import ConversionResult, DifferenceFoundError
from edge_opt.inspection import conversion_report
from edge_opt.ir import Model, Operator, Quantization, Tensor, save, to_bytes
from edge_opt.ir.opening import Part
from edge_opt.ir.parse import parse
from edge_opt.ir.walk import placements
from edge_opt.passes import (
    Check,
    Exact,
    Proof,
    Rewrite,
    Status,
    Steps,
    Table,
    Verdict,
    Within,
    mha_to_sha,
)
from edge_opt.verification.examine import Verifier
from edge_opt.verification.whole import (
    Allowance,
    WholeSignature,
    allowance,
    by_graph,
    changed_on_purpose,
)


@pytest.fixture(scope="module")
def converting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The int16 demo with a QUANTIZE behind every product, whose own scale is larger: `matmul_convert` takes them."""
    model = load(QUANTIZED)
    graph = dict(model.entry_points())["decode"]
    for product in [operator for operator in graph.operators if operator.name == "BATCH_MATMUL"]:
        result = product.output
        coarser = Quantization.affine(1.07 * float(result.quantization.scale[0]))
        wide = Tensor(f"{result.name}/wide", result.shape, result.dtype, quantization=coarser)
        between = graph.add_tensor(wide)
        new = (
            Operator(product.code, product.inputs, (between,), product.options),
            Operator(model.operator_code("QUANTIZE", 2), (between,), (result,)),
        )
        graph.replace([product], placements(graph, [product], new))
    path = tmp_path_factory.mktemp("converting") / "converting.tflite"
    save(model, path)
    return path


def believe_bitwise_ones(monkeypatch: Patch) -> None:
    """Heads are joined in another order, and the proof of that, which demands the same bits, says that all is well."""
    prove, build = Verifier.verify, mha_to_sha._build

    def swapped(*arguments: Any) -> Rewrite:
        rewrite: Any = build(*arguments)
        new = list(rewrite.new)
        at = max(
            i for i, op in enumerate(new) if op.name == "CONCATENATION" and len(op.inputs) == 4
        )
        new[at] = Operator(new[at].code, new[at].inputs[::-1], new[at].outputs, new[at].options)
        return replace(rewrite, new=tuple(new))

    def lie(self: Verifier, rewrite: Any, check: Check) -> Proof:
        if isinstance(check, Exact):
            return Proof(check, holds=True, bitwise=True, max_abs=0.0)
        return prove(self, rewrite, check)

    monkeypatch.setattr(mha_to_sha, "_build", swapped)
    monkeypatch.setattr(Verifier, "verify", lie)


@pytest.fixture(scope="module")
def tolerant(converting: Path) -> ConversionResult:
    return convert(converting, dry_run=True, verify="full", signatures=["decode"])


def test_where_every_site_demanded_bits_so_does_the_whole(capsys: Captured) -> None:
    ran = run(
        capsys, "convert", DEMO, "--dry-run", "--verify", "full", "--signatures", "decode", "--json"
    )
    for signature in ran.json["whole"]:
        assert (signature["holds"], signature["comparison"]["bitwise"]) == (True, True)
        assert signature["allowance"] == {"relative": 0.0, "steps": 0, "because": ""}
    assert [signature["name"] for signature in ran.json["whole"]] == ["prefill_8", "decode"]


def test_a_site_that_demands_a_step_gives_every_output_room_and_says_why(
    tolerant: ConversionResult,
) -> None:
    assert {"matmul_convert", "mha_to_sha"} <= {site.pass_name for site in tolerant.converted}
    prefill, decode = tolerant.whole
    assert str(prefill.allowance) == "bit-identical, as is every rewritten region"
    assert decode.holds
    assert not decode.comparison.bitwise, "otherwise this shows nothing"
    assert "sites of matmul_convert" in str(decode.allowance)
    assert "steps" in decode.outcome
    assert decode.allowance.steps == 80
    (line,) = (line for line in tolerant.summary().splitlines() if line.startswith("  decode: "))
    assert line == f"  {decode.name}: {decode.outcome}; required: {decode.allowance}"
    for suffix in (".md", ".html"):
        text = conversion_report(tolerant).render(suffix).replace("\\_", "_")
        assert "required" in text
        assert "of matmul_convert" in text


def test_swapped_heads_are_found_under_a_tolerance(
    converting: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    believe_bitwise_ones(monkeypatch)
    with pytest.raises(DifferenceFoundError, match="nothing was written") as caught:
        convert(converting, tmp_path / "out.tflite", signatures=["decode"], verify="full")
    assert "signature 'decode'" in str(caught.value)
    assert "within 80 steps or" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    told = caught.value.result.to_dict()
    assert (caught.value.exit_code, told["output"], told["failure"]) == (1, None, str(caught.value))
    assert [each["holds"] for each in told["whole"]] == [True, False]


@pytest.mark.parametrize("dry", [True, False])
def test_a_bundle_is_compared_in_any_case(dry: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "m.litertlm"
    path.write_bytes(bundle([model_part("prefill_decode", DEMO.read_bytes())]))
    options: dict[str, Any] = {"verify": "full", "dry_run": dry, "signatures": ["decode"]}
    result = convert(path, None if dry else tmp_path / "good.litertlm", **options)
    assert [(each.name, each.holds) for each in result.whole] == [
        ("prefill_8", True),
        ("decode", True),
    ]
    believe_bitwise_ones(monkeypatch)
    with pytest.raises(DifferenceFoundError, match="signature 'decode'"):
        convert(path, None if dry else tmp_path / "bad.litertlm", **options)
    assert not (tmp_path / "bad.litertlm").exists()


@pytest.mark.parametrize("name", ["main", "graph"])
def test_a_model_without_signatures_has_the_room_of_its_only_entry_point(name: str) -> None:
    model = parse(f"""
subgraph {name} (%a: int16[1,4,8] q(0.001, 0), %b: int16[1,8,8] q(0.001, 0)) {{
  %p: int16[1,4,8] q(0.5, 0) = BATCH_MATMUL(%a, %b)
  %y: int16[1,4,8] q(0.6, 0) = QUANTIZE(%p)
  return %y
}}
""")
    (found,) = convert(to_bytes(model), dry_run=True, verify="full").whole
    assert (found.name, found.allowance.because) == (name, "1 site of matmul_convert")


def test_a_model_that_only_writes_its_state_has_nothing_to_compare() -> None:
    model = parse("""
subgraph main (%a: int16[1,4,8] q(0.001, 0), %b: int16[1,8,8] q(0.001, 0)) {
  %state: resource[] = VAR_HANDLE() {shared_name: "state"}
  %p: int16[1,4,8] q(0.5, 0) = BATCH_MATMUL(%a, %b)
  %y: int16[1,4,8] q(0.6, 0) = QUANTIZE(%p)
  ASSIGN_VARIABLE(%state, %y)
  return
}
""")
    (found,) = convert(to_bytes(model), dry_run=True, verify="full").whole
    assert found.outcome == "there is no output to compare"


def site(check: Check, *, bitwise: bool = True, **more: Any) -> Verdict:
    proof = Proof(check, holds=True, bitwise=bitwise, max_abs=0.0)
    facts = {"proof": proof, "signature": "decode", **more}
    return Verdict("p", index=0, operator="", status=Status.CONVERTED, **facts)


def allowed(model: Model, *sites: Verdict) -> Allowance:
    graph = dict(model.entry_points())["decode"]
    return allowance(by_graph(Part(model), sites)[graph], graph)


def test_room_adds_up_over_sites_and_quantized_activations_have_their_own() -> None:
    real, coded = load(DEMO), load(QUANTIZED)
    close, step = Within(1e-6), Steps(1)
    assert allowed(real, site(Exact())) == Allowance()
    assert allowed(real, site(close), site(close)).relative == pytest.approx(3.2e-5)
    assert allowed(real, site(Exact(), bitwise=False)).relative == pytest.approx(1.6e-5)
    assert allowed(real, site(close, proof=None)) == Allowance()
    found = allowed(coded, site(step))
    assert found.relative == pytest.approx(80 / 65536)
    assert str(found).endswith("because of 1 site of p")
    assert allowed(real, site(close, signature="prefill_8")) == Allowance()


def test_an_output_of_more_bits_than_the_activations_has_room_for_as_much_of_its_range() -> None:
    model = load(QUANTIZED)
    graph = dict(model.entry_points())["decode"]
    softmax = next(operator for operator in graph.operators if operator.name == "SOFTMAX")
    softmax.output.dtype = type(softmax.output.dtype).INT8
    found = allowed(model, site(Steps(1)))
    assert found.relative == pytest.approx(24 / 256)
    assert found.steps == 24


@pytest.mark.parametrize(("scale", "holds"), [(0.0, False), (0.5, True)])
def test_room_is_for_real_numbers_and_not_for_tokens(scale: float, holds: bool) -> None:
    info = tensor("y", 2, dtype="int32", scale=scale)
    a = np.array([151643, 7], np.int32)
    output = measured(info, info, [(a, a + 2)])
    room = Allowance(relative=0.1, steps=24, because="a site")
    whole = WholeSignature("decode", room, SignatureComparison("decode", (output,)))
    assert whole.holds is holds
    assert whole.violation.endswith("" if holds else "but must be equal, as it has no rounding")


@pytest.mark.parametrize(
    ("operator", "bits"),
    [
        ("FULLY_CONNECTED(%x, int8[4,4]{splat 1} q(0.5, 0))", 8),
        ("FULLY_CONNECTED(%x, float32[4,4]{splat 1.0})", None),
        ("GATHER(int8[4,4]{splat 1} q(0.5, 0), %i)", None),
        ("EMBEDDING_LOOKUP(%i, int8[4,4]{splat 1} q(0.5, 0))", None),
        ("DEQUANTIZE(int8[4,4]{splat 1} q(0.5, 0))", None),
    ],
)
def test_floats_that_meet_integer_weights_have_the_room_of_kernels(
    operator: str, bits: int | None
) -> None:
    """The kernels quantize each row of such an activation to 8 bits; what only reads integers does not."""
    given = "%x: float32[4,4], %i: int32[4]"
    model = parse(f"subgraph main ({given}) {{\n  %y: float32[4,4] = {operator}\n  return %y\n}}\n")
    found = allowance([site(Within(1e-6))], model.subgraphs[0])
    assert found.relative == pytest.approx(16e-6 if bits is None else 24 / 2**bits)


def test_signatures_of_a_graph_that_changes_on_purpose_change_with_it() -> None:
    text = "subgraph main (%x: float32[4]) {\n  %y: float32[4] = ABS(%x)\n  return %y\n}\n"
    names = ("first", "second")
    model = parse("".join(f"signature {name} = #0 (x=%x) -> (y=%y)\n" for name in names) + text)
    for check, changed in ((Table(0.5), [*names]), (Exact(), [])):
        sites = by_graph(Part(model), [site(check, signature="first")])
        assert changed_on_purpose(model, sites) == changed
