"""Carries the head label backwards through a graph, operator by operator, and remembers what it met."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factored
from edge_opt.attention.rule import Labelled, Operands, Rule
from edge_opt.attention.rules import RULES, is_product, rule_of
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.refusal import Refusal, RefusedError

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
        self._known: dict[tuple[Operator, Factored, int], Operands | Refusal | None] = {}

    def __call__(self, operator: Operator, result: Factored, output: int = 0) -> Operands | Refusal | None:
        """Factors of the operands, given those of result `output`; None where the operator has no rule."""
        key = (operator, result, output)
        if key not in self._known:
            self._known[key] = self.distrusted(operator) or self._by_rule(Labelled(operator, result, output))
        return self._known[key]

    def _by_rule(self, of: Labelled) -> Operands | Refusal | None:
        rule = rule_of(of.operator, self.rules)
        try:
            return None if rule is None else rule.operands(of)
        except RefusedError as refused:
            return refused.refusal

    def known(self, operator: Operator, result: Factored, output: int = 0) -> Operands:
        """As a call, where the label is known to pass."""
        operands = self(operator, result, output)
        assert isinstance(operands, dict)
        return operands

    def distrusted(self, operator: Operator) -> Refusal | None:
        """Why the recorded shapes of an operator tell nothing; None where they do."""
        if operator.doubt:
            return Refusal("the recorded shapes do not fit", operator)
        if any(tensor is not None and tensor.is_dynamic for tensor in operator.inputs):
            return Refusal("a dimension is known only at run time", operator, operator.outputs[0])
        return None

    def of(self, tensor: Tensor, factored: Factored) -> Operands | Refusal | None:
        """As for the operator that defines the tensor; None where that is none."""
        operator = tensor.producer
        return None if operator is None else self(operator, factored, output_index(tensor))

    def upwards(
        self, starts: Iterable[tuple[Tensor, Factored]], through: Callable[[Tensor, Factored], bool]
    ) -> Iterator[tuple[Tensor, Factored, bool]]:
        """The labelled tensors that these are made of, themselves too, and whether the way up ends there.

        It goes on above those that `through` lets pass, as far as the label can be followed.
        """
        pending = list(starts)
        seen: set[tuple[int, Factored]] = set()
        while pending:
            tensor, factored = pending.pop()
            if (id(tensor), factored) in seen:
                continue
            seen.add((id(tensor), factored))
            operator = tensor.producer
            above = self.of(tensor, factored) if through(tensor, factored) else None
            if operator is None or not isinstance(above, dict):
                yield tensor, factored, True
                continue
            yield tensor, factored, False
            pending.extend((operator.input(index), own) for index, own in above.items())

    def chain(self, tensor: Tensor, factored: Factored) -> Iterator[tuple[Operator, int, Factored]]:
        """Upwards while one operand alone tells heads apart: each operator, which operand it is, and its factors."""
        for _ in range(DEEPEST):
            operands = self.of(tensor, factored)
            found = operands.items() if isinstance(operands, dict) else ()
            carriers = [(index, own) for index, own in found if fx.piece_count(own) > 1]
            if tensor.producer is None or len(carriers) != 1:
                return
            index, factored = carriers[0]
            yield tensor.producer, index, factored
            tensor = tensor.producer.input(index)


def output_index(tensor: Tensor) -> int:
    """Which result of its operator a tensor is."""
    assert tensor.producer is not None
    return next(i for i, output in enumerate(tensor.producer.outputs) if output is tensor)


class Labelling:
    """Carries the head label from the merged heads back to the logits products, along the operators' rules."""

    def __init__(self, values: Weighings, operands: OperandFactors) -> None:
        self._values = values
        self._operands = operands
        self._memo: dict[tuple[int, Factored], bool] = {}
        self.products: dict[Operator, Factored] = {}
        self.logits: dict[Operator, Factored] = {}
        self.core_operators: dict[Operator, None] = {}
        self.first_refusal: Refusal | None = None

    def is_core(self, tensor: Tensor) -> bool:
        """True for tensors that depend on the logits products."""
        return tensor.producer in self.core_operators

    def reach_products(self, tensor: Tensor, factored: Factored) -> dict[Operator, Factored]:
        """Factors of the value products' results, those that can be reached; nothing is kept of the walk."""
        found: dict[Operator, Factored] = {}
        walk = self._operands.upwards(
            [(tensor, factored)],
            lambda tensor, own: tensor.producer not in self._values and fx.piece_count(own) > 1,
        )
        for current, labelled, _ in walk:
            if current.producer in self._values:
                found[current.producer] = labelled
        return found

    def core(self, tensor: Tensor, factored: Factored, depth: int = 0, *, behind_values: bool = True) -> bool:
        """True where the tensor depends on a logits product through labelled tensors; collects what is between."""
        operator = tensor.producer
        if operator is None or depth > DEEPEST or fx.is_shared(factored):
            return False
        key = (id(tensor), factored)
        if key not in self._memo:
            self._memo[key] = False
            operands = self._operands.of(tensor, factored)
            if isinstance(operands, Refusal):
                self.first_refusal = self.first_refusal or operands
            elif operands and self._core_operands(operator, factored, operands, depth, behind=behind_values):
                self._memo[key] = True
                self.core_operators[operator] = None
        return self._memo[key]

    def refusal(self, heads: int, end: Operator | None, *, core: bool) -> Refusal | None:
        """Why that many heads at the `end` do not all reach the logits; `core`: whether its tensors depend on these."""
        if not core or not self.logits:
            return self.first_refusal or Refusal("no product of queries and keys carries the heads", end)
        for product, factored in self.logits.items():
            count = fx.piece_count(factored)
            if count != heads:
                return Refusal("not every head reaches the logits", product, None, str(heads), str(count))
        return None

    def _core_operands(
        self, operator: Operator, factored: Factored, operands: Operands, depth: int, *, behind: bool
    ) -> bool:
        if operator in self._values:
            self.products[operator] = factored
            place = self._values[operator].operand
            return self.core(operator.input(place), operands[place], depth, behind_values=False)
        if is_product(operator) and not behind and fx.piece_count(factored) > 1:
            self.logits[operator] = factored
            return True
        # All are followed: each may lead to logits.
        results = [
            self.core(operator.input(index), labelled, depth + 1, behind_values=behind)
            for index, labelled in operands.items()
        ]
        return any(results)
