"""A record of what a graph computes, step by step: originally, and after verified rewrites. Runs nothing.

A proof runs both regions as they are at that time. It misses side effects of building the new one, e.g. on options that
old and new operators share, and later merges and removals. So in the end every step of the graph must be original or
verified.
"""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.walk import custom_options, is_pure, renumbered
from edge_opt.passes.rewrite import Rewrite

_SMALL = 1 << 12
_Value: TypeAlias = Hashable
"""Tensors of equal values hold equal bits for any inputs."""


class UnverifiedChangeError(EdgeOptError):
    """The graph has unverified changes; the model in memory must not be used."""

    exit_code = 1


class Ledger:
    """The steps of one subgraph: each operator, with the values that it reads and writes."""

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self._model, self._subgraph = model, subgraph
        self._interface = self._names()
        self._values: dict[Tensor, _Value] = {
            tensor: hash(("input", place)) for place, tensor in enumerate(subgraph.inputs)
        }
        self._steps: set[_Value] = set()
        self._effects: set[Operator] = set()
        self._enter(subgraph.operators)

    def allow(self, rewrite: Rewrite) -> None:
        """Accept a verified rewrite: its results keep their values.

        Raises:
            UnverifiedChangeError: an operator that it replaces has changed.
        """
        for operator in rewrite.old:
            self._compare(operator)
        self._effects.difference_update(rewrite.removed())
        self._enter(rewrite.added())

    def merge(self, added: Iterable[Operator]) -> None:
        """Merge `added` operators that do the same with equal values: readers get the first one's results.

        Operators that read state, draw random numbers or call a subgraph are never merged.
        """
        chosen, first = set(added), dict[_Value, Operator]()
        for operator in self._subgraph.operators if chosen else ():
            is_result = any(map(self._subgraph.is_output, operator.outputs))
            if operator not in chosen or is_result or not is_pure(operator):
                continue
            known = first.setdefault(self._read(operator), operator)
            if known is not operator:
                for old, new in zip(operator.outputs, known.outputs, strict=True):
                    self._subgraph.replace_uses(old, new)
                    # Two verified rewrites may compute two values by the same step.
                    self._steps.update(map(self._step, new.consumers))
                self._subgraph.remove(operator)

    def check(self) -> None:
        """Check that the graph has only original and allowed steps; their order is checked on writing.

        Raises:
            UnverifiedChangeError: it has any other change.
        """
        if self._interface != self._names():
            raise _changed("inputs, outputs or signatures differ")
        for operator in self._subgraph.operators:
            self._compare(operator)
        for operator in self._effects:
            if operator.subgraph is not self._subgraph:
                raise _changed(f"{_named(operator)} was removed, although it has side effects")

    def _enter(self, operators: Iterable[Operator]) -> None:
        """Record steps. A tensor that has a value already keeps it: the step was verified to give that value."""
        for operator in operators:
            read = hash(self._read(operator))
            for place, tensor in enumerate(operator.outputs):
                self._values.setdefault(tensor, hash((read, place)))
            self._steps.add(self._step(operator))
            if not is_pure(operator, self._model.subgraphs):
                self._effects.add(operator)

    def _compare(self, operator: Operator) -> None:
        if self._step(operator) not in self._steps:
            raise _changed(f"{_named(operator)} is new, or has other inputs, outputs or options")

    def _step(self, operator: Operator) -> _Value:
        return self._read(operator), tuple(map(self._values.get, operator.outputs))

    def _read(self, operator: Operator) -> _Value:
        """An operator's code, options and result types, and the types and values of its inputs."""
        options, own, called = operator.options, custom_options(operator), subgraph_indices(operator.options)
        if called:
            options = renumbered(options, dict.fromkeys(called, 0))
        read = [
            tensor and (self._values.get(tensor) or _constant(tensor), _type_of(tensor))
            for tensor in operator.inputs
        ]
        return (
            operator.code,
            *(None if table is None else table.key() for table in (options, own)),
            *(id(self._model.subgraphs[index]) for index in called),
            *map(_type_of, operator.outputs),
            *read,
        )

    def _names(self) -> _Value:
        """The graph's interface to callers."""
        signatures = (
            (s.key, s.subgraph, tuple(s.inputs.items()), tuple(s.outputs.items()))
            for s in self._model.signatures
        )
        return (tuple(self._subgraph.inputs), tuple(self._subgraph.outputs), *signatures)


def _changed(text: str) -> UnverifiedChangeError:
    remedy = "nothing was written, please report this bug in edge-opt"
    return UnverifiedChangeError(f"the graph was changed outside the verified rewrites: {text}; {remedy}")


def _named(operator: Operator) -> str:
    name = operator.outputs[0].name if operator.outputs else ""
    return f"the operator {operator.name} that defines '{name}'"


def _type_of(tensor: Tensor) -> _Value:
    """Everything that determines which numbers a tensor's bytes represent."""
    quantization = tensor.quantization
    # Weights may have many scales; those arrays are read-only parts of the file.
    numbers = id(quantization) if quantization is None or quantization.is_per_axis else quantization.key()
    return tensor.dtype, tensor.shape, tensor.shape_signature, tensor.is_variable, numbers


def _constant(tensor: Tensor) -> _Value:
    """A constant's bytes if they are few, else their place; for a variable, its identity."""
    data = None if tensor.buffer is None else tensor.buffer.data
    if data is None or tensor.is_variable:
        return id(tensor)
    if data.length <= _SMALL:
        return bytes(data.view())
    return data.key
