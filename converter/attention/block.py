"""Finds attention blocks. Reads graphs, changes nothing.

From a SOFTMAX forward to its value products and to the tensor where the heads are merged, and from there back along
the head label to the logits products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored
from edge_opt.attention.labelling import DEEPEST, Labelling, OperandFactors
from edge_opt.attention.refusal import Refusal
from edge_opt.attention.rule import constant_integers
from edge_opt.attention.rules import CUTTING, ELEMENTWISE, MOVEMENT, REPEATING, UNARY
from edge_opt.attention.tail import Tail, value_products

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edge_opt.ir import Operator, Subgraph, Tensor

_JOINS = frozenset({"CONCATENATION", "PACK"})
_SUMS = frozenset({"SUM", "MEAN"})
_LINEAR = frozenset({"FULLY_CONNECTED", "CONV_2D"})
_MASKING = frozenset({"ADD", "SUB", "SELECT", "SELECT_V2"})
_FOLLOWED_UP = ELEMENTWISE | MOVEMENT | REPEATING | CUTTING | _JOINS


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's attention, matched.

    `output` is the tensor where the heads stand side by side (factors `factored`, heads N); `core` are the operators
    from the logits products to it, `logits` and `values` the products themselves. `heads_are_rows` is True where a
    product's rows are nothing but heads (T = 1). `kv_heads` is K,
    `query_length` T, `key_lengths` the segments of keys (S, or S and T), `head_size` H.
    """

    softmax: Operator
    output: Tensor
    factored: Factored
    heads: int
    kv_heads: int
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None
    logits: tuple[Operator, ...]
    values: tuple[Operator, ...]
    core: frozenset[Operator]
    operands: OperandFactors
    heads_are_rows: bool

    @property
    def merged(self) -> bool:
        """True where the heads end beside the head size in one axis, `[.., N*H]`, False for `[.., N, H]`."""
        return any(factor.stride for factor in self.factored[-1])


@dataclass(frozen=True, slots=True)
class SingleHead:
    """An attention that has one head (or is one of those that were split already).

    `output` is the (sum of the) value product(s), `[.., T, H]` or `[.., H, T]`; `row_axis` is where T stands.
    """

    softmax: Operator
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None
    output: Tensor
    row_axis: int
    products: dict[Operator, int]
    operands: OperandFactors


@dataclass(frozen=True, slots=True)
class NotABlock:
    """A SOFTMAX that is no attention, or one that does not match; `reason` says which condition failed."""

    softmax: Operator
    reason: Refusal
    is_attention: bool = True


Match = Block | SingleHead | NotABlock


def find_blocks(subgraph: Subgraph) -> Iterator[Match]:
    """One match for every SOFTMAX of the subgraph, in execution order."""
    operands = OperandFactors()
    for operator in subgraph.operators:
        if operator.name == "SOFTMAX":
            yield match_block(subgraph, operator, operands)


def match_block(subgraph: Subgraph, softmax: Operator, operands: OperandFactors | None = None) -> Match:
    """What a SOFTMAX belongs to."""
    products = value_products(softmax)
    if isinstance(products, Refusal):
        return NotABlock(softmax, products, is_attention=False)
    sizes = {head_size for _, head_size in products.values()}
    if len(sizes) != 1:
        return NotABlock(softmax, Refusal("value products differ in head size", actual=str(sorted(sizes))))
    logits, ends = products_before(softmax)
    if not logits:
        learned = all(end is None or end.name in _LINEAR for end in ends)
        blocker = next((end for end in ends if end is not None), None)
        reason = Refusal("no product of queries and keys leads to this SOFTMAX: not attention", blocker)
        return NotABlock(softmax, reason, is_attention=not learned)
    if sizes == {1}:
        return NotABlock(softmax, Refusal("a head size of 1 leaves no trace to follow", next(iter(products))))
    return _Matcher(subgraph, softmax, products, logits, operands or OperandFactors()).match()


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
        logits=tuple(labelling.logits),
        values=tuple(single.products),
        core=frozenset(labelling.core_operators),
        operands=single.operands,
        heads_are_rows=False,
    )


class _Matcher:
    def __init__(
        self,
        subgraph: Subgraph,
        softmax: Operator,
        products: dict[Operator, tuple[int, int]],
        logits: list[Operator],
        operands: OperandFactors,
    ) -> None:
        self._subgraph = subgraph
        self._softmax = softmax
        self._products = products
        self._before = logits
        self._head_size = next(iter(products.values()))[1]
        self._operands = operands
        self._labelling = Labelling({product: side for product, (side, _) in products.items()}, operands)
        self._tail = Tail(products)

    def match(self) -> Match:
        found = self._merged() or self._side_by_side()
        if found is None:
            return self._without_heads()
        output, factored, heads = found
        output, factored = self._before_escapes(output, factored)
        core = self._labelling.core(output, factored)
        logits = self._labelling.logits
        reason = self._refusal(heads, core=core)
        if reason is not None:
            return NotABlock(self._softmax, reason)
        product, labelled = next(iter(self._labelling.products.items()))
        return Block(
            softmax=self._softmax,
            output=output,
            factored=factored,
            heads=heads,
            kv_heads=max(self._kv_heads(*pair) for pair in self._labelling.products.items()),
            head_size=self._head_size,
            query_length=_plain(labelled[-2 if self._products[product][0] == 0 else -1]),
            key_lengths=tuple(
                _plain(f for axis in own for f in axis) // self._rows(own, product, labelled)
                for own in logits.values()
            ),
            mask=self._mask(),
            logits=tuple(logits),
            values=tuple(self._products),
            core=frozenset(self._labelling.core_operators),
            operands=self._operands,
            heads_are_rows=any(_rows_are_heads(labelled) for labelled in logits.values()),
        )

    def _refusal(self, heads: int, *, core: bool) -> Refusal | None:
        """Why labels that reach the tail do not make a block; None where they do."""
        refusal = self._labelling.first_refusal
        logits = self._labelling.logits
        if not core or not logits:
            return refusal or Refusal("no product of queries and keys carries the heads", self._softmax)
        for product, labelled in logits.items():
            count = fx.piece_count(labelled)
            if count != heads:
                return Refusal("not every head reaches the logits", product, None, str(heads), str(count))
        missed = [product for product in self._before if product not in logits]
        return refusal if missed else None

    # No heads beside the head size

    def _without_heads(self) -> SingleHead | NotABlock:
        """One head, as far as anybody can tell: or several that never come to stand beside the head size."""
        for tensor in self._tail.tensors:
            distrusted = tensor.producer and self._operands.distrusted(tensor.producer)
            if distrusted:
                return NotABlock(self._softmax, distrusted)
        product, (side, _) = next(iter(self._products.items()))
        shape = product.outputs[0].shape
        for end in self._tail.ends:
            if end.name in _SUMS and not set(_axes(end)) <= {-1, -2}:
                return NotABlock(
                    self._softmax, Refusal("heads are summed before they stand side by side", end)
                )
        joined = bool(self._tail.ends) and all(end.name in _JOINS for end in self._tail.ends)
        if math.prod(shape[1:-2]) > 1 and not joined:
            last = self._tail.ends[0] if self._tail.ends else product
            reason = Refusal(
                "heads never stand beside the head size",
                last,
                None,
                f"[.., N*{self._head_size}] or [.., N, {self._head_size}]",
                str(list(self._tail.tensors[-1].shape if self._tail.tensors else shape)),
            )
            return NotABlock(self._softmax, reason)
        rows = shape[-2 if side == 0 else -1]
        lengths = tuple(op.outputs[0].elements // (math.prod(shape[:-2]) * rows) for op in self._before)
        return SingleHead(
            self._softmax,
            self._head_size,
            rows,
            lengths,
            _mask_between(self._softmax),
            output=self._tail.tensors[0] if self._tail.tensors else product.outputs[0],
            row_axis=len(shape) - (2 if side == 0 else 1),
            products={operator: operand for operator, (operand, _) in self._products.items()},
            operands=self._operands,
        )

    # Where the heads are

    def _merged(self) -> tuple[Tensor, Factored, int] | None:
        """Heads beside the head size, in the axis that the output projection contracts: `[.., N*H]`."""
        size = self._head_size
        for tensor in self._tail.tensors:
            width = tensor.shape[-1] if tensor.shape else 0
            if width <= size or width % size:
                continue
            heads = width // size
            front = fx.plain(tensor.shape[:-1])
            if self._ends_in_head_size(tensor, (*front, (Factor(heads), Factor(size, 1)))):
                return tensor, (*front, (Factor(heads, 1), Factor(size))), heads
        return None

    def _side_by_side(self) -> tuple[Tensor, Factored, int] | None:
        """Heads in the axis left of the head size, where nothing merges them: `[.., T, N, H]`.

        The nearest tensor that has them all: `[.., K, G, H]` on the way to it has only some.
        """
        found: tuple[Tensor, Factored, int] | None = None
        for tensor in self._tail.tensors:
            shape = tensor.shape
            if len(shape) < 3 or shape[-1] != self._head_size or shape[-2] <= (found[2] if found else 1):
                continue
            front = fx.plain(shape[:-1])
            if not self._ends_in_head_size(tensor, (*front, (Factor(shape[-1], 1),))):
                continue
            factored = (*front[:-1], (Factor(shape[-2], 1),), (Factor(shape[-1]),))
            reached = self._labelling.reach_products(tensor, factored).items()
            if reached and all(_heads_apart(own, self._products[product][0]) for product, own in reached):
                found = tensor, factored, shape[-2]
        return found

    def _ends_in_head_size(self, tensor: Tensor, marked: Factored) -> bool:
        """True where the innermost factor of the last axis is the value products' head-size axis."""
        traced = self._labelling.reach_products(tensor, marked)
        for product, (side, _) in self._products.items():
            factored = traced.get(product)
            if factored is None:
                return False
            axis = factored[-1 if side == 0 else -2]
            if axis != (Factor(self._head_size, 1),) or fx.piece_count(factored) != self._head_size:
                return False
        return True

    def _before_escapes(self, output: Tensor, factored: Factored) -> tuple[Tensor, Factored]:
        """The block may end earlier: where somebody else reads a tensor of the tail too, it ends there.

        Else the operators up to that tensor would stay, beside those of the single heads.
        """
        whole = {id(tensor) for tensor in self._tail.tensors}
        best, tensor, labelled = (output, factored), output, factored
        while tensor.producer is not None:
            operator, operands = tensor.producer, self._operands.of(tensor, labelled)
            if not isinstance(operands, dict):
                break
            carriers = [index for index, own in operands.items() if fx.piece_count(own) > 1]
            if len(carriers) != 1 or id(operator.input(carriers[0])) not in whole:
                break
            tensor, labelled = operator.input(carriers[0]), operands[carriers[0]]
            escapes = len(tensor.consumers) > 1 or self._subgraph.is_output(tensor)
            if escapes and fx.before_heads(labelled) is not None:
                best = tensor, labelled
        return best

    # What there is to tell

    def _kv_heads(self, product: Operator, labelled: Factored) -> int:
        """K: how many different keys and values the heads have, before any repeats them."""
        operands = self._operands(product, labelled)
        assert isinstance(operands, dict)
        side = 1 - self._products[product][0]
        tensor, factored = product.input(side), operands[side]
        count = fx.piece_count(factored)
        for _ in range(DEEPEST):
            operator, above = tensor.producer, self._operands.of(tensor, factored)
            if operator is None or not isinstance(above, dict) or not _only_repeats(operator):
                break
            tensor, factored = operator.input(0), above[0]
            count = min(count, fx.piece_count(factored))
        return count

    def _rows(self, logits: Factored, product: Operator, labelled: Factored) -> int:
        """B*T of a logits product: its elements without heads and keys."""
        length = _plain(labelled[-2 if self._products[product][0] == 0 else -1])
        return length * math.prod(_plain(axis) for axis in logits[:-2])

    def _mask(self) -> Tensor | None:
        for operator in self._labelling.core_operators:
            if operator.name in _MASKING:
                for tensor in operator.inputs:
                    if tensor is not None and not self._labelling.is_core(tensor) and tensor.elements > 1:
                        return tensor
        return None


def _plain(factors: Iterable[Factor]) -> int:
    return math.prod(factor.size for factor in factors if not factor.stride)


def _rows_are_heads(factored: Factored) -> bool:
    return any(axis and all(factor.stride for factor in axis) for axis in factored[-2:])


def _heads_apart(product: Factored, side: int) -> bool:
    """True where the label can only be heads: batch axes of a value product, or `(heads)(sequence)` among its rows.

    `(sequence)(x)` may be anything, e.g. rows and columns of an image.
    """
    rows, columns = product[-2 if side == 0 else -1], product[-1 if side == 0 else -2]
    labelled = [factor for factor in rows if factor.stride]
    apart = not labelled or (len(labelled) < len(rows) and list(rows[: len(labelled)]) == labelled)
    return apart and not fx.tells_heads(columns)


def _only_repeats(operator: Operator) -> bool:
    same = len({id(tensor) for tensor in operator.inputs}) == 1
    return operator.name in UNARY | MOVEMENT | REPEATING or (operator.name == "CONCATENATION" and same)


def _axes(reduction: Operator) -> list[int]:
    """Reduced axes, counted from the back."""
    axes = constant_integers(reduction, 1)
    rank = len(reduction.input(0).shape)
    return [] if isinstance(axes, Refusal) else [axis % rank - rank for axis in axes]


def products_before(softmax: Operator) -> tuple[list[Operator], list[Operator | None]]:
    """The nearest BATCH_MATMULs on the way up from a SOFTMAX, as they are met, and where the other ways end."""
    return _products_above(softmax.inputs[0])


def _products_above(start: Tensor | None) -> tuple[list[Operator], list[Operator | None]]:
    found: list[Operator] = []
    ends: list[Operator | None] = []
    seen: set[int] = set()
    frontier = [start]
    while frontier and len(seen) < DEEPEST:
        tensor = frontier.pop(0)
        producer = None if tensor is None else tensor.producer
        if producer is None:
            ends.append(None)
        elif id(producer) in seen:
            continue
        elif producer.name == "BATCH_MATMUL":
            found.append(producer)
        elif producer.name in _FOLLOWED_UP:
            frontier.extend(producer.inputs)
        else:
            ends.append(producer)
        seen.add(id(producer))
    return found, ends


def _mask_between(softmax: Operator) -> Tensor | None:
    """What is added to, or selects from, the logits of a single head."""
    operator = softmax.input(0).producer
    while operator is not None and operator.name in UNARY | MOVEMENT:
        operator = operator.input(0).producer
    if operator is None or operator.name not in _MASKING:
        return None
    for tensor in operator.inputs:
        if tensor is not None and tensor.elements > 1 and not _products_above(tensor)[0]:
            return tensor
    return None
