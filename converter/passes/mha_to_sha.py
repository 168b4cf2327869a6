"""Multi-head attention -> one single-head attention per head, or per tile of query rows; and attention that stays."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from edge_opt.attention.block import Block, Form, Match, NotABlock, form_for, row_tiles
from edge_opt.attention.build import split_heads
from edge_opt.attention.find import find_blocks
from edge_opt.attention.rules import PRODUCTS
from edge_opt.attention.surroundings import products_beside
from edge_opt.base.words import shortened
from edge_opt.ir import Model, Operator, Subgraph
from edge_opt.ir.cleanup import called
from edge_opt.ir.composites import COMPOSITE, composite_name
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import walked
from edge_opt.passes.contract import Context, Pass, Site, SiteReport, Status
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.rewrite import Demand, Rewrite
from edge_opt.targets import Target

_TILED = Form(sink=False)


class TileRows(Pass):
    """`softmax` is per row, so query rows never mix: `[.., T, S]` -> T/R x `[.., R, S]`, joined at the value product.

    Off unless the target asks for it. The mask is cut once per mask and length, and shared by
    heads and layers. These are the attentions that have one head; where there are several, `mha_to_sha` cuts rows and
    heads in one go.
    """

    name = "tile_rows"
    summary = "cuts attention further, into blocks of query rows"

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each single-head attention that is to be cut."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, Block) and match.heads == 1:
                target = context.target.for_attention(match)
                try:
                    tiled = tiled_block(target, match)
                except RefusedError as refused:
                    yield Site(match.softmax, reason=str(refused))
                    continue
                if tiled is not match:
                    yield Site(match.softmax, partial(in_pieces, context, tiled, _TILED), heads=1, kv_heads=1)


def tiled_block(target: Target, block: Block) -> Block:
    """The attention cut into as few equal blocks of rows as the target's wish allows; itself where it stays whole.

    Raises:
        RefusedError: its rows cannot be cut that way.
    """
    rows = block.query_length
    if target.rows_per_tile is None or target.rows_per_tile >= rows:
        return block
    size = max(size for size in range(1, target.rows_per_tile + 1) if rows % size == 0)
    if 2 * size < target.rows_per_tile:
        text = f"{rows} rows have no equal blocks of {target.rows_per_tile} rows or somewhat fewer"
        raise RefusedError(text, block.softmax, None, f"{-(-target.rows_per_tile // 2)} or more", str(size))
    return row_tiles(block, rows // size)


def in_pieces(context: Context, block: Block, form: Form) -> Rewrite:
    """The block with each of its pieces computed alone."""
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    return Rewrite(context.model, context.subgraph, tuple(old), tuple(new), parts=block.pieces)


ROUNDED = Demand("relative", 1e-6)
"""Of a block with FULLY_CONNECTED products."""


class MhaToSha(Pass):
    """`softmax` is per row and `BATCH_MATMUL` per batch and row, so heads never mix before the output projection.

    `[B,K,G*T,S]` becomes N x `[B,1,T,S]`, with N = K*G. Exact: the same products are summed in the same order.
    """

    name = "mha_to_sha"
    summary = "splits multi-head attention into one single-head attention per head"

    def sites(self, context: Context) -> Iterable[Site]:
        """One for each SOFTMAX."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, NotABlock):
                yield Site(match.softmax, None, str(match.reason), settled=not match.is_attention)
                continue
            kept = context.target.no_gain(context.signature, match)
            if match.heads > 1 and not kept:
                yield _site(context, match)
            else:
                reason = "already single-head"
                if match.heads > 1:
                    reason = f"target '{context.target.name}' gains nothing from splitting {kept}"
                yield Site(match.softmax, None, reason, True, match.heads, match.kv_heads)


def _site(context: Context, block: Block) -> Site:
    """Rows are cut in the same go, where they are to be: a tile's heads are then joined to finished rows."""
    target = context.target.for_attention(block)
    form = form_for(target.form, merged=block.merged)
    if block.head_size < (target.norm_per_head_from or 0):
        form = replace(form, composites=False)
    notes = []
    try:
        block = tiled_block(target, block)
    except RefusedError as refused:
        notes.append(f"rows are not cut: {refused}")
    beside = products_beside(block.core)
    if beside:
        where = ", ".join(sorted(f"'{shortened(product.outputs[0].name)}'" for product in beside))
        notes.append(f"the heads are not followed up to scores that are added: {where} still holds several")
    demand = None
    if any(operator.name == "FULLY_CONNECTED" for operator in block.core):
        demand = ROUNDED
        notes.append("products by FULLY_CONNECTED, which XNNPACK rounds by the number of rows: equal to 1e-6")
    build = partial(_build, context, block, form, demand, "; ".join(notes))
    return Site(block.softmax, build, heads=block.heads, kv_heads=block.kv_heads)


def _build(context: Context, block: Block, form: Form, demand: Demand | None, note: str) -> Rewrite:
    rewrite = replace(in_pieces(context, block, form), demand=demand, note=note)
    staying = next((op for op in rewrite.new if op in block.core and op.name in (*PRODUCTS, "SOFTMAX")), None)
    if staying is not None:
        raise RefusedError("somebody else reads what several heads make together", staying)
    return rewrite


def attention_left(
    model: Model, graph: Subgraph, signature: str, sites: Sequence[SiteReport], *, split: bool
) -> Iterator[SiteReport]:
    """Multi-head attention of an entry point that is in none of its `sites`, as sites that were skipped.

    It is in a graph that another operator calls (a branch of IF, a composite), or heads were not to be `split`.
    """
    index = sum(site.pass_name == MhaToSha.name for site in sites)
    reported = {site.operator for site in sites if site.pass_name == InlineComposites.name}
    for current, reason in with_callees(model, graph, reported):
        for match in () if split and current is graph else find_blocks(current):
            if match.heads > 1 if isinstance(match, Block) else match.is_attention:
                yield _left(match, signature, index, reason)
                index += 1


def attention_uncalled(model: Model) -> Iterator[SiteReport]:
    """Attention in subgraphs that neither a signature nor an operator reaches, as sites that were skipped."""
    reached = called(model)
    for place, graph in enumerate(model.subgraphs):
        if graph not in reached:
            matches = (one for one in find_blocks(graph) if isinstance(one, Block) or one.is_attention)
            reason = f"in subgraph {place}, which no signature and no operator calls"
            for index, match in enumerate(matches):
                yield _left(match, f"subgraph {place}", index, reason)


def _left(match: Match, signature: str, index: int, reason: str) -> SiteReport:
    heads, kv_heads = (match.heads, match.kv_heads) if isinstance(match, Block) else (None, None)
    name = match.softmax.outputs[0].name
    return SiteReport(MhaToSha.name, signature, index, Status.SKIPPED, reason, heads, kv_heads, operator=name)


def with_callees(
    model: Model, graph: Subgraph, reported: Container[str] = ()
) -> Iterator[tuple[Subgraph, str]]:
    """A graph and all that its operators call, each once, with why attention in it stays.

    Composites that are sites themselves are told of there.
    """
    reasons = {graph: f"the pass {MhaToSha.name} was left out"}

    def callees(current: Subgraph) -> Iterator[Subgraph]:
        for operator in current.operators:
            if current is graph and operator.name == COMPOSITE and operator.outputs[0].name in reported:
                continue
            for place in subgraph_indices(operator.options):
                reasons.setdefault(model.subgraphs[place], _inside(operator))
                yield model.subgraphs[place]

    for current in walked([graph], callees):
        yield current, reasons[current]


def _inside(operator: Operator) -> str:
    if operator.name == COMPOSITE:
        name = composite_name(operator)
        return (
            f"inside the composite '{name}', which was not opened: a target with inline_composites opens all"
        )
    return f"inside a graph that {operator.title} calls: only what a signature runs itself is rewritten"
