"""What a pass is, what happens to each place where it could apply, and what is told of it afterwards."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import CONTROL_EDGES, remove_uncalled
from edge_opt.ir.refusal import Refusal
from edge_opt.output.errors import TRACEBACK, EdgeOptError
from edge_opt.passes.frame import Frame, frame_violation
from edge_opt.passes.rewrite import (
    Rewrite,
    commit,
    parameter_violation,
    remove_dead,
    shape_violation,
    share_equal,
    version_violation,
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
    (`edge_opt.proof.extremes.KINDS`) but the `spared` ones, on which both may rightly differ; `relative` says nothing
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
        rows = list(self.rows) if self.rows else None
        return {"kernels": self.kernels, "rows": rows, "of": self.length or None}


@dataclass(frozen=True, slots=True)
class Proof:
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

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "demand": str(self.demand),
            "bitwise": self.bitwise,
            "max_abs": self.max_abs,
            "steps": self.steps,
            "fully_masked_rows_max_abs": self.fully_masked_rows_max_abs,
            "note": self.note or None,
            "repeated": self.repeated,
            "ran": [ran.to_dict() for ran in self.ran],
            "extremes": self.extremes,
        }


class Prover(Protocol):
    """Runs both versions of a region."""

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Whether the new region does what the old one did, to the demand."""

    def expect(self, coming: Iterator[tuple[Rewrite, Demand]]) -> None:
        """What will probably be asked for next, in that order; may be begun while a proof takes its time."""


@dataclass(slots=True)
class SiteReport:
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

    def to_dict(self) -> dict[str, Any]:
        """For reports; `index` counts the sites of a pass in a signature."""
        return {
            "pass": self.pass_name,
            "signature": self.signature,
            "index": self.index,
            "status": str(self.status),
            "reason": self.reason or None,
            "note": self.note or None,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "operator": self.operator,
            "proof": None if self.proof is None else self.proof.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """What converted `sites` change in rows that are masked everywhere: by up to `max_abs`, infinite where from NaN."""

    sites: int
    max_abs: float
    passes: tuple[str, ...]

    @classmethod
    def of(cls, sites: Iterable[SiteReport]) -> MaskedRows | None:
        """None where the proofs found no change."""
        found = [
            (site.pass_name, site.proof.fully_masked_rows_max_abs)
            for site in sites
            if site.status is Status.CONVERTED and site.proof and site.proof.fully_masked_rows_max_abs
        ]
        if not found:
            return None
        passes = tuple(dict.fromkeys(name for name, _ in found))
        return cls(len(found), max(figure for _, figure in found), passes)

    @property
    def how(self) -> str:
        """How much they change."""
        return f"by up to {self.max_abs:.3g}" if self.max_abs < math.inf else "from NaN to numbers"

    def __str__(self) -> str:
        count = f"{self.sites} site{'s'[: self.sites > 1]} of {', '.join(self.passes)}"
        return f"rows that are masked everywhere change {self.how} ({count})"

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"sites": self.sites, "max_abs": self.max_abs, "passes": list(self.passes)}


@dataclass(frozen=True, slots=True)
class Site:
    """A place that matched; `build` makes the rewrite aside, or says why it cannot.

    `demand`: other than the pass's. `note`: what to tell of it once it is converted.
    """

    operator: Operator
    build: Callable[[], Rewrite | Refusal]
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
        names = {entry.name for entry in self.model.metadata}
        if CONTROL_EDGES in names:
            return f"the model orders operators by index (metadata {CONTROL_EDGES}), which a rewrite breaks"
        return ""


def shape_options(inputs: Mapping[str, Tensor]) -> list[str]:
    """The options that give inputs of open lengths static shapes, with ? for the sizes to fill in."""
    return [
        f"--shape {name}={','.join('?' if size < 0 else str(size) for size in tensor.shape_signature)}"
        for name, tensor in inputs.items()
        if tensor.is_dynamic and tensor.shape_signature
    ]


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
    begun: set[Operator] = set()
    if context.prover is not None:
        context.prover.expect(_coming(chosen, context, list(sites), begun))
    while sites:
        site = sites.popleft()
        begun.add(site.operator)
        report = _begun(chosen, site, context, len(reports))
        if (
            isinstance(site, Site)
            and not report.reason
            and (rewrite := _tried(chosen, site, context, report))
        ):
            assert frame is not None
            frame.allow(rewrite)
            staying += commit(rewrite)
            added += rewrite.added()
            report.status, report.note = Status.CONVERTED, site.note
            report.replaced = tuple(one for one in rewrite.old if one not in rewrite.new)
            report.added = len(rewrite.added())
        reports.append(report)
        if context.on_site is not None:
            context.on_site(report)
        if not sites and chosen.repeats:
            sites.extend(found for found in _sites(chosen, context) if found.operator not in begun)
    violation = frame and frame.violation()
    if violation:
        raise BrokenFrameError(
            f"pass '{chosen.name}' changed signature '{context.signature}' outside its rewrites: {violation}; nothing "
            f"was written, convert with skip='{chosen.name}' and report this mistake of edge-opt"
        )
    remove_dead(context.subgraph, staying, context.model.subgraphs)
    share_equal(context.subgraph, added)
    remove_uncalled(context.model, subgraphs)
    return reports


def _begun(chosen: Pass, site: Site | SkippedSite, context: Context, index: int) -> SiteReport:
    """The report of a site, with the reason where it stays as it is, whatever a rewrite would be."""
    name, heads = site.operator.outputs[0].name, (site.heads, site.kv_heads)
    report = SiteReport(chosen.name, context.signature, index, Status.SKIPPED, "", *heads, operator=name)
    if isinstance(site, SkippedSite):
        report.reason, report.settled, report.is_bug = site.reason, site.settled, site.is_bug
    if not report.is_bug and (left_open := context.left_open([site.operator])):
        report.reason, report.settled = left_open, False
    report.reason = report.reason or context.frozen
    return report


def _coming(
    chosen: Pass, context: Context, sites: Iterable[Site | SkippedSite], begun: Collection[Operator]
) -> Iterator[tuple[Rewrite, Demand]]:
    """What would be asked of the sites that are not begun, were the graph to stay as it is."""
    for site in sites:
        if site.operator in begun or isinstance(site, SkippedSite):
            continue
        try:
            rewrite = site.build()
        except Exception:  # noqa: S112  told when it is the site's turn
            continue
        if isinstance(rewrite, Rewrite):
            yield rewrite, site.demand or chosen.demand


def _sites(chosen: Pass, context: Context) -> Iterator[Site | SkippedSite]:
    """The sites of a pass; where looking for them fails, those until then, and what failed."""
    try:
        yield from chosen.sites(context)
    except Exception as error:
        last = deque(context.subgraph.operators, 1)
        yield SkippedSite(last[0], f"looking for further sites failed: {_bug(error)}", is_bug=True)


def _tried(chosen: Pass, site: Site, context: Context, report: SiteReport) -> Rewrite | None:
    """As `_accepted`; an error that nobody foresaw is this site's reason, and the others go on."""
    try:
        return _accepted(chosen, site, context, report)
    except Exception as error:
        report.status, report.reason, report.is_bug = Status.ROLLED_BACK, _bug(error), True
        return None


def _bug(error: Exception) -> str:
    """The words for an error that is a mistake of ours; others are raised, and all where a traceback is wanted."""
    if isinstance(error, EdgeOptError) or os.environ.get(TRACEBACK):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a bug in edge-opt, please report it with the model's source: {what} ({TRACEBACK}=1 shows where)"


def _accepted(chosen: Pass, site: Site, context: Context, report: SiteReport) -> Rewrite | None:
    """The rewrite of a site, if it passes every check and the proof; else the report says what it failed."""
    rewrite = site.build()
    if isinstance(rewrite, Refusal):
        report.reason = str(rewrite)
        return None
    report.reason = context.left_open((*rewrite.old, *rewrite.added()))
    if report.reason:
        return None
    violation = (
        frame_violation(rewrite)
        or shape_violation(rewrite.derivable(), rewrite.calls)
        or version_violation(rewrite)
        or context.target.violation(rewrite.added(), rewrite.old)
    )
    if violation is not None:
        report.status, report.reason = Status.ROLLED_BACK, violation
        return None
    if context.prover is not None:
        report.proof = context.prover.prove(rewrite, site.demand or chosen.demand)
        if not report.proof.holds:
            report.status = Status.SKIPPED if report.proof.open else Status.ROLLED_BACK
            report.reason = report.proof.reason
            return None
    # After the proof, which says by how much results differ where they do.
    violation = parameter_violation(rewrite)
    if violation is not None:
        report.status, report.reason = Status.ROLLED_BACK, violation
        return None
    return rewrite
