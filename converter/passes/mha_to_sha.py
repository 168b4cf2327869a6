"""Multi-head attention -> one single-head attention per head, joined at the end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from edge_opt.attention.block import Block, NotABlock, find_blocks
from edge_opt.attention.form import form_for
from edge_opt.attention.split import split_heads
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.passes.spreads import attention_spreads
from edge_opt.passes.tile_rows import chained, tiled_block, tiles_note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_opt.attention.form import Form


class MhaToSha(Pass):
    """`softmax` is per row and `BATCH_MATMUL` per batch and row, so heads never mix before the output projection.

    `[B,K,G*T,S]` becomes N x `[B,1,T,S]`, with N = K*G. Exact: the same products are summed in the same order.
    """

    name: ClassVar[str] = "mha_to_sha"
    summary: ClassVar[str] = "splits multi-head attention into one single-head attention per head"
    demand: ClassVar[Demand] = Demand("bitwise")

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each SOFTMAX."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, Block) and not context.target.splits(context.signature):
                reason = f"target '{context.target.name}' gains nothing from splitting this signature"
                heads, kv_heads = match.heads, match.kv_heads
                yield SkippedSite(match.softmax, reason, settled=True, heads=heads, kv_heads=kv_heads)
            elif isinstance(match, Block):
                yield _site(context, match)
            elif isinstance(match, NotABlock):
                yield SkippedSite(match.softmax, str(match.reason), settled=not match.is_attention)
            else:
                yield SkippedSite(match.softmax, "already single-head", settled=True, heads=1, kv_heads=1)


def _site(context: Context, block: Block) -> Site:
    """Rows are cut in the same go, where they are to be: a tile's heads are then joined to finished rows."""
    target = context.target.for_attention(block)
    tiled = tiled_block(target, block)
    chosen, note = block, ""
    if isinstance(tiled, Block):
        chosen, note = tiled, tiles_note(tiled, target)
    elif tiled is not None:
        note = f"rows are not cut: {tiled}"
    form = chained(form_for(target.form, merged=block.merged), chosen, chain=target.chain)
    build = partial(_build, context, chosen, form)
    return Site(block.softmax, build, block.heads, block.kv_heads, note=note)


def _build(context: Context, block: Block, form: Form) -> Rewrite:
    anchor = block.output.producer
    assert anchor is not None
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    spreads = (attention_spreads(old, block.softmax),)
    return Rewrite(context.subgraph, tuple(old), tuple(new), anchor, spreads=spreads)
