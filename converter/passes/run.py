"""Apply a pass at each of its sites in turn: check, verify and commit each rewrite, or leave the graph unchanged."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    subgraphs = len(context.model.subgraphs)
    while pending:
        site = pending.popleft()
        visited.add(site.anchor)
        attempt = _decide(site, chosen, context)
        verdicts.append(_verdict(site, attempt, chosen, context, len(verdicts)))
        if attempt.rewrite is not None:
            if context.audit is not None:
                context.audit.accept(attempt.rewrite)
            staying += attempt.rewrite.commit()
            added += attempt.rewrite.added()
        if context.on_site is not None:
            context.on_site(verdicts[-1])
        if not pending and chosen.repeats:
            pending.extend(site for site in _sites(chosen, context) if site.anchor not in visited)
    remove_dead(context.subgraph, staying, context.model.subgraphs)
    remove_uncalled(context.model, subgraphs)
    merge_equal(context.subgraph, added, context.audit)
    return verdicts


def _sites(chosen: Pass, context: Context) -> Iterator[Site]:
    """The sites of a pass; if the search fails, those found so far, and one with the error."""
    try:
        yield from chosen.sites(context)
    except Exception as error:
        last = context.subgraph.operators[-1]
        text = f"looking for further sites failed: {_bug(error)}"
        yield Site(last, reason=Reason(Why.BUG, text))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try at a site, and what came of it."""

    status: Status
    reason: Reason | None = None
    rewrite: Rewrite | None = None
    proof: Proof | None = None
    note: str = ""
    failed: tuple[str, ...] = ()

    @property
    def is_bug(self) -> bool:
        """True if edge-opt failed."""
        return self.reason is not None and self.reason.why is Why.BUG


def _decide(site: Site, chosen: Pass, context: Context) -> _Attempt:
    """The first rewrite of a site that passes every check; else the failure of the first one."""
    try:
        if site.reason is None or site.reason.why is not Why.BUG:
            context.check_lengths([site.anchor])
        if site.build is None or site.reason is not None:
            return _Attempt(Status.SETTLED if site.is_settled else Status.SKIPPED, site.reason)
        context.check_order()
    except RefusedError as refused:
        return _Attempt(Status.SKIPPED, refused.reason)
    first = _attempt(site.build, chosen, context)
    attempt = first
    failed: list[str] = []
    for form, build in site.others.items():
        if attempt.rewrite is not None or attempt.is_bug:
            break
        failed.append(str(attempt.reason))
        attempt = _attempt(build, chosen, context)
        attempt = replace(attempt, note=f"in form '{form}', because the target's form failed")
    if attempt.rewrite is None and not attempt.is_bug:
        return first
    return replace(attempt, failed=tuple(failed))


def _attempt(build: Build, chosen: Pass, context: Context) -> _Attempt:
    """Build one rewrite, and check and verify it.

    An unexpected error becomes the reason of this site, and the other sites go on.
    """
    status = Status.SKIPPED
    proof: Proof | None = None
    try:
        rewrite = build()
        context.check_lengths((*rewrite.old, *rewrite.added()))
        status = Status.REVERTED  # unless all checks below pass
        check_before(rewrite, context.target)
        if context.verifier is not None:
            proof = context.verifier.verify(rewrite, rewrite.check or chosen.check)
            if not proof.holds:
                status = Status.SKIPPED if proof.open else Status.REVERTED
                raise RefusedError(Why.INCONCLUSIVE if proof.open else Why.DIFFERENT, proof.reason)
        # After the verification, which says by how much results differ.
        check_parameters(rewrite)
    except RefusedError as refused:
        return _Attempt(status, refused.reason, proof=proof)
    except Exception as error:
        return _Attempt(Status.REVERTED, Reason(Why.BUG, _bug(error)), proof=proof)
    return _Attempt(Status.CONVERTED, rewrite=rewrite, proof=proof)


def _bug(error: Exception) -> str:
    """The message for a bug in edge-opt; other errors are raised, and all if a traceback is wanted."""
    if isinstance(error, EdgeOptError) or os.environ.get(TRACEBACK):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a bug in edge-opt, please report it with the model's source: {what} ({TRACEBACK}=1 shows where)"


def _verdict(site: Site, attempt: _Attempt, chosen: Pass, context: Context, index: int) -> Verdict:
    """What became of a site; to be made before its rewrite is committed."""
    rewrite = attempt.rewrite
    notes = [attempt.note, rewrite.note] if rewrite is not None else []
    return Verdict(
        pass_name=chosen.name,
        signature=context.signature,
        index=index,
        operator=site.anchor.label,
        status=attempt.status,
        reason="" if attempt.reason is None else attempt.reason.text,
        why="" if attempt.reason is None else attempt.reason.why,
        heads=site.heads,
        kv_heads=site.kv_heads,
        proof=attempt.proof,
        note="; ".join(filter(None, notes)),
        failed=attempt.failed,
        anchor=site.anchor,
        replaced=() if rewrite is None else rewrite.removed(),
        added=0 if rewrite is None else len(rewrite.added()),
    )
