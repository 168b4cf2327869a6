"""Apply a pass at each of its sites in turn: check, verify and commit each rewrite, or leave the graph unchanged."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from edge_opt.base.errors import TRACEBACK, EdgeOptError
from edge_opt.ir import Operator
from edge_opt.ir.cleanup import remove_uncalled
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.passes.contract import Build, Context, Pass, Site
from edge_opt.passes.merging import merge_equal
from edge_opt.verification.frame import check_before, check_parameters
from edge_opt.verification.rewrite import Rewrite, remove_dead
from edge_opt.verification.verdict import Proof, Status, Verdict


def run_pass(chosen: Pass, context: Context) -> list[Verdict]:
    """Apply a pass wherever it matches; a site that fails a check leaves the graph unchanged.

    Raises:
        UnverifiedChangeError: the pass changed operators outside its rewrites, which is a bug in the pass.
    """
    pending = deque(_sites(chosen, context))
    verdicts: list[Verdict] = []
    visited: set[Operator] = set()
    staying: list[Operator] = []
    added: list[Operator] = []
    subgraphs_before = len(context.model.subgraphs)
    while pending:
        site = pending.popleft()
        visited.add(site.anchor)
        verdict, rewrite = _decide(site, chosen, context, len(verdicts))
        verdicts.append(verdict)
        if rewrite is not None:
            if context.audit is not None:
                context.audit.accept(rewrite)
            staying += rewrite.commit()
            added += rewrite.added()
        if context.on_site is not None:
            context.on_site(verdict)
        if not pending and chosen.repeats:
            pending.extend(site for site in _sites(chosen, context) if site.anchor not in visited)
    remove_dead(context.subgraph, staying, context.model.subgraphs)
    remove_uncalled(context.model, subgraphs_before)
    merge_equal(context.subgraph, added, context.audit)
    return verdicts


def _sites(chosen: Pass, context: Context) -> Iterator[Site]:
    """The sites of a pass; if the search fails, those found so far, and one with the error."""
    if not context.subgraph.operators:
        return
    try:
        yield from chosen.sites(context)
    except Exception as error:
        last = context.subgraph.operators[-1]
        text = f"looking for further sites failed: {_bug(error)}"
        yield Site(last, reason=Reason(Why.BUG, text))


_Outcome: TypeAlias = tuple[Verdict, Rewrite | None]
"""What became of a site, and its rewrite, which is not committed yet; None unless it passed every check."""


def _decide(site: Site, chosen: Pass, context: Context, index: int) -> _Outcome:
    """The first rewrite of a site that passes every check; else the failure of the first one."""
    blank = Verdict(
        pass_name=chosen.name,
        signature=context.signature,
        index=index,
        operator=site.anchor.label,
        status=Status.SETTLED if site.is_settled else Status.SKIPPED,
        heads=site.heads,
        kv_heads=site.kv_heads,
        anchor=site.anchor,
    )
    try:
        # Open lengths explain most other reasons, and are what the user can mend.
        if site.reason is None or site.reason.why is not Why.BUG:
            context.check_lengths([site.anchor])
        if site.reason is not None:
            return _failed(blank, blank.status, site.reason), None
        if site.build is None:
            return blank, None
        context.check_order()
    except RefusedError as refused:
        return _failed(blank, Status.SKIPPED, refused.reason), None
    failed: list[Verdict] = []
    for form, build in {"": site.build, **site.others}.items():
        verdict, rewrite = _attempt(build, chosen, context, blank)
        if rewrite is None and not verdict.is_bug:
            failed.append(verdict)
            continue
        if rewrite is not None and failed:
            note = f"in form '{form}', because the target's form failed"
            verdict = replace(verdict, note="; ".join(filter(None, (note, verdict.note))))
        return replace(verdict, failed=tuple(one.reason for one in failed)), rewrite
    return failed[0], None


def _attempt(build: Build, chosen: Pass, context: Context, blank: Verdict) -> _Outcome:
    """Build one rewrite, and check and verify it.

    An unexpected error becomes the reason of this site, and the other sites go on.
    """
    if_refused = Status.SKIPPED
    proof: Proof | None = None
    try:
        rewrite = build()
        context.check_lengths((*rewrite.old, *rewrite.added()))
        if_refused = Status.REVERTED
        check_before(rewrite, context.target)
        if context.verifier is not None:
            proof = context.verifier.verify(rewrite, rewrite.check or chosen.check)
            if proof.is_inconclusive:
                if_refused = Status.SKIPPED
                raise RefusedError(Why.INCONCLUSIVE, proof.reason)
            if not proof.holds:
                raise RefusedError(Why.DIFFERENT, proof.reason)
        # After the verification, which says by how much results differ.
        check_parameters(rewrite)
    except RefusedError as refused:
        return _failed(blank, if_refused, refused.reason, proof), None
    except Exception as error:
        return _failed(blank, Status.REVERTED, Reason(Why.BUG, _bug(error)), proof), None
    converted = replace(
        blank,
        status=Status.CONVERTED,
        proof=proof,
        note=rewrite.note,
        replaced=rewrite.removed(),
        added=len(rewrite.added()),
    )
    return converted, rewrite


def _failed(blank: Verdict, status: Status, reason: Reason, proof: Proof | None = None) -> Verdict:
    return replace(blank, status=status, reason=reason.text, why=reason.why, proof=proof)


def _bug(error: Exception) -> str:
    """The message for a bug in edge-opt; other errors are raised, and all if a traceback is wanted."""
    if isinstance(error, EdgeOptError | MemoryError) or os.environ.get(TRACEBACK):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a bug in edge-opt, please report it with the model's source: {what} ({TRACEBACK}=1 shows where)"
