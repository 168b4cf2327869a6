"""Node data for Model Explorer: which operators a conversion rewrites or rewrote, by what, and why others stay.

The format is that of ai-edge-model-explorer's `node_data_builder.ModelNodeData`: by graph (the subgraph's name) and
node (the operator's place in it), a text and a colour. Nothing is run or written.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_opt.conversion import convert
from edge_opt.ir import load
from edge_opt.passes import Status
from edge_opt.schema.atomic import replacing
from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    from edge_opt.ir import Model, Operator, Subgraph
    from edge_opt.passes import SiteReport
    from edge_opt.targets import Target

_COLOURS = {
    Status.CONVERTED: "#bfe5cb",
    Status.SKIPPED: "#f7dcae",
    Status.ROLLED_BACK: "#f3b8b0",
}
_SETTLED = "#e3e6ea"
_PART = re.compile(r"/(head|rows|group)_(\d+)")


def node_data(
    source: str | os.PathLike[str] | bytes,
    converted: str | os.PathLike[str] | bytes | None = None,
    *,
    target: str | Target | None = None,
) -> dict[str, Any]:
    """An overlay for `source`: what a conversion makes of each operator; with `converted`, one for that model.

    Args:
        source: the model as it was.
        converted: what a conversion with the same target made of it.
        target: as for `edge_opt.convert`.

    Raises:
        ModelFormatError: one of the two is not a valid model.
        UsageError: there is no such target, or `converted` is not made of `source`.
    """
    model = load(source)
    rewriting = _Rewriting(model)
    result = convert(model, target=target, verify="none", progress=rewriting.on_progress)
    if converted is None:
        return rewriting.overlay_before(result.sites)
    return rewriting.overlay_after(result.sites, load(converted))


def write_node_data(data: dict[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write an overlay as Model Explorer reads it.

    Raises:
        UsageError: the file exists and `overwrite` is False.
        OutputError: it cannot be written.
    """
    text = json.dumps(data, indent=2) + "\n"
    with replacing(path, overwrite=overwrite) as target, os.fdopen(os.dup(target), "wb") as file:
        file.write(text.encode())


@dataclass(slots=True)
class _Step:
    """What one site took away and put in."""

    old: list[Operator]
    new: list[Operator]


@dataclass(slots=True)
class _Rewriting:
    """Watches a conversion: after each site, which operators are gone and which are new."""

    model: Model
    places: dict[int, tuple[str, int]] = field(init=False)
    kept: list[Operator] = field(init=False)
    known: dict[int, Operator] = field(init=False)
    names: dict[str, tuple[str, int]] = field(init=False)
    steps: list[_Step] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.places, self.names = {}, {}
        self.kept = []
        for graph in self.model.subgraphs:
            for place, operator in enumerate(graph.operators):
                self.places[id(operator)] = graph.name, place
                self.kept.append(operator)
                self.names.update({tensor.name: (graph.name, place) for tensor in operator.outputs})
        self.known = {id(operator): operator for operator in self.kept}

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Called once for each site."""
        del done, total
        if stage != "rewriting":
            return
        present = [operator for graph in self.model.subgraphs for operator in graph.operators]
        now = {id(operator) for operator in present}
        old = [operator for operator in self.kept if id(operator) not in now]
        new = [operator for operator in present if id(operator) not in self.known]
        self.steps.append(_Step(old, new))
        self.kept = present
        # Operators that are gone stay known: their identity must not be given to another.
        self.known.update({id(operator): operator for operator in new})

    def overlay_before(self, sites: list[SiteReport]) -> dict[str, Any]:
        """For the model as it was."""
        overlay = _Overlay()
        for site, step in zip(sites, self.steps, strict=True):
            for operator in step.old:
                if id(operator) in self.places:
                    count = f"{len(step.old)} operators become {len(step.new)}"
                    overlay.add(*self.places[id(operator)], f"{_title(site)}: {count}", _colour(site))
            if site.status is not Status.CONVERTED and site.operator in self.names:
                overlay.add(*self.names[site.operator], f"{_title(site)}: {site.reason}", _colour(site))
        return overlay.graphs

    def overlay_after(self, sites: list[SiteReport], converted: Model) -> dict[str, Any]:
        """For the model that came of it: its new operators, found by the tensors that they define."""
        made = {
            tensor.name: site
            for site, step in zip(sites, self.steps, strict=True)
            for operator in step.new
            for tensor in operator.outputs
        }
        overlay = _Overlay()
        for graph in converted.subgraphs:
            for place, operator in enumerate(graph.operators):
                name = operator.outputs[0].name if operator.outputs else ""
                if name in made:
                    site = made[name]
                    part = _part(name) if len(operator.outputs) == 1 else ""
                    overlay.add(graph.name, place, f"{_title(site)}{part}", _colour(site))
        own = {tensor.name for graph in converted.subgraphs for tensor in graph.tensors}
        fresh = made.keys() - self.names.keys()
        if fresh and not fresh & own:
            raise UsageError(
                "the converted model has no operator that converting the first one makes: give its own"
            )
        for site in sites:
            if site.status is not Status.CONVERTED:
                found = _place(converted, site.operator)
                if found is not None:
                    overlay.add(*found, f"{_title(site)}: {site.reason}", _colour(site))
        return overlay.graphs


class _Overlay:
    """Results by graph and node; what came first about a node stays."""

    def __init__(self) -> None:
        self.graphs: dict[str, Any] = {}

    def add(self, graph: str, place: int, text: str, colour: str) -> None:
        data = self.graphs.setdefault(
            graph, {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
        )
        data["results"].setdefault(str(place), {"value": text, "bgColor": colour, "textColor": "#111111"})


def _place(model: Model, tensor: str) -> tuple[str, int] | None:
    for graph in model.subgraphs:
        place = _place_in(graph, tensor)
        if place is not None:
            return graph.name, place
    return None


def _place_in(graph: Subgraph, tensor: str) -> int | None:
    pairs = enumerate(graph.operators)
    return next((place for place, operator in pairs if any(t.name == tensor for t in operator.outputs)), None)


def _title(site: SiteReport) -> str:
    name = f"{site.pass_name} #{site.index}"
    if site.status is Status.CONVERTED:
        return f"converted by {name}"
    return f"{'nothing to do' if site.settled else site.status} ({name})"


def _part(name: str) -> str:
    """`.../head_2` -> `, head 2`."""
    found = _PART.search(name)
    return f", {found[1]} {found[2]}" if found else ""


def _colour(site: SiteReport) -> str:
    return _SETTLED if site.settled else _COLOURS[site.status]
