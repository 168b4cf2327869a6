"""Apply a pass at each of its sites in turn: check, verify and commit each rewrite, or leave the graph unchanged."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator

from edge_opt.base.errors import TRACEBACK, EdgeOptError
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.cleanup import remove_uncalled
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import reads, with_called
from edge_opt.passes.contract import Context, Pass, Site, Status
from edge_opt.passes.ledger import Ledger, UnverifiedChangeError
from edge_opt.passes.rewrite import Rewrite, remove_dead
from edge_opt.shapes.inference import check_operators


def run_pass(chosen: Pass, context: Context) -> list[Site]:
    """Apply a pass wherever it matches; a site that fails a check leaves the graph unchanged.

    Raises:
        UnverifiedChangeError: the pass changed the graph outside its rewrites, or merging changed their results. That
            is a bug in edge-opt, not in the model.
    """
    sites, ledger = deque(_sites(chosen, context)), None
    if any(site.build for site in sites):
        ledger = context.ledger = context.ledger or Ledger(context.model, context.subgraph)
    try:
        return _applied(chosen, context, sites, ledger)
    except UnverifiedChangeError as changed:
        remedy = f"leave it out with skip='{chosen.name}'"
        where = f"pass '{chosen.name}' ({remedy}), signature '{context.signature}'"
        raise UnverifiedChangeError(f"{where}: {changed}") from changed


def _applied(chosen: Pass, context: Context, sites: deque[Site], ledger: Ledger | None) -> list[Site]:
    done: list[Site] = []
    listed, visited = len(context.model.subgraphs), set[Operator]()
    staying, added = list[Operator](), list[Operator]()
    while sites:
        site = sites.popleft()
        assert site.anchor is not None
        visited.add(site.anchor)
        site.pass_name, site.signature, site.index = chosen.name, context.signature, len(done)
        site.operator = site.anchor.outputs[0].name
        if not site.is_bug and (left_open := context.left_open([site.anchor])):
            site.reason, site.status = left_open, Status.SKIPPED
        site.reason = site.reason or context.frozen
        rewrite = None if site.reason else _verified_rewrite(site, chosen, context)
        if rewrite is not None and ledger is not None:
            ledger.allow(rewrite)
            staying += rewrite.commit()
            added += rewrite.added()
        done.append(site)
        if context.on_site is not None:
            context.on_site(site)
        if not sites and chosen.repeats:
            sites.extend(site for site in _sites(chosen, context) if site.anchor not in visited)
    remove_dead(context.subgraph, staying, context.model.subgraphs)
    remove_uncalled(context.model, listed)
    if ledger is not None:
        ledger.merge(added)
        ledger.check()
    return done


def _sites(chosen: Pass, context: Context) -> Iterator[Site]:
    """The sites of a pass; if the search fails, those found so far, and one with the error."""
    try:
        yield from chosen.sites(context)
    except Exception as error:
        last = context.subgraph.operators[-1]
        yield Site(last, reason=f"looking for further sites failed: {_bug(error)}", is_bug=True)


def _verified_rewrite(site: Site, chosen: Pass, context: Context) -> Rewrite | None:
    """The first rewrite of a site that passes every check and the proof; else None, with the first reason in the site.

    An unexpected error becomes this site's reason, and the other sites go on.
    """
    assert site.build is not None
    rewrite = _checked(site, site.build, chosen, context)
    outcome = site.status, site.reason, site.proof
    failed = list[str]()
    for form, build in site.others.items():
        if rewrite is not None or site.is_bug:
            break
        failed.append(site.reason)
        rewrite = _checked(site, build, chosen, context)
        if rewrite is not None:
            site.note = "; ".join(
                filter(None, (f"in form '{form}', because the target's form failed", site.note))
            )
            site.failed = tuple(failed)
    if rewrite is None and not site.is_bug:
        site.status, site.reason, site.proof = outcome
    return rewrite


def _checked(site: Site, build: Callable[[], Rewrite], chosen: Pass, context: Context) -> Rewrite | None:
    """One rewrite of a site, if it passes every check and the proof; else None, with the reason in the site."""
    site.status, site.reason, site.proof = Status.SKIPPED, "", None
    try:
        rewrite = build()
        if left_open := context.left_open((*rewrite.old, *rewrite.added())):
            raise RefusedError(left_open)
        site.status = Status.REVERTED  # unless all checks below pass
        check_frame(rewrite)
        check_shapes(rewrite)
        context.target.check(rewrite.added(), rewrite.old)
        if context.prover is not None:
            site.proof = context.prover.prove(rewrite, rewrite.demand or chosen.demand)
            if not site.proof.holds:
                site.status = Status.SKIPPED if site.proof.open else Status.REVERTED
                raise RefusedError(site.proof.reason)
        # After the proof, because that says by how much results differ.
        check_parameters(rewrite)
    except RefusedError as refused:
        site.reason = str(refused)
        return None
    except Exception as error:
        site.status, site.reason, site.is_bug = Status.REVERTED, _bug(error), True
        return None
    site.status, site.note = Status.CONVERTED, rewrite.note
    site.replaced, site.added = rewrite.removed(), len(rewrite.added())
    return rewrite


def _bug(error: Exception) -> str:
    """The message for a bug in edge-opt; other errors are raised, and all if a traceback is wanted."""
    if isinstance(error, EdgeOptError) or os.environ.get(TRACEBACK):
        raise error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a bug in edge-opt, please report it with the model's source: {what} ({TRACEBACK}=1 shows where)"


def check_frame(rewrite: Rewrite) -> None:
    """Check that the new region changes nothing outside itself.

    It may read only tensors that the old region read (or new constants), and must define exactly those that the old one
    defined for other operators. Only operators without side effects may be reordered.

    Raises:
        RefusedError: it may change something else.
    """
    old = set(rewrite.old)
    for operator in (*rewrite.old, *rewrite.added()):
        if (operator.subgraph is rewrite.subgraph) != (operator in old):
            where = "is no longer in the graph" if operator in old else "is already in the graph"
            name = operator.outputs[0].name
            raise RefusedError(f"the operator {operator.name} that defines '{name}' {where}")
    for tensor in reads((*rewrite.old, *rewrite.new)):
        if tensor.is_blockwise:
            where = "its scales are named by a place in its own subgraph"
            raise RefusedError(f"'{tensor.name}' is quantized by blocks: {where}")
    defined = _defined(rewrite)
    if not rewrite.changed():
        raise RefusedError("nothing reads the region's results, so they cannot be verified")
    for tensor in rewrite.outputs():
        if tensor not in defined:
            raise RefusedError(f"the new region leaves '{tensor.name}' undefined")
    rewrite.order()


def _defined(rewrite: Rewrite) -> Collection[Tensor]:
    """Tensors that the new region defines, each once, from constants and the old region's inputs."""
    known, own = set(reads(rewrite.old)), {tensor for operator in rewrite.old for tensor in operator.outputs}
    for tensor in reads(rewrite.new):
        if tensor not in known and not tensor.is_constant:
            raise RefusedError(f"the new region reads '{tensor.name}', which the old one did not")
    defined = Counter(tensor for operator in rewrite.new for tensor in operator.outputs)
    for tensor, count in defined.items():
        if count > 1 or tensor.is_constant or (tensor not in own and rewrite.subgraph.lists(tensor)):
            text = "another operator defines it too, or it is a constant"
            raise RefusedError(f"the new region must not define '{tensor.name}': {text}")
    return defined


def check_shapes(rewrite: Rewrite) -> None:
    """Check that the recorded shapes of new operators, and of those that they call, equal the inferred ones.

    Raises:
        RefusedError: an inferred shape differs from the recorded one.
    """
    subgraphs = rewrite.model.subgraphs
    check_operators(with_called(rewrite.added(), subgraphs), subgraphs)


def check_parameters(rewrite: Rewrite) -> None:
    """Check that the quantized results of new operators have only parameters that the old region has.

    A scale that is off by one unit in the last place changes one code in millions, which a run may not show.

    Raises:
        RefusedError: a tensor has new parameters.
    """

    def parameters(tensor: Tensor | None) -> Hashable:
        quantization = tensor and tensor.quantization
        return tensor and quantization and (tensor.dtype, quantization.key())

    old = with_called(rewrite.old, rewrite.model.subgraphs)
    known = {parameters(tensor) for operator in old for tensor in (*operator.inputs, *operator.outputs)}
    for operator in rewrite.added():
        for tensor in operator.outputs:
            if tensor.is_quantized and tensor not in rewrite.chosen and parameters(tensor) not in known:
                where = f"{operator.name} '{tensor.name}'"
                raise RefusedError(f"{where} has parameters that no tensor of the old region has")
