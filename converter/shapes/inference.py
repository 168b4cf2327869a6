"""Infer every tensor's shape from graph inputs and constants, and compare it with the file.

The interpreter is not used, and the model is not changed, except for temporary marks by `doubted`.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from edge_opt.base.record import Record
from edge_opt.ir import Model, Operator, Subgraph, Tensor, load
from edge_opt.ir.operators import KINDS, subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.walk import called_by
from edge_opt.schema.data import Source
from edge_opt.shapes.dimension import OPEN, Shape, ShapeError, as_shape, misfit, shape_text
from edge_opt.shapes.folding import fold
from edge_opt.shapes.rules import RULES, Call, Fact, UnknownError, recorded_fact, recorded_shape


@dataclass(frozen=True, slots=True)
class Disagreement(Record):
    """A tensor whose recorded shape differs from what its operator gives.

    `operator` is its index and name, "34 (BATCH_MATMUL)", "" for a constant. `inferred` is None if the operator's
    inputs do not fit together.
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
        comparison = f"is recorded as {shape_text(self.recorded)}, inferred as {shape_text(self.inferred)}"
        return f"{where}: tensor '{self.tensor}' {comparison}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ShapeReport(Record):
    """The inferred shapes of a model with `tensors` tensors, `inferred` or given; `unknown` results have no shape.

    `shapes` has all graph inputs and operators' results; it is left out of a pickle. In a subgraph that is called with
    several shapes, a size is open unless all calls agree.
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


def shape_report(model: Model, *, resize: Mapping[Tensor, Sequence[int]] | None = None) -> ShapeReport:
    """Infer the shapes of all tensors, without changing the model.

    `resize` has shapes of graph inputs that replace the recorded ones, as if the caller resized them.
    """
    given = {tensor: as_shape(shape, f"tensor '{tensor.name}'") for tensor, shape in (resize or {}).items()}
    walk, graphs = _Walk(model), model.subgraphs
    for graph, tensor in ((one, tensor) for one in graphs for tensor in one.tensors):
        if tensor.wrong_size is not None:
            walk.report(graph, "", tensor, None, f"tensor '{tensor.name}': {tensor.wrong_size}")
    # Subgraphs that operators call come last: by then most were walked with their callers' shapes.
    entered = called_by((operator for graph in graphs for operator in graph), graphs)
    for graph in sorted(graphs, key=entered.__contains__):
        if graph not in walk.walked:
            walk.walk(graph, {one: Fact(given.get(one, recorded_shape(one))) for one in graph.inputs})
    count = sum(len(graph.tensors) for graph in graphs)
    unknown = sum(shape is None and tensor.producer is not None for tensor, shape in walk.shapes.items())
    return ShapeReport(count, tuple(walk.disagreements.values()), count - unknown, unknown, walk.shapes)


Enter: TypeAlias = Callable[[int, Sequence[Fact]], Sequence[Fact] | None]
"""Infer the outputs of a subgraph (by index) from facts about its inputs; None if it cannot."""


def infer_operator(op: Operator, inputs: Sequence[Fact], enter: Enter = lambda *_: None) -> Sequence[Fact]:
    """Infer facts about an operator's results from facts about its inputs; none for unknown operators.

    Recorded shapes of its tensors are not read, only names and types. An omitted input is `Fact(None)`. `enter` infers
    the subgraph that a composite or call runs.

    Raises:
        ShapeError: the inputs do not fit together; names tensors, axes and sizes.
    """
    unknown = [Fact(None)] * len(op.outputs)
    if op.name in ("CALL", "STABLEHLO_COMPOSITE"):
        entered = next((enter(index, inputs) for index in subgraph_indices(op.options)), None)
        return unknown if entered is None or len(entered) != len(unknown) else entered
    if op.name not in RULES:
        return unknown
    if (reason := KINDS[op.name].misfit(op.inputs, op.outputs)) is not None:
        raise ShapeError(f"it {reason}")
    call = Call(op, inputs)
    try:
        shapes = RULES[op.name].rule(call)
    except UnknownError:
        return unknown
    return [Fact(*pair) for pair in zip(shapes, fold(call, shapes), strict=True)]


class _Step(NamedTuple):
    """Inferred facts about an operator's results, or the error; `is_open` if an input has an open size."""

    operator: Operator
    results: Sequence[Fact]
    error: str
    is_open: bool


def _steps(graph: Iterable[Operator], facts: dict[Tensor, Fact], enter: Enter) -> Iterator[_Step]:
    """Infer each operator in turn; `facts` starts with the graph's inputs and collects all results."""
    for operator in graph:
        inputs = [facts[tensor] if tensor in facts else recorded_fact(tensor) for tensor in operator.inputs]
        is_open = any(fact.shape and OPEN in fact.shape for fact in inputs)
        try:
            step = _Step(operator, infer_operator(operator, inputs, enter), "", is_open)
        except ShapeError as error:
            step = _Step(operator, [Fact(None)] * len(operator.outputs), str(error), is_open)
        for tensor, (shape, value) in zip(operator.outputs, step.results, strict=True):
            # Without an inferred size, use the recorded one, unless it may depend on an open size.
            recorded, known = recorded_shape(tensor), shape
            if recorded is not None and shape is None:
                known = (OPEN,) * len(recorded) if is_open and not tensor.is_dynamic else recorded
            elif recorded and shape and not is_open and len(shape) == len(recorded):
                sizes = zip(shape, recorded, strict=True)
                known = tuple(there if size < 0 else size for size, there in sizes)
            facts[tensor] = Fact(known, value)
        yield step


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
        where = self._model.signature_name(graph), tensor.name, operator
        found = Disagreement(*where, recorded_shape(tensor), inferred, reason)
        self.disagreements.setdefault((tensor, operator), found)

    def walk(self, graph: Subgraph, facts: dict[Tensor, Fact], place: str | None = None) -> list[Fact]:
        """Infer a subgraph from its inputs in `facts`; return facts about its outputs.

        Inputs whose shapes differ from the recorded ones are reported at `place`, if given.
        """
        self.walked.add(graph)
        wrong = {tensor for tensor in facts if self._take(graph, place, tensor, facts[tensor].shape, "")}
        for position, (operator, results, error, _) in enumerate(_steps(graph, facts, self.enter)):
            where = f"{position} ({operator.name})"
            named = next(filter(None, (*operator.outputs, *operator.inputs)), None)
            if error and named is not None:
                self.report(graph, where, named, None, error)
            cause = next((tensor for tensor in operator.inputs if tensor in wrong), None)
            source = "" if cause is None else f"; it follows from tensor '{cause.name}'"
            for tensor, (shape, _) in zip(operator.outputs, results, strict=True):
                if self._take(graph, where, tensor, shape, source):
                    wrong.add(tensor)
        return [facts[tensor] if tensor in facts else recorded_fact(tensor) for tensor in graph.outputs]

    def _take(
        self, graph: Subgraph, where: str | None, tensor: Tensor, shape: Shape | None, source: str
    ) -> bool:
        """Merge a shape with those of earlier calls; if it differs from the record, report it and return True."""
        known = self.shapes.get(tensor, shape)
        alike = shape is not None and known is not None and len(shape) == len(known)
        common = (a if a == b else OPEN for a, b in zip(shape or (), known or (), strict=False))
        self.shapes[tensor] = tuple(common) if alike else None
        reason = misfit(shape, recorded_shape(tensor))
        if where is None or reason is None:
            return False
        reason = reason + source if where else f"an operator passes {shape_text(shape)} to it"
        self.report(graph, where, tensor, shape, reason)
        return True

    def enter(self, index: int, inputs: Sequence[Fact]) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs: once for equal inputs, and at most `_MOST_ENTRIES` times."""
        graph = self._model.subgraphs[index]
        if len(inputs) != len(graph.inputs):
            raise ShapeError(f"it passes {len(inputs)} inputs to subgraph '{graph.name}'")
        values = (None if value is None else (value.dtype.str, repr(value.tolist())) for _, value in inputs)
        key = (index, tuple(fact.shape for fact in inputs), *values)
        if key not in self._entered and self._entries[index] < _MOST_ENTRIES:
            self._entries[index] += 1
            self._entered[key] = None  # if it calls itself
            pairs = zip(graph.inputs, inputs, strict=True)
            facts = {t: Fact(recorded_shape(t) if shape is None else shape, v) for t, (shape, v) in pairs}
            self._entered[key] = self.walk(graph, facts, "")
        return self._entered.get(key)


def check_operators(operators: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Check that operators' recorded result shapes equal the inferred ones, if any; `subgraphs`: the model's.

    Called subgraphs are not inferred: their recorded shapes are used.

    Raises:
        RefusedError: an inferred shape differs from the recorded one.
    """

    def enter(index: int, inputs: Sequence[Fact]) -> list[Fact]:
        body = subgraphs[index]
        given, expected = [fact.shape for fact in inputs], [recorded_shape(t) for t in body.inputs]
        if given != expected:
            raise ShapeError(f"subgraph '{body.name}' takes {expected}, but gets {given}")
        return [Fact(recorded_shape(tensor)) for tensor in body.outputs]

    steps = (step for operator in operators for step in _steps([operator], {}, enter))
    for operator, results, error, _ in steps:
        for tensor, (shape, _) in zip(operator.outputs, results, strict=True):
            recorded = recorded_shape(tensor)
            if error or shape not in (None, recorded):
                text = f"inferred shape {shape_text(shape)}, recorded {shape_text(recorded)}"
                raise RefusedError(f"{operator.name} '{tensor.name}': {error or text}")


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, operators with invalid recorded shapes have a `shape_error` and the name UNTRUSTED.

    A file may record a size that differs from the inferred one, or one for an open size. LiteRT follows the inputs.
    """
    checked = [graph for graph in graphs if not graph.is_checked]
    steps = [step for graph in checked for step in _steps(graph, {}, lambda *_: None)]
    for operator, results, error, is_open in steps:
        operator.shape_error = error
        for tensor, (shape, _) in zip(operator.outputs, results, strict=True):
            may_be_open = bool(tensor.shape) if shape is None else OPEN in shape
            if (reason := misfit(shape, recorded_shape(tensor))) is not None:
                operator.shape_error = f"{reason} of '{tensor.name}'"
            elif 0 in tensor.shape:
                operator.shape_error = f"'{tensor.name}' is empty"
            elif is_open and may_be_open and not tensor.is_dynamic and not error:
                operator.shape_error = f"'{tensor.name}' has a static size, but an operand has an open one"
    for graph in checked:
        graph.is_checked = True
    try:
        yield
    finally:
        for step in steps:
            step.operator.shape_error = ""
        for graph in checked:
            graph.is_checked = False
