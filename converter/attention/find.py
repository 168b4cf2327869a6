"""Finds attention blocks and how their heads lie. Reads graphs, changes nothing.

From a SOFTMAX forward to its value products, and from there back along the head label to the products of queries and
keys. Heads are read off where they are merged, `[.., N*H]`; else off the batch axes of the products and of the SOFTMAX.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edge_opt.attention import factors as fx
from edge_opt.attention import surroundings as around
from edge_opt.attention.block import Block, Match, NotABlock
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.labels import OnHeads, OperandFactors, Trace, Weighings, distrusted, trace_heads
from edge_opt.attention.rule import Labelled
from edge_opt.attention.rules import is_product, multiplies_activations
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.ir.walk import producers
from edge_opt.shapes.inference import doubted


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """One match for every attention or other SOFTMAX of the subgraph, in execution order.

    Where several SOFTMAXes weigh the same values together, they are one attention, told of the first. Attention without
    a SOFTMAX stands at the operator that makes what weighs the values.
    """
    operands = OperandFactors()
    with doubted([subgraph]):
        softmaxes = [operator for operator in subgraph.operators if operator.code.name in around.SOFTMAXES]
        anchors = {*softmaxes, *_weights_without_softmax(subgraph, softmaxes)}
        inside: set[Operator] = set()
        for softmax in (operator for operator in subgraph.operators if operator in anchors):
            if softmax in inside:
                continue
            try:
                match = _match(softmax, operands)
            except RefusedError as refused:
                match = NotABlock(softmax, refused.refusal)
            if isinstance(match, Block):
                products = set(match.products)
                if match.heads == 1 and products <= inside:
                    continue
                inside |= match.core | products
            yield match


def _weights_without_softmax(subgraph: Subgraph, softmaxes: Sequence[Operator]) -> Iterator[Operator]:
    """The last operators between two products of several matrices that belong to no SOFTMAX: each makes weights."""
    assigned: set[Operator] = set()
    for softmax in softmaxes:
        assigned.update(around.value_products(softmax)[0], around.products_above(producers(softmax))[0])
    for product in subgraph.operators:
        if product in assigned or not multiplies_activations(product):
            continue
        makers = [around.last_computation(product.input(side)) for side in (0, 1)]
        for weights in filter(None, makers):
            scores = [weights]
            if not is_product(weights):
                scores, _ = around.products_above(producers(weights))
            several = all(map(around.holds_several, scores)) and not any(map(around.is_residual, scores))
            if scores and assigned.isdisjoint(scores) and several:
                assigned.update((product, *scores))
                yield weights
                break


def _match(softmax: Operator, operands: OperandFactors) -> Match:
    """What a SOFTMAX belongs to; raises RefusedError where that is attention which is not understood."""
    if is_product(softmax):
        raise RefusedError("linear attention: nothing lies between this product and the next", softmax)
    if softmax.shape_error:
        raise RefusedError("the recorded shapes do not fit", softmax)
    products, blocker = around.value_products(softmax)
    if not products and blocker is not None and around.is_opaque(blocker):
        raise RefusedError("the probabilities go into an operator that nothing is known of", blocker)
    attends = around.is_attention(softmax)
    if not products and attends:
        raise RefusedError("the probabilities are not followed through this operator", blocker)
    if not products:
        reason = Refusal("no value product behind this SOFTMAX: not attention", blocker)
        return NotABlock(softmax, reason, is_attention=False)
    if not all(weighing.head_size for weighing in products.values()):
        raise RefusedError("an empty tensor", next(iter(products)))
    logits, ends = around.products_above(producers(softmax))
    if not logits and (attends or not all(end.name in around.PROJECTIONS for end in ends)):
        raise RefusedError("the scores are not followed through this operator", next(iter(ends), softmax))
    if not logits:
        reason = Refusal(
            "no product of queries and keys leads to this SOFTMAX: not attention", next(iter(ends), None)
        )
        return NotABlock(softmax, reason, is_attention=False)
    if any(tensor.is_dynamic for one in (softmax, *products, *logits) for tensor in one.outputs):
        raise RefusedError("a dimension is known only at run time", softmax)
    return _Search(softmax, products, logits, operands).block()


@dataclass(eq=False)
class _Search:
    """The search for one block: `values` are the value products, `scores` the nearest ones in front of the SOFTMAX."""

    softmax: Operator
    values: Weighings
    scores: list[Operator]
    operands: OperandFactors

    def __post_init__(self) -> None:
        first, self._weighing = next(iter(self.values.items()))
        self._product = first.outputs[0]
        self._tail = around.tail_of(self.values)
        masking = around.masking(self.softmax)
        self._masked = self.softmax if masking is None else masking[0]
        self._mask = None if masking is None else masking[1]

    def block(self) -> Block:
        """What the SOFTMAX belongs to.

        Raises:
            RefusedError: its heads cannot be told, or not be followed.
        """
        placed = self._beside_head_size() or self._on_batch_axes()
        return self._single_head() if placed is None else self._with_heads(*placed)

    def _with_heads(self, output: Tensor, factored: Factored) -> Block:
        heads = fx.piece_count(factored)
        trace = trace_heads((output, factored), self.values, self.operands)
        trace.check(heads, self.softmax)
        if trace.refusal is not None and any(product not in trace.logits for product in self.scores):
            raise RefusedError(trace.refusal)
        product, labelled = next(iter(trace.products.items()))
        length = _plain(labelled[self.values[product].rows])
        rows = {own: length * math.prod(map(_plain, own[:-2])) for own in trace.logits.values()}
        axes = (axis for own in trace.logits.values() for axis in own[-2:] if axis)
        return Block(
            softmax=self.softmax,
            output=output,
            factored=factored,
            pieces=heads,
            kv_heads=max(self._kv_heads(value, own, heads) for value, own in trace.products.items()),
            head_size=self.values[product].head_size,
            query_length=length,
            key_lengths=tuple(math.prod(map(_plain, own)) // rows[own] for own in trace.logits.values()),
            mask=self._mask,
            products=self.values,
            logits=trace.logits,
            core=trace.core,
            operands=self.operands,
            heads_are_rows=any(map(fx.only_labels, axes)),
        )

    def _kv_heads(self, product: Operator, factored: Factored, heads: int) -> int:
        """K: how many different keys or values the heads have, before anything repeats them for several heads."""
        side = 1 - self.values[product].operand
        start = product.input(side), self.operands.known(product.outputs[0], factored)[side]
        walk = self.operands.upwards([start])
        # Some exporters repeat by multiplying with ones.
        sources = [own for tensor, own, ends in walk if ends and not _is_one_number(tensor)]
        return len({tuple(fx.piece_key(own, head) for own in sources) for head in range(heads)})

    # Heads beside the head size

    def _beside_head_size(self) -> OnHeads | None:
        """Heads left of the head size: in its axis, `[.., N*H]`, which a projection contracts, or `[.., N, H]`.

        The nearest tensor with the most heads: `[.., K, G, H]` on the way to it has only some beside.
        """
        size, most, best = self._weighing.head_size, 1, None
        if size == 1 or any(own.head_size != size for own in self.values.values()):
            return None
        for tensor in self._tail:
            *front, width = tensor.shape
            merged = width > size
            count = width // size if merged else (1, *front)[-1]
            if width % size or not self._are_heads(tensor, count, merged=merged):
                continue
            if merged:
                return tensor, (*fx.plain(tuple(front)), (Factor(count, 1), Factor(size)))
            if count > most:
                most, best = (
                    count,
                    (tensor, (*fx.plain(tuple(front[:-1])), (Factor(count, 1),), (Factor(size),))),
                )
        return best

    def _are_heads(self, tensor: Tensor, count: int, *, merged: bool) -> bool:
        """True where the digits left of the head size are heads: batch axes of a product, then a part of its rows.

        In the other order they are the sequence, as in `[B, T*N*H]`. Unmerged, inner rows are the sequence, too, and
        batch axes that do not lie in the outermost axis more heads.
        """
        size = self._weighing.head_size
        front = tensor.shape[:-1] if merged else tensor.shape[:-2]
        batch = (Factor(front[0], count * size),) if front and front[0] > 1 else ()
        beside = (
            ((Factor(count, size), Factor(size, 1)),)
            if merged
            else ((Factor(count, size),), (Factor(size, 1),))
        )
        own = self._at_product(tensor, (*(() if not front else (batch, *fx.plain(front[1:]))), *beside))
        if own is None or own[self._weighing.columns] != (Factor(size, 1),):
            return False
        digits = [digit for axis in own for digit in axis if size <= digit.stride < count * size]
        if any(outer.stride < inner.stride for outer, inner in pairwise(digits)):
            return False
        rows = [digit in digits for digit in own[self._weighing.rows]]
        is_sequence = any(rows) and (not rows[0] or rows[-1])
        return merged or not (is_sequence or not all(map(fx.only_labels, own[:-2])))

    def _at_product(self, tensor: Tensor, factored: Factored) -> Factored | None:
        """How a label of a tensor behind the first value product lies in its result."""
        walk = self.operands.upwards([(tensor, factored)], self.values)
        return next((own for met, own, _ in walk if met is self._product), None)

    # Heads in batch axes

    def _on_batch_axes(self) -> OnHeads | None:
        """Heads in the batch axes of the products, where each index is a matrix by itself, or only of the SOFTMAX.

        All are heads but the own batch of the model.

        Raises:
            RefusedError: the heads do not reach the logits.
        """
        output = self._product
        if self._tail and self._tail[0].shape[:-2] == output.shape[:-2]:
            output = self._tail[0]
        elif len(self.values) > 1 and math.prod(output.shape[:-2]) > 1:
            raise RefusedError("the probabilities weigh several values that are never summed", self.softmax)
        heads: dict[int, int] = {}
        for axis, size in enumerate(output.shape[:-2]):
            try:
                trace = self._traced(_labelled(output, {axis: size}))
            except RefusedError:
                if axis or len(output.shape) == 3:
                    raise
                continue
            if trace is not None:
                heads[axis] = size // self._batch(trace)
        in_rows = self._heads_in_rows()
        factored = _labelled(output, heads, self._weighing.rows, in_rows)[1]
        if self._traced((output, factored)) is None:
            return None
        if in_rows == 1:
            self._check_rows()
        return output, factored

    def _heads_in_rows(self) -> int:
        """How many heads a product's rows hold, by how they are masked: `[1,1,(G)(T),S] -> [1,G,T,S] + [1,1,T,S]`."""
        own = math.prod(self._product.shape[:-2])
        *lanes, rows, _ = (1, 1, *self._masked.outputs[0].shape)
        mask = (1, 1, *(self._mask.shape if self._mask is not None else ()))
        if mask[-2] != rows or math.prod(lanes) % own or (rows == 1 and math.prod(mask[:-2]) > 1):
            return 1
        return math.prod(lanes) // own

    def _traced(self, placed: OnHeads) -> Trace | None:
        """The way of the label, which all heads go; None where there is no label."""
        heads = fx.piece_count(placed[1])
        if heads == 1:
            return None
        trace = trace_heads(placed, self.values, self.operands)
        trace.check(heads, placed[0].producer)
        return trace

    def _batch(self, trace: Trace) -> int:
        """How many steps of a label are the model's batch: the outermost axis of all that is computed above.

        Weights alone have no batch.
        """
        starts = [
            (product.input(index), labelled)
            for product, own in (*trace.products.items(), *trace.logits.items())
            for index, labelled in self.operands.known(product.outputs[0], own).items()
            if product.input(index).producer not in trace.core
        ]
        edges = [(tensor, own) for tensor, own, ends in self.operands.upwards(starts) if ends]
        computed = [own for tensor, own in edges if fx.piece_count(own) > 1 and not tensor.is_constant]
        return min((math.prod(factor.size for factor in fx.leading(own[0])) for own in computed), default=1)

    # One head

    def _single_head(self) -> Block:
        """One head; refused where there may be several which nothing tells apart."""
        for tensor in self._tail:
            if tensor.producer and (refusal := distrusted(tensor.producer)):
                raise RefusedError(refusal)
        self._check_rows()
        product = self._product
        rows = product.shape[self._weighing.rows]
        lengths = tuple(
            one.outputs[0].elements // (math.prod(product.shape[:-2]) * rows) for one in self.scores
        )
        output, size = self._tail[0] if self._tail else product, self._weighing.head_size
        shape = fx.plain(output.shape), size, rows, lengths
        return Block(self.softmax, output, *shape, self._mask, self.values, self.operands)

    def _check_rows(self) -> None:
        """Raises RefusedError where rows of the value product are several heads', but nothing tells which."""
        product, place = self._product, self._weighing.rows
        if math.prod(self.softmax.outputs[0].shape[:-2]) > math.prod(product.shape[:-2]):
            raise RefusedError("the SOFTMAX has more matrices than the value product", self.softmax)
        factored = list(fx.plain(product.shape))
        factored[place] = (Factor(product.shape[place], 1),)
        text = "rows of the value product are taken apart or repeated, for heads or not"
        for tensor, labelled, _ in self.operands.upwards([(product, tuple(factored))]):
            maker = tensor.producer
            repeats = (
                maker is not None
                and maker.name in around.JOINING
                and len({*maker.inputs}) < len(maker.inputs)
            )
            if repeats:
                repeats = Labelled(tensor, labelled).axis(len(labelled)) in fx.labelled_axes(labelled)
            if len(fx.merge_neighbours(fx.labels(labelled))) > 1 or repeats:
                raise RefusedError(text, maker, tensor)
        for tensor in self._tail:
            shape = tensor.shape
            steps = [(Factor(size, math.prod(shape[axis + 1 :])),) for axis, size in enumerate(shape)]
            own = self._at_product(tensor, fx.canonical(tuple(steps)))
            if own is not None and len(fx.merge_neighbours(own[place])) > 1:
                raise RefusedError(text, tensor.producer, tensor)


def _labelled(output: Tensor, heads: Mapping[int, int], rows: int = -2, in_rows: int = 1) -> OnHeads:
    """A tensor with so many heads innermost in these axes, and so many outermost in the rows."""
    factored = list(fx.plain(output.shape))
    for axis, count in heads.items():
        inner = math.prod(heads[other] for other in heads if other > axis)
        parts = Factor(output.shape[axis] // count), Factor(count, inner * in_rows)
        factored[axis] = tuple(part for part in parts if part.size > 1)
    if in_rows > 1:
        factored[rows] = (Factor(in_rows, 1), *fx.plain((output.shape[rows] // in_rows,))[0])
    return output, tuple(factored)


def _plain(factors: Axis) -> int:
    return math.prod(factor.size for factor in factors if not factor.stride)


def _is_one_number(tensor: Tensor) -> bool:
    if not (tensor.has_numbers and tensor.elements):
        return False
    values = tensor.array()
    return bool((values == values.flat[0]).all())
