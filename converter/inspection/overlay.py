"""Node data for Model Explorer: which operators a conversion rewrites, by what, and why others stay.

The format is that of ai-edge-model-explorer's `node_data_builder.ModelNodeData`: by graph (the subgraph's name) and
node (the operator's place in it), a text and a colour. Nothing is run or written.
"""

import os
from typing import Any

from edge_opt.conversion import convert
from edge_opt.ir import Operator, load
from edge_opt.passes import SiteReport, Status
from edge_opt.targets import Target

_Place = tuple[str, int]

_COLOURS = {Status.CONVERTED: "#bfe5cb", Status.SKIPPED: "#f7dcae", Status.ROLLED_BACK: "#f3b8b0"}
_SETTLED = "#e3e6ea"


def node_data(
    source: str | os.PathLike[str] | bytes, *, target: str | Target | None = None
) -> dict[str, Any]:
    """What a conversion makes of each operator of a model.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: there is no such target.
    """
    model = load(source)
    places = {
        operator: (graph.name, place)
        for graph in model.subgraphs
        for place, operator in enumerate(graph.operators)
    }
    makers = {tensor.name: place for operator, place in places.items() for tensor in operator.outputs}
    present = list(places)
    steps: list[tuple[list[Operator], int]] = []

    def on_progress(stage: str, *_: int) -> None:
        """Called once for each site: which operators are gone by now, and how many are new."""
        nonlocal present
        if stage == "rewriting":
            before, present = present, [one for graph in model.subgraphs for one in graph.operators]
            old, now = {*before}, {*present}
            steps.append(([operator for operator in before if operator not in now], len(now - old)))

    result = convert(model, target=target, verify="none", progress=on_progress)
    overlay: dict[str, Any] = {}
    for site, (gone, new) in zip(result.sites, steps, strict=True):
        for place in (places[operator] for operator in gone if operator in places):
            _add(overlay, place, site, f": {len(gone)} operators become {new}")
        if site.status is not Status.CONVERTED and site.operator in makers:
            _add(overlay, makers[site.operator], site, f": {site.reason}")
    return overlay


def _add(overlay: dict[str, Any], place: _Place, site: SiteReport, text: str) -> None:
    """One result for a graph and node; what came first about a node stays."""
    graph = {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
    colour = _SETTLED if site.settled else _COLOURS[site.status]
    name = f"{site.pass_name} #{site.index}"
    verdict = f"{'nothing to do' if site.settled else site.status} ({name})"
    title = f"converted by {name}" if site.status is Status.CONVERTED else verdict
    result = {"value": f"{title}{text}", "bgColor": colour, "textColor": "#111111"}
    overlay.setdefault(place[0], graph)["results"].setdefault(str(place[1]), result)
