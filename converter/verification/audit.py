"""The audit of a rewritten model: every operator is original or belongs to a verified rewrite. Runs nothing.

A verification runs both versions of a region as they are at that time. It misses side effects of building the new one,
such as a change of options that old and new operators share, and later changes by other passes and by cleanup.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.walk import called_by, has_effects, is_impure, renumbered, unmodelled_fields
from edge_opt.schema.table import key_of
from edge_opt.verification.rewrite import Rewrite

Source = tuple[Hashable, Hashable]
"""Where an operand comes from: a constant's content or a tensor, and its type."""

_SMALL = 1 << 12


class UnverifiedChangeError(EdgeOptError):
    """The graph has unverified changes; the model in memory must not be used."""

    exit_code = 1


class Step(NamedTuple):
    """One operator: what it does, where its operands come from, and the tensors that it defines."""

    operation: Hashable
    sources: tuple[Source | None, ...]
    outputs: tuple[Tensor, ...]


class Audit:
    """What a model computed at the start, and what verified rewrites added since.

    Operators are compared by code, options, tensors, their types and constants, not as objects.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._interface = self._current_interface()
        self._accepted: dict[Operator, Step] = {}
        self._impure: set[Operator] = set()
        self._pure_bodies: dict[tuple[Subgraph, ...], bool] = {}
        self._twins: dict[Hashable, Tensor] = {}
        self._enter(model.operators())

    def accept(self, rewrite: Rewrite) -> None:
        """Accept the operators of a verified rewrite in place of those that it is about to remove.

        Raises:
            UnverifiedChangeError: the old operators were changed, so that the verification compared with others.
        """
        for operator in rewrite.old:
            self._compare(operator)
        for operator in rewrite.removed():
            self._accepted.pop(operator, None)
        self._enter(rewrite.added())
        for graph in called_by(rewrite.added(), self._model.subgraphs):
            self._enter(operator for operator in graph if operator not in self._accepted)

    def merge(self, operator: Operator, twin: Operator) -> None:
        """Accept that readers of `operator` read the results of its `twin`, which must be the same.

        Raises:
            UnverifiedChangeError: `operator`, which is about to be removed, was changed.
        """
        self._compare(operator)
        if step_key(operator) == step_key(twin):
            self._twins.update(zip(operator.outputs, twin.outputs, strict=True))

    def check(self) -> None:
        """Check that the model has only original and accepted operators; their order is checked on writing.

        To be called before bodies of composites that were opened are removed, and at the end.

        Raises:
            UnverifiedChangeError: it has any other change.
        """
        for operator in self._model.operators():
            self._compare(operator)
        for operator in self._impure:
            if operator.subgraph is None and operator in self._accepted:
                raise _changed(f"{_named(operator)} was removed, although it has side effects")
        if self._interface != self._current_interface():
            raise _changed("inputs, outputs, signatures or metadata differ")

    def _compare(self, operator: Operator) -> None:
        accepted = self._accepted.get(operator)
        now = _step(operator, self._model.subgraphs)
        if accepted is None or self._merged(accepted) != self._merged(now):
            raise _changed(f"{_named(operator)} is new, or has other inputs, outputs or options")

    def _enter(self, operators: Iterable[Operator]) -> None:
        for operator in operators:
            self._accepted[operator] = _step(operator, self._model.subgraphs)
            # Known now: once an operator and its body are removed, its index is that of another subgraph.
            if not self._is_pure(operator):
                self._impure.add(operator)

    def _is_pure(self, operator: Operator) -> bool:
        """Like `is_pure`; bodies that several operators call are looked at once."""
        subgraphs = self._model.subgraphs
        called = tuple(subgraphs[index] for index in subgraph_indices(operator.options))
        if called not in self._pure_bodies:
            inside = list(chain.from_iterable(called))
            self._pure_bodies[called] = not has_effects(inside, subgraphs)
        return self._pure_bodies[called] and not is_impure(operator)

    def _merged(self, step: Step) -> Step:
        """The step with the results of twins in place of those that were merged with them."""
        return step._replace(sources=tuple(map(self._origin, step.sources)))

    def _origin(self, source: Source | None) -> Source | None:
        if source is None:
            return None
        place, kind = source
        while place in self._twins:
            place = self._twins[place]
        return place, kind

    def _current_interface(self) -> Hashable:
        """The model's interface to callers, and its metadata."""
        parts: list[Hashable] = []
        for signature in self._model.signatures:
            inputs = tuple(signature.inputs.items())
            outputs = tuple(signature.outputs.items())
            parts.append((signature.key, signature.subgraph, inputs, outputs))
        for _, graph in self._model.entry_points():
            parts.append(tuple((tensor, _type_of(tensor)) for tensor in graph.inputs))
            parts.append(tuple(graph.outputs))
        parts += ((entry.name, entry.buffer.data) for entry in self._model.metadata)
        return tuple(parts)


def step_key(operator: Operator) -> Hashable:
    """Equal for operators that compute the same from the same tensors; they must not call a subgraph."""
    step = _step(operator, ())
    return step.operation, step.sources


def _step(operator: Operator, subgraphs: Sequence[Subgraph]) -> Step:
    options = operator.options
    called = subgraph_indices(options)
    if called:
        options = renumbered(options, dict.fromkeys(called, 0))
    operation = (
        operator.code,
        key_of(options),
        key_of(unmodelled_fields(operator)),
        tuple(_called(subgraphs[index]) for index in called),
        tuple(map(_type_of, operator.outputs)),
        tuple(map(_type_of, operator.intermediates)),
    )
    return Step(operation, tuple(map(_source, operator.inputs)), tuple(operator.outputs))


def _called(graph: Subgraph) -> Hashable:
    return graph, tuple(graph.inputs), tuple(graph.outputs)


def _changed(text: str) -> UnverifiedChangeError:
    remedy = "nothing was written, please report this bug in edge-opt"
    return UnverifiedChangeError(
        f"the graph was changed outside the verified rewrites: {text}; {remedy}"
    )


def _named(operator: Operator) -> str:
    return f"the operator {operator.name} that defines '{operator.label}'"


def _type_of(tensor: Tensor) -> Hashable:
    """Everything that determines which numbers a tensor has, but its bytes."""
    return tensor.kind, tensor.shape_signature, tensor.is_variable


def _source(tensor: Tensor | None) -> Source | None:
    return None if tensor is None else (_constant(tensor) or tensor, _type_of(tensor))


def _constant(tensor: Tensor) -> Hashable:
    """A constant's bytes if they are few, else their place; None for other tensors."""
    data = tensor.data
    if data is None or tensor.is_variable:
        return None
    return bytes(data.view()) if data.length <= _SMALL else data.key
