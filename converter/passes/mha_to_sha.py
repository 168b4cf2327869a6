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

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_opt.attention.refusal import Refusal


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
                build = partial(_build, context, match)
                yield Site(match.softmax, build, match.heads, match.kv_heads)
            elif isinstance(match, NotABlock):
                yield SkippedSite(match.softmax, str(match.reason), settled=not match.is_attention)
            else:
                yield SkippedSite(match.softmax, "already single-head", settled=True, heads=1, kv_heads=1)


def _build(context: Context, block: Block) -> Rewrite | Refusal:
    form = form_for(context.target.form, merged=block.merged)
    anchor = block.output.producer
    assert anchor is not None
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    spreads = (attention_spreads(old, block.softmax),)
    return Rewrite(context.subgraph, tuple(old), tuple(new), anchor, spreads=spreads)
