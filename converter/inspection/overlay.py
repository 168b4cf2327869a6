"""Node data for Model Explorer: which operators a conversion rewrites or rewrote, by what, and why others stay.

The format is that of ai-edge-model-explorer's `node_data_builder.ModelNodeData`: by graph (the subgraph's name) and
node (the operator's place in it), a text and a colour. Nothing is run or written.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from edge_opt.conversion import convert
from edge_opt.ir import load
from edge_opt.passes import Status
from edge_opt.schema.atomic import replacing
from edge_opt.schema.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.ir import Model, Operator
    from edge_opt.passes import SiteReport
    from edge_opt.targets import Target

    _Place = tuple[str, int]

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


class _Rewriting:
    """Watches a conversion: after each site, which operators are gone and which are new."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._places = {id(operator): place for operator, place in _places(model)}
        self._names = _makers(model)
        self._kept = [operator for operator, _ in _places(model)]
        # Operators that are gone stay known: their identity must not be given to another.
        self._known = {id(operator): operator for operator in self._kept}
        self._steps: list[tuple[list[Operator], list[Operator]]] = []

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Called once for each site."""
        del done, total
        if stage != "rewriting":
            return
        present = [operator for operator, _ in _places(self._model)]
        now = {id(operator) for operator in present}
        old = [operator for operator in self._kept if id(operator) not in now]
        new = [operator for operator in present if id(operator) not in self._known]
        self._steps.append((old, new))
        self._kept = present
        self._known.update({id(operator): operator for operator in new})

    def overlay_before(self, sites: list[SiteReport]) -> dict[str, Any]:
        """For the model as it was."""
        overlay: dict[str, Any] = {}
        for site, (old, new) in zip(sites, self._steps, strict=True):
            for operator in old:
                if id(operator) in self._places:
                    _add(
                        overlay, self._places[id(operator)], site, f": {len(old)} operators become {len(new)}"
                    )
            if site.status is not Status.CONVERTED and site.operator in self._names:
                _add(overlay, self._names[site.operator], site, f": {site.reason}")
        return overlay

    def overlay_after(self, sites: list[SiteReport], converted: Model) -> dict[str, Any]:
        """For the model that came of it: its new operators, found by the tensors that they define."""
        made = {
            tensor.name: site
            for site, (_, new) in zip(sites, self._steps, strict=True)
            for operator in new
            for tensor in operator.outputs
        }
        overlay: dict[str, Any] = {}
        for operator, place in _places(converted):
            name = operator.outputs[0].name if operator.outputs else ""
            if name in made:
                _add(overlay, place, made[name], _part(name) if len(operator.outputs) == 1 else "")
        own = _makers(converted)
        fresh = made.keys() - self._names.keys()
        if fresh and not fresh & own.keys():
            raise UsageError(
                "the converted model has no operator that converting the first one makes: give its own"
            )
        for site in sites:
            if site.status is not Status.CONVERTED and site.operator in own:
                _add(overlay, own[site.operator], site, f": {site.reason}")
        return overlay


def _places(model: Model) -> Iterator[tuple[Operator, _Place]]:
    for graph in model.subgraphs:
        for place, operator in enumerate(graph.operators):
            yield operator, (graph.name, place)


def _makers(model: Model) -> dict[str, _Place]:
    """The operator that defines each tensor, by the tensor's name."""
    return {tensor.name: place for operator, place in _places(model) for tensor in operator.outputs}


def _add(overlay: dict[str, Any], place: _Place, site: SiteReport, text: str) -> None:
    """One result for a graph and node; what came first about a node stays."""
    graph = {"name": "edge-opt", "results": {}, "showExpandedSummaryOnGroupNode": True}
    colour = _SETTLED if site.settled else _COLOURS[site.status]
    result = {"value": f"{_title(site)}{text}", "bgColor": colour, "textColor": "#111111"}
    overlay.setdefault(place[0], graph)["results"].setdefault(str(place[1]), result)


def _title(site: SiteReport) -> str:
    name = f"{site.pass_name} #{site.index}"
    if site.status is Status.CONVERTED:
        return f"converted by {name}"
    return f"{'nothing to do' if site.settled else site.status} ({name})"


def _part(name: str) -> str:
    """`.../head_2` -> `, head 2`."""
    found = _PART.search(name)
    return f", {found[1]} {found[2]}" if found else ""
