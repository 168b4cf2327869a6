"""Infer every tensor's shape from graph inputs and constants, and compare it with the file.

The interpreter is not used, and the model is not changed, except for temporary marks by `doubted`.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias

from edge_opt.base.record import Record
from edge_opt.ir import Model, Operator, Subgraph, Tensor, load
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.walk import called_by
from edge_opt.schema.data import Source
from edge_opt.shapes.dimension import OPEN, Shape, ShapeError, as_shape, misfit, shape_text
from edge_opt.shapes.folding import fold
from edge_opt.shapes.rules import RULES, Call, Fact, UnknownError, recorded_fact, recorded_shape


@dataclass(frozen=True, slots=True)
class Disagreement(Record):
    """A tensor whose recorded shape differs from what its operator gives.

    `operator` is its index and name, "34 (BATCH_MATMUL)", "" for an input or a constant. `inferred` is None if the
    operator's inputs do not fit together.
    """

    subgraph: str
    tensor: str
    operator: str
    recorded: Shape | None
    inferred: Shape | None
    reason: str

    def __str__(self) -> str:
        place = f"operator {self.operator}" if self.operator else "no operator"
        where = f"subgraph '{self.subgraph}', {place}"
        if self.inferred is None:
            return f"{where}: {self.reason}"
        comparison = (
            f"is recorded as {shape_text(self.recorded)}, inferred as {shape_text(self.inferred)}"
        )
        return f"{where}: tensor '{self.tensor}' {comparison}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ShapeReport(Record):
    """The inferred shapes of a model with `tensors` tensors, `inferred` or given; `unknown` results have no shape.

    `shapes` has all graph inputs and operators' results; it is left out of a pickle. In a subgraph that is called with
    several shapes, those that differ are unknown.
    """

    tensors: int
    disagreements: tuple[Disagreement, ...]
    inferred: int
    unknown: int
    shapes: Mapping[Tensor, Shape | None] = field(default_factory=dict, repr=False)

    _left_out = ("shapes",)
    _only_here = ("shapes",)


def infer_shapes(model: Model | str | os.PathLike[str] | bytes | Source) -> list[Disagreement]:
    """Infer every tensor's shape, and list disagreements with the file.

    `model` is a loaded model or an argument for `ir.load`. Open dimensions (-1 in a shape signature) stay open; a
    recorded size does not disagree with an inferred -1.
    """
    return list(shape_report(model if isinstance(model, Model) else load(model)).disagreements)


def shape_report(
    model: Model, *, resize: Mapping[Tensor, Sequence[int]] | None = None
) -> ShapeReport:
    """Infer the shapes of all tensors, without changing the model.

    `resize` has shapes of graph inputs that replace the recorded ones, as if the caller resized them.
    """
    given: dict[Tensor, Fact] = {}
    for tensor, shape in (resize or {}).items():
        given[tensor] = Fact(as_shape(shape, f"tensor '{tensor.name}'"))
    walk = _Walk(model)
    graphs = model.subgraphs
    # The reader refuses such files, but a model in memory may have been edited.
    for graph in graphs:
        for tensor in graph.tensors:
            reason = tensor.wrong_size
            if reason is not None:
                walk.report(graph, "", tensor, None, f"tensor '{tensor.name}': {reason}")
    # Subgraphs that operators call come last: by then most were walked with their callers' shapes.
    called = called_by(chain.from_iterable(graphs), graphs)
    for graph in sorted(graphs, key=called.__contains__):
        if graph in walk.walked:
            continue
        facts: dict[Tensor, Fact] = {}
        for tensor in graph.inputs:
            facts[tensor] = given.get(tensor, Fact(recorded_shape(tensor)))
        walk.walk(graph, facts)
    count = sum(len(graph.tensors) for graph in graphs)
    results = [shape for tensor, shape in walk.shapes.items() if tensor.producer is not None]
    unknown = results.count(None)
    return ShapeReport(
        tensors=count,
        disagreements=tuple(walk.disagreements.values()),
        inferred=count - unknown,
        unknown=unknown,
        shapes=walk.shapes,
    )


Enter: TypeAlias = Callable[[int, Sequence[Fact]], Sequence[Fact] | None]
"""Infer the outputs of a subgraph (by index) from facts about its inputs; None if it cannot."""


def infer_operator(
    op: Operator, inputs: Sequence[Fact], enter: Enter = lambda *_: None
) -> Sequence[Fact]:
    """Infer facts about an operator's results from facts about its inputs; none for unknown operators.

    Recorded shapes of its tensors are not read, only names and types. An omitted input is `Fact(None)`. `enter` infers
    the subgraph that a composite or call runs.

    Raises:
        ShapeError: the inputs do not fit together; names tensors, axes and sizes.
    """
    unknown = [Fact(None)] * len(op.outputs)
    if op.name in ("CALL", "STABLEHLO_COMPOSITE"):
        called = subgraph_indices(op.options)
        entered = enter(called[0], inputs) if called else None
        return unknown if entered is None or len(entered) != len(unknown) else entered
    if op.name not in RULES:
        return unknown
    kind = KINDS[op.name]
    reason = kind.misfit(op.inputs, op.outputs)
    if reason is not None:
        raise ShapeError(f"it {reason}")
    if op.options is not None and kind.options not in (None, op.options.name):
        raise ShapeError(f"it has {op.options.name}, expected {kind.options}")
    call = Call(op, inputs)
    try:
        shapes = RULES[op.name](call)
    except UnknownError:
        return unknown
    return list(map(Fact, shapes, fold(call, shapes)))


class _Inference(NamedTuple):
    """Inferred facts about an operator's results, or the error; `is_open` if an input has an open size."""

    operator: Operator
    results: Sequence[Fact]
    error: str
    is_open: bool

    def pairs(self) -> Iterator[tuple[Tensor, Fact]]:
        """The operator's results with the inferred facts."""
        return zip(self.operator.outputs, self.results, strict=True)

    def doubt(self) -> str:
        """Why the recorded shapes of the results are wrong, or would be for other open sizes; empty if right."""
        if self.error:
            return self.error
        for tensor, fact in self.pairs():
            reason = misfit(fact.shape, recorded_shape(tensor))
            if reason is not None:
                return f"{reason} of '{tensor.name}'"
            if 0 in tensor.shape:
                return f"'{tensor.name}' is empty"
            may_be_open = bool(tensor.shape) if fact.shape is None else fact.is_open
            if self.is_open and may_be_open and not tensor.is_dynamic:
                return f"'{tensor.name}' has a static size, but an operand has an open one"
        return ""


def _fact_of(tensor: Tensor | None, facts: Mapping[Tensor, Fact]) -> Fact:
    """The inferred fact about a tensor; without one, what the file records."""
    return recorded_fact(tensor) if tensor is None or tensor not in facts else facts[tensor]


def _infer(operator: Operator, facts: Mapping[Tensor, Fact], enter: Enter) -> _Inference:
    """Infer one operator; inputs that are not in `facts` are as recorded."""
    inputs = [_fact_of(tensor, facts) for tensor in operator.inputs]
    error = ""
    try:
        results = infer_operator(operator, inputs, enter)
    except ShapeError as reason:
        results = [Fact(None)] * len(operator.outputs)
        error = str(reason)
    is_open = any(fact.is_open for fact in inputs)
    return _Inference(operator, results, error, is_open)


def _infer_in_order(
    graph: Iterable[Operator], facts: dict[Tensor, Fact], enter: Enter
) -> Iterator[_Inference]:
    """Infer each operator in turn; `facts` starts with the graph's inputs and collects all results."""
    for operator in graph:
        inference = _infer(operator, facts, enter)
        for tensor, fact in inference.pairs():
            known = _with_recorded_sizes(fact.shape, tensor, is_open=inference.is_open)
            facts[tensor] = Fact(known, fact.value)
        yield inference


def _with_recorded_sizes(shape: Shape | None, tensor: Tensor, *, is_open: bool) -> Shape | None:
    """The inferred shape, with the recorded sizes where none is inferred, unless they may depend on an open size."""
    recorded = recorded_shape(tensor)
    if recorded is None:
        return shape
    if shape is None:
        may_depend = is_open and not tensor.is_dynamic
        return (OPEN,) * len(recorded) if may_depend else recorded
    if is_open or len(shape) != len(recorded):
        return shape
    return tuple(there if size < 0 else size for size, there in zip(shape, recorded, strict=True))


# Most calls of one subgraph to infer: if each subgraph calls the next one twice, calls grow exponentially.
_MOST_ENTRIES = 64


class _Walk:
    """Infer subgraphs in execution order, called ones with their callers' shapes."""

    def __init__(self, model: Model) -> None:
        self.shapes: dict[Tensor, Shape | None] = {}
        self.disagreements: dict[object, Disagreement] = {}
        self.walked: set[Subgraph] = set()
        self._model = model
        self._entered: dict[object, Sequence[Fact] | None] = {}
        self._entries = Counter[int]()

    def report(
        self, graph: Subgraph, operator: str, tensor: Tensor, inferred: Shape | None, reason: str
    ) -> None:
        """Report a disagreement, once per tensor even if its subgraph is called several times."""
        name = self._model.signature_name(graph)
        recorded = recorded_shape(tensor)
        found = Disagreement(name, tensor.name, operator, recorded, inferred, reason)
        self.disagreements.setdefault((tensor, operator), found)

    def walk(
        self, graph: Subgraph, facts: dict[Tensor, Fact], *, is_called: bool = False
    ) -> list[Fact]:
        """Infer a subgraph from its inputs in `facts`; return facts about its outputs.

        If an operator calls it, inputs whose shapes differ from the recorded ones are reported.
        """
        self.walked.add(graph)
        wrong: set[Tensor] = set()
        for tensor, fact in facts.items():
            self._keep(tensor, fact.shape)
            if is_called and misfit(fact.shape, recorded_shape(tensor)):
                wrong.add(tensor)
                passed = f"an operator passes {shape_text(fact.shape)} to it"
                self.report(graph, "", tensor, fact.shape, passed)
        for position, inference in enumerate(_infer_in_order(graph, facts, self.enter)):
            where = f"{position} ({inference.operator.name})"
            self._compare(graph, inference, where, wrong)
        return [_fact_of(tensor, facts) for tensor in graph.outputs]

    def _compare(
        self, graph: Subgraph, inference: _Inference, where: str, wrong: set[Tensor]
    ) -> None:
        """Report an operator's error and its results that disagree, which are added to the `wrong` ones before it."""
        operator = inference.operator
        named = [*operator.outputs, *operator.given]
        if inference.error and named:
            self.report(graph, where, named[0], None, inference.error)
        causes = [tensor.name for tensor in operator.given if tensor in wrong]
        source = f"; it follows from tensor '{causes[0]}'" if causes else ""
        for tensor, fact in inference.pairs():
            self._keep(tensor, fact.shape)
            reason = misfit(fact.shape, recorded_shape(tensor))
            if reason:
                wrong.add(tensor)
                self.report(graph, where, tensor, fact.shape, reason + source)

    def _keep(self, tensor: Tensor, shape: Shape | None) -> None:
        """Keep a shape, or that it is unknown if an earlier call gave another one."""
        is_same = self.shapes.get(tensor, shape) == shape
        self.shapes[tensor] = shape if is_same else None

    def enter(self, index: int, inputs: Sequence[Fact]) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs: once for equal inputs, and at most `_MOST_ENTRIES` times."""
        graph = self._model.subgraphs[index]
        if len(inputs) != len(graph.inputs):
            raise ShapeError(f"it passes {len(inputs)} inputs to subgraph '{graph.name}'")
        key = (index, *(fact.key for fact in inputs))
        if key in self._entered:
            return self._entered[key]
        if self._entries[index] == _MOST_ENTRIES:
            return None
        self._entries[index] += 1
        self._entered[key] = None  # if it calls itself
        facts: dict[Tensor, Fact] = {}
        for tensor, fact in zip(graph.inputs, inputs, strict=True):
            shape = recorded_shape(tensor) if fact.shape is None else fact.shape
            facts[tensor] = Fact(shape, fact.value)
        outputs = self.walk(graph, facts, is_called=True)
        self._entered[key] = outputs
        return outputs


def check_operators(operators: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Check that operators' recorded result shapes equal the inferred ones, if any; `subgraphs`: the model's.

    Called subgraphs are not inferred: their recorded shapes are used.

    Raises:
        RefusedError: an inferred shape differs from the recorded one.
    """

    def enter(index: int, inputs: Sequence[Fact]) -> list[Fact]:
        body = subgraphs[index]
        given = [fact.shape for fact in inputs]
        expected = list(map(recorded_shape, body.inputs))
        if given != expected:
            raise ShapeError(f"subgraph '{body.name}' takes {expected}, but gets {given}")
        return [Fact(recorded_shape(tensor)) for tensor in body.outputs]

    for operator in operators:
        inference = _infer(operator, {}, enter)
        for tensor, fact in inference.pairs():
            recorded = recorded_shape(tensor)
            reason = inference.error
            if not reason and fact.shape not in (None, recorded):
                reason = f"inferred shape {shape_text(fact.shape)}, recorded {shape_text(recorded)}"
            if reason:
                raise RefusedError(Why.INVALID_MODEL, f"{operator.name} '{tensor.name}': {reason}")


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, operators with invalid recorded shapes have a `shape_error` and the name UNTRUSTED.

    A file may record a size that differs from the inferred one, or one for an open size. LiteRT follows the inputs, so
    such a file runs; a block that is cut by the recorded sizes does not, and a region of it would pass verification.
    """
    checked = [graph for graph in graphs if not graph.is_checked]
    marked: list[Operator] = []
    for graph in checked:
        graph.is_checked = True
        for inference in _infer_in_order(graph, {}, lambda *_: None):
            inference.operator.shape_error = inference.doubt()
            marked.append(inference.operator)
    try:
        yield
    finally:
        for operator in marked:
            operator.shape_error = ""
        for graph in checked:
            graph.is_checked = False
