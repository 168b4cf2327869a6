"""Follows the head label backwards through a graph, operator by operator, from the merged heads to the logits."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.assembly import Assembly
from edge_opt.attention.factors import Factored
from edge_opt.attention.rules import (
    RULES,
    Labelled,
    OneHead,
    Operands,
    Rule,
    is_product,
    reads_each_scale,
)
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import walked

DEEPEST = 60
"""Maximum number of operators followed in one direction; real blocks have under thirty."""

Weighings: TypeAlias = dict[Operator, int]
"""Value products, each with the operand that holds the probabilities: 0 in `P V`, `[.., T, H]`, 1 in `V^T P^T`.

With operand p, the axis of the queries in the result is p - 2, and the axis of the head size is -1 - p.
"""


class OperandFactors:
    """The layouts of heads in operands, derived by rule from those in results."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self.rules = rules
        # The key includes the operator, since a rewrite may define the same tensor by another one.
        self._found: dict[tuple[Operator, Labelled], tuple[Operands, RefusedError | None]] = {}
        self.clear: set[Labelled] = set()
        """Rows that a search followed to all their ends without ambiguity, so that the next one need not."""

    def above(self, of: Labelled) -> Operands:
        """The operands that carry data, by index; none for an input, or if the label cannot be followed."""
        return self._found_above(of)[0]

    def refusal(self, of: Labelled) -> RefusedError | None:
        """Why the label does not pass; None also for an input or an operator without a rule."""
        return self._found_above(of)[1]

    def _found_above(self, of: Labelled) -> tuple[Operands, RefusedError | None]:
        if of.tensor.producer is None:
            return {}, None
        key = (of.operator, of)
        if key not in self._found:
            try:
                self._found[key] = self._by_rule(of), None
            except RefusedError as refused:
                self._found[key] = {}, refused.with_traceback(None)
        return self._found[key]

    def _by_rule(self, of: Labelled) -> Operands:
        operator = of.operator
        if operator.shape_error:
            raise RefusedError("the recorded shapes are inconsistent", operator)
        if any(tensor and (tensor.is_dynamic or not tensor.has_rank) for tensor in operator.inputs):
            raise RefusedError("a dimension is known only at run time", operator, operator.outputs[0])
        rule = self.rules.get(operator.name)
        factored = {} if rule is None else rule.operands(of)
        operands = {i: Labelled(operator.input(i), own, of.keep) for i, own in factored.items()}
        for operand in operands.values():
            is_cut = operand.piece_quantization() is not operand.tensor.quantization
            if is_cut and not reads_each_scale(operator, operand.tensor):
                raise RefusedError("a tensor with several scales cannot be cut", operator, operand.tensor)
        return operands

    def made(
        self, of: Labelled, head: int, assembly: Assembly, make: Callable[[Labelled], Tensor], suffix: str
    ) -> Tensor:
        """Make the operator for one head by its rule; `make` gives the head's parts of the operands."""
        one = OneHead(assembly, of, self.above(of), head, make, suffix)
        return self.rules[of.operator.name].emit(one)

    def upwards(
        self,
        starts: Iterable[Labelled],
        stop: Callable[[Operator], bool] = lambda _: False,
        known: Container[Labelled] = (),
    ) -> Iterator[tuple[Labelled, bool]]:
        """The starts and all tensors above them, each with its layout of heads, and whether the walk ends there.

        It ends if all heads see the same, at results of operators for which `stop` is true, at those `known`, and if
        the label cannot be followed.
        """

        def above(of: Labelled) -> Iterable[Labelled]:
            is_end = of.pieces == 1 or of in known
            return () if is_end or (of.tensor.producer and stop(of.operator)) else self.above(of).values()

        for of in walked(starts, above):
            yield of, not above(of)


@dataclass(slots=True)
class Trace:
    """The path of the head label from the merged heads up to the products of queries and keys.

    `products` are the value products and `logits` the products of queries and keys, with the factors of their results.
    `core` are the operators from `logits` on, `refusal` the first reason why the label was not followed further.
    """

    products: dict[Operator, Factored] = field(default_factory=dict)
    logits: dict[Operator, Factored] = field(default_factory=dict)
    core: frozenset[Operator] = frozenset()
    refusal: RefusedError | None = None


def trace_heads(merged: Labelled, values: Weighings, operands: OperandFactors) -> Trace:
    """Follow the label from the tensor of merged heads, after the value products, to the logits products.

    Raises:
        RefusedError: not all heads reach the logits.
    """
    trace = Trace()
    readers: dict[Operator, list[Operator]] = {}

    def above(node: tuple[Labelled, bool]) -> Iterator[tuple[Labelled, bool]]:
        of, is_behind_values = node
        if fx.is_shared(of.factored):
            return
        found = operands.above(of)
        if not found:
            trace.refusal = trace.refusal or operands.refusal(of)
            return
        operator = of.operator
        if operator in values:
            trace.products[operator] = of.factored
            place = values[operator]
            found, is_behind_values = {place: found[place]}, False
        elif is_product(operator) and not is_behind_values and of.pieces > 1:
            trace.logits[operator] = of.factored
            return
        for source in found.values():
            if source.tensor.producer is not None:
                readers.setdefault(source.operator, []).append(operator)
            yield source, is_behind_values

    for _ in walked([(merged, True)], above, 2 * DEEPEST):
        pass
    _check_logits(trace, merged)
    trace.core = frozenset(walked(trace.logits, lambda operator: readers.get(operator, ())))
    return trace


def _check_logits(trace: Trace, merged: Labelled) -> None:
    if not trace.logits:
        end = merged.tensor.producer
        raise trace.refusal or RefusedError("no product of queries and keys carries the heads", end)
    for product, factored in trace.logits.items():
        if (count := fx.piece_count(factored)) != merged.pieces:
            text = "not every head reaches the logits"
            raise RefusedError(text, product, None, str(merged.pieces), str(count))
