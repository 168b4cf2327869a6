"""A single-head attention -> several, each for some of the query rows, so that logits and mask fit on the chip."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from edge_opt.attention.block import SingleHead, find_blocks, row_tiles
from edge_opt.attention.form import Form
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.split import split_heads
from edge_opt.passes.contract import Context, Demand, Pass, Site, SkippedSite
from edge_opt.passes.rewrite import Rewrite
from edge_opt.passes.spreads import attention_spreads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_opt.targets import Target

_FORM = Form(cut="split", position="near", sink=False)
_HALF = 2


class TileRows(Pass):
    """`softmax` is per row, so query rows never mix: `[.., T, S]` -> T/R x `[.., R, S]`, joined at the value product.

    Off unless the target or `--rows-per-tile` asks for it, or a mask operand exceeds the target's limit. The mask is
    cut once per mask and length, and shared by heads and layers.
    """

    name: ClassVar[str] = "tile_rows"
    summary: ClassVar[str] = "cuts single-head attention further, into blocks of query rows"
    demand: ClassVar[Demand] = Demand("bitwise")

    def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
        """One for each single-head attention that is to be cut."""
        for match in find_blocks(context.subgraph):
            if isinstance(match, SingleHead):
                count = tiles(context.target, match)
                if count > 1:
                    yield Site(match.softmax, partial(_build, context, match, count), heads=1, kv_heads=1)


def tiles(target: Target, single: SingleHead) -> int:
    """Into how many equal blocks of rows a head is to be cut: the fewest that the target's wishes allow."""
    rows = single.query_length
    for count in range(1, rows + 1):
        if rows % count == 0 and _fits(target, single, rows // count):
            return count
    return 1


def _fits(target: Target, single: SingleHead, rows: int) -> bool:
    if target.rows_per_tile is not None and rows > target.rows_per_tile:
        return False
    if target.largest_mask_bytes is None or single.mask is None:
        return True
    return rows * sum(single.key_lengths) * mask_element_bytes(single) <= target.largest_mask_bytes


def mask_element_bytes(single: SingleHead) -> int:
    """Bytes of an element of the mask on an NPU, which keeps floats in half precision."""
    assert single.mask is not None
    dtype = single.mask.dtype
    return _HALF if dtype.is_float else (dtype.bits or 8) // 8


def _build(context: Context, single: SingleHead, count: int) -> Rewrite | Refusal:
    block = row_tiles(single, count)
    if isinstance(block, Refusal):
        return block
    anchor = block.output.producer
    assert anchor is not None
    old, new = split_heads(context.model, context.subgraph, block, _FORM, context.constants)
    spreads = (attention_spreads(old, single.softmax),)
    return Rewrite(context.subgraph, tuple(old), tuple(new), anchor, spreads=spreads)
