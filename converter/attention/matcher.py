"""Finds attention blocks and how their heads lie. Reads graphs, changes nothing.

From a SOFTMAX forward to its value products and to the tensor where the heads are merged, and from there back along
the head label to the logits products.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from edge_opt.attention import factors as fx
from edge_opt.attention import surroundings as around
from edge_opt.attention.block import Block, Match, NotABlock
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.labelling import (
    OnHeads,
    OperandFactors,
    Trace,
    Weighing,
    Weighings,
    heads_by_origin,
    placed_by_products,
    trace_heads,
)
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, is_product, multiplies_activations
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.shapes.inference import doubted
from edge_opt.shapes.rules import constants_of

_SMALL = 1 << 16


@dataclass(eq=False)
class Matcher:
    """The search for one block: `products` are those of the values, `before` the nearest ones in front of the SOFTMAX.

    `match_other` gives what another SOFTMAX of the graph belongs to.
    """

    subgraph: Subgraph
    softmax: Operator
    products: Weighings
    before: list[Operator]
    operands: OperandFactors
    match_other: Callable[[Operator], Match]

    def __post_init__(self) -> None:
        self._first, self._weighing = next(iter(self.products.items()))
        self._head_size = self._weighing.head_size
        self._tail, self._ends = around.tail_of(self.products)

    def match(self) -> Block:
        """What the SOFTMAX belongs to.

        Raises:
            RefusedError: its heads cannot be told, or not be followed.
        """
        merged, summed = self._by_size(), self._tail[:1]
        if merged is None and summed:
            # Where nothing that follows tells, the label goes forward from the queries instead of back.
            merged = heads_by_origin(summed[0], self.products, self.before, self.operands)
        if merged is None:
            alike = summed and summed[0].shape[:-2] == self._first.outputs[0].shape[:-2]
            outputs = summed if alike else [product.outputs[0] for product in self.products]
            placed = placed_by_products(outputs, self.products, self.operands)
            if placed is not None:
                return self._block(*placed)
            merged = self._by_weights() or self._by_mask()
        if merged is None:
            return self._single_head()
        return self._block([self._before_escapes(*merged)], fx.piece_count(merged[1]))

    def _block(self, outputs: Sequence[OnHeads], heads: int) -> Block:
        trace = trace_heads(outputs, self.products, self.operands)
        trace.check(heads, self.softmax)
        if trace.refusal is not None and any(product not in trace.logits for product in self.before):
            raise RefusedError(trace.refusal)
        product, labelled = next(iter(trace.products.items()))
        length = _plain(labelled[self.products[product].rows])
        rows = {own: length * math.prod(map(_plain, own[:-2])) for own in trace.logits.values()}
        made_by = {tensor.producer: (tensor, factored) for tensor, factored in outputs}
        *others, (output, factored) = (made_by[one] for one in self.subgraph.operators if one in made_by)
        axes = (axis for own in trace.logits.values() for axis in own[-2:] if axis)
        return Block(
            softmax=self.softmax,
            output=output,
            factored=factored,
            pieces=heads,
            kv_heads=max(self._kv_heads(value, own, heads) for value, own in trace.products.items()),
            head_size=self.products[product].head_size,
            query_length=length,
            key_lengths=tuple(math.prod(map(_plain, own)) // rows[own] for own in trace.logits.values()),
            mask=_mask(trace),
            products=self.products,
            logits=trace.logits,
            core=frozenset(trace.core),
            operands=self.operands,
            heads_are_rows=any(map(fx.only_labels, axes)),
            others=tuple(others),
        )

    def _by_size(self) -> OnHeads | None:
        """By the size of a head, which what follows has beside the heads: so none of 1, nor several sizes."""
        if {own.head_size for own in self.products.values()} != {self._head_size} or self._head_size == 1:
            return None
        return self._merged() or self._side_by_side() or self._next_query()

    # No heads beside the head size

    def _single_head(self) -> Block:
        """One head, as far as anybody can tell; refused where several never come to stand beside the head size."""
        for tensor in self._tail:
            if tensor.producer and (refusal := self.operands.distrusted(tensor.producer)):
                raise RefusedError(refusal)
        shape = self._first.outputs[0].shape
        for end in self._ends:
            axes = constants_of(end)(1) if end.name in around.SUMS else None
            rank = len(end.input(0).shape)
            if axes is not None and any(axis % rank < rank - 2 for axis in axes.ravel()):
                raise RefusedError("heads are summed before they stand side by side", end)
        joined = bool(self._ends) and all(end.name in around.JOINING for end in self._ends)
        if math.prod(shape[1:-2]) > 1 and not joined:
            last = self._ends[0] if self._ends else self._first
            expected = f"[.., N*{self._head_size}] or [.., N, {self._head_size}]"
            actual = self._tail[-1].shape if self._tail else shape
            raise RefusedError("heads never stand beside the head size", last, None, expected, actual)
        rows = shape[self._weighing.rows]
        lengths = tuple(op.outputs[0].elements // (math.prod(shape[:-2]) * rows) for op in self.before)
        output = self._tail[0] if self._tail else self._first.outputs[0]
        mask, factored = around.mask_between(self.softmax), fx.plain(output.shape)
        sizes = self._head_size, rows, lengths
        return Block(self.softmax, output, factored, *sizes, mask, self.products, self.operands)

    # Where the heads are

    def _merged(self) -> OnHeads | None:
        """Heads beside the head size, in the axis that the output projection contracts: `[.., N*H]`."""
        size = self._head_size
        for tensor in self._tail:
            width = tensor.shape[-1] if tensor.shape else 0
            if width <= size or width % size:
                continue
            heads = width // size
            front = fx.plain(tensor.shape[:-1])
            if self._ends_in_head_size(tensor, (*front, (Factor(heads), Factor(size, 1)))):
                sequence = self._sequence_among(tensor, (*front, (Factor(heads, 1), Factor(size))))
                own = (*fx.plain((sequence,))[0], Factor(heads // sequence, 1), Factor(size))
                return tensor, (*front, own)
        return None

    def _sequence_among(self, tensor: Tensor, factored: Factored) -> int:
        """How much of a label left of the head size is the sequence, where a tensor is flattened to `[B, T*N*H]`.

        In a product heads lie in front of the sequence; where the flattened tensor has them the other way round, the
        sequence is the outer digit of the label. Where both have the sequence in front, the queries' projection tells.
        """
        reached = self._reach_products(tensor, factored)
        length = 1
        if all(fx.only_labels(own[self.products[product].rows]) for product, own in reached.items()):
            length = self._projected_apart(tensor, factored)
        for product, own in reached.items():
            rows = own[self.products[product].rows]
            before = [factor.stride for axis in own[:-2] for factor in axis if factor.stride]
            outside: list[int] = []
            for factor in rows:
                if any(factor.stride > stride for stride in before):
                    outside.append(factor.size)
                before.extend([factor.stride] if factor.stride else [])
            length = max(length, math.prod(outside))
        return length

    def _projected_apart(self, tensor: Tensor, factored: Factored) -> int:
        """How much of a label lies along the rows of a projection whose columns hold the rest: its rows are tokens."""
        logits = trace_heads([(tensor, factored)], self.products, self.operands).logits
        starts = [
            (product.input(index), own)
            for product, labelled in logits.items()
            for index, own in self.operands.known(product.outputs[0], labelled).items()
        ]
        projected = [
            fx.piece_count(own[:-1])
            for made, own, _ in self.operands.upwards(starts, _tells_heads)
            if made.producer is not None and made.producer.name in _LINEAR and fx.tells_heads(own[-1])
        ]
        return max(projected, default=1)

    def _side_by_side(self) -> OnHeads | None:
        """Heads in the axis left of the head size, where nothing merges them: `[.., T, N, H]`.

        The nearest tensor that has them all: `[.., K, G, H]` on the way to it has only some.
        """
        most, best = 1, None
        for tensor in self._tail:
            shape = tensor.shape
            if len(shape) < 3 or shape[-1] != self._head_size or shape[-2] <= most:
                continue
            front = fx.plain(shape[:-1])
            if not self._ends_in_head_size(tensor, (*front, (Factor(shape[-1], 1),))):
                continue
            factored = (*front[:-1], (Factor(shape[-2], 1),), (Factor(shape[-1]),))
            reached = self._reach_products(tensor, factored).items()
            if reached and all(_heads_apart(own, self.products[product]) for product, own in reached):
                most, best = shape[-2], (tensor, factored)
        return best

    def _next_query(self) -> OnHeads | None:
        """As the next attention has them, where it reads these heads as its queries, no TRANSPOSE being left."""
        for end in filter(is_product, self._ends):
            softmax = around.softmax_behind(end)
            block = None if softmax in (None, self.softmax) else self.match_other(softmax)
            if not isinstance(block, Block) or end not in block.logits:
                continue
            for index, factored in self.operands.known(end.outputs[0], block.logits[end]).items():
                tensor = end.input(index)
                if tensor in self._tail and fx.piece_count(factored) == block.heads:
                    return tensor, factored
        return None

    def _by_weights(self) -> OnHeads | None:
        """As a product with constants has them, one matrix a head: values leave a latent by `[N,T,C] x [N,C,H]`."""
        for end in self._ends:
            for index in (0, 1) if end.name == "BATCH_MATMUL" else ():
                tensor, batch = end.input(index), end.input(1 - index).shape[:-2]
                heads, first = math.prod(batch), len(tensor.shape) - 2 - len(batch)
                if heads == 1 or tensor not in self._tail or not end.input(1 - index).is_constant:
                    continue
                labelled = fx.regroup(((Factor(heads, 1),),), batch)
                if first < 0 or tensor.shape[first:-2] != batch or labelled is None:
                    continue
                plain = fx.plain(tensor.shape)
                factored = (*plain[:first], *labelled, *plain[-2:])
                reached = self._reach_products(tensor, factored)
                # No label may lie on the axis of the head size.
                apart = not any(fx.tells_heads(own[self.products[p].columns]) for p, own in reached.items())
                if len(reached) == len(self.products) and apart:
                    return tensor, factored
        return None

    def _by_mask(self) -> OnHeads | None:
        """As a mask has them that is repeated along the rows, once a head: `[1,1,(G)(T),S]`."""
        product, shape, place = self._first, self._first.outputs[0].shape, self._weighing.rows
        if len(self.products) > 1 or math.prod(shape[:-2]) > 1:
            return None

        def above(operator: Operator) -> Iterable[Operator]:
            return around.producers(operator) if operator.name in ELEMENTWISE | MOVEMENT else ()

        for operator in around.walked(around.producers(self.softmax), above):
            count = len(operator.inputs)
            if operator.name == "CONCATENATION" and len({*operator.inputs}) == 1 < count:
                axis = int(operator.option("axis"))
                if operator.outputs[0].shape[axis] == shape[place] and axis % len(shape) == len(shape) - 2:
                    axes = list(fx.plain(shape))
                    axes[place] = (Factor(count, 1), Factor(shape[place] // count))
                    return product.outputs[0], tuple(axes)
        return None

    def _ends_in_head_size(self, tensor: Tensor, marked: Factored) -> bool:
        """True where the innermost factor of the last axis is the value products' head-size axis."""
        traced = self._reach_products(tensor, marked)
        columns = (Factor(self._head_size, 1),)
        return all(
            (own := traced.get(product)) is not None
            and own[weighing.columns] == columns
            and fx.piece_count(own) == self._head_size
            for product, weighing in self.products.items()
        )

    def _before_escapes(self, output: Tensor, factored: Factored) -> OnHeads:
        """The block may end earlier: where somebody else reads a tensor of the tail too, it ends there.

        Else the operators up to that tensor would stay, beside those of the single heads.
        """
        best = output, factored
        for operator, index, labelled in self.operands.chain(output, factored):
            tensor = operator.input(index)
            if tensor not in self._tail:
                return best
            if len(tensor.consumers) > 1 or self.subgraph.is_output(tensor):
                best = tensor, labelled
        return best

    def _reach_products(self, tensor: Tensor, factored: Factored) -> dict[Operator, Factored]:
        """Factors of the value products' results, those that can be reached from a tensor behind them."""
        walk = self.operands.upwards(
            [(tensor, factored)],
            lambda tensor, own: tensor.producer not in self.products and fx.piece_count(own) > 1,
        )
        return {current.producer: own for current, own, _ in walk if current.producer in self.products}

    def _kv_heads(self, product: Operator, factored: Factored, heads: int) -> int:
        """K: how many different keys or values the heads have, before anything repeats them for several heads."""
        side = 1 - self.products[product].operand
        start = product.input(side), self.operands.known(product.outputs[0], factored)[side]
        walk = self.operands.upwards([start], _tells_heads)
        sources = [own for tensor, own, ends in walk if ends and not _is_one_number(tensor)]
        return len({tuple(fx.piece_key(own, head) for own in sources) for head in range(heads)})


def _mask(trace: Trace) -> Tensor | None:
    """What is added to the logits, or selects from them."""
    masking = (operator for operator in trace.core if operator.name in around.MASKING)
    read = (tensor for operator in masking for tensor in operator.inputs if tensor is not None)
    return next((t for t in read if t.elements > 1 and t.producer not in trace.core), None)


def _is_one_number(tensor: Tensor) -> bool:
    """True for a constant that has the same number everywhere: some exporters repeat by multiplying with ones."""
    if not tensor.has_numbers or not 0 < tensor.elements <= _SMALL:
        return False
    values = tensor.array()
    return bool((values == values.flat[0]).all())


def _tells_heads(_: Tensor, factored: Factored) -> bool:
    return fx.piece_count(factored) > 1


def _plain(factors: Iterable[Factor]) -> int:
    return math.prod(factor.size for factor in factors if not factor.stride)


def _heads_apart(product: Factored, weighing: Weighing) -> bool:
    """True where the label can only be heads: batch axes of a value product, or `(heads)(sequence)` among its rows.

    `(sequence)(x)` may be anything, e.g. rows and columns of an image.
    """
    rows, columns = product[weighing.rows], product[weighing.columns]
    labelled = [factor for factor in rows if factor.stride]
    apart = not labelled or (len(labelled) < len(rows) and list(rows[: len(labelled)]) == labelled)
    return apart and not fx.tells_heads(columns)


_LINEAR = frozenset({"FULLY_CONNECTED", "CONV_2D"})


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """One match for every attention or other SOFTMAX of the subgraph, in execution order.

    Where several SOFTMAXes weigh the same values together, they are one attention, told of the first. Attention without
    a SOFTMAX stands at the operator that makes what weighs the values.
    """
    operands = OperandFactors()

    @cache  # one block may have to look at the next
    def match_of(softmax: Operator) -> Match:
        try:
            return _match(subgraph, softmax, operands, match_of)
        except RefusedError as refused:
            return NotABlock(softmax, refused.refusal)

    with doubted([subgraph]):
        softmaxes = [operator for operator in subgraph.operators if operator.code.name in around.SOFTMAXES]
        # From the last one on: a block may look at the next, and a file may chain more of them than a stack holds.
        for softmax in reversed(softmaxes):
            match_of(softmax)
        anchors = {*softmaxes, *_weights_without_softmax(subgraph, softmaxes)}
        inside: set[Operator] = set()
        weighed: set[frozenset[Operator]] = set()
        for softmax in (operator for operator in subgraph.operators if operator in anchors):
            match = match_of(softmax)
            values = frozenset(match.products) if isinstance(match, Block) and match.heads == 1 else None
            if softmax not in inside and values not in weighed:
                yield match
            if isinstance(match, Block):
                inside |= match.core
            if values is not None:
                weighed.add(values)


def _weights_without_softmax(subgraph: Subgraph, softmaxes: list[Operator]) -> Iterator[Operator]:
    """The last operators between two products of several matrices that belong to no SOFTMAX: each makes weights."""
    assigned: set[Operator] = set()
    for softmax in softmaxes:
        with suppress(RefusedError):
            assigned.update(around.value_products(softmax))
        assigned.update(around.products_above(around.producers(softmax))[0])
    for product in subgraph.operators:
        if product in assigned or not multiplies_activations(product):
            continue
        makers = [around.last_computation(product.input(index)) for index in (0, 1)]
        for weights in filter(None, makers):
            scores = [weights]
            if not is_product(weights):
                scores, _ = around.products_above(around.producers(weights))
            several = all(map(around.holds_several, scores)) and not any(map(around.is_residual, scores))
            if scores and assigned.isdisjoint(scores) and several:
                assigned.update((product, *scores))
                yield weights
                break


def _match(
    subgraph: Subgraph, softmax: Operator, operands: OperandFactors, match_other: Callable[[Operator], Match]
) -> Match:
    """What a SOFTMAX belongs to; raises RefusedError where that is attention which is not understood."""
    if is_product(softmax):
        raise RefusedError("linear attention: nothing lies between this product and the next", softmax)
    if softmax.shape_error:
        raise RefusedError("the recorded shapes do not fit", softmax)
    try:
        products = around.value_products(softmax)
    except RefusedError as refused:
        return _without_values(softmax, refused.refusal)
    if not all(weighing.head_size for weighing in products.values()):
        raise RefusedError("an empty tensor", next(iter(products)))
    logits, ends = around.products_above(around.producers(softmax))
    if not logits:
        return _without_scores(softmax, ends)
    if any(tensor.is_dynamic for one in (softmax, *products, *logits) for tensor in one.outputs):
        raise RefusedError("a dimension is known only at run time", softmax)
    return Matcher(subgraph, softmax, products, logits, operands, match_other).match()


def _without_values(softmax: Operator, reason: Refusal) -> NotABlock:
    """A SOFTMAX behind which no value product is seen; it is attention all the same if its rows weigh something."""
    opaque = reason.operator is not None and around.is_opaque(reason.operator)
    summed = around.weighing_sum(softmax)
    if summed is not None:
        raise RefusedError("the probabilities weigh values by MUL and a sum, which is not split", summed)
    if not opaque and around.between_products(softmax):
        raise RefusedError("the probabilities are not followed through this operator", reason.operator)
    return NotABlock(softmax, reason, is_attention=opaque)


def _without_scores(softmax: Operator, ends: list[Operator]) -> NotABlock:
    """A SOFTMAX whose numbers weigh something, of which no product of queries and keys is seen."""
    blocker = ends[0] if ends else None
    if all(end.name in _LINEAR for end in ends) and not around.between_products(softmax):
        reason = Refusal("no product of queries and keys leads to this SOFTMAX: not attention", blocker)
        return NotABlock(softmax, reason, is_attention=False)
    if blocker is None:
        raise RefusedError("no product of queries and keys is found above this SOFTMAX")
    raise RefusedError("the scores are not followed through this operator", blocker)
