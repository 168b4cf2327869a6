"""Follows the head label backwards through a graph, operator by operator, from the merged heads to the logits."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.rules import RULES, Labelled, Operands, Rule, is_product
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import Refusal, RefusedError
from edge_opt.ir.walk import walked

OnHeads: TypeAlias = tuple[Tensor, Factored]
"""A tensor, and the layout of heads in it."""

DEEPEST = 60
"""Maximum number of operators followed in one direction; real blocks have under thirty."""


class Weighing(NamedTuple):
    """A value product: the operand that holds the probabilities, and the head size.

    `P V` is `[.., T, H]`, `V^T P^T` is `[.., H, T]`.
    """

    operand: int
    head_size: int

    @property
    def rows(self) -> int:
        """The axis of the queries in the result, counted from the back."""
        return self.operand - 2

    @property
    def columns(self) -> int:
        """The axis of the head size in the result, counted from the back."""
        return -1 - self.operand


Weighings: TypeAlias = dict[Operator, Weighing]


class OperandFactors:
    """Factors of an operator's operands, if its recorded shapes match the inferred ones."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self.rules = rules
        # The key includes the operator, since a rewrite may define the same tensor by another one.
        self._by_result: dict[tuple[Operator, Tensor, Factored], Operands | Refusal | None] = {}

    def __call__(self, tensor: Tensor, factored: Factored) -> Operands | Refusal | None:
        """Factors of the operands of a tensor's producer; None for an input or an operator without a rule."""
        operator = tensor.producer
        if operator is None:
            return None
        key = (operator, tensor, factored)
        if key not in self._by_result:
            self._by_result[key] = distrusted(operator) or self._by_rule(Labelled(tensor, factored))
        return self._by_result[key]

    def _by_rule(self, of: Labelled) -> Operands | Refusal | None:
        rule = self.rules.get(of.operator.name)
        if rule is None:
            return None
        try:
            operands = rule.operands(of)
        except RefusedError as refused:
            return refused.refusal
        for index, own in operands.items():
            tensor = of.operator.input(index)
            per_axis = tensor.quantization is not None and tensor.quantization.is_per_axis
            if fx.piece_count(own) > 1 and (tensor.is_blockwise or (per_axis and not tensor.has_numbers)):
                text = "a tensor with several scales is cut only where its numbers can be read here"
                return Refusal(text, of.operator, tensor)
        return operands

    def known(self, tensor: Tensor, factored: Factored) -> Operands:
        """Like a call, if the label is known to pass."""
        operands = self(tensor, factored)
        assert isinstance(operands, dict)
        return operands

    def upwards(
        self, starts: Iterable[OnHeads], stops: Container[Operator] = ()
    ) -> Iterator[tuple[Tensor, Factored, bool]]:
        """The starts and all tensors above them, with the layout of heads and whether the walk ends there.

        It ends if all heads see the same, at results of `stops`, and if the label cannot be followed.
        """

        def above(node: OnHeads) -> Operands | Refusal | None:
            ends = fx.piece_count(node[1]) == 1 or node[0].producer in stops
            return None if ends else self(*node)

        def beside(node: OnHeads) -> Iterator[OnHeads]:
            found, operator = above(node), node[0].producer
            if operator is not None and isinstance(found, dict):
                yield from ((operator.input(index), own) for index, own in found.items())

        for node in walked(starts, beside):
            yield (*node, not isinstance(above(node), dict))


def distrusted(operator: Operator) -> Refusal | None:
    """The reason why an operator's recorded shapes cannot be used; None if they can."""
    if operator.shape_error:
        return Refusal("the recorded shapes do not fit", operator)
    if any(tensor and (tensor.is_dynamic or not tensor.has_rank) for tensor in operator.inputs):
        return Refusal("a dimension is known only at run time", operator, operator.outputs[0])
    return None


@dataclass(slots=True)
class Trace:
    """The way of the head label from the merged heads up to the products of queries and keys.

    `products` are the value products and `logits` the products of queries and keys, with the factors of their results.
    `core` are the operators from `logits` on, `refusal` the first reason why the label was not followed further.
    """

    products: dict[Operator, Factored] = field(default_factory=dict)
    logits: dict[Operator, Factored] = field(default_factory=dict)
    core: frozenset[Operator] = frozenset()
    refusal: Refusal | None = None


def trace_heads(merged: OnHeads, values: Weighings, operands: OperandFactors) -> Trace:
    """Follow the label from the tensor of merged heads, after the value products, to the logits products.

    Raises:
        RefusedError: not all heads reach the logits.
    """
    trace = Trace()
    readers: dict[Operator, list[Operator]] = {}

    def above(node: tuple[Tensor, Factored, bool]) -> Iterator[tuple[Tensor, Factored, bool]]:
        tensor, factored, is_behind_values = node
        operator = tensor.producer
        found = None if fx.is_shared(factored) else operands(tensor, factored)
        if operator is None or not isinstance(found, dict):
            trace.refusal = trace.refusal or found if isinstance(found, Refusal) else trace.refusal
            return
        if operator in values:
            trace.products[operator] = factored
            place = values[operator].operand
            found, is_behind_values = {place: found[place]}, False
        elif is_product(operator) and not is_behind_values and fx.piece_count(factored) > 1:
            trace.logits[operator] = factored
            return
        for index, own in found.items():
            source = operator.input(index)
            if source.producer is not None:
                readers.setdefault(source.producer, []).append(operator)
            yield source, own, is_behind_values

    for _ in walked([(*merged, True)], above, 2 * DEEPEST):
        pass
    _check_logits(trace, fx.piece_count(merged[1]), merged[0].producer)
    trace.core = frozenset(walked(trace.logits, lambda operator: readers.get(operator, ())))
    return trace


def _check_logits(trace: Trace, heads: int, end: Operator | None) -> None:
    if not trace.logits:
        raise RefusedError(trace.refusal or "no product of queries and keys carries the heads", end)
    for product, factored in trace.logits.items():
        count = fx.piece_count(factored)
        if count != heads:
            raise RefusedError("not every head reaches the logits", product, None, str(heads), str(count))
