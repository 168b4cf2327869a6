"""Matches of a SOFTMAX (an attention block or not), forms of splitting, and cutting a block's rows into tiles.

The head axis is explained in docs/head-axis.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import HeadLayouts, Trace, ValueProducts, query_axis, trace_heads
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import Reason, RefusedError, Why
from edge_opt.shapes.dimension import with_axis


@dataclass(frozen=True, slots=True)
class Form:
    """Where and how heads are cut.

    With `keep_axes`, SPLIT keeps the head axis, `[B,1,N*T,H]` -> N x `[B,1,T,H]`, right above the logits products; else
    UNPACK drops it as far up as possible, `[B,T,N,H]` -> N x `[B,T,H]`, and rearranges each head. `above` cuts higher
    up, as long as heads can be computed separately: above RoPE and, with `composites`, above a norm over H.
    """

    keep_axes: bool = True
    above: bool = False
    composites: bool = True


FORMS = {"split": Form(), "unpack": Form(keep_axes=False), "split-above": Form(above=True)}
AS_FOUND = "as-found"
"""Heads that the block merges into `[.., N*H]` are split and concatenated; heads that it leaves apart in
`[.., N, H]` are unpacked and packed. The reference graphs do this."""

FORM_NAMES = (AS_FOUND, *FORMS)
"""Names of forms in target files."""


@dataclass(frozen=True, slots=True)
class Block:
    """The attention block of one layer.

    `merged` is the tensor that holds all heads side by side. `logits` are the logits products with the layout of heads
    in their results, `core` the operators from these to `merged`. `kv_heads` is K, `query_length` T, `key_lengths` the
    segments of keys (S, or S and T), `head_size` H. Each of the N heads is a piece; if rows are cut into `tiles`, there
    are N*tiles pieces, and `query_length` is a tile's.

    A single head is one piece without a label: `merged` is the (sum of the) value product(s), and `logits` and `core`
    are empty.
    """

    softmax: Operator
    merged: Labelled
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    value_products: ValueProducts
    layouts: HeadLayouts
    kv_heads: int = 1
    logits: dict[Operator, Labelled] = field(default_factory=dict)
    core: frozenset[Operator] = frozenset()
    tiles: int = 1
    is_attention: ClassVar[bool] = True

    @property
    def heads(self) -> int:
        """N, regardless of tiles."""
        return self.merged.pieces // self.tiles

    @property
    def shares_axis(self) -> bool:
        """True if heads and head size share one axis, `[.., N*H]`; False for `[.., N, H]`."""
        return any(factor.stride for factor in self.merged.factored[-1])


@dataclass(frozen=True, slots=True)
class NotABlock:
    """A SOFTMAX that is not attention, or in an unknown form; `reason` is the condition that failed."""

    softmax: Operator
    reason: Reason
    is_attention: bool = True


Match = Block | NotABlock

_MOST_PIECES = 1 << 14


def logits_bytes(block: Block) -> int:
    """Bytes of one head's logits `[T, S]` on an NPU, with S counting all keys and T all rows."""
    rows = block.query_length * block.tiles
    return rows * sum(block.key_lengths) * element_bytes(block.softmax.input(0))


def element_bytes(tensor: Tensor) -> int:
    """Bytes of an element on an NPU, which keeps floats in half precision."""
    return 2 if tensor.dtype.is_float else max((tensor.dtype.bits or 8) // 8, 1)


def row_tiles(block: Block, count: int) -> Block:
    """The block with its query rows cut into `count` (two or more) tiles, which are independent like heads.

    `softmax` is per row: `[.., T, S]` -> count x `[.., T/count, S]`; keys, values and columns of the mask are shared.
    Piece p is head p % N of tile p // N: the outer digit is the tile, so a tile's heads are made one after the other
    and joined to finished rows.

    Raises:
        RefusedError: the rows cannot be followed to the logits, or there are too many tiles.
    """
    if count * block.heads > _MOST_PIECES:
        text = f"more than {_MOST_PIECES:,} tiles are not made"
        found = f"{count * block.heads:,}"
        raise RefusedError(Why.LIMIT, text, block.softmax, actual=found)
    merged = block.merged
    text = "no axis of the result is the queries' sequence"
    refusal = RefusedError(Why.HEADS, text, block.softmax, merged.tensor)
    for factored in _with_rows(block, count):
        cut = Labelled(merged.tensor, factored)
        try:
            trace = trace_heads(cut, block.value_products, block.layouts)
        except RefusedError as refused:
            refusal = refused
            continue
        if _has_tiles(trace, block):
            return replace(
                block,
                merged=cut,
                query_length=block.query_length // count,
                logits=trace.logits,
                core=trace.core,
                tiles=count,
            )
    raise refusal


def _with_rows(block: Block, count: int) -> Iterator[Factored]:
    """The factors with T cut into `count` tiles, for each possible T: `(B*T)` -> `(B)(count: stride N)(T/count)`."""
    rows = block.query_length
    factored = block.merged.factored
    if rows % count:
        return
    for place, axis in enumerate(factored):
        for index, factor in enumerate(axis):
            if factor.stride or factor.size % rows:
                continue
            outer = Factor(factor.size // rows)
            parts = fx.merge_neighbours((outer, Factor(count, block.heads), Factor(rows // count)))
            yield with_axis(factored, place, with_axis(axis, index, *parts))


def _has_tiles(trace: Trace, block: Block) -> bool:
    """True if the tiles lie in the rows of each value product, and so in the queries' sequence."""
    for product, result in trace.value_products.items():
        rows = result.factored[query_axis(block.value_products[product])]
        if not any(factor.stride * factor.size > block.heads for factor in rows):
            return False
    return True
