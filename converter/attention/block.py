"""Finds attention blocks. Reads graphs, changes nothing.

From a SOFTMAX forward to its value products and to the tensor where the heads are merged, and from there back along
the head label to the logits products.
"""

from collections.abc import Iterator
from contextlib import suppress

from edge_opt.attention.found import Block, Match, NotABlock
from edge_opt.attention.labelling import OperandFactors
from edge_opt.attention.matcher import Matcher
from edge_opt.attention.rules import is_product, multiplies_activations
from edge_opt.attention.surroundings import (
    SOFTMAXES,
    between_products,
    holds_several,
    is_opaque,
    is_residual,
    last_computation,
    producers,
    products_above,
    value_products,
    weighing_sum,
)
from edge_opt.ir import Operator, Subgraph
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.shapes.trust import doubted

__all__ = ["Block", "Match", "NotABlock", "find_blocks"]

_LINEAR = frozenset({"FULLY_CONNECTED", "CONV_2D"})


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """One match for every attention or other SOFTMAX of the subgraph, in execution order.

    Where several SOFTMAXes weigh the same values together, they are one attention, told of the first. Attention without
    a SOFTMAX stands at the operator that makes what weighs the values.
    """
    with doubted([subgraph]):
        yield from _found(subgraph)


def _found(subgraph: Subgraph) -> Iterator[Match]:
    finder = _Finder(subgraph)
    softmaxes = [operator for operator in subgraph.operators if operator.code.name in SOFTMAXES]
    # From the last one on: a block may look at the next, and a file may chain more of them than a stack holds.
    for softmax in reversed(softmaxes):
        finder.match(softmax)
    anchors = {*softmaxes, *finder.weights_without_softmax(softmaxes)}
    inside: set[Operator] = set()
    weighed: set[frozenset[Operator]] = set()
    for softmax in (operator for operator in subgraph.operators if operator in anchors):
        match = finder.match(softmax)
        values = frozenset(match.products) if isinstance(match, Block) and match.heads == 1 else None
        if softmax not in inside and values not in weighed:
            yield match
        if isinstance(match, Block):
            inside |= match.core
        if values is not None:
            weighed.add(values)


class _Finder:
    """Matches each SOFTMAX once: one block may have to look at the next."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._subgraph = subgraph
        self._operands = OperandFactors()
        self._known: dict[Operator, Match] = {}

    def match(self, softmax: Operator) -> Match:
        """What a SOFTMAX belongs to."""
        if softmax not in self._known:
            try:
                self._known[softmax] = self._match(softmax)
            except RefusedError as refused:
                self._known[softmax] = NotABlock(softmax, refused.refusal)
        return self._known[softmax]

    def weights_without_softmax(self, softmaxes: list[Operator]) -> Iterator[Operator]:
        """The last operators between two products of several matrices that belong to no SOFTMAX: each makes weights."""
        known: set[Operator] = set()
        for softmax in softmaxes:
            with suppress(RefusedError):
                known.update(value_products(softmax))
            known.update(products_above(producers(softmax))[0])
        for product in self._subgraph.operators:
            if product in known or not multiplies_activations(product):
                continue
            makers = [last_computation(product.input(index)) for index in (0, 1)]
            for weights in (operator for operator in makers if operator is not None):
                linear = is_product(weights)
                scores = [weights] if linear else products_above(producers(weights))[0]
                several = all(map(holds_several, scores)) and not any(map(is_residual, scores))
                if scores and known.isdisjoint(scores) and several:
                    known.update((product, *scores))
                    yield weights
                    break

    def _match(self, softmax: Operator) -> Match:
        if is_product(softmax):
            raise RefusedError("linear attention: nothing lies between this product and the next", softmax)
        if softmax.shape_error:
            raise RefusedError("the recorded shapes do not fit", softmax)
        try:
            products = value_products(softmax)
        except RefusedError as refused:
            return _without_values(softmax, refused.refusal)
        if not all(weighing.head_size for weighing in products.values()):
            raise RefusedError("an empty tensor", next(iter(products)))
        logits, ends = products_above(producers(softmax))
        if not logits:
            return _without_scores(softmax, ends)
        around = (softmax, *products, *logits)
        if any(tensor.is_dynamic for operator in around for tensor in operator.outputs):
            raise RefusedError("a dimension is known only at run time", softmax)
        return Matcher(self._subgraph, softmax, products, logits, self._operands, self.match).match()


def _without_values(softmax: Operator, reason: Refusal) -> NotABlock:
    """A SOFTMAX behind which no value product is seen; it is attention all the same if its rows weigh something."""
    opaque = reason.operator is not None and is_opaque(reason.operator)
    summed = weighing_sum(softmax)
    if summed is not None:
        raise RefusedError("the probabilities weigh values by MUL and a sum, which is not split", summed)
    if not opaque and between_products(softmax):
        raise RefusedError("the probabilities are not followed through this operator", reason.operator)
    return NotABlock(softmax, reason, is_attention=opaque)


def _without_scores(softmax: Operator, ends: list[Operator]) -> NotABlock:
    """A SOFTMAX whose numbers weigh something, of which no product of queries and keys is seen."""
    blocker = ends[0] if ends else None
    if all(end.name in _LINEAR for end in ends) and not between_products(softmax):
        reason = Refusal("no product of queries and keys leads to this SOFTMAX: not attention", blocker)
        return NotABlock(softmax, reason, is_attention=False)
    if blocker is None:
        raise RefusedError("no product of queries and keys is found above this SOFTMAX")
    raise RefusedError("the scores are not followed through this operator", blocker)
