"""Finds attention blocks and the layout of their heads. Never changes a graph.

A block is found at its SOFTMAX or, without one, at the operator that computes the values' weights. The search goes from
there to the products around it (`around`), finds the heads in the result (`heads`), and follows them back along the
head label to the products of queries and keys (`labels`). Each pair of products (`pairs`) is in a block, or in a match
with the reason why not. The head axis is explained in docs/head-axis.md.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from edge_opt.attention import factors as fx
from edge_opt.attention.around import (
    CUTTING,
    SOFTMAXES,
    Below,
    ends_above,
    follow_probabilities,
    followed_up,
    is_opaque,
    products_above,
    products_around,
)
from edge_opt.attention.axes import data_of, has_known_axes
from edge_opt.attention.block import Block, Match, NotABlock
from edge_opt.attention.heads import HeadSearch, SearchedLayouts, has_heads_in_rows, holds_heads
from edge_opt.attention.labelled import Labelled, along, unlabelled
from edge_opt.attention.labels import (
    DEEPEST,
    HeadLayouts,
    Trace,
    head_size_axis,
    query_axis,
    trace_heads,
)
from edge_opt.attention.pairs import Pair, Product, pairs_among, products_among
from edge_opt.attention.rules import (
    JOINING,
    MOVEMENT,
    PROJECTIONS,
    is_product,
    is_projection,
    multiplies_activations,
)
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import producers, walked
from edge_opt.shapes.inference import doubted

MOST_HEADS = 1024
"""Each head gets operators of its own; real models have up to 128."""

_MOVING = MOVEMENT | CUTTING | {"BROADCAST_TO", "TILE"}
_ARITHMETIC = frozenset({"ADD", "SUB", "MUL", "DIV", "NEG", "CAST", "QUANTIZE", "DEQUANTIZE"})
_LINEAR = _ARITHMETIC | MOVEMENT | CUTTING | JOINING


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """Yield one match per SOFTMAX, attention or not, and per other pair of products, in execution order.

    Several SOFTMAXes that weigh the same values together are one block, reported at the first.
    """
    with doubted([subgraph]):
        products = list(products_among(subgraph.operators))
        pairs = list(pairs_among(products))
        found = _matches(subgraph, pairs)
        for match in _unexplained(products, pairs, found):
            found[match.softmax] = match
    for operator in subgraph.operators:
        if operator in found:
            yield found[operator]


def _matches(subgraph: Subgraph, pairs: Sequence[Pair]) -> dict[Operator, Match]:
    """The matches of SOFTMAXes, and of other operators that compute the weights of values, by operator."""
    layouts = SearchedLayouts()
    softmaxes = [operator for operator in subgraph.operators if operator.code.name in SOFTMAXES]
    anchors = {*softmaxes, *_weights_without_softmax(pairs, softmaxes)}
    found: dict[Operator, Match] = {}
    inside: set[Operator] = set()
    for anchor in subgraph.operators:
        if anchor not in anchors or anchor in inside:
            continue
        try:
            match = _match(anchor, layouts)
        except RefusedError as refused:
            match = NotABlock(anchor, refused.reason)
        if isinstance(match, Block):
            if match.heads == 1 and inside.issuperset(match.value_products):
                continue
            inside.update(match.core, match.value_products)
        found[anchor] = match
    return found


def _match(softmax: Operator, layouts: SearchedLayouts) -> Match:
    """The match of a SOFTMAX; raises RefusedError if it is attention of an unknown form."""
    if softmax.shape_error:
        raise RefusedError(Why.INVALID_MODEL, "the recorded shapes are inconsistent", softmax)
    below = follow_probabilities(softmax)
    scores = products_above(softmax)
    if not below.value_products:
        return _without_values(softmax, below, scores)
    for product in below.value_products:
        if 0 in product.outputs[0].shape:
            raise RefusedError(Why.PATTERN, "an empty tensor", product)
    if not scores:
        return _without_scores(softmax)
    for operator in (softmax, *below.value_products, *scores):
        if any(tensor.is_dynamic for tensor in operator.outputs):
            raise RefusedError(Why.OPEN_LENGTHS, "a dimension is known only at run time", softmax)
    return _block(HeadSearch(softmax, below.value_products, scores, layouts))


def _without_values(softmax: Operator, below: Below, scores: list[Operator]) -> NotABlock:
    """The match of a SOFTMAX before no value product; raises RefusedError if there may be one."""
    blocker = below.blocker
    if blocker is not None and is_opaque(blocker):
        raise RefusedError(
            Why.OPERATOR, "an operator with unknown effects reads the probabilities", blocker
        )
    if blocker is not None and (scores or _has_computed_weights(blocker)):
        raise RefusedError(
            Why.OPERATOR, "the probabilities cannot be followed through this operator", blocker
        )
    return _no_attention(softmax, "no product with values follows this SOFTMAX", blocker)


def _without_scores(softmax: Operator) -> NotABlock:
    """The match of a SOFTMAX behind no product of queries and keys; raises RefusedError if there may be one."""
    ends = ends_above(producers(softmax))
    end = ends[0] if ends else None
    if not all(map(is_projection, ends)):
        raise RefusedError(Why.OPERATOR, "the scores cannot be followed through this operator", end)
    return _no_attention(softmax, "no product of queries and keys leads to this SOFTMAX", end)


def _has_computed_weights(operator: Operator) -> bool:
    """True for a product or convolution whose weights are activations."""
    return operator.name in PROJECTIONS and not is_projection(operator)


def _no_attention(softmax: Operator, text: str, end: Operator | None) -> NotABlock:
    refusal = RefusedError(Why.NOT_ATTENTION, f"{text}: not attention", end)
    return NotABlock(softmax, refusal.reason, is_attention=False)


def _block(search: HeadSearch) -> Block:
    """The block of one attention; raises RefusedError if its heads are ambiguous or cannot be followed."""
    softmax = search.softmax
    trace = _trace(search)
    product = next(iter(trace.value_products or search.value_products))
    probabilities = search.value_products[product]
    result = product.outputs[0]
    head_size = result.shape[head_size_axis(probabilities)]
    of_one_head = trace.value_products.get(product, unlabelled(result)).full_shape
    scores = trace.logits or search.scores
    rows = result.elements // head_size  # of all heads, N * B * T
    # Heads may lie between the rows, so rows are counted and not matrices.
    if softmax.code.name in SOFTMAXES and math.prod(softmax.outputs[0].shape[:-1]) > rows:
        text = "the probabilities have more rows than the value product"
        raise RefusedError(Why.HEADS, text, softmax)
    _check_products(search, trace)
    return Block(
        softmax=softmax,
        merged=trace.merged,
        kv_heads=_kv_heads(search, trace),
        head_size=head_size,
        query_length=of_one_head[query_axis(probabilities)],
        key_lengths=tuple(score.outputs[0].elements // rows for score in scores),
        value_products=search.value_products,
        logits=trace.logits,
        core=trace.core,
        layouts=search.layouts,
    )


def _trace(search: HeadSearch) -> Trace:
    """The path of the heads up to all scores, for a single head only the output; RefusedError if there is none."""
    merged = search.heads()
    if merged is None:
        return Trace(search.output())
    if merged.pieces > MOST_HEADS:
        text = f"more than {MOST_HEADS:,} heads are not split"
        raise RefusedError(Why.LIMIT, text, search.softmax, actual=f"{merged.pieces:,}")
    trace = trace_heads(merged, search.value_products, search.layouts)
    if trace.refusal is not None and not trace.logits.keys() >= {*search.scores}:
        raise trace.refusal
    return trace


def _check_products(search: HeadSearch, trace: Trace) -> None:
    """Raise RefusedError if a product of one head would still hold several, beside those that were found."""
    for product in dict.fromkeys([*search.value_products, *search.scores]):
        if not multiplies_activations(product):
            continue
        found = trace.value_products.get(product) or trace.logits.get(product)
        labelled = found or unlabelled(product.outputs[0])
        has_rows = product in search.scores and has_heads_in_rows(labelled, search.layouts)
        if has_rows or _has_heads_in_batch(labelled, search.layouts):
            raise labelled.refusal("a product of one head would still hold several")


def _has_heads_in_batch(labelled: Labelled, layouts: HeadLayouts) -> bool:
    """True if a batch axis of a product that has no label holds heads."""
    if labelled.operator.name == "FULLY_CONNECTED":
        return False
    for axis, size in enumerate(labelled.tensor.shape[:-2]):
        is_whole = size > 1 and fx.is_shared((labelled.factored[axis],))
        if is_whole and holds_heads(labelled.tensor, axis, layouts):
            return True
    return False


def _kv_heads(search: HeadSearch, trace: Trace) -> int:
    """K: the number of different keys or values among heads, before any repeat for several heads."""
    counts = [1]
    layouts = search.layouts
    for product, result in trace.value_products.items():
        values = layouts.above(result)[1 - search.value_products[product]]
        for labelled in layouts.upwards([values], is_product):
            if layouts.is_end(labelled, is_product):
                # Heads that a product made are different.
                counts.append(labelled.pieces)
            elif labelled.operator.name in JOINING:
                parts = set(layouts.above(labelled).values())
                if all(part.pieces < labelled.pieces for part in parts):
                    counts.append(sum(part.pieces for part in parts))
    return max(counts)


# Attention without a SOFTMAX


def _weights_without_softmax(
    pairs: Iterable[Pair], softmaxes: Iterable[Operator]
) -> Iterator[Operator]:
    """Operators other than a SOFTMAX that compute the weights of values, such as a LOGISTIC before a value product.

    Nothing is weighed if there is no computation between two products or, for single matrices, only a linear one, as
    between the two products of an adapter.
    """
    assigned: set[Operator] = set()
    for softmax in softmaxes:
        assigned |= products_around(softmax)
    weighing: dict[Operator, dict[Operator, list[Operator]]] = {}
    for pair in pairs:
        if pair.mixed_by is not None:
            continue
        if any(end.is_written_out or end.operator in assigned for end in pair.products):
            continue
        value_product = pair.second.operator
        if value_product not in weighing:
            weighing[value_product] = _computations_above(value_product)
        for weights, above in weighing[value_product].items():
            if pair.first.operator not in above:
                continue
            if pair.first.may_hold_heads or not all(map(_is_linear, above)):
                assigned.update(end.operator for end in pair.products)
                yield weights


def _computations_above(value_product: Operator) -> dict[Operator, list[Operator]]:
    """The last computations above a product's operands, products left out, each with the operators above it."""
    found: dict[Operator, list[Operator]] = {}
    for producer in producers(value_product):
        weights = _last_computation(producer)
        if weights is not None and not is_product(weights):
            found[weights] = list(walked([weights], followed_up, DEEPEST))
    return found


def _last_computation(operator: Operator | None) -> Operator | None:
    """The operator, or the nearest one above that does more than move, cut or repeat; None for a graph input."""
    while operator is not None and operator.name in _MOVING:
        operator = data_of(operator)[0].producer
    return operator


def _is_linear(operator: Operator) -> bool:
    return operator.name in _LINEAR or is_product(operator)


# Products that no block explains


def _unexplained(
    products: Iterable[Product], pairs: Iterable[Pair], found: Mapping[Operator, Match]
) -> Iterator[NotABlock]:
    """Matches for pairs of products, and for single ones of several heads, that are in no match."""
    in_blocks: set[Operator] = set()
    skipped: set[Operator] = set()
    for anchor, match in found.items():
        if isinstance(match, Block):
            scores = match.logits or products_above(anchor)
            in_blocks.update(match.value_products, scores)
        elif match.is_attention:
            skipped |= products_around(anchor)
    layouts = SearchedLayouts()
    for pair in pairs:
        if not _may_be_attention(pair, in_blocks, layouts):
            continue
        operators = {end.operator for end in pair.products}
        if skipped.isdisjoint(operators):
            value_product = pair.second.operator
            anchor = _no_attention_above(value_product, found) or value_product
            yield NotABlock(anchor, pair.refusal().reason)
        skipped |= operators
    for product in products:
        operator = product.operator
        if operator in in_blocks or operator in skipped or not _holds_heads(product, layouts):
            continue
        anchor = _no_attention_above(operator, found) or operator
        text = "a product of several heads is in no attention of queries, keys and values"
        yield NotABlock(anchor, RefusedError(Why.PATTERN, text, operator).reason)


def _holds_heads(product: Product, layouts: HeadLayouts) -> bool:
    """True if a product that sums has a matrix for each of several heads."""
    if not product.may_hold_heads or product.is_outer or not has_known_axes(product.operator):
        return False
    result = product.operator.outputs[0]
    others = set(range(len(result.shape))).difference(*product.matrix)
    wide = [axis for axis in others if result.shape[axis] > 1]
    return any(
        holds_heads(result, axis, layouts) or _is_given(result, axis, layouts) for axis in wide
    )


def _is_given(result: Tensor, axis: int, layouts: HeadLayouts) -> bool:
    """True if an axis of a product, not the outermost, comes from the graph's inputs, where it may be heads."""
    if axis == 0:
        return False
    sources = islice(layouts.upwards([along(result, axis)], is_projection), 2 * DEEPEST)
    ends = layouts.ends(sources, is_projection)
    return all(source.tensor.producer is None for source in ends)


def _may_be_attention(pair: Pair, in_blocks: Container[Operator], layouts: SearchedLayouts) -> bool:
    """True if the products of a pair that are in no block may hold several heads."""
    left = [end for end in pair.products if end.operator not in in_blocks]
    if len(left) == 1 and left[0].is_outer:
        return False  # writes keys or values into a cache, at positions that are ones and zeros
    if any(end.may_hold_heads or _has_heads_in_rows(end, layouts) for end in left):
        return True
    if not left or pair.mixed_by is None:
        return False
    # A product with weights that a block took for one of queries and keys may be what mixes the heads.
    return len(left) == 2 or pair.mixed_by in in_blocks or (pair.is_mixed and not pair.lost_axes)


def _has_heads_in_rows(product: Product, layouts: SearchedLayouts) -> bool:
    """True if rows or columns of a product lie as heads do."""
    if product.is_written_out or not has_known_axes(product.operator):
        return False
    return has_heads_in_rows(unlabelled(product.operator.outputs[0]), layouts)


def _no_attention_above(
    value_product: Operator, found: Mapping[Operator, Match]
) -> Operator | None:
    """The SOFTMAX between a value product and the products above it, if its match says that it is not attention."""

    def above(operator: Operator) -> list[Operator]:
        return [] if is_product(operator) else producers(operator)

    for operator in walked(producers(value_product), above, DEEPEST):
        if operator in found and not found[operator].is_attention:
            return operator
    return None
