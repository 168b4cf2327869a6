"""The outcome of a site, as data for reports: its status, its reason, and the figures of its verification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from edge_opt.base.record import Record
from edge_opt.ir import Operator
from edge_opt.ir.refusal import Why
from edge_opt.verification.check import Check


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

    `note`: how the check was met, if not as stated. `like`: the region of the same structure that was run instead of
    this one. `ran`: the kernels, and how much was run; `extremes`: extreme inputs were run, too. `is_inconclusive`: for
    lack of time or of inputs that distinguish right from wrong; `reason` says what is missing.
    """

    check: Check
    holds: bool
    bitwise: bool = False
    max_abs: float = math.inf
    steps: int | None = None
    reason: str = ""
    note: str = ""
    like: str = ""
    ran: tuple[Ran, ...] = ()
    is_inconclusive: bool = False
    extremes: bool = False

    _left_out = ("check", "holds", "reason", "is_inconclusive")
    _or_null = ("note", "like")

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"check": str(self.check), **Record.to_dict(self)}


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """What became of one site of a pass.

    `index` counts the sites of a pass in a signature; `operator` names the first result of the site's operator, its
    `anchor`. `reason`: why it was not converted; `why`: the kind of that reason (`edge_opt.ir.refusal.Why`). `note`:
    what a user should know about a converted site. `failed`: why rewrites that were tried before it failed. `replaced`:
    the operators that the rewrite removed; `added`: the number that it added. A pickled verdict has no operators.
    """

    pass_name: str
    signature: str
    index: int
    operator: str
    status: Status
    reason: str = ""
    why: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    proof: Proof | None = None
    note: str = ""
    failed: tuple[str, ...] = ()
    anchor: Operator | None = field(default=None, repr=False)
    replaced: tuple[Operator, ...] = field(default=(), repr=False)
    added: int = 0

    _left_out = ("anchor", "pass_name", "replaced", "added")
    _or_null = ("reason", "why", "note")
    _only_here = ("anchor", "replaced")

    @property
    def is_bug(self) -> bool:
        """True if edge-opt failed here, which should be reported."""
        return self.why == Why.BUG

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"pass": self.pass_name, **Record.to_dict(self)}
