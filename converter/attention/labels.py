"""Carries the head label backwards through a graph, operator by operator, from the merged heads to the logits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.rule import Labelled, Operands, Rule
from edge_opt.attention.rules import RULES, is_product
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import Refusal, RefusedError

OnHeads: TypeAlias = tuple[Tensor, Factored]
"""A tensor, and how the heads lie in it."""

DEEPEST = 60
"""Operators that a label is followed through at most; real blocks have under thirty."""


class Weighing(NamedTuple):
    """A value product: which operand holds the probabilities, and the head size.

    `P V` is `[.., T, H]`, `V^T P^T` is `[.., H, T]`.
    """

    operand: int
    head_size: int

    @property
    def rows(self) -> int:
        """The axis of the queries in its result, counted from the back."""
        return self.operand - 2

    @property
    def columns(self) -> int:
        """The axis of the head size."""
        return -1 - self.operand


Weighings: TypeAlias = dict[Operator, Weighing]


class OperandFactors:
    """Factors of an operator's operands, for operators whose recorded shapes are what their inputs give."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self.rules = rules
        # By the operator too: a rewrite may define the same tensor with another one.
        self._by_result: dict[tuple[Operator, Tensor, Factored], Operands | Refusal | None] = {}

    def __call__(self, tensor: Tensor, factored: Factored) -> Operands | Refusal | None:
        """Factors of the operands that a tensor is made of; None where no operator makes it, or one without a rule."""
        operator = tensor.producer
        if operator is None:
            return None
        key = (operator, tensor, factored)
        if key not in self._by_result:
            self._by_result[key] = distrusted(operator) or self._by_rule(Labelled(tensor, factored))
        return self._by_result[key]

    def _by_rule(self, of: Labelled) -> Operands | Refusal | None:
        rule = self.rules.get(of.operator.name)
        # A projection mixes all that it reads, so a region ends there.
        if rule is None or (of.operator.name == "FULLY_CONNECTED" and not is_product(of.operator)):
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
        """As a call, where the label is known to pass."""
        operands = self(tensor, factored)
        assert isinstance(operands, dict)
        return operands

    def upwards(
        self, starts: Iterable[OnHeads], through: Callable[[Tensor, Factored], bool]
    ) -> Iterator[tuple[Tensor, Factored, bool]]:
        """The labelled tensors that these are made of, themselves too, and whether the way up ends there.

        It goes on above those that `through` lets pass, as far as the label can be followed.
        """
        pending = list(starts)
        seen: set[OnHeads] = set()
        while pending:
            tensor, factored = pending.pop()
            if (tensor, factored) in seen:
                continue
            seen.add((tensor, factored))
            operator = tensor.producer
            above = self(tensor, factored) if through(tensor, factored) else None
            if operator is None or not isinstance(above, dict):
                yield tensor, factored, True
                continue
            yield tensor, factored, False
            pending.extend((operator.input(index), own) for index, own in above.items())


def distrusted(operator: Operator) -> Refusal | None:
    """Why the recorded shapes of an operator tell nothing; None where they do."""
    if operator.shape_error:
        return Refusal("the recorded shapes do not fit", operator)
    if any(tensor and (tensor.is_dynamic or not tensor.has_rank) for tensor in operator.inputs):
        return Refusal("a dimension is known only at run time", operator, operator.outputs[0])
    return None


def tells_heads(_: Tensor, factored: Factored) -> bool:
    """True where heads have different pieces of a tensor."""
    return fx.piece_count(factored) > 1


@dataclass(slots=True)
class Trace:
    """Where the head label leads from the merged heads: up to the products of queries and keys.

    `products` are those of the values and `logits` those of queries and keys, with the factors of their results. `core`
    are the operators from the latter on, `refusal` the first reason why the label was not followed further.
    """

    products: dict[Operator, Factored] = field(default_factory=dict)
    logits: dict[Operator, Factored] = field(default_factory=dict)
    core: dict[Operator, None] = field(default_factory=dict)
    refusal: Refusal | None = None

    def check(self, heads: int, end: Operator | None) -> None:
        """Whether that many heads, which are merged at the `end`, reach the logits.

        Raises:
            RefusedError: not all do.
        """
        if not self.logits:
            raise RefusedError(self.refusal or "no product of queries and keys carries the heads", end)
        for product, factored in self.logits.items():
            count = fx.piece_count(factored)
            if count != heads:
                raise RefusedError("not every head reaches the logits", product, None, str(heads), str(count))


def trace_heads(merged: OnHeads, values: Weighings, operands: OperandFactors) -> Trace:
    """Follow the label from the tensor where heads are merged, behind the value products, to the logits products."""
    trace = Trace()
    readers: dict[Operator, list[Operator]] = {}
    seen: set[OnHeads] = set()
    pending = [(*merged, 0, True)]
    while pending:
        tensor, factored, depth, is_behind_values = pending.pop()
        operator = tensor.producer
        if operator is None or depth > DEEPEST or fx.is_shared(factored) or (tensor, factored) in seen:
            continue
        seen.add((tensor, factored))
        above = operands(tensor, factored)
        if not isinstance(above, dict):
            trace.refusal = trace.refusal or above
            continue
        if operator in values:
            trace.products[operator] = factored
            place = values[operator].operand
            above, is_behind_values = {place: above[place]}, False
        elif is_product(operator) and not is_behind_values and fx.piece_count(factored) > 1:
            trace.logits[operator] = factored
            continue
        for index, own in reversed(above.items()):
            source = operator.input(index)
            pending.append((source, own, depth + 1, is_behind_values))
            if source.producer is not None:
                readers.setdefault(source.producer, []).append(operator)
    reached = list(trace.logits)
    while reached:
        operator = reached.pop()
        if operator not in trace.core:
            trace.core[operator] = None
            reached += readers.get(operator, ())
    return trace
