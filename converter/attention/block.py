"""Finds attention blocks. Reads graphs, changes nothing.

From a SOFTMAX forward to its value products and to the tensor where the heads are merged, and from there back along
the head label to the logits products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor
from edge_opt.attention.found import Block, Match, NotABlock, SingleHead
from edge_opt.attention.front import products_before
from edge_opt.attention.labelling import Labelling, OperandFactors
from edge_opt.attention.matcher import Matcher
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.tail import OPAQUE, value_products

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.ir import Operator, Subgraph

__all__ = ["Block", "Match", "NotABlock", "SingleHead", "find_blocks", "match_block", "row_tiles"]

_LINEAR = frozenset({"FULLY_CONNECTED", "CONV_2D"})


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """One match for every SOFTMAX of the subgraph, in execution order."""
    finder = _Finder(subgraph, OperandFactors())
    softmaxes = [operator for operator in subgraph.operators if operator.name == "SOFTMAX"]
    # From the last one on: a block may look at the next, and a file may chain more of them than a stack holds.
    for softmax in reversed(softmaxes):
        finder.match(softmax)
    for softmax in softmaxes:
        yield finder.match(softmax)


def match_block(subgraph: Subgraph, softmax: Operator, operands: OperandFactors | None = None) -> Match:
    """What a SOFTMAX belongs to."""
    return _Finder(subgraph, operands or OperandFactors()).match(softmax)


class _Finder:
    """Matches each SOFTMAX once: one block may have to look at the next."""

    def __init__(self, subgraph: Subgraph, operands: OperandFactors) -> None:
        self._subgraph = subgraph
        self._operands = operands
        self._known: dict[Operator, Match] = {}

    def match(self, softmax: Operator) -> Match:
        """What a SOFTMAX belongs to."""
        if softmax not in self._known:
            self._known[softmax] = self._match(softmax)
        return self._known[softmax]

    def _match(self, softmax: Operator) -> Match:
        products = value_products(softmax)
        if isinstance(products, Refusal):
            opaque = products.operator is not None and products.operator.name in OPAQUE
            return NotABlock(softmax, products, is_attention=opaque)
        sizes = {head_size for _, head_size in products.values()}
        if 0 in sizes:
            return NotABlock(softmax, Refusal("an empty tensor", next(iter(products))))
        if len(sizes) != 1:
            return NotABlock(
                softmax, Refusal("value products differ in head size", actual=str(sorted(sizes)))
            )
        logits, ends = products_before(softmax)
        if not logits:
            learned = all(end is None or end.name in _LINEAR for end in ends)
            blocker = next((end for end in ends if end is not None), None)
            reason = Refusal("no product of queries and keys leads to this SOFTMAX: not attention", blocker)
            return NotABlock(softmax, reason, is_attention=not learned)
        if sizes == {1}:
            return NotABlock(
                softmax, Refusal("a head size of 1 leaves no trace to follow", next(iter(products)))
            )
        matcher = Matcher(self._subgraph, softmax, products, logits, self._operands, self.match)
        return matcher.match()


def row_tiles(single: SingleHead, count: int) -> Block | Refusal:
    """A single head seen as `count` blocks of query rows, which are as independent of each other as heads are.

    softmax is per row: `[.., T, S]` -> count x `[.., T/count, S]`, keys, values and the columns of the mask shared.
    """
    shape, axis = single.output.shape, single.row_axis
    if axis >= len(shape) or shape[axis] != single.query_length or single.query_length % count:
        return Refusal("the rows of the value product are not its sequence", single.softmax, single.output)
    front, back = fx.plain(shape[:axis]), fx.plain(shape[axis + 1 :])
    rest = single.query_length // count
    rows = (Factor(count, 1), *((Factor(rest),) if rest > 1 else ()))
    factored = (*front, rows, *back)
    labelling = Labelling(single.products, single.operands)
    if not labelling.core(single.output, factored) or not labelling.logits:
        return labelling.first_refusal or Refusal("no logits product leads to this SOFTMAX", single.softmax)
    for product, labelled in labelling.logits.items():
        if fx.piece_count(labelled) != count:
            return Refusal("not every row reaches the logits", product)
    return Block(
        softmax=single.softmax,
        output=single.output,
        factored=factored,
        heads=count,
        kv_heads=1,
        head_size=single.head_size,
        query_length=rest,
        key_lengths=single.key_lengths,
        mask=single.mask,
        logits=dict(labelling.logits),
        values=tuple(single.products),
        core=frozenset(labelling.core_operators),
        operands=single.operands,
        heads_are_rows=False,
    )
