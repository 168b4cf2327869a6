"""What a pass is, what happens to each place where it could apply, and what is told of it afterwards."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from edge_opt.base.errors import TRACEBACK, EdgeOptError
from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import CONTROL_EDGES, remove_uncalled
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.frame import Frame, check_frame
from edge_opt.passes.rewrite import (
    Rewrite,
    check_parameters,
    check_shapes,
    check_versions,
    commit,
    remove_dead,
    share_equal,
)
from edge_opt.targets import Target


class Status(StrEnum):
    """What became of a site."""

    CONVERTED = "converted"
    SKIPPED = "skipped"
    ROLLED_BACK = "rolled-back"


@dataclass(frozen=True, slots=True)
class Demand:
    """How equal the new region must be to the old one, on random inputs and both kernel sets.

    `bitwise`: the same bits. `relative`: `|a - b| <= tolerance * max|a|` on rows that are not masked everywhere,
    with the maximum of the whole tensor: a channel that is a million times smaller than another one is not held to it.
    `steps`: integers at most `tolerance` quantization steps apart. The same holds on every kind of extreme inputs
    (`edge_opt.runtime.extremes.KINDS`) but the `spared` ones, on which both may rightly differ; `relative` says nothing
    of any, because a softmax makes a large difference of a small one between large logits.
    `absolute`: `|a - b| <= tolerance`, where the new region is held to the rewrite's `reference` in float.
    """

    kind: str = "bitwise"
    tolerance: float = 0.0
    spared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kind if self.kind == "bitwise" else f"{self.kind} {self.tolerance:g}"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a proof ran on one kernel set: everything, or these `rows` of `length`."""

    kernels: str
    rows: tuple[int, ...] = ()
    length: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For reports; `rows` is null where everything was run."""
        return {"kernels": self.kernels, "rows": list(self.rows) or None, "of": self.length or None}


@dataclass(frozen=True, slots=True)
class Proof(Record):
    """What running both versions of a region gave; `None` where a figure does not apply.

    `note` says where the demand was met in another way than stated; `repeated` that an equal region was run before.
    `ran` says on which kernels, and how much; `extremes` whether extreme inputs were run too. `open` is true where
    nothing was shown either way: there was no time, or no inputs tell right from wrong. Then `holds` is false, and
    `reason` says what is missing.
    """

    demand: Demand
    holds: bool
    bitwise: bool
    max_abs: float
    steps: int | None = None
    fully_masked_rows_max_abs: float | None = None
    reason: str = ""
    note: str = ""
    repeated: bool = False
    ran: tuple[Ran, ...] = ()
    open: bool = False
    extremes: bool = False

    _left_out = ("holds", "reason", "open")
    _or_null = ("note",)

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {**Record.to_dict(self), "demand": str(self.demand)}


class Prover(Protocol):
    """Runs both versions of a region."""

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Whether the new region does what the old one did, to the demand."""

    def expect(self, coming: Iterator[tuple[Rewrite, Demand]]) -> None:
        """What will probably be asked for next, in that order; may be begun while a proof takes its time."""


@dataclass(slots=True)
class SiteReport(Record):
    """One place where a pass could apply, and the verdict; `settled` where there was nothing to do.

    `note` is what a user should know of a site that was converted: values clamped, or no longer saturated. `is_bug`: it
    stays because of a mistake of edge-opt, which should be reported. `replaced` are the operators that a rewrite took
    out of the graph, and `added` counts those that it put in.
    """

    pass_name: str
    signature: str
    index: int
    status: Status
    reason: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    operator: str = ""
    settled: bool = False
    proof: Proof | None = None
    note: str = ""
    is_bug: bool = False
    replaced: tuple[Operator, ...] = field(default=(), repr=False)
    added: int = 0

    _left_out = ("pass_name", "settled", "is_bug", "replaced", "added")
    _or_null = ("reason", "note")

    def to_dict(self) -> dict[str, Any]:
        """For reports; `index` counts the sites of a pass in a signature."""
        return {"pass": self.pass_name, **Record.to_dict(self)}


@dataclass(frozen=True, slots=True)
class MaskedRows(Record):
    """What converted `sites` change in rows that are masked everywhere: by up to `max_abs`, infinite where from NaN."""

    sites: int
    max_abs: float
    passes: tuple[str, ...]

    @classmethod
    def of(cls, sites: Iterable[SiteReport]) -> MaskedRows | None:
        """None where the proofs found no change."""
        converted = [(s.pass_name, s.proof) for s in sites if s.status is Status.CONVERTED and s.proof]
        figures = [(name, proof.fully_masked_rows_max_abs) for name, proof in converted]
        changes = [(name, figure) for name, figure in figures if figure]
        if not changes:
            return None
        passes = tuple(dict.fromkeys(name for name, _ in changes))
        return cls(len(changes), max(figure for _, figure in changes), passes)

    @property
    def how(self) -> str:
        """How much they change."""
        return f"by up to {self.max_abs:.3g}" if self.max_abs < math.inf else "from NaN to numbers"

    def __str__(self) -> str:
        count = f"{many(self.sites, 'site')} of {', '.join(self.passes)}"
        return f"rows that are masked everywhere change {self.how} ({count})"


@dataclass(frozen=True, slots=True)
class Site:
    """A place that matched; `build` makes the rewrite aside, or raises RefusedError where it cannot.

    `demand`: other than the pass's. `note`: what to tell of it once it is converted.
    """

    operator: Operator
    build: Callable[[], Rewrite]
    heads: int | None = None
    kv_heads: int | None = None
    demand: Demand | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class SkippedSite:
    """A place that did not match, or (`settled`) needs nothing done."""

    operator: Operator
    reason: str
    settled: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    is_bug: bool = False


@dataclass(slots=True)
class Context:
    """What a pass works on: one entry point of a model, for a target.

    `positions`: how many the caches of the model, or of its bundle, have room for; None where nothing tells.
    """

    model: Model
    subgraph: Subgraph
    signature: str
    target: Target
    constants: Constants
    prover: Prover | None = None
    on_site: Callable[[SiteReport], None] | None = None
    positions: int | None = None

    def left_open(self, operators: Iterable[Operator]) -> str:
        """Why operators whose tensors have open lengths stay, and what closes these; empty where there are none."""
        tensors = (tensor for operator in operators for tensor in (*operator.inputs, *operator.outputs))
        if not any(tensor is not None and tensor.is_dynamic for tensor in tensors):
            return ""
        given = next((s.inputs for s in self.model.signatures if s.subgraph is self.subgraph), None)
        options = shape_options({t.name: t for t in self.subgraph.inputs} if given is None else given)
        remedy = f"give {' '.join(options)}" if options else "they follow from data"
        return f"lengths are known only at run time: {remedy}"

    @property
    def frozen(self) -> str:
        """Why nothing in this model may be rewritten; empty where it may."""
        if all(entry.name != CONTROL_EDGES for entry in self.model.metadata):
            return ""
        return f"the model orders operators by index (metadata {CONTROL_EDGES}), which a rewrite breaks"


def shape_options(inputs: Mapping[str, Tensor]) -> list[str]:
    """The options that give inputs of open lengths static shapes, with ? for the sizes to fill in."""
    return [
        f"--shape {name}={','.join('?' if size < 0 else str(size) for size in tensor.shape_signature)}"
        for name, tensor in inputs.items()
        if tensor.is_dynamic and tensor.shape_signature
    ]


def site_or_reason(operator: Operator, make: Callable[[], Site]) -> Site | SkippedSite:
    """The site at an operator, or why there is none: what `make` raises as RefusedError."""
    try:
        return make()
    except RefusedError as refused:
        return SkippedSite(operator, str(refused))


class Pass(ABC):
    """A rewrite that applies at sites, each on its own: matched, built aside, checked, proved, committed or dropped."""

    name: ClassVar[str]
    summary: ClassVar[str]
    demand: ClassVar[Demand] = Demand()
    repeats: ClassVar[bool] = False
    """Its rewrites may bring further sites, which are then looked for again."""

    @abstractmethod
    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """Every place where the pass could apply, in execution order."""


class BrokenFrameError(EdgeOptError):
    """A pass changed what it must leave alone; the model in memory is worth nothing any more."""

    exit_code = 1


def run_pass(chosen: Pass, context: Context) -> list[SiteReport]:
    """Apply a pass wherever it matches; a site that fails a check leaves the graph as it was.

    Raises:
        BrokenFrameError: the pass changed the graph outside its rewrites. That is a mistake of ours, not of the model.
    """
    reports: list[SiteReport] = []
    subgraphs = len(context.model.subgraphs)
    sites = deque(_sites(chosen, context))
    frame = Frame(context.model, context.subgraph) if any(isinstance(site, Site) for site in sites) else None
    staying: list[Operator] = []
    added: list[Operator] = []
    visited: set[Operator] = set()
    if context.prover is not None:
        context.prover.expect(_likely_rewrites(chosen, context, list(sites), visited))
    while sites:
        site = sites.popleft()
        visited.add(site.operator)
        report = _report_on(site, chosen, context, len(reports))
        rewrite = _checked_rewrite(site, chosen, context, report) if isinstance(site, Site) else None
        if rewrite is not None:
            assert frame is not None
            frame.allow(rewrite)
            staying += commit(rewrite)
            added += rewrite.added()
        reports.append(report)
        if context.on_site is not None:
            context.on_site(report)
        if not sites and chosen.repeats:
            sites.extend(further for further in _sites(chosen, context) if further.operator not in visited)
    try:
        if frame is not None:
            frame.check()
    except RefusedError as refused:
        raise BrokenFrameError(
            f"pass '{chosen.name}' changed signature '{context.signature}' outside its rewrites: {refused}; nothing "
            f"was written, convert with skip='{chosen.name}' and report this mistake of edge-opt"
        ) from refused
    remove_dead(context.subgraph, staying, context.model.subgraphs)
    share_equal(context.subgraph, added)
    remove_uncalled(context.model, subgraphs)
    return reports


def _sites(chosen: Pass, context: Context) -> Iterator[Site | SkippedSite]:
    """The sites of a pass; where looking for them fails, those until then, and what failed."""
    try:
        yield from chosen.sites(context)
    except Exception as error:
        last = deque(context.subgraph.operators, 1)
        yield SkippedSite(last[0], f"looking for further sites failed: {_bug(error)}", is_bug=True)


def _likely_rewrites(
    chosen: Pass, context: Context, sites: Iterable[Site | SkippedSite], visited: Collection[Operator]
) -> Iterator[tuple[Rewrite, Demand]]:
    """The rewrites of sites that were not visited, were the graph to stay as it is; for the prover to begin with."""
    for site in sites:
        if isinstance(site, Site) and site.operator not in visited:
            with suppress(Exception):  # it is reported when it is the site's turn
                yield site.build(), site.demand or chosen.demand


def _report_on(site: Site | SkippedSite, chosen: Pass, context: Context, index: int) -> SiteReport:
    """The report of a site, with the reason where it stays whatever a rewrite would be."""
    name, heads = site.operator.outputs[0].name, (site.heads, site.kv_heads)
    report = SiteReport(chosen.name, context.signature, index, Status.SKIPPED, "", *heads, operator=name)
    if isinstance(site, SkippedSite):
        report.reason, report.settled, report.is_bug = site.reason, site.settled, site.is_bug
    if not report.is_bug and (left_open := context.left_open([site.operator])):
        report.reason, report.settled = left_open, False
    report.reason = report.reason or context.frozen
    return report


def _checked_rewrite(site: Site, chosen: Pass, context: Context, report: SiteReport) -> Rewrite | None:
    """The rewrite of a site, if it passes every check and the proof; else the report says why it stays.

    An error that nobody foresaw is this site's reason, and the others go on.
    """
    if report.reason:
        return None
    try:
        rewrite = site.build()
        report.reason = context.left_open((*rewrite.old, *rewrite.added()))
        if report.reason:
            return None
        report.status = Status.ROLLED_BACK  # unless all that follows holds
        check_frame(rewrite)
        check_shapes(rewrite.derivable(), rewrite.calls)
        check_versions(rewrite)
        context.target.check(rewrite.added(), rewrite.old)
        if context.prover is not None:
            report.proof = context.prover.prove(rewrite, site.demand or chosen.demand)
            if not report.proof.holds:
                report.status = Status.SKIPPED if report.proof.open else Status.ROLLED_BACK
                raise RefusedError(report.proof.reason)
        # After the proof, which says by how much results differ where they do.
        check_parameters(rewrite)
    except RefusedError as refused:
        report.reason = str(refused)
        return None
    except Exception as error:
        report.status, report.reason, report.is_bug = Status.ROLLED_BACK, _bug(error), True
        return None
    report.status, report.note = Status.CONVERTED, site.note
    report.replaced, report.added = rewrite.removed(), len(rewrite.added())
    return rewrite


def _bug(error: Exception) -> str:
    """The words for an error that is a mistake of ours; others are raised, and all where a traceback is wanted."""
    if isinstance(error, EdgeOptError) or os.environ.get(TRACEBACK):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a bug in edge-opt, please report it with the model's source: {what} ({TRACEBACK}=1 shows where)"
