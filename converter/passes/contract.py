"""What a pass is, the places where it applies, and what is reported of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from edge_opt.base.record import Record
from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import CONTROL_EDGES
from edge_opt.passes.ledger import Ledger
from edge_opt.passes.rewrite import Demand, Rewrite
from edge_opt.targets import Target


class Status(StrEnum):
    """What became of a site."""

    CONVERTED = "converted"
    SKIPPED = "skipped"
    REVERTED = "reverted"


@dataclass(frozen=True, slots=True)
class Ran:
    """What was run on one kernel set: the region as it is, or with its lengths `divided` by so much."""

    kernels: str
    divided: int = 1


@dataclass(frozen=True, slots=True)
class Proof(Record):
    """What running both versions of a region showed; `None` where a figure does not apply.

    `note`: where the demand was met in another way than stated. `like`: the region of the same structure that was run
    instead of this one. `ran`: on which kernels, and how much; `extremes`: also on extreme inputs. `open`: nothing was
    shown either way, for lack of time or of inputs that distinguish right from wrong; `reason` says what is missing.
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
        """Whether the new region does what the old one did, to the demand."""


@dataclass(slots=True)
class Site(Record):
    """A place where a pass could apply, and what became of it.

    A pass says where: the operator, and what is known of it beforehand. `build` makes the rewrite aside, or raises
    RefusedError where it cannot. Without `build` the place is skipped for a `reason`; `settled` where there is nothing
    to do, `is_bug` where the reason is a mistake of edge-opt, which should be reported.

    `run_pass` fills in the rest. `index` counts the sites of a pass in a signature, `operator` names the operator's
    first result. `note`: what a user should know of a converted site. `replaced`: the operators that the rewrite took
    out; `added` counts those that it put in.
    """

    anchor: Operator | None = field(repr=False)
    build: Callable[[], Rewrite] | None = field(default=None, repr=False)
    reason: str = ""
    settled: bool = False
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
    replaced: tuple[Operator, ...] = field(default=(), repr=False)
    added: int = 0

    _left_out = ("anchor", "build", "pass_name", "settled", "is_bug", "replaced", "added")
    _or_null = ("reason", "note")

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"pass": self.pass_name, **Record.to_dict(self)}


@dataclass(slots=True)
class Context:
    """What a pass works on: one entry point of a model, for a target.

    `positions`: how many the caches of the model, or of its bundle, have room for; None where it is unknown.
    `exported`: the entry points as they were before they were quantized, where the caller has them. `ledger`: what the
    subgraph computes, once a pass found something to rewrite.
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


class Pass(ABC):
    """A rewrite that applies at sites, each on its own: matched, built aside, checked, proved, committed or dropped."""

    name: ClassVar[str]
    summary: ClassVar[str]
    demand: ClassVar[Demand] = Demand()
    """What its rewrites are held to where they demand nothing else."""
    repairs: ClassVar[bool] = False
    """It makes answers better, so that its rewrites stay where they gain no time."""
    repeats: ClassVar[bool] = False
    """Its rewrites may bring further sites, which are then looked for again."""

    @abstractmethod
    def sites(self, context: Context) -> Iterable[Site]:
        """Every place where the pass could apply, in execution order."""

    def mend(self, model: Model) -> Iterable[Site]:
        """Changes of a model that no region holds, made before its signatures are rewritten; most passes make none."""
        del model
        return ()
