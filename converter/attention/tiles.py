"""Smaller pieces than heads: query rows as one more digit of a head's number."""

from collections.abc import Iterator
from dataclasses import replace

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.found import Block
from edge_opt.attention.labelling import trace_heads
from edge_opt.ir.refusal import RefusedError


def row_tiles(block: Block, count: int) -> Block:
    """The attention as `count` (two or more) times as many blocks of query rows, as independent of each other as heads.

    `softmax` is per row: `[.., T, S]` -> count x `[.., T/count, S]`, keys, values and the columns of the mask shared.
    Piece p is head p % N of tile p // N: the outer digit is the tile, so a tile's heads are made one after the other
    and joined to finished rows.

    Raises:
        RefusedError: the rows cannot be followed to the logits.
    """
    if block.others:
        raise RefusedError("the probabilities weigh several values that are never summed", block.softmax)
    refusal = RefusedError("no axis of the result is the queries' sequence", block.softmax, block.output)
    for factored in _with_rows(block, count):
        try:
            return _labelled(block, factored, count)
        except RefusedError as refused:
            refusal = refused
    raise refusal


def _with_rows(block: Block, count: int) -> Iterator[Factored]:
    """The factors with T cut into `count` tiles, wherever T may be: `(B*T)` -> `(B)(count: stride N)(T/count)`."""
    rows = block.query_length
    if rows % count:
        return
    for place, axis in enumerate(block.factored):
        for index, factor in enumerate(axis):
            if factor.stride == 0 and factor.size % rows == 0:
                parts = (Factor(factor.size // rows), Factor(count, block.heads), Factor(rows // count))
                own = (*axis[:index], *(part for part in parts if part.size > 1), *axis[index + 1 :])
                yield (*block.factored[:place], own, *block.factored[place + 1 :])


def _labelled(block: Block, factored: Factored, count: int) -> Block:
    """The block with other factors, where every piece of them reaches the logits as rows of its own."""
    trace = trace_heads([(block.output, factored)], block.products, block.operands)
    if trace.lost is not None or not trace.logits:
        raise RefusedError(trace.refusal or "no logits product leads to this SOFTMAX", block.softmax)
    for product, labelled in trace.products.items():
        rows = labelled[block.products[product].rows]
        if not any(factor.stride * factor.size > block.heads for factor in rows):
            raise RefusedError("what is cut are no rows of the value product", product)
    pieces = block.heads * count
    for product, labelled in trace.logits.items():
        if fx.piece_count(labelled) != pieces:
            raise RefusedError("not every row reaches the logits", product)
    return replace(
        block,
        factored=factored,
        pieces=pieces,
        query_length=block.query_length // count,
        logits=trace.logits,
        core=frozenset(trace.core),
        heads_are_rows=False,
        tiles=count,
    )
