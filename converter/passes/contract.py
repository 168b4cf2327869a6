"""The interface of passes: their sites, and the report on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from edge_opt.base.record import Record
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import CONTROL_EDGES
from edge_opt.ir.walk import still_needed
from edge_opt.passes.ledger import Ledger
from edge_opt.passes.rewrite import Demand, Rewrite
from edge_opt.targets import Target


class Status(StrEnum):
    """The outcome of a site; a settled one needs no rewrite, a skipped one cannot be rewritten."""

    CONVERTED = "converted"
    SKIPPED = "skipped"
    REVERTED = "reverted"
    SETTLED = "nothing to do"


@dataclass(frozen=True, slots=True)
class Ran:
    """A run on one kernel set: of the whole region, or with its lengths `divided` by this factor."""

    kernels: str
    divided: int = 1


@dataclass(frozen=True, slots=True)
class Proof(Record):
    """The result of running both versions of a region; `None` if a figure does not apply.

    `note`: how the demand was met, if not as stated. `like`: the region of the same structure that was run instead of
    this one. `ran`: the kernels, and how much was run; `extremes`: extreme inputs were run, too. `open`: inconclusive,
    for lack of time or of inputs that distinguish right from wrong; `reason` says what is missing.
    """

    demand: Demand
    holds: bool
    bitwise: bool
    max_abs: float
    steps: int | None = None
    reason: str = ""
    note: str = ""
    like: str = ""
    ran: tuple[Ran, ...] = ()
    open: bool = False
    extremes: bool = False

    _left_out = ("holds", "reason", "open")
    _or_null = ("note", "like")

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {**Record.to_dict(self), "demand": str(self.demand)}


class Prover(Protocol):
    """Runs both versions of a region."""

    def prove(self, rewrite: Rewrite, demand: Demand) -> Proof:
        """Verify that the new region matches the old one, to the demand."""


@dataclass(slots=True)
class Site(Record):
    """A place where a pass could apply, and the outcome.

    The pass gives the operator and facts known beforehand. `build` makes the rewrite without changing the graph, or
    raises RefusedError if it cannot; `others` make rewrites of other forms, by name, to try in turn if that one
    fails. Without `build` the place is skipped, or settled, for a `reason`. `is_bug`: the reason is a bug in edge-opt,
    which should be reported.

    `run_pass` fills in the rest. `index` counts the sites of a pass in a signature, `operator` names the operator's
    first result. `note`: what a user should know about a converted site. `failed`: why rewrites that were tried before
    it failed. `replaced`: the operators that the rewrite removed; `added`: the number that it added. A pickled site has
    the outcome without the operators.
    """

    anchor: Operator | None = field(default=None, repr=False)
    build: Callable[[], Rewrite] | None = field(default=None, repr=False)
    others: Mapping[str, Callable[[], Rewrite]] = field(default_factory=dict, repr=False)
    reason: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    is_bug: bool = False
    pass_name: str = ""
    signature: str = ""
    index: int = 0
    operator: str = ""
    status: Status = Status.SKIPPED
    proof: Proof | None = None
    note: str = ""
    failed: tuple[str, ...] = ()
    replaced: tuple[Operator, ...] = field(default=(), repr=False)
    added: int = 0

    _left_out = ("anchor", "build", "others", "pass_name", "is_bug", "replaced", "added")
    _or_null = ("reason", "note")
    _only_here = ("anchor", "build", "others", "replaced")

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"pass": self.pass_name, **Record.to_dict(self)}


@dataclass(slots=True)
class Context:
    """A pass's input: one entry point of a model, and a target.

    `positions`: the number that the caches of the model, or of its bundle, hold; None if unknown. `exported`: the entry
    points before quantization, if the caller has them. `ledger`: what the subgraph computes, if the caller records it,
    or once a pass has found something to rewrite.
    """

    model: Model
    subgraph: Subgraph
    signature: str
    target: Target
    constants: Constants
    prover: Prover | None = None
    on_site: Callable[[Site], None] | None = None
    positions: int | None = None
    exported: Mapping[str, Subgraph] = field(default_factory=dict)
    ledger: Ledger | None = None

    def rewrite(self, old: Sequence[Operator], new: Sequence[Operator], **facts: Any) -> Rewrite:
        """The replacement of `old` operators by `new` ones, both in execution order; those still needed stay."""
        kept = still_needed(self.subgraph, old, new)
        return Rewrite(self.model, self.subgraph, tuple(old), (*kept, *new), **facts)

    def left_open(self, operators: Iterable[Operator]) -> str:
        """Why operators with open lengths are skipped, and the options that close them; empty if there are none."""
        tensors = (tensor for operator in operators for tensor in (*operator.inputs, *operator.outputs))
        if not any(tensor is not None and tensor.is_dynamic for tensor in tensors):
            return ""
        options = shape_options(self.model.arguments(self.model.signature_name(self.subgraph))[1])
        remedy = f"give {' '.join(options)}" if options else "they follow from data"
        return f"lengths are known only at run time: {remedy}"

    @property
    def frozen(self) -> str:
        """Why this model must not be rewritten; empty if it may be."""
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


class Pass(ABC):
    """A rewrite that applies at independent sites: each is matched, built, checked, verified, and kept or reverted."""

    name: ClassVar[str]
    summary: ClassVar[str]
    demand: ClassVar[Demand] = Demand()
    """The demand on its rewrites, unless they have their own."""
    repairs: ClassVar[bool] = False
    """True if it makes results more accurate: its rewrites are kept even if they are not faster."""
    repeats: ClassVar[bool] = False
    """True if its rewrites may create further sites, which are then searched for again."""

    @abstractmethod
    def sites(self, context: Context) -> Iterable[Site]:
        """All sites where the pass could apply, in execution order."""

    def mend(self, model: Model, signatures: Collection[str]) -> Iterable[Site]:
        """Change these signatures outside of regions, before they are rewritten; most passes change nothing."""
        del model, signatures
        return ()
