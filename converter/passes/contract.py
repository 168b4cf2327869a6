"""The interface of passes: the places where they apply, and what they know there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from edge_opt.ir import Constants, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import CONTROL_EDGES
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.ir.walk import still_needed
from edge_opt.shapes.dimension import size_text
from edge_opt.targets import Target
from edge_opt.verification.audit import Audit
from edge_opt.verification.check import Check, Exact
from edge_opt.verification.examine import Verifier
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.verdict import Verdict

Build = Callable[[], Rewrite]
"""Makes a rewrite without changing the graph, or raises RefusedError if it cannot."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a pass could apply: an operator, and facts known beforehand.

    `build` makes the rewrite; `others` make rewrites of other forms, by name, to try in turn if that one fails. Without
    `build` the place is skipped for a `reason`, or, if `is_settled`, needs no rewrite.
    """

    anchor: Operator
    build: Build | None = None
    others: Mapping[str, Build] = field(default_factory=dict)
    reason: Reason | None = None
    heads: int | None = None
    kv_heads: int | None = None
    is_settled: bool = False


@dataclass(slots=True)
class Context:
    """A pass's input: one entry point of a model, and a target.

    `positions`: the number that the caches of the model, or of its bundle, hold; None if unknown. `exported`: the entry
    points before quantization, if the caller has them. `audit`: accepts verified rewrites, if the caller checks the
    model in the end.
    """

    model: Model
    subgraph: Subgraph
    signature: str
    target: Target
    constants: Constants
    verifier: Verifier | None = None
    on_site: Callable[[Verdict], None] | None = None
    positions: int | None = None
    exported: Mapping[str, Subgraph] = field(default_factory=dict)
    audit: Audit | None = None

    def rewrite(self, old: Sequence[Operator], new: Sequence[Operator], **facts: Any) -> Rewrite:
        """The replacement of `old` operators by `new` ones, both in execution order; those still needed stay."""
        kept = still_needed(self.subgraph, old, new)
        return Rewrite(self.model, self.subgraph, tuple(old), (*kept, *new), **facts)

    def check_lengths(self, operators: Iterable[Operator]) -> None:
        """Raise RefusedError if operators have open lengths, with the options that close them."""
        tensors = chain.from_iterable(operator.tensors for operator in operators)
        if not any(tensor.is_dynamic for tensor in tensors):
            return
        options = shape_options(
            self.model.arguments(self.model.signature_name(self.subgraph)).inputs
        )
        remedy = f"give {' '.join(options)}" if options else "they follow from data"
        raise RefusedError(Why.OPEN_LENGTHS, f"lengths are known only at run time: {remedy}")

    def check_order(self) -> None:
        """Raise RefusedError if the model must not be rewritten."""
        if any(entry.name == CONTROL_EDGES for entry in self.model.metadata):
            text = f"the model orders operators by index (metadata {CONTROL_EDGES}), which a rewrite breaks"
            raise RefusedError(Why.FIXED_ORDER, text)


def shape_options(inputs: Mapping[str, Tensor]) -> list[str]:
    """The options that give inputs of open lengths static shapes, with ? for the sizes to fill in."""
    options: list[str] = []
    for name, tensor in inputs.items():
        if tensor.is_dynamic and tensor.shape_signature:
            sizes = ",".join(map(size_text, tensor.shape_signature))
            options.append(f"--shape {name}={sizes}")
    return options


class Pass(ABC):
    """A rewrite that applies at independent sites: each is matched, built, checked, verified, and kept or reverted."""

    name: ClassVar[str]
    summary: ClassVar[str]
    check: ClassVar[Check] = Exact()
    """The check of its rewrites, unless they have their own."""
    repairs: ClassVar[bool] = False
    """True if it makes results more accurate: its rewrites are kept even if they are not faster."""
    repeats: ClassVar[bool] = False
    """True if its rewrites may create further sites, which are then searched for again."""

    @abstractmethod
    def sites(self, context: Context) -> Iterable[Site]:
        """All sites where the pass could apply, in execution order."""

    def fix_interface(self, model: Model, signatures: Collection[str]) -> Iterable[Verdict]:
        """Change inputs of these signatures that no operator reads; most passes change nothing."""
        del model, signatures
        return ()
