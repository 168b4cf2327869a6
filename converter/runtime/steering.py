"""The integers that an input may be: any of its type, those below a limit, or unknown.

The values of an input are followed to every operand that they reach, unchanged or not, also in called subgraphs and
through variables. An operand that steers (an index, a start, the end of a loop) ends a path, as does every operand that
is not known to take any number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from edge_opt.ir import DType, Model, Operator, Tensor
from edge_opt.ir.operators import KINDS, Effect, operators_that, subgraph_indices
from edge_opt.ir.walk import walked
from edge_opt.runtime.tensors import TensorInfo

ANY = 0
"""Stands for every number of the type, in place of a limit."""

_COMPARISONS = frozenset({
    "EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "MAXIMUM", "MINIMUM", "NOT_EQUAL",
})  # fmt: skip
# Elementwise operators whose kernels take any integer. Floats, booleans and quantized numbers may be any everywhere.
_ANY_INTEGER = _COMPARISONS | {
    "ABS", "ADD", "ADD_N", "BITWISE_XOR", "CAST", "MUL", "NEG", "RELU", "SELECT", "SELECT_V2",
    "SIGN", "SQUARE", "SQUARED_DIFFERENCE", "SUB",
}  # fmt: skip
_DIVISIONS = frozenset({"DIV", "FLOOR_DIV", "FLOOR_MOD", "RIGHT_SHIFT"})
_ANY_DATA = operators_that(
    Effect.ALONG_ROWS, Effect.CUTTING, Effect.JOINING, Effect.PADDING, Effect.PRODUCT, Effect.REARRANGING,
    Effect.REDUCTION, Effect.REPEATING,
) | {"CUMSUM"}  # fmt: skip
_CHOICES = frozenset({"IF", "SELECT", "SELECT_V2"})  # operand 0 chooses between results
# The values are followed into the subgraphs.
_CALLS = frozenset({"CALL", "IF", "STABLEHLO_COMPOSITE", "WHILE"})
# The results are valid for any operand 0.
_BOUNDED = frozenset({"ARG_MAX", "ARG_MIN", "SHAPE", "RANK", "ZEROS_LIKE"})
_KEEPS_PLACES = frozenset({"CAST", "EXPAND_DIMS", "RESHAPE", "SQUEEZE"})
# Nothing but a start is made of the values.
_MOVES = _KEEPS_PLACES | _CALLS | {"CONCATENATION", "PACK"}

_MOST_AXES = 8
"""A start has no more elements; those of longer vectors are not distinguished."""
_MOST_COMPARED = 4
_LARGEST = 1 << 62

How = Literal["same", "changed", "decided"]
"""How the input's values arrive: unchanged, as other numbers, or as the result of a comparison."""


class _Reached(NamedTuple):
    """A tensor that the input's values reach, how, and the `element` of it that they are; None if several are."""

    tensor: Tensor
    how: How = "same"
    element: int | None = None


class _Limit(NamedTuple):
    """A steering operand accepts 0 to `end` - 1 (0: the end is unknown), or with `clamps` any, as one of these."""

    end: int
    clamps: bool = False


class Steering:
    """The calls and variables of a model, through which values pass; answers for any of its inputs."""

    def __init__(self, model: Model) -> None:
        self._subgraphs = model.subgraphs
        self._passed = defaultdict[Tensor, list[Tensor]](list)
        self._conditions = set[Tensor]()  # of loops
        self._known = dict[Operator, defaultdict[Tensor | None, list[int]]]()
        # Any variable may be read where any is written.
        memory = Tensor("variables", (), DType.RESOURCE)
        for operator in chain.from_iterable(self._subgraphs):
            if KINDS[operator.code.name].effect is Effect.CALLING:
                self._add_call(operator)
            elif operator.name == "READ_VARIABLE":
                self._passed[memory] += operator.outputs
            elif operator.name == "ASSIGN_VARIABLE":
                self._pass(operator.inputs[1:], [memory])

    def _add_call(self, operator: Operator) -> None:
        """Note which tensors of a call have the same numbers: arguments, results, and what a loop hands over."""
        called = [self._subgraphs[index] for index in subgraph_indices(operator.options)]
        for graph in called:
            # IF has its condition before the operands that it passes on.
            first = len(operator.inputs) - len(graph.inputs)
            self._pass(operator.inputs[first:], graph.inputs)
        if operator.name != "WHILE":
            for graph in called:
                self._pass(graph.outputs, operator.outputs)
            return
        condition, body = called
        self._conditions.update(condition.outputs)
        for targets in (condition.inputs, body.inputs, operator.outputs):
            self._pass(body.outputs, targets)
        self._pass(operator.inputs, operator.outputs)

    def _pass(self, sources: Sequence[Tensor | None], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=False):
            if source is not None:
                self._passed[source].append(target)

    def describe(self, info: TensorInfo, tensor: Tensor) -> TensorInfo:
        """The description of an input, with what its readers accept."""
        uses = _Uses()

        def beyond(reached: _Reached) -> Iterator[_Reached]:
            if reached.tensor in self._conditions:
                uses.unknown.add(reached.how)
            for other in self._passed.get(reached.tensor, ()):
                yield reached._replace(tensor=other)
            for operator in reached.tensor.consumers:
                for place in self._places(operator)[reached.tensor]:
                    yield from uses.follow(operator, place, reached)

        for _ in walked([_Reached(tensor)], beyond):
            pass
        return uses.describe(info)

    def _places(self, operator: Operator) -> Mapping[Tensor | None, Sequence[int]]:
        """The places of each input of an operator; listed once, because a join may have thousands."""
        if operator not in self._known:
            places = defaultdict[Tensor | None, list[int]](list)
            for place, tensor in enumerate(operator.inputs):
                places[tensor].append(place)
            self._known[operator] = places
        return self._known[operator]


class _Uses:
    """The operands that an input's values reach.

    `ends` has the limits of steering operands that the unchanged input reaches, `changed` those that other numbers
    reach; `unknown` says how values reach operands whose limits nobody knows. Changed numbers may index only where
    unchanged ones do, too: exporters wrap negative indices by SELECT(i < 0, i + n, i). Where a comparison decides, a
    table that the input itself indexes tells its range. If other numbers are `computed` from an input, those beyond the
    ends of an operand that clamps matter, too. `compared` has constants that the unchanged input is compared with.
    """

    def __init__(self) -> None:
        self.computed = False
        self.ends: dict[tuple[Operator, int], _Limit] = {}
        self.changed = set[tuple[Operator, int]]()
        self.unknown = set[How]()
        self.compared = set[int]()

    def follow(self, operator: Operator, place: int, reached: _Reached) -> Iterator[_Reached]:
        """Note one operand, and yield the results that depend on its numbers if these may be any."""
        how = reached.how
        limit = _limit(operator, place, reached.element)
        if limit is None and _takes_any(operator, place):
            self.computed |= operator.name not in _MOVES
            if how == "same" and operator.name in _COMPARISONS:
                self._compare(operator.input(1 - place))
            yield from _results(operator, place, reached)
        elif limit is None:
            self.unknown.add(how)
        elif how == "same":
            self.ends[operator, place] = limit
        elif how == "changed" and not limit.clamps:
            self.changed.add((operator, place))
        elif not limit.clamps:
            self.unknown.add(how)

    def _compare(self, other: Tensor) -> None:
        """Note the numbers that an input is compared with, if they are few constants."""
        if other.has_numbers and other.elements <= _MOST_COMPARED:
            numbers = other.array().ravel()
            sizes = np.abs(numbers.astype(np.float64))
            self.compared.update(map(int, numbers[sizes < _LARGEST]))

    def describe(self, info: TensorInfo) -> TensorInfo:
        """The description of the input, with the limits of its uses and the constants that it is compared with.

        It accepts ANY if it steers nothing, or nothing but operands that clamp while other operators compute with it;
        their end counts as entries.
        """
        near: set[int] = set()
        for number in sorted(self.compared)[:_MOST_COMPARED]:
            near |= {number - 1, number, number + 1}
        tables = [limit.end for limit in self.ends.values() if not limit.clamps]
        clamped = [limit.end for limit in self.ends.values() if limit.clamps]
        entries = min(filter(None, tables), default=0)
        info = replace(info, entries=entries, near=tuple(sorted(near)))
        unknown = self.unknown - {"decided"} if entries else self.unknown
        changed_alone = self.changed - self.ends.keys()
        has_open_end = 0 in (*tables, *clamped)
        if unknown or changed_alone or has_open_end:
            return replace(info, accepts=None)
        if entries:
            return replace(info, accepts=entries)
        most = max(clamped, default=ANY)
        if self.computed:
            return replace(info, entries=most, accepts=ANY)
        return replace(info, accepts=most)


def _takes_any(operator: Operator, place: int) -> bool:
    """True if the operand may have any number of its type, and no more than elements of the results depend on it."""
    name = operator.name
    kind = KINDS.get(name)
    if kind is None:
        return False
    if name in _CALLS or name == "ASSIGN_VARIABLE" or kind.effect is Effect.PRODUCT:
        return True
    if place == 0 and name in _BOUNDED | _CHOICES:
        return True
    if not kind.has_data_at(place):
        return False
    if kind.effect is not Effect.ELEMENTWISE:
        return kind.copies or name in _ANY_DATA
    given = operator.input(place)
    if given.dtype.is_float or given.dtype is DType.BOOL or given.is_quantized:
        return True
    if name not in _DIVISIONS:
        return name in _ANY_INTEGER
    divisor = operator.input(1)
    if place != 0 or not divisor.has_numbers:
        return False
    return bool(np.all(np.greater(divisor.array(), 0)))


def _results(operator: Operator, place: int, reached: _Reached) -> Iterator[_Reached]:
    """The results that depend on the operand's numbers; those of calls are known to `Steering`."""
    name = operator.name
    kind = KINDS[name]
    is_choice = place == 0 and name in _CHOICES
    if name in _BOUNDED or (name in _CALLS and not is_choice):
        return
    how = reached.how
    keeps_numbers = kind.copies or name == "CAST"
    if how == "same" and not keeps_numbers:
        how = "changed"
    element = reached.element
    if name not in _KEEPS_PLACES:
        element = _joined_place(operator, place, reached)
    results = operator.outputs if is_choice else kind.data_results(operator.outputs)
    for result in results:
        yield _Reached(result, "decided" if result.dtype is DType.BOOL else how, element)


def _joined_place(operator: Operator, place: int, reached: _Reached) -> int | None:
    """The element of a vector that a single number becomes; None if there are several."""
    if operator.name not in {"PACK", "CONCATENATION"} or not operator.outputs:
        return None
    result = operator.outputs[0]
    if len(result.shape) != 1 or max(result.elements, len(operator.inputs)) > _MOST_AXES:
        return None
    before = sum(tensor.elements for tensor in operator.inputs[:place] if tensor is not None)
    if reached.tensor.elements == 1:
        return before
    return None if reached.element is None else before + reached.element


def _limit(operator: Operator, place: int, element: int | None) -> _Limit | None:
    """What a steering operand accepts, all of it or one element; None if it does not steer, or nobody knows."""
    inputs = operator.inputs
    kind = KINDS.get(operator.name)
    if kind is None or len(inputs) < kind.min_inputs or None in inputs:
        return None
    match operator.name, place:
        case "GATHER", 1:
            return _Limit(_size(operator.input(0), int(operator.option("axis"))))
        case "EMBEDDING_LOOKUP", 0:
            return _Limit(_size(operator.input(1), 0))
        case "GATHER_ND", 1:
            count = max(operator.input(1).shape[-1:], default=0)
            sizes = [_size(operator.input(0), axis) for axis in range(count)]
            return _Limit(min(sizes, default=0))
        case "ONE_HOT", 0:
            depth = operator.input(1)
            is_known = depth.has_numbers and depth.elements
            return _Limit(int(depth.array().ravel()[0]) if is_known else 0, clamps=True)
        case "DYNAMIC_UPDATE_SLICE", 2:
            end = _end_of_updates(operator.input(0), operator.input(1), element)
            return _Limit(end, clamps=True)
        case "SLICE", 1 if operator.input(2).has_numbers:
            return _Limit(_end_of_slices(operator.input(0), operator.input(2), element))
    return None


def _end_of_updates(table: Tensor, part: Tensor, element: int | None) -> int:
    """The end of the starts at which a part fits into a table, on the axis with the most room; 0 if unknown."""
    axes = range(len(table.shape)) if element is None else (element,)
    end = 1
    for axis in axes:
        whole = _size(table, axis)
        length = _size(part, axis)
        if not whole or not length:
            return 0
        end = max(end, whole - length + 1)
    return end


def _end_of_slices(data: Tensor, lengths: Tensor, element: int | None) -> int:
    """The end of the starts from which a slice stays inside on every axis; 0 if unknown."""
    ends: list[int] = []
    for axis, length in enumerate(lengths.array().ravel().tolist()):
        if element not in (None, axis):
            continue
        if length < 0:
            return 0  # to the end of the axis, from any start
        ends.append(_size(data, axis) - length + 1)
    return max(min(ends, default=0), 0)


def _size(tensor: Tensor, axis: int) -> int:
    """The size of an axis; 0 if it is unknown."""
    sizes = tensor.shape_signature or tensor.shape
    return max(sizes[axis], 0) if -len(sizes) <= axis < len(sizes) else 0
