"""What a graph computes, step by step, as it was found and as verified rewrites changed it. Runs nothing.

A rewrite is built aside, and building it may change nothing that is there already, e.g. options that new operators
share with old ones: the proof cannot see that, it runs both regions as they then are. Nor does it see what is merged or
removed afterwards. So every step is compared in the end with what it was when it was found, or verified.
"""

from collections.abc import Hashable
from typing import TypeAlias

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.walk import is_pure, renumbered
from edge_opt.passes.rewrite import Rewrite

_SMALL = 1 << 12
_Value: TypeAlias = Hashable
_Operand: TypeAlias = tuple[_Value, _Value]
"""A value, and the type of the tensor that holds it."""


class UnverifiedChangeError(EdgeOptError):
    """The graph is not what was found and verified; the model in memory is worth nothing any more."""

    exit_code = 1


class Ledger:
    """The value of every tensor of one subgraph: tensors of equal values hold equal bits, whatever is put in."""

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self._model, self._subgraph = model, subgraph
        self._interface = self._names()
        self._values: dict[Tensor, _Value] = {
            tensor: ("input", place) for place, tensor in enumerate(subgraph.inputs)
        }
        self._steps: dict[Operator, tuple[_Value, list[_Operand]]] = {}
        self._same: dict[_Value, _Value] = {}
        self._effects: list[Operator] = []
        for operator in subgraph.operators:
            self._enter(operator)
            if not is_pure(operator, model.subgraphs):
                self._effects.append(operator)

    def allow(self, rewrite: Rewrite) -> None:
        """A verified rewrite that becomes part of the graph: its results have the values that they had.

        Raises:
            UnverifiedChangeError: what it replaces is not what it was.
        """
        for operator in rewrite.old:
            self._compare(operator)
        for operator in rewrite.added():
            self._enter(operator)
        replaced = rewrite.removed()
        self._effects = [operator for operator in self._effects if operator not in replaced]

    def check(self) -> None:
        """Compare the graph with what it was, and what was allowed.

        Raises:
            UnverifiedChangeError: something else is different.
        """
        if self._interface != self._names():
            raise _changed("the inputs, outputs or signatures are others")
        defined = set(self._subgraph.inputs)
        for operator in self._subgraph.operators:
            if operator not in self._steps:
                raise _changed(f"{_named(operator)} is new")
            for tensor in operator.inputs:
                if tensor in self._values and tensor not in defined:
                    raise _changed(f"{_named(operator)} reads what nothing defines before it")
            self._compare(operator)
            defined.update(operator.outputs)
        for tensor in self._subgraph.outputs:
            if tensor not in defined and not tensor.is_constant:
                raise _changed(f"nothing defines the output '{tensor.name}'")
        for operator in self._effects:
            if operator.subgraph is not self._subgraph:
                raise _changed(f"{_named(operator)} is gone, and does more than compute")

    def _enter(self, operator: Operator) -> None:
        """Take up a step. A tensor that has a value already keeps it: the step was verified to give that one."""
        kind, operands = self._steps[operator] = self._step(operator)
        for place, tensor in enumerate(operator.outputs):
            value = hash((kind, *map(self._resolved, operands), place))
            known = self._values.setdefault(tensor, value)
            # Where two verified rewrites give two values by the same step, these are one.
            same = self._resolved((self._same.setdefault(value, known), None))[0]
            if same != self._resolved((known, None))[0]:
                self._same[known] = same

    def _resolved(self, operand: _Operand) -> _Operand:
        value, kind = operand
        while self._same.get(value, value) != value:
            value = self._same[value]
        return value, kind

    def _compare(self, operator: Operator) -> None:
        kind, operands = self._steps[operator]
        found, given = self._step(operator)
        if kind != found or [*map(self._resolved, operands)] != [*map(self._resolved, given)]:
            raise _changed(f"{_named(operator)} has other inputs, outputs or options")

    def _step(self, operator: Operator) -> tuple[_Value, list[_Operand]]:
        """What an operator does, its results' types among it; and the values of what it reads."""
        options, called = operator.options, subgraph_indices(operator.options)
        if called:
            options = renumbered(options, dict.fromkeys(called, 0))
        kind = (
            operator.code.key(),
            None if options is None else options.key(),
            *(id(self._model.subgraphs[index]) for index in called),
            *map(_type_of, operator.outputs),
            len(operator.inputs),
        )
        return kind, [self._operand(tensor) for tensor in operator.inputs]

    def _operand(self, tensor: Tensor | None) -> _Operand:
        if tensor is None:
            return None, None
        return self._values.get(tensor) or _constant(tensor), _type_of(tensor)

    def _names(self) -> _Value:
        """What callers know the graph by."""
        signatures = (
            (s.key, s.subgraph, tuple(s.inputs.items()), tuple(s.outputs.items()))
            for s in self._model.signatures
        )
        return (tuple(self._subgraph.inputs), tuple(self._subgraph.outputs), *signatures)


def _changed(text: str) -> UnverifiedChangeError:
    remedy = "nothing was written, please report this mistake of edge-opt"
    return UnverifiedChangeError(f"the graph was changed outside the verified rewrites: {text}; {remedy}")


def _named(operator: Operator) -> str:
    name = operator.outputs[0].name if operator.outputs else ""
    return f"the operator {operator.name} that defines '{name}'"


def _type_of(tensor: Tensor) -> _Value:
    """What decides which values a tensor's bytes stand for."""
    quantization = tensor.quantization
    small = quantization is not None and not quantization.is_per_axis
    # The scales of weights may be many; those arrays are the file's own and cannot be written to.
    numbers = quantization.key() if quantization is not None and small else id(quantization)
    return tensor.dtype, tensor.shape, tensor.shape_signature, tensor.is_variable, numbers


def _constant(tensor: Tensor) -> _Value:
    """A constant by its bytes where they are few, else by where they lie; a variable is itself."""
    data = None if tensor.buffer is None else tensor.buffer.data
    if data is None or tensor.is_variable:
        return id(tensor)
    if data.length <= _SMALL:
        return bytes(data.view())
    return (id(data), 0) if data.source is None else (id(data.source), data.offset)
