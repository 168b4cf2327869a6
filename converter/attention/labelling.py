"""Carries the head label backwards through a graph, operator by operator; and tells which axes hold the heads.

Where nothing that follows the products of an attention tells, its queries may: there heads stand beside the head size,
as `[.., N*H]` or `[.., T, N, H]`. Else the products alone: a matrix product treats every index of its batch axes by
itself, so each of them may be split, and all are heads but those that are the own batch of the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeAlias

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Axis, Factor, Factored
from edge_opt.attention.rule import Labelled, Operands, Rule
from edge_opt.attention.rules import MOVEMENT, RULES, is_product, is_turned
from edge_opt.ir import Operator, Shape, Tensor
from edge_opt.ir.operators import UNARY
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
            self._by_result[key] = self.distrusted(operator) or self._by_rule(Labelled(tensor, factored))
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
            if per_axis and not tensor.has_numbers and fx.piece_count(own) > 1:
                text = "what has scales along an axis is cut only where it is constant"
                return Refusal(text, of.operator, tensor)
        return operands

    def known(self, tensor: Tensor, factored: Factored) -> Operands:
        """As a call, where the label is known to pass."""
        operands = self(tensor, factored)
        assert isinstance(operands, dict)
        return operands

    def distrusted(self, operator: Operator) -> Refusal | None:
        """Why the recorded shapes of an operator tell nothing; None where they do."""
        if operator.shape_error:
            return Refusal("the recorded shapes do not fit", operator)
        if any(tensor and (tensor.is_dynamic or not tensor.has_rank) for tensor in operator.inputs):
            return Refusal("a dimension is known only at run time", operator, operator.outputs[0])
        return None

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

    def chain(self, tensor: Tensor, factored: Factored) -> Iterator[tuple[Operator, int, Factored]]:
        """Upwards while one operand alone tells heads apart: each operator, which operand it is, and its factors."""
        for _ in range(DEEPEST):
            operands = self(tensor, factored)
            read = operands.items() if isinstance(operands, dict) else ()
            carriers = [(index, own) for index, own in read if fx.piece_count(own) > 1]
            if tensor.producer is None or len(carriers) != 1:
                return
            index, factored = carriers[0]
            yield tensor.producer, index, factored
            tensor = tensor.producer.input(index)


@dataclass(slots=True)
class Trace:
    """Where the head label leads from the merged heads: up to the products of queries and keys.

    `products` are those of the values and `logits` those of queries and keys, with the factors of their results. `core`
    are the operators from the latter on, in the order in which they are reached from there. `lost` is a tensor with
    merged heads that leads to no logits, `refusal` the first reason why the label was not followed further.
    """

    products: dict[Operator, Factored] = field(default_factory=dict)
    logits: dict[Operator, Factored] = field(default_factory=dict)
    core: dict[Operator, None] = field(default_factory=dict)
    lost: Tensor | None = None
    refusal: Refusal | None = None

    def check(self, heads: int, end: Operator | None) -> None:
        """Whether that many heads, which are merged at the `end`, reach the logits.

        Raises:
            RefusedError: not all do.
        """
        if self.lost is not None or not self.logits:
            raise RefusedError(self.refusal or "no product of queries and keys carries the heads", end)
        for product, factored in self.logits.items():
            count = fx.piece_count(factored)
            if count != heads:
                raise RefusedError("not every head reaches the logits", product, None, str(heads), str(count))


def trace_heads(merged: Sequence[OnHeads], values: Weighings, operands: OperandFactors) -> Trace:
    """Follow the label from tensors where heads are merged, behind the value products, to the logits products."""
    trace = Trace()
    readers: dict[Operator, list[Operator]] = {}
    seen: set[OnHeads] = set()
    pending = [(tensor, factored, 0, True) for tensor, factored in reversed(merged)]
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
    trace.lost = next((tensor for tensor, _ in merged if tensor.producer not in trace.core), None)
    return trace


Placed: TypeAlias = tuple[list[OnHeads], int]
"""Results of the value products, or their sum, with the factors that say where heads lie; and how many heads."""

# By where the queries come from


def heads_by_origin(
    output: Tensor, values: Weighings, logits: list[Operator], operands: OperandFactors
) -> OnHeads | None:
    """`output`, the (sum of the) value product(s), as its heads lie by where the queries come from; None if unknown."""
    products = [*values, *logits]
    summed = [] if output.producer is None else [output.producer]
    if any(map(operands.distrusted, products + summed)) or not all(map(_contracted, products)):
        return None
    rows = len(output.shape) + next(iter(values.values())).rows
    for heads in sorted(_head_counts(logits), reverse=True):
        factored = _placement(output.shape, rows, heads)
        if factored is None:
            continue
        labelled = trace_heads([(output, factored)], values, operands).logits
        everywhere = bool(labelled) and all(fx.piece_count(own) == heads for own in labelled.values())
        has_sequence = any(not factor.stride for factor in factored[rows])
        if everywhere and _come_from_heads(labelled, operands, heads, merged=not has_sequence):
            return output, factored
    return None


def _head_counts(logits: Iterable[Operator]) -> set[int]:
    """Numbers of heads that some tensor above the queries or keys may have, going by its shape."""
    counts: set[int] = set()
    for product in logits:
        size = _contracted(product)
        for tensor in (*_rising(product.input(0)), *_rising(product.input(1))):
            shape = tensor.shape
            if shape and shape[-1] > size and shape[-1] % size == 0:
                counts.add(shape[-1] // size)
            elif len(shape) > 2 and shape[-1] == size and shape[-2] > 1:
                counts.add(shape[-2])
    return counts


def _contracted(product: Operator) -> int:
    shape = product.input(0).shape
    return shape[-2 if is_turned(product, 0) else -1]


def _rising(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and one after the other those that it is a rearrangement or scaling of."""
    for _ in range(DEEPEST):
        yield tensor
        operator = tensor.producer
        if operator is None:
            return
        varying = [t for t in operator.inputs if t is not None and not t.is_constant]
        if operator.name in UNARY | MOVEMENT | {"PACK", "UNPACK"}:
            tensor = operator.input(0)
        elif operator.name in ("MUL", "DIV") and len(varying) == 1:
            tensor = varying[0]
        else:
            return


def _placement(shape: Shape, rows: int, heads: int) -> Factored | None:
    """Where that many heads may lie in a product: in its batch axes behind the first, and outermost in its rows.

    In three axes `[B*N, T, H]` they are the inner part of the first.
    """
    batch = len(shape) - 2
    lanes = math.prod(shape[1:batch]) if batch > 1 else math.gcd(math.prod(shape[:batch]), heads)
    groups, left = divmod(heads, lanes)
    if left or shape[rows] % groups:
        return None
    axes: list[Axis] = list(fx.plain(shape))
    axes[rows] = tuple(fx.merge_neighbours([Factor(groups, 1), Factor(shape[rows] // groups)]))
    if batch == 1:
        axes[0] = tuple(fx.merge_neighbours([Factor(shape[0] // lanes), Factor(lanes, groups)]))
    stride = groups
    for axis in range(batch - 1, 0, -1):
        axes[axis] = tuple(fx.merge_neighbours([Factor(shape[axis], stride)]))
        stride *= shape[axis]
    return tuple(axes)


def _come_from_heads(
    logits: Mapping[Operator, Factored], operands: OperandFactors, heads: int, *, merged: bool
) -> bool:
    """True where the label of a query or key comes from heads beside the head size.

    `merged`: in one axis with it, nothing less will do. Without a sequence, `[1, N, H]` may be `[1, T, H]` as well.
    """
    for product, factored in logits.items():
        size = _contracted(product)
        for index, by_head in operands.known(product.outputs[0], factored).items():
            for own, by_size in _labelled_twice(product, index, by_head, operands):
                if own[-1][-2:] == (Factor(heads, 1), Factor(size)) and by_size[-1][-1] == Factor(size, 1):
                    return True
                is_apart = own[-2:] == ((Factor(heads, 1),), (Factor(size),))
                if is_apart and by_size[-1] == (Factor(size, 1),) and len(own) > 2 and not merged:
                    return True
    return False


def _labelled_twice(
    product: Operator, index: int, by_head: Factored, operands: OperandFactors
) -> Iterator[tuple[Factored, Factored]]:
    """Factors of an operand and of all that it is a rearrangement of: with the heads labelled, and the head size."""
    tensor = product.input(index)
    rank = len(by_head)
    contracted = rank - (1 if is_turned(product, index) == (index == 1) else 2)
    plain = fx.plain(tensor.shape)
    by_size = (*plain[:contracted], (Factor(tensor.shape[contracted], 1),), *plain[contracted + 1 :])
    for source in _rising(tensor):
        if source is not tensor:
            above = [operands(tensor, own) for own in (by_head, by_size)]
            read = [own for own in above if isinstance(own, dict)]
            if tensor.producer is None or len(read) < len(above):
                return
            place = tensor.producer.inputs.index(source)
            tensor, by_head, by_size = source, read[0][place], read[1][place]
        yield by_head, by_size


# By the products alone


def placed_by_products(
    outputs: Sequence[Tensor], values: Weighings, operands: OperandFactors
) -> Placed | None:
    """How the heads lie in the products' batch axes; None where these are of size 1, or are the batch.

    Raises:
        RefusedError: the heads do not reach the logits.
    """
    rank = max(len(output.shape) for output in outputs)
    chosen: list[int] = []
    for axis in range(-rank, -2):
        try:
            alone = _placed(outputs, [axis], values, operands)
        except RefusedError:
            if axis == -rank and rank > 3:
                continue
            raise
        if alone is not None and not _is_batch(alone[0], operands):
            chosen.append(axis)
    placed = _placed(outputs, chosen, values, operands)
    return None if placed is None else placed[1]


def _placed(
    outputs: Sequence[Tensor], axes: Sequence[int], values: Weighings, operands: OperandFactors
) -> tuple[Trace, Placed] | None:
    """With the heads in these axes."""
    sizes = {axis: max(_size(output, axis) for output in outputs) for axis in axes}
    heads = math.prod(sizes.values())
    if heads == 1:
        return None
    strides = {axis: math.prod(sizes[inner] for inner in axes if inner > axis) for axis in axes}
    placed = []
    for output in outputs:
        factored = list(fx.plain(output.shape))
        for axis in axes:
            if _size(output, axis) > 1:
                factored[axis] = (Factor(output.shape[axis], strides[axis]),)
        placed.append((output, tuple(factored)))
    trace = trace_heads(placed, values, operands)
    trace.check(heads, (trace.lost or outputs[0]).producer)
    return trace, (placed, heads)


def _size(output: Tensor, axis: int) -> int:
    return output.shape[axis] if -axis <= len(output.shape) else 1


def _is_batch(trace: Trace, operands: OperandFactors) -> bool:
    """True where the label is the outermost axis of all that is computed above; weights alone have no batch.

    Queries, keys and values are looked at as far up as their label can be followed.
    """
    starts = [
        (product.input(index), labelled)
        for product, own in (*trace.products.items(), *trace.logits.items())
        for index, labelled in operands.known(product.outputs[0], own).items()
        if product.input(index).producer not in trace.core
    ]
    walk = operands.upwards(starts, lambda tensor, own: not tensor.is_constant and fx.piece_count(own) > 1)
    edges = ((tensor, own) for tensor, own, ends in islice(walk, DEEPEST * len(trace.logits)) if ends)
    computed = [own for tensor, own in edges if fx.piece_count(own) > 1 and not tensor.is_constant]
    return bool(computed) and all(bool(own[0]) and own[0][0].stride > 0 for own in computed)
