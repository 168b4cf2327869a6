"""Multi-head attention -> one single-head attention per head, or per tile of query rows."""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from edge_opt.attention.around import products_around
from edge_opt.attention.block import AS_FOUND, FORMS, Block, Form, Match, NotABlock, row_tiles
from edge_opt.attention.find import find_blocks
from edge_opt.attention.pairs import products_among
from edge_opt.attention.rules import is_product
from edge_opt.attention.split import split_heads
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.composites import COMPOSITE
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.ir.walk import called_by
from edge_opt.passes.contract import Context, Pass, Site
from edge_opt.targets import Target
from edge_opt.verification.check import Within
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.verdict import Status, Verdict

_BY_ROWS = Within(
    1e-6, "XNNPACK rounds a FULLY_CONNECTED by its number of rows, so results may differ by 1e-6"
)


class MhaToSha(Pass):
    """`softmax` is per row and `BATCH_MATMUL` per batch and row, so heads never mix before the output projection.

    `[B,K,G*T,S]` becomes N x `[B,1,T,S]`, with N = K*G. Exact: the same products are summed in the same order. Query
    rows never mix either: if the target asks for it, each head (or the only one) is cut into blocks of rows,
    `[.., T, S]` -> T/R x `[.., R, S]`, joined at the value product. The mask is cut once for all heads and layers.
    """

    name = "mha_to_sha"
    summary = "splits multi-head attention into one single-head attention per head, or per block of its rows"

    def sites(self, context: Context) -> Iterable[Site]:
        """One site for each SOFTMAX or other attention, then one for each operator that calls a graph with some."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, NotABlock):
                yield Site(match.softmax, reason=match.reason, is_settled=not match.is_attention)
            else:
                yield _site(context, match)
        for operator in _callers(context):
            text = "attention may be in a graph that it calls, which is not rewritten"
            yield Site(operator, reason=Reason(Why.PATTERN, text))


def left_over(
    context: Context, sites: Sequence[Verdict], before: Container[Operator]
) -> Iterator[Verdict]:
    """Attention of several heads in a converted graph that none of its `sites` reports, found in a second search.

    Only operators from `before` the pass are looked at: whether the axes of new ones are heads is no longer visible.
    """
    statuses = {site.status for site in sites}
    if Status.CONVERTED not in statuses or statuses & {Status.SKIPPED, Status.REVERTED}:
        return
    settled = {site.anchor for site in sites if site.status is Status.SETTLED}
    index = len(sites)
    for match in find_blocks(context.subgraph):
        anchor = match.softmax
        if anchor not in before or anchor in settled or not _has_several(match):
            continue
        reason = RefusedError(
            Why.HEADS, "several heads are left after the conversion", anchor
        ).reason
        yield Verdict(
            pass_name=sites[0].pass_name,
            signature=context.signature,
            index=index,
            operator=anchor.outputs[0].name,
            status=Status.SKIPPED,
            reason=reason.text,
            why=reason.why,
            anchor=anchor,
        )
        index += 1


def _has_several(match: Match) -> bool:
    """True for attention of several heads; if it is not understood, for products of several matrices."""
    if isinstance(match, Block):
        return match.heads > 1
    products = products_among((match.softmax, *products_around(match.softmax)))
    return match.is_attention and any(product.may_hold_heads for product in products)


def _callers(context: Context) -> Iterator[Operator]:
    """Operators that call a graph in which there may be attention of several heads."""
    answers: dict[Hashable, bool] = {}
    for operator in context.subgraph.operators:
        called = tuple(subgraph_indices(operator.options))
        if not called:
            continue
        arguments = operator.inputs if operator.name == COMPOSITE else ()
        # Composites of one body have one answer if the same arguments are constants.
        key = called, tuple(one is not None and one.is_constant for one in arguments)
        if key not in answers:
            first, *others = called_by([operator], context.model.subgraphs)
            answers[key] = _may_attend(first, arguments) or any(map(_may_attend, others))
        if answers[key]:
            yield operator


def _may_attend(graph: Subgraph, arguments: Sequence[Tensor | None] = ()) -> bool:
    """True if a called graph may hold attention of several heads, or a part of it; `arguments` are its known inputs."""
    pairs = zip(graph.inputs, arguments, strict=False)
    weights = {own for own, given in pairs if given is not None and given.is_constant}
    candidates = (one for one in graph if weights.isdisjoint(one.inputs[:2]))
    products = list(products_among(candidates))
    if not products:
        return False
    if any(product.may_hold_heads for product in products):
        return True
    if any(operator.name == "SOFTMAX" for operator in graph):
        return True
    attention = (match for match in find_blocks(graph) if match.is_attention)
    return any(isinstance(match, NotABlock) or match.heads != 1 for match in attention)


def _site(context: Context, block: Block) -> Site:
    """The site of a block of several heads, or the reason why it is not split.

    Heads and rows are cut in one rewrite, so that a tile's heads are joined to finished rows.
    """
    target = context.target.for_attention(block)
    if block.heads == 1:
        return _single_head_site(context, target, block)
    site = partial(Site, block.softmax, heads=block.heads, kv_heads=block.kv_heads)
    no_gain = context.target.no_gain(context.signature, block)
    if no_gain:
        text = f"target '{context.target.name}' gains nothing from splitting {no_gain}"
        return site(reason=Reason(Why.NO_GAIN, text), is_settled=True)
    note = ""
    tiled = block
    try:
        tiled = _tiled(target, block)
    except RefusedError as refused:
        note = f"rows are not cut: {refused}"
    builds = {name: partial(_build, context, tiled, form, note) for name, form in FORMS.items()}
    preferred = target.form
    if preferred == AS_FOUND:
        preferred = "split" if block.shares_axis else "unpack"
    build = builds.pop(preferred)
    return site(build=build, others=builds)


def _single_head_site(context: Context, target: Target, block: Block) -> Site:
    """The site of a single head, whose rows may be cut, or the reason why they are not."""
    try:
        tiled = _tiled(target, block)
    except RefusedError as refused:
        return Site(block.softmax, reason=refused.reason)
    site = partial(Site, block.softmax, heads=1, kv_heads=block.kv_heads)
    if tiled is block:
        return site(reason=Reason(Why.SINGLE_HEAD, "already single-head"), is_settled=True)
    return site(build=partial(_build, context, tiled, FORMS["split"], ""))


def _tiled(target: Target, block: Block) -> Block:
    """Cut attention into as few equal blocks of rows as the target allows, maybe one; RefusedError if it cannot be."""
    rows = block.query_length
    if target.rows_per_tile is None or target.rows_per_tile >= rows:
        return block
    size = max(size for size in range(1, target.rows_per_tile + 1) if rows % size == 0)
    if 2 * size < target.rows_per_tile:
        text = f"{rows} rows have no equal blocks of {target.rows_per_tile} rows or somewhat fewer"
        raise RefusedError(
            Why.TARGET,
            text,
            block.softmax,
            None,
            f"{-(-target.rows_per_tile // 2)} or more",
            str(size),
        )
    return row_tiles(block, rows // size)


def _build(context: Context, block: Block, form: Form, note: str) -> Rewrite:
    if block.heads > 1 and block.head_size < (context.target.norm_per_head_from or 0):
        form = replace(form, composites=False)
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    check = None
    if any(
        operator.name == "FULLY_CONNECTED" for operator in (*block.value_products, *block.logits)
    ):
        check = _BY_ROWS
        note = "; ".join(filter(None, (note, check.because)))
    rewrite = context.rewrite(old, new, note=note, parts=block.merged[:2], check=check)
    if block.heads == 1:
        return rewrite
    for operator in rewrite.new:
        if operator in block.core and (is_product(operator) or operator.name == "SOFTMAX"):
            raise RefusedError(
                Why.SHARED_RESULT,
                "another operator reads a result that holds several heads",
                operator,
            )
    return rewrite
