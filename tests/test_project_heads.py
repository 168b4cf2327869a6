"""project_heads: the output projection summed head by head, where heads stand side by side in front of it."""

from dataclasses import replace

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED
from fault_graphs import Edit
from pass_runs import convert_text, names

from edge_opt.conversion import convert
from edge_opt.ir import Constants, Model, load
from edge_opt.ir.text import parse
from edge_opt.passes import Context, Status
from edge_opt.passes.contract import Site
from edge_opt.passes.project_heads import ProjectHeads
from edge_opt.passes.rewrite import Rewrite
from edge_opt.targets import load_target
from edge_opt.verify.compare import compare
from edge_opt.verify.regions import RegionProver

PER_HEAD = replace(load_target("generic"), projection_per_head=True)


def two_heads(*, activation: int = 0, joined: str = "%h0, %h1") -> str:
    weights = ", ".join(map(str, range(24)))
    options = f"{{keep_num_dims: true, fused_activation_function: {activation}}}"
    return f"""
    subgraph main (%q: float32[1,4,4], %k: float32[1,6,4], %v: float32[1,6,4], %b: float32[3]) {{
      %l0: float32[1,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p0: float32[1,4,6] = SOFTMAX(%l0) {{beta: 1.0}}
      %h0: float32[1,4,4] = BATCH_MATMUL(%p0, %v)
      %l1: float32[1,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
      %p1: float32[1,4,6] = SOFTMAX(%l1) {{beta: 1.0}}
      %h1: float32[1,4,4] = BATCH_MATMUL(%p1, %v)
      %all: float32[1,4,8] = CONCATENATION({joined}) {{axis: -1}}
      %out: float32[1,4,3] = FULLY_CONNECTED(%all, float32[3,8]{{{weights}}}, %b) {options}
      return %out
    }}"""


def test_off_unless_the_target_asks_for_it() -> None:
    _, sites = convert_text(two_heads(), "project_heads")
    assert sites == []


def test_one_projection_for_each_head_and_the_bias_once() -> None:
    model, sites = convert_text(two_heads(), "project_heads", target=PER_HEAD)
    assert [site.status for site in sites] == [Status.CONVERTED]
    assert "CONCATENATION" not in names(model)
    projections = [op for op in model.subgraphs[0].operators if op.name == "FULLY_CONNECTED"]
    weights = np.arange(24, dtype=np.float32).reshape(3, 8)
    np.testing.assert_array_equal(projections[0].input(1).array(), weights[:, :4])
    np.testing.assert_array_equal(projections[1].input(1).array(), weights[:, 4:])
    assert [op.inputs[2] is None for op in projections] == [False, True]
    assert names(model)[-1] == "ADD"


def test_heads_that_are_read_elsewhere_too_stay_joined_for_that() -> None:
    text = two_heads().replace("return %out", "return %out, %all")
    model, sites = convert_text(text, "project_heads", target=PER_HEAD)
    assert [(site.status, site.reason) for site in sites] == [(Status.CONVERTED, "")]
    assert names(model).count("FULLY_CONNECTED") == 2
    assert names(model).count("CONCATENATION") == 1


def test_the_activation_is_applied_to_the_sum() -> None:
    model, _ = convert_text(two_heads(activation=1), "project_heads", target=PER_HEAD)
    kinds = [
        (op.name, op.option("fused_activation_function"))
        for op in model.subgraphs[0].operators
        if op.name in ("FULLY_CONNECTED", "ADD")
    ]
    assert kinds == [("FULLY_CONNECTED", 0), ("FULLY_CONNECTED", 0), ("ADD", 1)]


@pytest.mark.parametrize("joined", ["%h0, %q", "%q, %q"])
def test_what_is_no_head_is_not_projected_by_itself(joined: str) -> None:
    _, sites = convert_text(two_heads(joined=joined), "project_heads", target=PER_HEAD)
    assert sites == []


def converted(path: object) -> Model:
    result = convert(path, target=PER_HEAD, dry_run=True)  # type: ignore[call-overload]
    assert result.model is not None
    return result.model  # type: ignore[no-any-return]


def test_a_real_export_stays_within_rounding_and_every_head_has_its_projection() -> None:
    model = converted(DEMO)
    report = compare(DEMO, model, atol=1e-5, rtol=1e-4)
    assert report.equal
    decode = dict(model.entry_points())["decode"]
    before = dict(load(DEMO).entry_points())["decode"]
    counts = [sum(op.name == "FULLY_CONNECTED" for op in graph.operators) for graph in (before, decode)]
    assert counts[1] - counts[0] == 3 * 3, "three layers of four heads each"


def test_sums_of_integers_are_left() -> None:
    result = convert(QUANTIZED, target=PER_HEAD, dry_run=True, require_all=True, verify="none")
    left = [site for site in result.sites if site.pass_name == "project_heads"]
    assert left
    assert all(site.settled and "rounded once more" in site.reason for site in left)


@pytest.mark.parametrize("corruption", ["columns of another head", "bias twice", "a head twice"])
def test_the_proof_finds_a_projection_that_is_wrong(corruption: str) -> None:
    model = parse(two_heads())
    context = Context(model, model.subgraphs[0], "main", PER_HEAD, Constants(model))
    (site,) = ProjectHeads().sites(context)
    assert isinstance(site, Site)
    with RegionProver() as prover:
        rewrite = site.build()
        assert isinstance(rewrite, Rewrite)
        assert prover.prove(rewrite, ProjectHeads.demand).holds
        edit = Edit(model, rewrite)
        first, second = (op for op in edit.new if op.name == "FULLY_CONNECTED")
        if corruption == "columns of another head":
            edit.read(second, 1, first.input(1))
        elif corruption == "bias twice":
            edit.read(second, 2, first.input(2))
        else:
            edit.read(second, 0, first.input(0))
        proof = prover.prove(edit.finish(), ProjectHeads.demand)
    assert not proof.holds
    assert "differs" in proof.reason
