"""Follows the head label backwards through a graph, operator by operator, from the merged heads to the logits.

    [1,T,(N)(H)] <- RESHAPE <- [1,T,(N),H] <- TRANSPOSE <- [1,(N),T,H] <- P x V     a value product: on with P
    P [1,(N),T,S] <- SOFTMAX <- ADD <- Q x K^T                                      a logits product: the trace ends

`(N)` is the labelled factor. Why this works, with pictures: docs/head-axis.md.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.labelled import Labelled, OneHead, Operands, Rule
from edge_opt.attention.rules import RULES, is_product
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.dtypes import same_quantization
from edge_opt.ir.operators import Effect, operators_that
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import walked

_DROPPED = operators_that(Effect.REARRANGING, Effect.JOINING, Effect.REPEATING)
"""Operators that one head may not need."""

DEEPEST = 60
"""Maximum number of operators followed in one direction; real blocks have under thirty."""

ValueProducts: TypeAlias = dict[Operator, int]
"""Value products, each with the operand that holds the probabilities: 0 in `P V`, 1 in `V^T P^T`."""


def query_axis(probabilities: int) -> int:
    """The axis of the queries in a value product's result: T in `P V = [.., T, H]` and in `V^T P^T = [.., H, T]`."""
    return probabilities - 2


def head_size_axis(probabilities: int) -> int:
    """The axis of the head size H in a value product's result."""
    return -1 - probabilities


Stop: TypeAlias = Callable[[Operator], bool]
"""Tells at which operators a walk up ends."""


def _nowhere(_: Operator) -> bool:
    return False


class HeadLayouts:
    """The layouts of heads in operands, derived by rule from those in results."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self.rules = rules
        # The keys include the operator, since a rewrite may define the same tensor by another one.
        self._found: dict[tuple[Operator, Labelled], Operands] = {}
        self._refusals: dict[tuple[Operator | None, Labelled], RefusedError] = {}

    def above(self, result: Labelled) -> Operands:
        """The operands that carry data, by index; none for an input, or if the label cannot be followed."""
        if result.tensor.producer is None:
            return {}
        key = (result.operator, result)
        if key not in self._found:
            try:
                self._found[key] = self._by_rule(result)
            except RefusedError as refused:
                self._found[key] = {}
                self._refusals[key] = refused.with_traceback(None)
        return self._found[key]

    def refusal(self, result: Labelled) -> RefusedError | None:
        """Why the label does not pass; None also for an input or an operator without a rule."""
        self.above(result)
        return self._refusals.get((result.tensor.producer, result))

    def _by_rule(self, result: Labelled) -> Operands:
        operator = result.operator
        if operator.shape_error:
            raise RefusedError(Why.INVALID_MODEL, "the recorded shapes are inconsistent", operator)
        if any(tensor.is_dynamic or not tensor.has_rank for tensor in operator.given):
            raise RefusedError(
                Why.OPEN_LENGTHS,
                "a dimension is known only at run time",
                operator,
                operator.outputs[0],
            )
        if operator.name not in self.rules:
            return {}
        operands: Operands = {}
        for index, factored in self.rules[operator.name].operands(result).items():
            operands[index] = Labelled(operator.input(index), factored, result.keep_axes)
            _check_scales(result, operands[index])
        return operands

    def made(self, one: OneHead) -> Tensor:
        """Make the result for one head by its operator's rule."""
        rule = self.rules[one.result.operator.name]
        operand = rule.passed_on(one.result, one.head)
        made = rule.made(one) if operand is None else one.piece(operand)
        return one.reshaped(made, one.result.piece_shape)

    def is_end(self, labelled: Labelled, stop: Stop = _nowhere) -> bool:
        """True if a walk up ends at this tensor.

        All heads see the same, `stop` is true for the operator that makes it, or the label cannot be followed.
        """
        made = labelled.tensor.producer
        return labelled.pieces == 1 or made is None or stop(made) or not self.above(labelled)

    def upwards(
        self,
        starts: Iterable[Labelled],
        stop: Stop = _nowhere,
        known: Container[Labelled] = (),
    ) -> Iterator[Labelled]:
        """The starts and all tensors above them, each with its layout of heads, up to the ends and the `known` ones."""

        def above(labelled: Labelled) -> Iterable[Labelled]:
            if labelled in known or self.is_end(labelled, stop):
                return ()
            return self.above(labelled).values()

        return walked(starts, above)

    def ends(self, walk: Iterable[Labelled], stop: Stop = _nowhere) -> Iterator[Labelled]:
        """The tensors of a walk up at which it ends and whose pieces differ, without constants."""
        for labelled in walk:
            differs = labelled.pieces > 1 and not labelled.tensor.is_constant
            if differs and self.is_end(labelled, stop):
                yield labelled


def _check_scales(result: Labelled, operand: Labelled) -> None:
    """Raise RefusedError if a head's part of an operand would stand for other real numbers than the operand does."""
    operator = result.operator
    own = operand.tensor.quantization
    has_several = own is not None and (own.is_per_axis or own.is_blockwise)
    if has_several and operand.piece_shape != operand.tensor.shape:
        text = "a tensor with several scales cannot be cut"
        raise RefusedError(Why.QUANTIZATION, text, operator, operand.tensor)
    if operator.name in _DROPPED and _has_other_scale(operand.tensor, result.tensor):
        text = "the operator gives the same integers another scale"
        raise RefusedError(Why.QUANTIZATION, text, operator, operand.tensor)


def _has_other_scale(one: Tensor, other: Tensor) -> bool:
    """True if tensors with one scale each hold the same real number as different integers."""
    both = (one.quantization, other.quantization)
    if any(own is not None and own.is_per_axis for own in both):
        return False
    return not same_quantization(*both)


@dataclass(slots=True)
class Trace:
    """The path of the head label from the `merged` heads up to the products of queries and keys.

    `value_products` and `logits`, the products of queries and keys, have their results with the layout of heads. `core`
    are the operators from `logits` on, `refusal` the first reason why the label was not followed further.
    """

    merged: Labelled
    value_products: dict[Operator, Labelled] = field(default_factory=dict)
    logits: dict[Operator, Labelled] = field(default_factory=dict)
    core: frozenset[Operator] = frozenset()
    refusal: RefusedError | None = None


class _Step(NamedTuple):
    """A tensor on the way up; `is_behind_values` until the way has passed a value product."""

    labelled: Labelled
    is_behind_values: bool


def trace_heads(merged: Labelled, value_products: ValueProducts, layouts: HeadLayouts) -> Trace:
    """Follow the label from the tensor of merged heads, after the value products, to the logits products.

    Raises:
        RefusedError: not all heads reach the logits.
    """
    trace = Trace(merged)
    readers: dict[Operator, list[Operator]] = {}

    def above(step: _Step) -> Iterator[_Step]:
        labelled, is_behind_values = step
        if fx.is_shared(labelled.factored):
            return
        found = layouts.above(labelled)
        if not found:
            trace.refusal = trace.refusal or layouts.refusal(labelled)
            return
        operator = labelled.operator
        sources = list(found.values())
        if operator in value_products:
            trace.value_products[operator] = labelled
            sources = [found[value_products[operator]]]  # the probabilities
            is_behind_values = False
        elif is_product(operator) and not is_behind_values and labelled.pieces > 1:
            trace.logits[operator] = labelled
            return
        for source in sources:
            if source.tensor.producer is not None:
                readers.setdefault(source.operator, []).append(operator)
            yield _Step(source, is_behind_values)

    for _ in walked([_Step(merged, True)], above, 2 * DEEPEST):
        pass
    _check_logits(trace)
    trace.core = frozenset(walked(trace.logits, lambda operator: readers.get(operator, ())))
    return trace


def _check_logits(trace: Trace) -> None:
    """Raise RefusedError unless all heads reach each of the logits products."""
    if not trace.logits:
        end = trace.merged.tensor.producer
        raise trace.refusal or RefusedError(
            Why.HEADS, "no product of queries and keys carries the heads", end
        )
    heads = trace.merged.pieces
    for product, result in trace.logits.items():
        if result.pieces != heads:
            text = "not every head reaches the logits"
            raise RefusedError(Why.HEADS, text, product, None, str(heads), str(result.pieces))
