"""An attention -> several, each for some of the query rows, so that logits and mask fit on the chip."""

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from edge_opt.attention.block import Block, find_blocks
from edge_opt.attention.form import Form
from edge_opt.attention.split import split_heads
from edge_opt.attention.tiles import row_tiles
from edge_opt.ir.refusal import RefusedError
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.passes.spreads import attention_spreads
from edge_opt.targets import Target

_FORM = Form(cut="split", position="near", sink=False)


class TileRows(Pass):
    """`softmax` is per row, so query rows never mix: `[.., T, S]` -> T/R x `[.., R, S]`, joined at the value product.

    Off unless the target or `--rows-per-tile` asks for it. The mask is cut once per mask and length, and shared by
    heads and layers. These are the attentions that have one head; where there are several, `mha_to_sha` cuts rows and
    heads in one go.
    """

    name: ClassVar[str] = "tile_rows"
    summary: ClassVar[str] = "cuts attention further, into blocks of query rows"
    demand: ClassVar[Demand] = Demand("bitwise")

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each single-head attention that is to be cut."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, Block) and match.heads == 1:
                target = context.target.for_attention(match)
                try:
                    tiled = tiled_block(target, match)
                except RefusedError as refused:
                    yield SkippedSite(match.softmax, str(refused))
                    continue
                if tiled is not match:
                    yield Site(match.softmax, partial(in_pieces, context, tiled, _FORM), heads=1, kv_heads=1)


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
    anchor = block.output.producer
    assert anchor is not None
    old, new = split_heads(context.model, context.subgraph, block, form, context.constants)
    return Rewrite(
        context.subgraph,
        tuple(old),
        tuple(new),
        anchor,
        calls=context.model,
        spreads=(attention_spreads(old, block.softmax),),
        parts=block.pieces,
    )
