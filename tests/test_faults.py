"""The prover is tested by lying to it: a corrupted rewrite is stopped before anything is written, and found again."""

from collections.abc import Iterable

import pytest
from fault_graphs import GRAPHS, Edit
from faults import (
    CHECKS,
    FAULTS,
    FRAME,
    GRAPH,
    PARAMETERS_OF,
    PROOF,
    SHAPES,
    VERSION,
    Fault,
)
from pass_runs import run
from text_parser import parse

from edge_opt.ir import Constants, Model, to_bytes
from edge_opt.passes import PASSES, Context, Pass, Rewrite, Site, Status
from edge_opt.passes.ledger import UnverifiedChangeError
from edge_opt.proof.regions import RegionProver
from edge_opt.targets import Target, load_target

CASES = [pytest.param(each, graph, id=f"{each.name}-{graph}") for each in FAULTS for graph in each.graphs]
TILES = Target("tiles", "", rows_per_tile=2)
PARTS = Target("parts", "", mask_before_join=True)


class Lying(Pass):
    """A pass whose first rewrite is corrupted between building and checking; `others` are left alone or built too."""

    name = "lying"
    summary = "for tests"

    def __init__(self, fault: Fault, *, others: bool = False) -> None:
        self._fault = fault
        self._others = others
        self._honest = PASSES[fault.pass_name]
        self.demand = self._honest.demand  # type: ignore[misc]

    def sites(self, context: Context) -> Iterable[Site]:
        for number, site in enumerate(self._honest.sites(context)):
            if number == 0:
                yield Site(site.operator, lambda site=site: self._build(context, site))  # type: ignore[misc]
            elif self._others:
                yield site

    def _build(self, context: Context, site: Site) -> Rewrite:
        assert site.build is not None
        rewrite = site.build()
        edit = Edit(context.model, rewrite)
        self._fault.apply(edit)
        return edit.finish()


def target_of(fault: Fault, graph: str) -> Target:
    if fault.pass_name == "mask_before_join":
        return PARTS
    return TILES if fault.pass_name == "tile_rows" or graph.startswith("tiled") else load_target("generic")


def context_of(model: Model, target: Target) -> Context:
    graph = model.subgraphs[0]
    return Context(model, graph, model.signature_name(graph), target, Constants(model))


SAYS = {
    FRAME: ("the new region", "the operator", "the old region"),
    SHAPES: ("derived shape", "shapes", "inner", "must", "out of", "begin"),
    VERSION: ("its types need version",),
    PARAMETERS_OF: ("has parameters that",),
    PROOF: (
        "the new region differs",
        "the runtime refuses the new region",
        "the two versions cannot be compared",
    ),
}


@pytest.mark.parametrize(("fault", "graph"), CASES)
def test_a_corrupted_rewrite_is_stopped_before_anything_is_written(
    fault: Fault, graph: str, prover: RegionProver
) -> None:
    model = parse(GRAPHS[graph])
    untouched = to_bytes(model)
    target = target_of(fault, graph)
    if fault.caught == GRAPH:
        with pytest.raises(UnverifiedChangeError):
            run(model, Lying(fault), prover=prover, target=target)
        return
    (report,) = run(model, Lying(fault), prover=prover, target=target)
    assert report.status is Status.ROLLED_BACK, f"not stopped: {report}"
    assert which(report.reason, proved=report.proof is not None) == fault.caught, report.reason
    assert to_bytes(model) == untouched


def test_one_corrupted_rewrite_does_not_keep_the_others_back(prover: RegionProver) -> None:
    model = parse(GRAPHS["attention float32"])
    reports = run(model, Lying(FAULTS[0], others=True), prover=prover)
    assert [report.status for report in reports] == [Status.ROLLED_BACK, Status.CONVERTED]
    defined = [operator.outputs[0].name for operator in model.subgraphs[0].operators]
    assert "p1" in defined
    assert "p2/head_0" in defined


def which(reason: str, *, proved: bool) -> str:
    """The check that gives such a reason."""
    if SAYS[PARAMETERS_OF][0] in reason:
        return PARAMETERS_OF
    if proved:
        return PROOF
    if "its types need version" in reason:
        return VERSION
    return FRAME if reason.startswith(SAYS[FRAME]) else SHAPES


@pytest.mark.parametrize(("pass_name", "graph"), sorted({(f.pass_name, g) for f in FAULTS for g in f.graphs}))
def test_without_a_corruption_all_of_it_holds(pass_name: str, graph: str, prover: RegionProver) -> None:
    """Or the tests above would prove nothing."""
    honest = Fault("none", "", lambda edit: None, (graph,), pass_name)
    model, target = parse(GRAPHS[graph]), target_of(honest, graph)
    reports = run(model, Lying(honest, others=True), prover=prover, target=target)
    assert {report.status for report in reports} == {Status.CONVERTED}


def test_there_are_enough_of_them_and_each_check_is_needed() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {fault.caught for fault in FAULTS} == set(CHECKS)
