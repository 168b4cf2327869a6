"""A record of what a graph computes, step by step: originally, and after verified rewrites. Runs nothing.

A proof runs both regions as they are at that time. It misses side effects of building the new one, e.g. on options that
old and new operators share, and later merges and removals. So in the end every step of the graph must be original or
verified.
"""

from collections.abc import Hashable, Iterable, Sequence

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.walk import called_by, is_pure, own_fields, renumbered
from edge_opt.passes.rewrite import Rewrite

_SMALL = 1 << 12


class UnverifiedChangeError(EdgeOptError):
    """The graph has unverified changes; the model in memory must not be used."""

    exit_code = 1


class Ledger:
    """The verified steps of one subgraph: each operator, as it was at the start or when its rewrite was verified."""

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self._model, self._subgraph = model, subgraph
        self._interface = self._names()
        self._steps: dict[Operator, Hashable] = {}
        self._enter(subgraph.operators)

    def allow(self, rewrite: Rewrite) -> None:
        """Accept a verified rewrite.

        Raises:
            UnverifiedChangeError: an operator that it replaces has changed.
        """
        for operator in rewrite.old:
            self._compare(operator)
        for operator in rewrite.removed():
            self._steps.pop(operator, None)
        self._enter(rewrite.added())

    def merge(self, added: Iterable[Operator]) -> None:
        """Merge `added` operators that do the same with the same tensors: readers get the first one's results.

        Operators that read state, draw random numbers or call a subgraph are never merged.
        """
        chosen = set(added)
        first: dict[Hashable, Operator] = {}
        merged: dict[Tensor | None, Tensor] = {}
        for operator in self._subgraph.operators if chosen else ():
            # A reader comes later, so it is changed once, however many of its inputs are merged.
            if not merged.keys().isdisjoint(operator.inputs):
                self._compare(operator)
                self._subgraph.set_inputs(operator, [merged.get(one, one) for one in operator.inputs])
                self._enter([operator])
            is_result = any(map(self._subgraph.is_output, operator.outputs))
            if operator not in chosen or is_result or not is_pure(operator):
                continue
            known = first.setdefault(self._read(operator), operator)
            if known is not operator:
                merged.update(zip(operator.outputs, known.outputs, strict=True))
        for tensor in merged:
            if tensor is not None and tensor.producer is not None:
                self._subgraph.remove(tensor.producer)

    def check(self) -> None:
        """Check that the graph has only original and allowed steps; their order is checked on writing.

        Raises:
            UnverifiedChangeError: it has any other change.
        """
        for operator in self._with_bodies(self._subgraph.operators):
            self._compare(operator)
        for operator in self._steps:
            if operator.subgraph is None and not is_pure(operator, self._model.subgraphs):
                raise _changed(f"{_named(operator)} was removed, although it has side effects")
        if self._interface != self._names():
            raise _changed("inputs, outputs, signatures or metadata differ")

    def _enter(self, operators: Sequence[Operator]) -> None:
        for operator in operators:
            self._steps[operator] = self._step(operator)
        for operator in self._with_bodies(operators):
            if operator not in self._steps:
                self._steps[operator] = self._step(operator)

    def _with_bodies(self, operators: Sequence[Operator]) -> list[Operator]:
        """The operators and those of subgraphs that they call; entry points have ledgers of their own."""
        bodies = (graph for graph in called_by(operators, self._model.subgraphs) if not graph.signatures)
        return [*operators, *(operator for graph in bodies for operator in graph)]

    def _compare(self, operator: Operator) -> None:
        if self._step(operator) != self._steps.get(operator):
            raise _changed(f"{_named(operator)} is new, or has other inputs, outputs or options")

    def _step(self, operator: Operator) -> Hashable:
        return self._read(operator), operator.outputs

    def _read(self, operator: Operator) -> Hashable:
        """An operator's code, options and result types, and its inputs: tensors and their types, or constants."""
        options, called = operator.options, subgraph_indices(operator.options)
        if called:
            options = renumbered(options, dict.fromkeys(called, 0))
        tables = options, own_fields(operator)
        read = [tensor and (_constant(tensor) or tensor, _type_of(tensor)) for tensor in operator.inputs]
        return (
            operator.code,
            tuple(None if table is None else table.key() for table in tables),
            tuple(self._model.subgraphs[index] for index in called),
            tuple(map(_type_of, operator.outputs)),
            tuple(map(_type_of, operator.intermediates)),
            tuple(read),
        )

    def _names(self) -> Hashable:
        """The graph's interface to callers, and the model's metadata."""
        signatures = (
            (s.key, s.subgraph, tuple(s.inputs.items()), tuple(s.outputs.items()))
            for s in self._model.signatures
        )
        metadata = ((entry.name, entry.buffer.data) for entry in self._model.metadata)
        inputs = ((tensor, _type_of(tensor)) for tensor in self._subgraph.inputs)
        return (*inputs, *self._subgraph.outputs, *signatures, *metadata)


def _changed(text: str) -> UnverifiedChangeError:
    remedy = "nothing was written, please report this bug in edge-opt"
    return UnverifiedChangeError(f"the graph was changed outside the verified rewrites: {text}; {remedy}")


def _named(operator: Operator) -> str:
    name = operator.outputs[0].name if operator.outputs else ""
    return f"the operator {operator.name} that defines '{name}'"


def _type_of(tensor: Tensor) -> Hashable:
    """Everything that determines which numbers a tensor has, but its bytes."""
    return tensor.kind, tensor.shape_signature, tensor.is_variable


def _constant(tensor: Tensor) -> Hashable:
    """A constant's bytes if they are few, else their place; None for other tensors."""
    data = None if tensor.buffer is None or tensor.is_variable else tensor.buffer.data
    if data is None:
        return None
    return bytes(data.view()) if data.length <= _SMALL else data.key
