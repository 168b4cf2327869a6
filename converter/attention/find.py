"""Finds attention blocks and the layout of their heads. Never changes a graph.

A block stands at its SOFTMAX or, without one, at the operator that makes what weighs the values. The search goes from
there forward to the value products, then back along the head label to the products of queries and keys. Heads are taken
from the tensor that merges them, `[.., N*H]`, or else from batch axes of the products. Each pair of products (see
`edge_opt.attention.pairs`) is in a block, or in a match with the reason why not.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from edge_opt.attention import factors as fx
from edge_opt.attention.axes import axes_behind
from edge_opt.attention.block import Block, Match, NotABlock
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import (
    DEEPEST,
    OperandFactors,
    Trace,
    ValueProducts,
    trace_heads,
)
from edge_opt.attention.pairs import Pair, pairs_among
from edge_opt.attention.places import contracted_axis
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, is_product
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.operators import KINDS, UNARY, Effect, operators_that
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import producers, walked
from edge_opt.shapes.inference import doubted

MOST_HEADS = 1024
"""Each head gets operators of its own; real models have up to 128."""

MASKING = frozenset({"ADD", "SUB", "SELECT", "SELECT_V2"})
_SOFTMAXES = frozenset({"SOFTMAX", "LOG_SOFTMAX"})
_PROJECTIONS = operators_that(Effect.PRODUCT) | {"CONV_2D"}
_JOINING, _CUTTING = operators_that(Effect.JOINING), operators_that(Effect.CUTTING)
_REPEATING = frozenset({"BROADCAST_TO", "TILE"})
_FOLLOWED = (
    ELEMENTWISE
    | operators_that(
        Effect.REARRANGING,
        Effect.CUTTING,
        Effect.JOINING,
        Effect.REPEATING,
        Effect.PADDING,
        Effect.REDUCTION,
        Effect.ALONG_ROWS,
    )
    - _SOFTMAXES
)
_LINEAR = (
    MOVEMENT | _CUTTING | _JOINING | {"ADD", "SUB", "MUL", "DIV", "NEG", "CAST", "QUANTIZE", "DEQUANTIZE"}
)
_PROBABILITY_PATH = UNARY | MOVEMENT | _CUTTING | {"PACK"}
_REARRANGED = UNARY | MOVEMENT | {"PACK", "UNPACK"}
_OPAQUE = operators_that(Effect.CALLING, Effect.UNKNOWN)


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """Yield one match per SOFTMAX, attention or not, and per other pair of products, in execution order.

    Several SOFTMAXes that weigh the same values together are one block, reported at the first.
    """
    with doubted([subgraph]):
        pairs = list(pairs_among(subgraph.operators))
        found = _matches(subgraph, pairs)
        for anchor, reason in _unexplained(pairs, found):
            found[anchor] = NotABlock(anchor, reason)
    for operator in subgraph.operators:
        if operator in found:
            yield found[operator]


def _matches(subgraph: Subgraph, pairs: Sequence[Pair]) -> dict[Operator, Match]:
    """The matches of SOFTMAXes, and of other operators whose results weigh values, by operator."""
    operands = OperandFactors()
    softmaxes = [operator for operator in subgraph.operators if operator.code.name in _SOFTMAXES]
    anchors = {*softmaxes, *_weights_without_softmax(pairs, softmaxes)}
    found: dict[Operator, Match] = {}
    inside: set[Operator] = set()
    for anchor in subgraph.operators:
        if anchor not in anchors or anchor in inside:
            continue
        try:
            match = _match(anchor, operands)
        except RefusedError as refused:
            match = NotABlock(anchor, str(refused))
        if isinstance(match, Block):
            products = set(match.products)
            if match.heads == 1 and products <= inside:
                continue
            inside |= match.core | products
        found[anchor] = match
    return found


def _weights_without_softmax(pairs: Iterable[Pair], softmaxes: Iterable[Operator]) -> Iterator[Operator]:
    """The operators that make what weighs values without a SOFTMAX, such as the LOGISTIC or DIV above a value product.

    Without a computation between two products, and for single matrices without one that is not linear, as in the two
    products of an adapter, nothing is weighed.
    """
    assigned: set[Operator] = set()
    for softmax in softmaxes:
        assigned |= products_around(softmax)
    for first, second, mixed, _ in pairs:
        scores, values = first.operator, second.operator
        if mixed is not None or first.is_sum or second.is_sum or not assigned.isdisjoint((scores, values)):
            continue
        for weights in map(_last_computation, producers(values)):
            if weights is None or is_product(weights):
                continue
            above = list(walked([weights], _followed_up, DEEPEST))
            if scores in above and (first.several or not all(map(_is_linear, above))):
                assigned.update((scores, values))
                yield weights


def _last_computation(operator: Operator) -> Operator | None:
    """The operator, or the nearest one above that does more than move, cut or repeat; None for a graph input."""
    above: Operator | None = operator
    while above is not None and above.name in MOVEMENT | _CUTTING | _REPEATING:
        above = KINDS[above.name].data_operands(above.inputs)[0].producer
    return above


def _is_linear(operator: Operator) -> bool:
    return operator.name in _LINEAR or is_product(operator)


def _unexplained(pairs: Iterable[Pair], found: Mapping[Operator, Match]) -> Iterator[tuple[Operator, str]]:
    """The pairs of products that are in no match although they may be attention, each with an operator and a reason."""
    in_blocks: set[Operator] = set()
    skipped: set[Operator] = set()
    for anchor, match in found.items():
        if isinstance(match, Block):
            in_blocks.update(match.products, match.logits or products_above(producers(anchor))[0])
        elif match.is_attention:
            skipped |= products_around(anchor)
    for pair in pairs:
        ends = pair.first, pair.second
        left = [end for end in ends if end.operator not in in_blocks]
        if len(left) == 1 and left[0].is_outer:
            continue  # writes keys or values into a cache, at positions that are ones and zeros
        # A product with weights that a block took for one of queries and keys may be what mixes the heads.
        is_sure = len(left) == 2 or pair.mixed in in_blocks or (pair.is_mixed and not pair.lost)
        may_be_mixed = pair.mixed is not None and is_sure
        if not any(end.several or may_be_mixed for end in left):
            continue
        operators = {end.operator for end in ends}
        if skipped.isdisjoint(operators):
            yield _no_attention_above(pair.second.operator, found) or pair.second.operator, pair.reason
        skipped |= operators


def _no_attention_above(values: Operator, found: Mapping[Operator, Match]) -> Operator | None:
    """The SOFTMAX between a value product and the products above it, if its match says that it is not attention."""
    above = walked(
        producers(values), lambda operator: [] if is_product(operator) else producers(operator), DEEPEST
    )
    return next((one for one in above if one in found and not found[one].is_attention), None)


def _match(softmax: Operator, operands: OperandFactors) -> Match:
    """The match of a SOFTMAX; raises RefusedError if it is attention of an unknown form."""
    if softmax.shape_error:
        raise RefusedError("the recorded shapes are inconsistent", softmax)
    products, blocker = _value_products(softmax)
    logits, ends = products_above(producers(softmax))
    if not products:
        if blocker is not None and _is_opaque(blocker):
            raise RefusedError("an operator with unknown effects reads the probabilities", blocker)
        if blocker is not None and logits:
            raise RefusedError("the probabilities cannot be followed through this operator", blocker)
        reason = RefusedError("no product with values follows this SOFTMAX: not attention", blocker)
        return NotABlock(softmax, str(reason), is_attention=False)
    for product in products:
        if 0 in product.outputs[0].shape:
            raise RefusedError("an empty tensor", product)
    if not logits:
        end = next(iter(ends), None)
        if not all(end.name in _PROJECTIONS for end in ends):
            raise RefusedError("the scores cannot be followed through this operator", end)
        reason = RefusedError("no product of queries and keys leads to this SOFTMAX: not attention", end)
        return NotABlock(softmax, str(reason), is_attention=False)
    if any(tensor.is_dynamic for one in (softmax, *products, *logits) for tensor in one.outputs):
        raise RefusedError("a dimension is known only at run time", softmax)
    return _Search(softmax, products, logits, operands).block()


# The products around a SOFTMAX, without heads


def products_around(softmax: Operator) -> set[Operator]:
    """The products of queries and keys and the value products around an operator that makes probabilities."""
    return {*_value_products(softmax)[0], *products_above(producers(softmax))[0]}


def _followed_up(operator: Operator) -> list[Operator]:
    return producers(operator) if operator.name in _FOLLOWED else []


def products_above(starts: Iterable[Operator]) -> tuple[list[Operator], list[Operator]]:
    """The nearest products above these operators, and the operators at which other paths end."""
    met = list(walked(starts, _followed_up, DEEPEST))
    ends = [operator for operator in met if operator.name not in _FOLLOWED and not is_product(operator)]
    return [operator for operator in met if is_product(operator)], ends


def find_mask(softmax: Operator) -> Tensor | None:
    """Find the mask: a tensor that is added to the scores or selects from them.

    The operators above the SOFTMAX are walked once; those from which a product is reached carry scores, no mask.
    """
    met = list(walked(producers(softmax), _followed_up, 4 * DEEPEST))
    readers: dict[Operator, list[Operator]] = {}
    for operator in met:
        for source in _followed_up(operator):
            readers.setdefault(source, []).append(operator)
    products = filter(is_product, {**dict.fromkeys(met), **readers})
    scores = set(walked(products, lambda operator: readers.get(operator, ())))
    for operator in met[:DEEPEST]:
        for tensor in operator.inputs if operator.name in MASKING else ():
            if tensor is not None and tensor.elements > 1 and tensor.producer not in scores:
                return tensor
    return None


def _is_opaque(operator: Operator) -> bool:
    """True for an operator that may be a value product, since its code or its shapes are unknown."""
    return operator.name in _OPAQUE or bool(operator.shape_error)


def _value_products(softmax: Operator) -> tuple[ValueProducts, Operator | None]:
    """The products of probabilities and values, and the first operator that probabilities are not followed through."""
    products: ValueProducts = {}
    blocked: Operator | None = None

    def behind(held: tuple[Tensor, frozenset[int]]) -> Iterator[tuple[Tensor, frozenset[int]]]:
        nonlocal blocked
        tensor, keys = held
        for operator in tensor.consumers:
            # Each element of the result belongs to one element of the tensor: a mask, a guard against NaN, a clip.
            per_element = operator.name in ELEMENTWISE and operator.outputs[0].elements == tensor.elements
            operand = 0 if operator.inputs[0] is tensor else 1
            weighs = is_product(operator) and len(operator.outputs[0].shape) > 1
            if weighs and (not keys or contracted_axis(operator, operand) in keys):
                products.setdefault(operator, operand)
            elif not weighs and (per_element or _maps(operator, tensor, _PROBABILITY_PATH)):
                behind_it = axes_behind(operator, tensor, keys)
                yield from ((result, behind_it) for result in operator.outputs)
            elif blocked is None or _is_opaque(operator):
                blocked = operator

    result = softmax.outputs[0]
    is_softmax = softmax.code.name in _SOFTMAXES and result.shape
    for _ in walked([(result, frozenset({len(result.shape) - 1} if is_softmax else ()))], behind):
        pass
    return products, blocked


def _maps(operator: Operator, tensor: Tensor, allowed: frozenset[str]) -> bool:
    """True if the operator's results depend only on this tensor and on scalars."""
    if operator.name == "PACK" and len(operator.inputs) > 1:
        return False
    if operator.name in allowed:
        return next(iter(KINDS[operator.name].data_operands(operator.inputs)), None) is tensor
    others = [t for t in operator.inputs if t is not tensor and t is not None]
    return operator.name in ELEMENTWISE and all(t.elements == 1 for t in others)


def _tail_of(products: ValueProducts) -> list[Tensor]:
    """The tensors after the value products that are made of all of them and nothing else, nearest first."""
    parts = {product.outputs[0]: frozenset({product}) for product in products}
    reached = [product.outputs[0] for product in products]
    # The list grows during the loop.
    for tensor in islice(reached, DEEPEST):
        for operator in tensor.consumers:
            held = [parts[t] for t in operator.inputs if t in parts]
            maps = _maps(operator, tensor, _REARRANGED) and len(operator.outputs) == 1
            # All inputs are made of products: the ADD of two segments of keys, or a gate.
            combines = operator.name in ELEMENTWISE and len(held) == len(operator.inputs)
            if (maps or combines) and operator.outputs[0] not in parts:
                parts[operator.outputs[0]] = frozenset().union(*held)
                reached.append(operator.outputs[0])
    return [tensor for tensor in reached[:DEEPEST] if len(parts[tensor]) == len(products)]


@dataclass(eq=False)
class _Search:
    """The search for one block: `values` are the value products, `scores` the nearest products above the SOFTMAX."""

    softmax: Operator
    values: ValueProducts
    scores: list[Operator]
    operands: OperandFactors

    def __post_init__(self) -> None:
        first, operand = next(iter(self.values.items()))
        self._product, self._rows, self._columns = first.outputs[0], operand - 2, -1 - operand
        self._head_size = self._product.shape[self._columns]
        self._tail = _tail_of(self.values)

    def block(self) -> Block:
        """Build the block; raises RefusedError if its heads are ambiguous or cannot be followed."""
        merged = self._beside_head_size() or self._on_batch_axes() or self._before_own_matrices()
        trace = Trace()
        if merged is not None and merged.pieces > MOST_HEADS:
            raise RefusedError(
                f"more than {MOST_HEADS:,} heads are not split", self.softmax, None, "", f"{merged.pieces:,}"
            )
        if merged is None:
            self._check_rows()
            output = self._tail[0] if self._tail else self._product
            merged = Labelled(output, fx.plain(output.shape))
        else:
            trace = trace_heads(merged, self.values, self.operands)
        if trace.refusal is not None and any(product not in trace.logits for product in self.scores):
            raise trace.refusal
        heads, product = merged.pieces, next(iter(trace.products or self.values))
        operand, result = self.values[product], product.outputs[0]
        length = fx.piece_shape(trace.products.get(product, fx.plain(result.shape)), keep=True)[operand - 2]
        head_size = result.shape[-1 - operand]
        rows = result.elements // head_size  # of all heads, N * B * T
        return Block(
            softmax=self.softmax,
            output=merged.tensor,
            factored=merged.factored,
            pieces=heads,
            kv_heads=max(
                (self._kv_heads(*labelled, heads) for labelled in trace.products.items()), default=1
            ),
            head_size=head_size,
            query_length=length,
            key_lengths=tuple(one.outputs[0].elements // rows for one in trace.logits or self.scores),
            products=self.values,
            logits=trace.logits,
            core=trace.core,
            operands=self.operands,
        )

    def _kv_heads(self, product: Operator, factored: Factored, heads: int) -> int:
        """K: the number of different keys or values among heads, before any repeat for several heads."""
        start = self.operands.above(Labelled(product.outputs[0], factored))[1 - self.values[product]]
        # Heads that a product made are different.
        sources = [
            of.factored
            for of in self.operands.upwards([start], is_product)
            if self.operands.is_end(of, is_product)
        ]
        return len({tuple(fx.piece_index(own, head) for own in sources) for head in range(heads)})

    def _beside_head_size(self) -> Labelled | None:
        """Heads left of the head size: in its axis, `[.., N*H]`, which a projection contracts, or `[.., N, H]`.

        This takes the nearest tensor with the most heads: an earlier `[.., K, G, H]` has only G beside H.
        """
        size, found = self._head_size, list[Labelled]()
        if size == 1 or any(one.outputs[0].shape[-1 - place] != size for one, place in self.values.items()):
            return None
        for tensor in self._tail:
            *front, width = tensor.shape or (1,)
            merged = width > size
            count = width // size if merged else (1, *front)[-1]
            if width % size or count == 1 or not self._are_heads(tensor, count, merged=merged):
                continue
            if merged:
                return Labelled(tensor, (*fx.plain(tuple(front)), (Factor(count, 1), Factor(size))))
            factored = (*fx.plain(tuple(front[:-1])), (Factor(count, 1),), (Factor(size),))
            found.append(Labelled(tensor, factored))
        return max(found, key=lambda of: of.pieces, default=None)

    def _are_heads(self, tensor: Tensor, count: int, *, merged: bool) -> bool:
        """True if the digits left of the head size are heads: batch axes of a product, then a part of its rows.

        In the other order they are the sequence, as in `[B, T*N*H]`. If unmerged, inner rows are the sequence, too, and
        batch axes that do not lie in the outermost axis are more heads.
        """
        size = self._head_size
        front = tensor.shape[:-1] if merged else tensor.shape[:-2]
        batch = (Factor(front[0], count * size),) if front and front[0] > 1 else ()
        outer = (batch, *fx.plain(front[1:])) if front else ()
        beside = (Factor(count, size),), (Factor(size, 1),)
        labelled = (*outer, beside[0] + beside[1]) if merged else (*outer, *beside)
        walk = self.operands.upwards([Labelled(tensor, labelled)], self.values.__contains__)
        own = next((of.factored for of in walk if of.tensor is self._product), None)
        if own is None or own[self._columns] != (Factor(size, 1),):
            return False
        digits = [digit for axis in own for digit in axis if size <= digit.stride < count * size]
        if any(outer.stride < inner.stride for outer, inner in pairwise(digits)):
            return False
        rows = [digit in digits for digit in own[self._rows]]
        is_sequence = any(rows) and (not rows[0] or rows[-1])
        if merged and any(rows) and all(rows):
            self._check_merged(own[self._rows])
        return merged or not (is_sequence or not all(map(fx.only_labels, own[:-2])))

    def _check_merged(self, rows: Axis) -> None:
        """Raise RefusedError if rows beside the head size may be the sequence, as in `[B, T*H]` before a classifier.

        Heads lie beside the head size in the queries, too, or have an axis of size 1 for the sequence.
        """
        for of in self._queries(rows):
            (place, *_) = fx.labelled_axes(of.factored)
            if fx.only_labels(of.factored[place]) and 1 not in of.tensor.shape[1:]:
                text = "rows of the value product may be the sequence, or heads"
                raise RefusedError(text, of.tensor.producer, of.tensor)

    def _queries(self, rows: Axis) -> Iterator[Labelled]:
        """The tensors that queries come from, with the layout of these rows of the value product."""
        for of in self._above_queries(rows):
            ends = self.operands.is_end(of, is_product)
            is_source = of.tensor.producer is None or not is_product(of.operator)
            if ends and is_source and not of.tensor.is_constant and fx.labels(of.factored):
                yield of

    def _above_queries(self, rows: Axis) -> Iterator[Labelled]:
        """The tensors above the scores up to the next products, with the layout of these rows of the value product."""
        factored, is_score = list(fx.plain(self._product.shape)), self.scores.__contains__
        factored[self._rows] = rows
        walk = self.operands.upwards([Labelled(self._product, tuple(factored))], is_score)
        logits = [of for of in walk if of.tensor.producer in self.scores]
        starts = [operand for of in logits for operand in self.operands.above(of).values()]
        yield from self.operands.upwards(starts, is_product)

    def _before_own_matrices(self) -> Labelled | None:
        """Heads in rows that become batch axes of a product behind, in which each row has its own matrix.

        `[1, N, C] -> [N, 1, C] x [N, C, H]`: values that are made of a latent, which all heads share.
        """
        for tensor in self._tail:
            for reader in tensor.consumers:
                factored = _own_matrices(reader, tensor)
                if fx.is_shared(factored):
                    continue
                merged = Labelled(tensor, factored)
                walk = self.operands.upwards([merged], self.values.__contains__)
                own = next((of.factored for of in walk if of.tensor is self._product), None)
                if own is not None and fx.tells_heads(own[self._rows]):
                    return merged
        return None

    def _on_batch_axes(self) -> Labelled | None:
        """Heads in the batch axes of the products, with one matrix per index; None if there is only one.

        The outermost of several axes is the model's batch; so is the outermost part in all sources of a single one.
        """
        output, lead = self._product, self._product.shape[:-2]
        if self._tail and self._tail[0].shape[:-2] == lead:
            output = self._tail[0]
        elif len(self.values) > 1 and math.prod(lead) > 1:
            raise RefusedError(
                "the probabilities weigh several values, and these products are never summed", self.softmax
            )
        first, matrix = min(len(lead) - 1, 1), fx.plain(output.shape[-2:])
        count = math.prod(lead[first:])
        if count == 1:
            return None
        axes = fx.regroup(((Factor(count, 1),),), lead[first:]) or ()
        if len(lead) == 1:
            walk = islice(self.operands.upwards([Labelled(output, (*axes, *matrix))]), DEEPEST)
            sources = [of.factored for of in walk if self.operands.is_end(of) and not of.tensor.is_constant]
            outer = [fx.sizes((fx.leading(own[0]),))[0] for own in sources if fx.piece_count(own) > 1]
            batch = min(outer, default=1)
            axes = (tuple(part for part in (Factor(batch), Factor(count // batch, 1)) if part.size > 1),)
        placed = Labelled(output, (*fx.plain(lead[:first]), *axes, *matrix))
        if placed.pieces == 1:
            return None
        self._check_rows()
        return placed

    def _check_rows(self) -> None:
        """Raise RefusedError if rows of the value product may belong to several heads that cannot be distinguished."""
        product, place = self._product, self._rows
        if math.prod(self.softmax.outputs[0].shape[:-2]) > math.prod(product.shape[:-2]):
            raise RefusedError("the probabilities have more matrices than the value product", self.softmax)
        factored = list(fx.plain(product.shape))
        factored[place] = (Factor(product.shape[place], 1),)
        text = "rows of the value product may belong to several heads"
        start = Labelled(product, tuple(factored))
        for of in self.operands.upwards([start], self.scores.__contains__):
            if len(fx.labelled_axes(of.factored)) > 1:  # logits at `[B, N, T, S]`
                raise RefusedError(text, of.tensor.producer, of.tensor)
        for of in self._above_queries(factored[place]):
            made = of.tensor.producer
            if (
                made is not None
                and made.name == "BATCH_MATMUL"
                and any(map(fx.tells_heads, of.factored[:-2]))
            ):
                raise RefusedError(text, made, of.tensor)  # each row has its own matrix
        for of in self._queries(factored[place]):
            if any(fx.tells_heads(axis) and not fx.only_labels(axis) for axis in of.factored[1:]):
                raise RefusedError(text, of.tensor.producer, of.tensor)
        clear = self.operands.clear
        met = [of for of in self.operands.upwards([start], known=clear)]
        for of in met:
            several = len(fx.merge_neighbours(fx.labels(of.factored))) > 1
            if several or _repeats(of.tensor.producer, of.factored):
                raise RefusedError(text, of.tensor.producer, of.tensor)
        clear.update(met)


def _repeats(operator: Operator | None, factored: Factored) -> bool:
    """True if the operator joins a tensor to itself along a labelled axis."""
    if operator is None or operator.name not in _JOINING or len({*operator.inputs}) == len(operator.inputs):
        return False
    return int(operator.option("axis")) % len(factored) in fx.labelled_axes(factored)


def _own_matrices(product: Operator, tensor: Tensor) -> Factored:
    """The layout of a product's operand with labels on batch axes on which the other operand has several steps, too."""
    factored = list(fx.plain(tensor.shape))
    others = [other for other in product.inputs if other is not None and other is not tensor]
    if product.name != "BATCH_MATMUL" or not others:
        return tuple(factored)
    rank, stride = len(tensor.shape), 1
    other = (1,) * (rank - len(others[0].shape)) + others[0].shape
    for axis in reversed(range(rank - 2)):
        size = tensor.shape[axis]
        if size > 1 and other[axis - rank] == size:
            factored[axis] = (Factor(size, stride),)
            stride *= size
    return tuple(factored)
