"""Node data for Model Explorer: which operators a conversion rewrites, by what, and why others stay.

The format is that of ai-edge-model-explorer's `node_data_builder.ModelNodeData`: by graph (the subgraph's name) and
node (the operator's place in it), a text and a colour. Nothing is run or written.
"""

import os
from typing import Any

from edge_opt.conversion import convert
from edge_opt.ir import load
from edge_opt.passes import SiteReport, Status
from edge_opt.targets import Target

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
        operator: (graph.name, str(place))
        for graph in model.subgraphs
        for place, operator in enumerate(graph.operators)
    }
    makers = {tensor.name: place for operator, place in places.items() for tensor in operator.outputs}
    overlay: dict[str, Any] = {}
    for site in convert(model, target=target, verify="none").sites:
        if site.status is Status.CONVERTED:
            text = f"{len(site.replaced)} operators become {site.added}"
            nodes = [places[operator] for operator in site.replaced if operator in places]
        else:
            text, nodes = site.reason, [makers[site.operator]] if site.operator in makers else []
        for graph, node in nodes:
            data = {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
            # What came first about a node stays.
            overlay.setdefault(graph, data)["results"].setdefault(node, _result(site, text))
    return overlay


def _result(site: SiteReport, text: str) -> dict[str, str]:
    name = f"{site.pass_name} #{site.index}"
    verdict = f"{'nothing to do' if site.settled else site.status} ({name})"
    title = f"converted by {name}" if site.status is Status.CONVERTED else verdict
    colour = _SETTLED if site.settled else _COLOURS[site.status]
    return {"value": f"{title}: {text}", "bgColor": colour, "textColor": "#111111"}
