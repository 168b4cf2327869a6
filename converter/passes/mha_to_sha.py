"""Multi-head attention -> one single-head attention per head, joined at the end."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from edge_opt.attention.block import Block, NotABlock, find_blocks
from edge_opt.attention.form import Form, form_for
from edge_opt.attention.rules import PRODUCTS
from edge_opt.attention.surroundings import products_beside
from edge_opt.ir.refusal import RefusedError
from edge_opt.output.words import shortened
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.passes.tile_rows import in_pieces, tiled_block

ROUNDED = Demand("relative", 1e-6)
"""Of a block with FULLY_CONNECTED products."""


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
            if isinstance(match, NotABlock):
                yield SkippedSite(match.softmax, str(match.reason), settled=not match.is_attention)
                continue
            kept = context.target.no_gain(context.signature, match)
            if match.heads > 1 and not kept:
                yield _site(context, match)
            else:
                reason = "already single-head"
                if match.heads > 1:
                    reason = f"target '{context.target.name}' gains nothing from splitting {kept}"
                heads, kv_heads = match.heads, match.kv_heads
                yield SkippedSite(match.softmax, reason, settled=True, heads=heads, kv_heads=kv_heads)


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
    build = partial(_build, context, block, form)
    beside = products_beside(block.core)
    if beside:
        where = ", ".join(sorted(f"'{shortened(product.outputs[0].name)}'" for product in beside))
        notes.append(f"the heads are not followed up to scores that are added: {where} still holds several")
    demand = None
    if any(operator.name == "FULLY_CONNECTED" for operator in block.core):
        demand = ROUNDED
        notes.append("products by FULLY_CONNECTED, which XNNPACK rounds by the number of rows: equal to 1e-6")
    return Site(block.softmax, build, block.heads, block.kv_heads, demand, "; ".join(notes))


def _build(context: Context, block: Block, form: Form) -> Rewrite:
    rewrite = in_pieces(context, block, form)
    staying = next((op for op in rewrite.new if op in block.core and op.name in (*PRODUCTS, "SOFTMAX")), None)
    if staying is not None:
        raise RefusedError("somebody else reads what several heads make together", staying)
    return rewrite
