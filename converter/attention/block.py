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
from edge_opt.attention.rules import ELEMENTWISE, MOVEMENT, UNARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from edge_opt.ir import Operator, Subgraph, Tensor

_PROBABILITY_PATH = UNARY | MOVEMENT | {"SLICE", "STRIDED_SLICE"}
_TAIL = UNARY | MOVEMENT


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
    """An attention that has one head (or is one of those that were split already)."""

    softmax: Operator
    head_size: int
    query_length: int
    key_lengths: tuple[int, ...]
    mask: Tensor | None


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
    return _Matcher(subgraph, softmax, products, sizes.pop(), operands or OperandFactors()).match()


def value_products(softmax: Operator) -> dict[Operator, tuple[int, int]] | Refusal:
    """The products of the probabilities with the values: operator -> (operand that holds P, head size)."""
    found: dict[Operator, tuple[int, int]] = {}
    blocked: Operator | None = None
    seen: set[int] = set()
    frontier = [softmax.outputs[0]]
    while frontier:
        tensor = frontier.pop()
        for operator in tensor.consumers:
            if id(operator) in seen:
                continue
            seen.add(id(operator))
            if operator.name == "BATCH_MATMUL":
                side = 0 if operator.inputs[0] is tensor else 1
                shape = operator.outputs[0].shape
                if len(shape) < 2:
                    return Refusal("a value product must be a matrix", operator)
                found[operator] = (side, shape[-1] if side == 0 else shape[-2])
            elif _follows_one(operator, tensor, _PROBABILITY_PATH):
                frontier.append(operator.outputs[0])
            else:
                blocked = operator
    if found:
        return found
    return Refusal("no value product behind this SOFTMAX: not attention", blocked)


def _follows_one(operator: Operator, tensor: Tensor, allowed: frozenset[str] | set[str]) -> bool:
    if operator.name in allowed:
        return operator.inputs[0] is tensor and len(operator.outputs) == 1
    others = [t for t in operator.inputs if t is not tensor and t is not None]
    return operator.name in ("MUL", "DIV") and all(t.is_constant and t.elements == 1 for t in others)


class _Matcher:
    def __init__(
        self,
        subgraph: Subgraph,
        softmax: Operator,
        products: dict[Operator, tuple[int, int]],
        head_size: int,
        operands: OperandFactors,
    ) -> None:
        self._subgraph = subgraph
        self._softmax = softmax
        self._products = products
        self._head_size = head_size
        self._operands = operands
        self._labelling = Labelling({product: side for product, (side, _) in products.items()}, operands)

    def match(self) -> Match:
        tail = list(self._tail())
        found = self._merged(tail) or self._side_by_side(tail)
        if found is None:
            return self._single_head()
        output, factored, heads = found
        core = self._labelling.core(output, factored)
        refusal = self._labelling.first_refusal
        logits = self._labelling.logits
        if not core or not logits:
            reason = refusal or Refusal("no logits product leads to this SOFTMAX", self._softmax)
            return NotABlock(self._softmax, reason)
        for product, labelled in logits.items():
            if fx.piece_count(labelled) != heads:
                actual = str(fx.piece_count(labelled))
                reason = Refusal("not every head reaches the logits", product, None, str(heads), actual)
                return NotABlock(self._softmax, reason)
        missed = [product for product in _products_before(self._softmax) if product not in logits]
        if refusal is not None and missed:
            return NotABlock(self._softmax, refusal)
        return Block(
            softmax=self._softmax,
            output=output,
            factored=factored,
            heads=heads,
            kv_heads=self._kv_heads(),
            head_size=self._head_size,
            query_length=self._query_length(heads),
            key_lengths=_key_lengths(logits),
            mask=self._mask(),
            logits=tuple(logits),
            values=tuple(self._products),
            core=frozenset(self._labelling.core_operators),
            operands=self._operands,
            heads_are_rows=any(_rows_are_heads(labelled) for labelled in logits.values()),
        )

    def _single_head(self) -> SingleHead | NotABlock:
        logits = _products_before(self._softmax)
        if not logits:
            return NotABlock(self._softmax, Refusal("no logits product leads to this SOFTMAX", self._softmax))
        rows = self._softmax.outputs[0].shape[-2:-1] or (1,)
        return SingleHead(
            self._softmax, self._head_size, rows[0], _key_lengths(logits), _mask_between(self._softmax)
        )

    def _tail(self) -> Iterator[Tensor]:
        """Tensors behind the value products that hold all of them, nearest first."""
        parts: dict[int, frozenset[Operator]] = {}
        frontier: list[Tensor] = []
        for product in self._products:
            parts[id(product.outputs[0])] = frozenset({product})
            frontier.append(product.outputs[0])
        position = 0
        while position < len(frontier) and position < DEEPEST:
            tensor = frontier[position]
            position += 1
            if len(parts[id(tensor)]) == len(self._products):
                yield tensor
            for operator in tensor.consumers:
                held = [parts[id(t)] for t in operator.inputs if t is not None and id(t) in parts]
                joins = operator.name == "ADD" and len(held) == 2
                if joins or _follows_one(operator, tensor, _TAIL):
                    result = operator.outputs[0]
                    if id(result) not in parts:
                        parts[id(result)] = frozenset().union(*held)
                        frontier.append(result)

    def _merged(self, tail: list[Tensor]) -> tuple[Tensor, Factored, int] | None:
        """Heads beside the head size, in the axis that the output projection contracts: `[.., N*H]`."""
        size = self._head_size
        for tensor in tail:
            width = tensor.shape[-1] if tensor.shape else 0
            if width <= size or width % size:
                continue
            heads = width // size
            front = fx.plain(tensor.shape[:-1])
            if self._ends_in_head_size(tensor, (*front, (Factor(heads), Factor(size, 1)))):
                return tensor, (*front, (Factor(heads, 1), *_factor(size))), heads
        return None

    def _side_by_side(self, tail: list[Tensor]) -> tuple[Tensor, Factored, int] | None:
        """Heads in the axis left of the head size, where nothing merges them: `[.., T, N, H]`.

        Only batch axes of the value product qualify: its rows may be the sequence.
        """
        for tensor in reversed(tail):
            shape = tensor.shape
            if len(shape) < 3 or shape[-1] != self._head_size or shape[-2] < 2:
                continue
            front = fx.plain(shape[:-2])
            heads = (Factor(shape[-2], 1),)
            last = (Factor(shape[-1], 1),) if shape[-1] > 1 else ()
            if not self._ends_in_head_size(tensor, (*front, fx.plain(shape[-2:-1])[0], last)):
                continue
            factored = (*front, heads, _factor(shape[-1]))
            found = self._labelling.reach_products(tensor, factored).values()
            if found and all(_only_batch(product) for product in found):
                return tensor, factored, shape[-2]
        return None

    def _ends_in_head_size(self, tensor: Tensor, marked: Factored) -> bool:
        """True where the innermost factor of the last axis is the value products' head-size axis."""
        if self._head_size == 1:
            return True
        traced = self._labelling.reach_products(tensor, marked)
        for product, (side, _) in self._products.items():
            factored = traced.get(product)
            if factored is None:
                return False
            axis = factored[-1 if side == 0 else -2]
            rest = [f for other in factored if other is not axis for f in other if f.stride and f.size > 1]
            if [f for f in axis if f.size > 1] != [Factor(self._head_size, 1)] or rest:
                return False
        return True

    def _kv_heads(self) -> int:
        count = 1
        for product, labelled in self._labelling.products.items():
            operands = self._operands(product, labelled)
            assert isinstance(operands, dict)
            side, _ = self._products[product]
            count = max(count, fx.piece_count(operands[1 - side]))
        return count

    def _query_length(self, heads: int) -> int:
        shape = self._softmax.outputs[0].shape
        batch = self._labelling.plain_batch(self._softmax)
        return max(1, math.prod(shape[:-1]) // (heads * batch))

    def _mask(self) -> Tensor | None:
        for operator in self._labelling.core_operators:
            if operator.name in ("ADD", "SELECT", "SELECT_V2", "SUB"):
                for tensor in operator.inputs:
                    if tensor is not None and not self._labelling.is_core(tensor) and tensor.elements > 1:
                        return tensor
        return None


def _rows_are_heads(factored: Factored) -> bool:
    return any(axis and all(factor.stride for factor in axis) for axis in factored[-2:])


def _factor(size: int) -> tuple[Factor, ...]:
    return () if size == 1 else (Factor(size),)


def _only_batch(factored: Factored) -> bool:
    matrix = [f for axis in factored[-2:] for f in axis if f.stride and f.size > 1]
    return not matrix


def _key_lengths(logits: Iterable[Operator]) -> tuple[int, ...]:
    return tuple(product.outputs[0].shape[-1] for product in logits)


def _products_before(softmax: Operator) -> list[Operator]:
    """The nearest BATCH_MATMULs on the way up from a SOFTMAX, in the order they are met."""
    found: list[Operator] = []
    seen: set[int] = set()
    frontier = [softmax.inputs[0]]
    while frontier and len(seen) < DEEPEST:
        tensor = frontier.pop(0)
        producer = None if tensor is None else tensor.producer
        if producer is None or id(producer) in seen:
            continue
        seen.add(id(producer))
        if producer.name == "BATCH_MATMUL":
            found.append(producer)
        elif producer.name in ELEMENTWISE | MOVEMENT or producer.name == "CONCATENATION":
            frontier.extend(producer.inputs)
    return found


def _mask_between(softmax: Operator) -> Tensor | None:
    tensor = softmax.inputs[0]
    producer = None if tensor is None else tensor.producer
    if producer is None or producer.name not in ("ADD", "SELECT", "SELECT_V2"):
        return None
    others = [t for t in producer.inputs if t is not None and t.elements > 1]
    return others[-1] if producer.name == "ADD" else others[0]
