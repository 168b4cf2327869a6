"""Finds where the heads of one attention lie: in the tensor that merges them, or else in batch axes of its products.

    value product  [1,(K),(G)(T),H]        K heads on a batch axis, G heads beside the T rows
      -> RESHAPE   [1,(K)(G),T,H]
      -> TRANSPOSE [1,T,(K)(G),H]          unmerged: the axis left of H has the heads, N = K*G
      -> RESHAPE   [1,T,(K)(G)(H)]         merged: so have the digits left of H in the last axis

The part left of the head size H is assumed to be heads, and followed up to the value product. These are heads
if they lie there as heads do: on batch axes, then in the outer part of the rows. See docs/head-axis.md.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from edge_opt.attention import factors as fx
from edge_opt.attention.around import CUTTING, tail_of
from edge_opt.attention.axes import contracted_axis, data_of
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.labelled import Labelled, along, unlabelled
from edge_opt.attention.labels import (
    DEEPEST,
    HeadLayouts,
    ValueProducts,
    head_size_axis,
    query_axis,
)
from edge_opt.attention.rules import ELEMENTWISE, JOINING, is_product, is_projection, is_weight
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import producers, walked
from edge_opt.shapes.dimension import with_axis


class SearchedLayouts(HeadLayouts):
    """Layouts, and rows that a search followed to all their ends without finding heads: later searches skip them."""

    def __init__(self) -> None:
        super().__init__()
        self.headless_rows: set[Labelled] = set()
        """Rows of value products, above the products of queries and keys."""
        self.headless_weights: set[Labelled] = set()
        """Rows of value products, up to the next products, where more is ambiguous."""
        self.headless_by_size: defaultdict[int, set[Labelled]] = defaultdict(set)
        """Rows of other products, by the size of the heads that they might be."""


@dataclass(eq=False)
class HeadSearch:
    """The search in one attention; `scores` are the nearest products above the SOFTMAX.

    `_result` is the result of the first value product, with `_row_axis` for the queries and `_size_axis` for the head
    size; `_tail` are the tensors after it.
    """

    softmax: Operator
    value_products: ValueProducts
    scores: list[Operator]
    layouts: SearchedLayouts

    def __post_init__(self) -> None:
        product, probabilities = next(iter(self.value_products.items()))
        self._result = product.outputs[0]
        rank = len(self._result.shape)
        self._row_axis = rank + query_axis(probabilities)
        self._size_axis = rank + head_size_axis(probabilities)
        self._head_size = self._result.shape[self._size_axis]
        self._tail = tail_of(self.value_products)

    def heads(self) -> Labelled | None:
        """The tensor that holds all heads side by side, with their layout; None for a single head.

        Raises:
            RefusedError: rows of the value product may be heads, but this cannot be decided.
        """
        found = self._beside_head_size() or self._on_batch_axes() or self._before_own_matrices()
        if found is None:
            self._check_rows()
        return found

    def output(self) -> Labelled:
        """The result of an attention with a single head: the (sum of the) value product(s)."""
        return unlabelled(self._tail[0] if self._tail else self._result)

    def _layout_at_product(self, labelled: Labelled) -> Factored | None:
        """The layout in the value product's result of heads that lie in this way in a tensor after it."""
        for above in self.layouts.upwards([labelled], self.value_products.__contains__):
            if above.tensor is self._result:
                return above.factored
        return None

    # Beside the head size

    def _beside_head_size(self) -> Labelled | None:
        """Heads left of the head size: in its axis, `[.., N*H]`, which a projection contracts, or `[.., N, H]`.

        This takes the nearest tensor with the most heads: an earlier `[.., K, G, H]` has only G beside H.
        """
        size = self._head_size
        if size == 1:
            return None
        for product, probabilities in self.value_products.items():
            if product.outputs[0].shape[head_size_axis(probabilities)] != size:
                return None
        found: list[Labelled] = []
        for tensor in self._tail:
            beside, width = (1, 1, *tensor.shape)[-2:]
            merged = width > size
            count = width // size if merged else beside
            if width % size or count == 1 or not self._are_heads(tensor, count, merged=merged):
                continue
            factored = _left_of_head_size(tensor, Factor(count, 1), Factor(size), merged=merged)
            found.append(Labelled(tensor, factored))
        merged_ones = [labelled for labelled in found if len(labelled.factored[-1]) > 1]
        return max(merged_ones or found, key=lambda labelled: labelled.pieces, default=None)

    def _are_heads(self, tensor: Tensor, count: int, *, merged: bool) -> bool:
        """True if the `count` digits left of the head size lie in the value product's result as heads do.

            tensor    [B, T, (count)(H)], or unmerged [B, T, (count), H]
            product   [B, (digits), (digits)(T), H]     heads: batch axes, then the outer part of the rows
                      [B, (T)(digits), H]               unmerged, these are the sequence

        If another batch axis holds heads, these are not all.
        """
        size = self._head_size
        # The batch, the digits and the steps of the head size are numbered together, so none is mistaken for another.
        factored = _left_of_head_size(tensor, Factor(count, size), Factor(size, 1), merged=merged)
        if factored[0] == (Factor(tensor.shape[0]),):
            factored = ((Factor(tensor.shape[0], count * size),), *factored[1:])
        own = self._layout_at_product(Labelled(tensor, factored))
        if own is None or own[self._size_axis] != (Factor(size, 1),):
            return False
        digits = [digit for digit in fx.all_factors(own) if size <= digit.stride < count * size]
        strides = [digit.stride for digit in digits]
        if strides != sorted(strides, reverse=True):
            return False  # the sequence, as in `[B, T*N*H]`
        others = [axis for axis in range(len(own) - 2) if set(digits).isdisjoint(own[axis])]
        if any(holds_heads(self._result, axis, self.layouts) for axis in others):
            return False  # these are not all heads
        if merged:
            return self._are_merged_heads(own[self._row_axis], digits, others)
        in_rows = [digit in digits for digit in own[self._row_axis]]
        is_sequence = any(in_rows) and (in_rows[-1] or not in_rows[0])
        # A batch axis without labels is not in the outermost axis of the tensor: it is more heads.
        return not is_sequence and all(map(fx.only_labels, own[:-2]))

    def _are_merged_heads(
        self, rows: Axis, digits: Collection[Factor], others: Iterable[int]
    ) -> bool:
        """True if the `others`, batch axes without a digit of the heads, are windows; `rows` are the product's."""
        if any(map(self._is_of_channels, others)):
            return False
        if rows and all(digit in digits for digit in rows):
            self._check_merged(rows)
        return True

    def _check_merged(self, rows: Axis) -> None:
        """Raise RefusedError if rows beside the head size may be the sequence, as in `[B, T*H]` before a classifier.

        Heads lie beside the head size in the queries, too, or have an axis of size 1 for the sequence.
        """
        layout = fx.labelled_axis(self._result.shape, self._row_axis, *rows)
        weights = self._weights(Labelled(self._result, layout))
        for labelled in self._sources(self._above_queries(weights)):
            place = fx.labelled_axes(labelled.factored)[0]
            if fx.only_labels(labelled.factored[place]) and 1 not in labelled.tensor.shape[1:]:
                raise labelled.refusal("rows of the value product may be the sequence, or heads")

    # In batch axes

    def _on_batch_axes(self) -> Labelled | None:
        """Heads in the batch axes of the products, with one matrix per index; None if there is only one."""
        output = self._result
        lead = output.shape[:-2]
        if self._tail and self._tail[0].shape[:-2] == lead:
            output = self._tail[0]
        elif len(self.value_products) > 1 and math.prod(lead) > 1:
            text = "the probabilities weigh several values, and these products are never summed"
            raise RefusedError(Why.PATTERN, text, self.softmax)
        found = Labelled(output, self._batch_layout(output) + fx.plain(output.shape[-2:]))
        if found.pieces == 1:
            return None
        self._check_rows()
        return found

    def _batch_layout(self, output: Tensor) -> Factored:
        """The layout of the batch axes: `[B, (K), (G)]`, `[(B)(N)]`, or `[(K), (G)]` if none is the model's batch."""
        lead = output.shape[:-2]
        if self._has_weights_behind() or holds_heads(self._result, 0, self.layouts):
            return _heads_of_axes(lead, 0)
        if len(lead) == 1:
            return self._heads_of_axis(output)
        if len(lead) > 1 and self._is_of_channels(0):
            return _heads_of_axes(lead, 0)
        return _heads_of_axes(lead, 1)

    def _heads_of_axis(self, output: Tensor) -> Factored:
        """The layout of a single batch axis, `[(B)(N)]`; B is the least outermost part of it in all its sources."""
        sources = islice(self.layouts.upwards([along(output, 0)]), DEEPEST)
        leads = [fx.leading(source.factored[0]) for source in self.layouts.ends(sources)]
        batch = min(map(fx.axis_size, leads), default=1)
        heads = Factor(output.shape[0] // batch, 1)
        return (tuple(fx.merge_neighbours((Factor(batch), heads))),)

    def _is_of_channels(self, axis: int) -> bool:
        """True if an axis was cut from the channels, as heads are: in a source, it lies left of the head size.

        `[B, T, (N)(H)] -> [N, B, T, H]`: no batch. Windows are cut from rows.
        """
        size = self._head_size
        count = self._result.shape[axis]
        if count == 1 or size == 1:
            return False
        layout = fx.labelled_axis(self._result.shape, self._size_axis, Factor(size, 1))
        # Numbers with a gap are not merged with those of the head size beside them.
        layout = with_axis(layout, axis, (Factor(count, 2 * size),))
        result = Labelled(self._result, layout)
        values = self.layouts.above(result).get(1 - self.value_products[result.operator])
        if values is None:
            return False  # the layout cannot be followed
        for source in self.layouts.upwards([values], is_product):
            if source.tensor.is_constant or not self.layouts.is_end(source, is_product):
                continue
            for factors in source.factored:
                strides = [factor.stride for factor in factors if factor.stride]
                if strides and min(strides) < size <= max(strides):
                    return True
        return False

    def _has_weights_behind(self) -> bool:
        """True if each step of the outermost axis has weights of its own behind it, which no batch has."""
        for tensor in self._tail:
            if tensor.shape[:-2] != self._result.shape[:-2]:
                continue
            for reader in tensor.consumers:
                if not fx.tells_heads(_labels_on_shared_batches(reader, tensor)[0]):
                    continue
                if any(is_weight(other) for other in reader.given if other is not tensor):
                    return True
        return False

    # Before matrices of their own

    def _before_own_matrices(self) -> Labelled | None:
        """Heads in rows that become batch axes of a product behind, in which each row has its own matrix.

        `[1, N, C] -> [N, 1, C] x [N, C, H]`: values that are made of a latent, which all heads share.
        """
        for tensor in self._tail:
            for reader in tensor.consumers:
                found = Labelled(tensor, _labels_on_shared_batches(reader, tensor))
                own = None if fx.is_shared(found.factored) else self._layout_at_product(found)
                if own is not None and fx.tells_heads(own[self._row_axis]):
                    return found
        return None

    # Rows that may be heads

    def _check_rows(self) -> None:
        """Raise RefusedError if rows of the value product may belong to several heads that cannot be distinguished."""
        probabilities = self.softmax.outputs[0]
        if math.prod(probabilities.shape[:-2]) > math.prod(self._result.shape[:-2]):
            text = "the probabilities have more matrices than the value product"
            raise RefusedError(Why.HEADS, text, self.softmax)
        for labelled in self._like_heads(along(self._result, self._row_axis)):
            raise labelled.refusal("rows of the value product may belong to several heads")

    def _like_heads(self, rows: Labelled) -> Iterator[Labelled]:
        """The tensors above the value product in which its rows lie as heads do."""
        weights = self._weights(rows, self.layouts.headless_weights)
        for labelled in weights:
            if len(fx.labelled_axes(labelled.factored)) > 1:
                yield labelled  # logits at `[B, N, T, S]`
        above = list(self._above_queries(weights, self.layouts.headless_rows))
        yield from filter(_are_batches, above)
        yield from filter(_is_repeated_for_constants, above)
        for labelled in self._sources(above):
            if any(
                fx.tells_heads(axis) and not fx.only_labels(axis) for axis in labelled.factored[1:]
            ):
                yield labelled  # `[1, T, (N)(H)]`
        yield from filter(_repeats, weights)
        # Nothing was found, or the search would have ended.
        self.layouts.headless_rows.update(above)
        self.layouts.headless_weights.update(weights)

    def _sources(self, above: Iterable[Labelled]) -> Iterator[Labelled]:
        """Those of the tensors above the scores at which the walk ends, without constants and products."""
        for labelled in self.layouts.ends(above, is_product):
            if labelled.tensor.producer is None or not is_product(labelled.operator):
                yield labelled

    def _weights(self, rows: Labelled, known: Container[Labelled] = ()) -> list[Labelled]:
        """The tensors that make the values' weights, up to the next products, with the layout of these rows.

        These products are the scores, and any gate that is multiplied with the probabilities.
        """
        operands = self.layouts.above(rows).values()
        return list(self.layouts.upwards(operands, is_product, known))

    def _above_queries(
        self, weights: Iterable[Labelled], known: Container[Labelled] = ()
    ) -> Iterator[Labelled]:
        """The tensors above the products that the weights end at, up to the next products."""
        starts: list[Labelled] = []
        for labelled in weights:
            made = labelled.tensor.producer
            if made is not None and is_product(made):
                starts += self.layouts.above(labelled).values()
        yield from self.layouts.upwards(starts, is_product, known)


def has_heads_in_rows(labelled: Labelled, layouts: SearchedLayouts) -> bool:
    """True if rows or columns of a product hold heads beside those in its layout.

    Heads were cut from the channels, or have weights of their own; no step of a sequence has:

        [1, T, (N)(H)] -> [1, (T)(N), H]
        [N, T, C] x [N, C, H] -> [(N)(T), H]
    """
    product = labelled.operator
    for side, operand in layouts.above(labelled).items():
        contracted = contracted_axis(product, side)
        size = operand.tensor.shape[contracted]
        rest = _rows_labelled(operand, contracted)
        headless = layouts.headless_by_size[size]
        above = list(layouts.upwards([rest], is_product, headless))
        for source in above:
            if source.tensor.is_constant or source.pieces == 1:
                continue
            if _has_own_weights(source):
                return True
            is_end = layouts.is_end(source, is_product)
            if is_end and _steps_inside(source.factored[-1]) >= max(size, 2):
                return True
        headless.update(above)
    return False


def _rows_labelled(operand: Labelled, contracted: int) -> Labelled:
    """An operand of a product with labels on what its layout leaves of the rows."""
    last = len(operand.factored) - 1
    rows = last - 1 if contracted == last else last
    stride = 1
    axis: list[Factor] = []
    for factor in reversed(operand.factored[rows]):
        axis.insert(0, Factor(factor.size, 0 if factor.stride else stride))
        stride *= factor.size
    return Labelled(operand.tensor, fx.labelled_axis(operand.tensor.shape, rows, *axis))


def _steps_inside(axis: Axis) -> int:
    """The number of steps of an axis within one step of its innermost label; 0 without a label."""
    if not fx.tells_heads(axis):
        return 0
    return fx.axis_size(takewhile(lambda factor: not factor.stride, reversed(axis)))


def _has_own_weights(labelled: Labelled) -> bool:
    """True if labels lie on batch axes of a product with a matrix of weights for each step."""
    made = labelled.tensor.producer
    if made is None or not is_projection(made) or made.name != "BATCH_MATMUL":
        return False
    weights = made.input(1)
    places = range(-3, -1 - min(len(weights.shape), len(labelled.factored)), -1)
    return any(fx.tells_heads(labelled.factored[at]) and weights.shape[at] > 1 for at in places)


def holds_heads(result: Tensor, axis: int, layouts: HeadLayouts) -> bool:
    """True if steps of an axis of a product come from different weights, or from parts of the channels.

    The model's batch and windows have neither:

        [1, T, D] x N [D, H] -> PACK -> [N, 1, T, H]
        [1, T, D] x [N, 1, D, H]     -> [N, 1, T, H]
        [1, T, (N)(H)] -> TRANSPOSE  -> [N, 1, T, H]
    """
    sources = layouts.upwards([along(result, axis)], is_projection)
    return any(_is_made_of_heads(source, layouts) for source in islice(sources, 2 * DEEPEST))


def _is_made_of_heads(labelled: Labelled, layouts: HeadLayouts) -> bool:
    """True if a tensor's pieces are parts of its channels, or joined from these or from different projections."""
    if labelled.tensor.is_constant:
        return False
    if _ends_in_channels(labelled, layouts):
        return True
    parts = layouts.above(labelled)
    if not parts:
        return False
    if is_projection(labelled.operator):
        return parts[1].pieces > 1
    if labelled.operator.name not in JOINING or any(part.pieces > 1 for part in parts.values()):
        return False
    makers = [_made_by(part.tensor) for part in parts.values()]
    weights = {*map(_weights_among, makers)}
    return len(weights) > 1 or any(_cuts_channels(maker, layouts) for maker in makers[0])


def _ends_in_channels(labelled: Labelled, layouts: HeadLayouts) -> bool:
    """True if a walk up ends at a tensor with all labels on its last axis, which holds more or is a projection's.

    The model's batch may be the last axis of an input, too: `[B]`, a length for each sequence.
    """
    last = len(labelled.factored) - 1
    if fx.labelled_axes(labelled.factored) != (last,) or not layouts.is_end(
        labelled, is_projection
    ):
        return False
    made = labelled.tensor.producer
    return not fx.only_labels(labelled.factored[last]) or (made is not None and is_projection(made))


def _cuts_channels(operator: Operator, layouts: HeadLayouts) -> bool:
    """True if an operator cuts off a part of the channels: `[1, T, (N)(H)] -> SPLIT -> N x [1, T, H]`."""
    if operator.name not in CUTTING:
        return False
    source = data_of(operator)[0]
    part = operator.outputs[0].shape
    for axis, size in enumerate(source.shape):
        if part[axis : axis + 1] != (size,):
            above = layouts.upwards([along(source, axis)], is_projection)
            return any(_ends_in_channels(source, layouts) for source in islice(above, DEEPEST))
    return False


def _made_by(tensor: Tensor) -> list[Operator]:
    """The operators that make a tensor, up to the nearest projections."""
    starts = () if tensor.producer is None else (tensor.producer,)
    return [*walked(starts, lambda one: () if is_projection(one) else producers(one), DEEPEST)]


def _weights_among(operators: Iterable[Operator]) -> frozenset[Tensor]:
    """The weights of the projections among operators."""
    return frozenset(one.input(1) for one in operators if is_projection(one))


def _heads_of_axes(lead: Shape, batch: int) -> Factored:
    """The layout of several batch axes, `[B, (K), (G)]`, of which the outermost `batch` are the model's."""
    heads = (Factor(math.prod(lead[batch:]), 1),)
    return fx.plain(lead[:batch]) + (fx.regroup((heads,), lead[batch:]) or ())


def _left_of_head_size(tensor: Tensor, heads: Factor, columns: Factor, *, merged: bool) -> Factored:
    """A tensor's layout with heads left of the head size: `[.., (heads)(columns)]`, or `[.., (heads), (columns)]`."""
    if merged:
        return (*fx.plain(tensor.shape[:-1]), (heads, columns))
    return (*fx.plain(tensor.shape[:-2]), (heads,), (columns,))


def _are_batches(labelled: Labelled) -> bool:
    """True if the labels lie on batch axes of a product, in which each row has its own matrix."""
    made = labelled.tensor.producer
    if made is None or made.name != "BATCH_MATMUL":
        return False
    return any(map(fx.tells_heads, labelled.factored[:-2]))


def _repeats(labelled: Labelled) -> bool:
    """True if the operator joins a tensor to itself along a labelled axis."""
    operator = labelled.tensor.producer
    if operator is None or operator.name not in JOINING:
        return False
    if len(set(operator.inputs)) == len(operator.inputs):
        return False
    return fx.tells_heads(labelled.factored[int(operator.option("axis"))])


def _is_repeated_for_constants(labelled: Labelled) -> bool:
    """True if rows are a tensor's rows repeated for each step of a constant: `[1, 1, T, C] * [1, N, 1, C]`."""
    axes = fx.labelled_axes(labelled.factored)
    made = labelled.tensor.producer
    if made is None or len(axes) < 2 or made.name not in ELEMENTWISE:
        return False
    activations = [tensor for tensor in made.given if not is_weight(tensor)]
    for axis in axes:
        from_right = axis - len(labelled.factored)
        sizes = [(1,) * -from_right + tensor.shape for tensor in activations]
        if all(shape[from_right] == 1 for shape in sizes):
            return True
    return False


def _labels_on_shared_batches(product: Operator, tensor: Tensor) -> Factored:
    """The layout of a product's operand with labels on batch axes on which the other operand has several steps, too."""
    axes = list(fx.plain(tensor.shape))
    others = [other.shape for other in product.given if other is not tensor]
    if product.name == "BATCH_MATMUL" and others:
        stride = 1
        for axis in range(-3, -1 - min(len(axes), len(others[0])), -1):
            size = tensor.shape[axis]
            if size > 1 and others[0][axis] == size:
                axes[axis] = (Factor(size, stride),)
                stride *= size
    return tuple(axes)
