"""Infers every tensor of a model from its graph inputs and constants, and compares with what the file records.

It never asks the interpreter, and never changes the model; `doubted` marks operators, and takes the marks back.
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
from edge_opt.shapes.results import wrong_results
from edge_opt.shapes.rules import RULES, Call, Fact, UnknownError, recorded_fact, recorded_shape

Stated: TypeAlias = Shape | str | None
"""A shape, a type or quantization parameters in words, or None where there are none."""


@dataclass(frozen=True, slots=True)
class Disagreement(Record):
    """One tensor for which the file records something else than its operator gives.

    `operator` is its index and name, "34 (BATCH_MATMUL)", "" for a constant. `recorded` and `inferred` are shapes, or
    types or quantization in words; `inferred` is None where the operator's inputs do not fit together.
    """

    subgraph: str
    tensor: str
    operator: str
    recorded: Stated
    inferred: Stated
    reason: str

    def __str__(self) -> str:
        place = f"operator {self.operator}" if self.operator else "no operator"
        where = f"subgraph '{self.subgraph}', {place}"
        if self.inferred is None:
            return f"{where}: {self.reason}"
        pair = (self.recorded, self.inferred)
        recorded, inferred = (one if isinstance(one, str) else shape_text(one) for one in pair)
        comparison = f"is recorded as {recorded}, inferred as {inferred}"
        return f"{where}: tensor '{self.tensor}' {comparison}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ShapeReport(Record):
    """The outcome for a whole model of that many `tensors`.

    `shapes` has every graph input and every operator's results. A tensor of a subgraph that is entered with several
    shapes has what these have in common.
    """

    tensors: int
    disagreements: tuple[Disagreement, ...]
    shapes: dict[Tensor, Shape | None] = field(repr=False)

    _properties = ("inferred", "unknown")
    _left_out = ("shapes",)

    @property
    def unknown(self) -> int:
        """How many operators' results have no inferred shape."""
        return sum(shape is None and tensor.producer is not None for tensor, shape in self.shapes.items())

    @property
    def inferred(self) -> int:
        """How many tensors' shapes are inferred, or given: graph inputs and constants."""
        return self.tensors - self.unknown


def infer_shapes(model: Model | str | os.PathLike[str] | bytes | Source) -> list[Disagreement]:
    """Infer every tensor's shape, type and quantization, and list where the file records something else.

    `model` is a loaded model, or what `ir.load` takes. Open dimensions (-1 in a shape signature) stay open; a recorded
    size where -1 is inferred is not a disagreement.
    """
    return list(shape_report(model if isinstance(model, Model) else load(model)).disagreements)


def shape_report(model: Model, *, resize: Mapping[Tensor, Sequence[int]] | None = None) -> ShapeReport:
    """Infer every tensor of the model, which is not changed.

    `resize` has shapes of graph inputs to use in place of the recorded ones, as if the caller resized them.
    """
    given = {tensor: as_shape(shape, f"tensor '{tensor.name}'") for tensor, shape in (resize or {}).items()}
    walk, graphs = _Walk(model), model.subgraphs
    for graph, tensor in ((one, tensor) for one in graphs for tensor in one.tensors):
        if tensor.wrong_size is not None:
            walk.report(graph, "", tensor, tensor.shape, None, f"tensor '{tensor.name}': {tensor.wrong_size}")
    # What operators enter is walked with their shapes; then with its own what was not entered after all.
    entered = called_by((operator for graph in graphs for operator in graph), graphs)
    for graph in sorted(graphs, key=entered.__contains__):
        if graph not in walk.walked:
            walk.walk(graph, {one: Fact(given.get(one, recorded_shape(one))) for one in graph.inputs})
    count = sum(len(graph.tensors) for graph in graphs)
    return ShapeReport(count, tuple(walk.disagreements.values()), walk.shapes)


Enter: TypeAlias = Callable[[int, Sequence[Fact]], Sequence[Fact] | None]
"""Infers the outputs of a subgraph (by index) from what is known of its inputs; None where it cannot."""


def infer_operator(op: Operator, inputs: Sequence[Fact], enter: Enter = lambda *_: None) -> Sequence[Fact]:
    """What is known of an operator's results, from what is known of its inputs; of unknown operators nothing.

    Of the operator only name, options, and the names and types of its tensors are read, not their shapes. An input that
    is left out is `Fact(None)`. `enter` infers the subgraph that a composite or call runs.

    Raises:
        ShapeError: the inputs cannot go together; names tensors, axes and sizes.
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
    """What is inferred of an operator's results, or why its inputs cannot go together; whether one has an open size."""

    operator: Operator
    results: Sequence[Fact]
    error: str
    is_open: bool


def _steps(graph: Iterable[Operator], facts: dict[Tensor, Fact], enter: Enter) -> Iterator[_Step]:
    """Infer each operator in turn; `facts` has the graph's inputs and takes up everything else."""
    for operator in graph:
        inputs = [facts[tensor] if tensor in facts else recorded_fact(tensor) for tensor in operator.inputs]
        is_open = any(fact.shape and OPEN in fact.shape for fact in inputs)
        try:
            step = _Step(operator, infer_operator(operator, inputs, enter), "", is_open)
        except ShapeError as error:
            step = _Step(operator, [Fact(None)] * len(operator.outputs), str(error), is_open)
        for tensor, (shape, value) in zip(operator.outputs, step.results, strict=True):
            # A size that is not inferred is the recorded one, unless it may follow from an open one.
            recorded, known = recorded_shape(tensor), shape
            if recorded is not None and shape is None:
                known = (OPEN,) * len(recorded) if is_open and not tensor.is_dynamic else recorded
            elif recorded and shape and not is_open and len(shape) == len(recorded):
                sizes = zip(shape, recorded, strict=True)
                known = tuple(there if size < 0 else size for size, there in sizes)
            facts[tensor] = Fact(known, value)
        yield step


_MOST_ENTRIES = 64
"""Ways to enter one subgraph: a file may call each from two places of the one before, with other values each time."""


class _Walk:
    """Goes through subgraphs in execution order; those that operators enter are walked with their callers' shapes."""

    def __init__(self, model: Model) -> None:
        self.shapes: dict[Tensor, Shape | None] = {}
        self.disagreements: dict[object, Disagreement] = {}
        self.walked: set[Subgraph] = set()
        self._model = model
        self._entered: dict[object, Sequence[Fact] | None] = {}
        self._entries: Counter[int] = Counter()

    def report(
        self, graph: Subgraph, operator: str, tensor: Tensor, recorded: Stated, inferred: Stated, reason: str
    ) -> None:
        """Report a disagreement; of a tensor in a subgraph that is entered twice, once."""
        key = (tensor, operator, inferred if isinstance(inferred, str) else None)
        name = self._model.signature_name(graph)
        found = Disagreement(name, tensor.name, operator, recorded, inferred, reason)
        self.disagreements.setdefault(key, found)

    def walk(self, graph: Subgraph, facts: dict[Tensor, Fact], place: str | None = None) -> list[Fact]:
        """Infer every operator of the subgraph, whose inputs are in `facts`; what is known of its outputs.

        Inputs of other shapes than recorded are reported at `place`, if one is given.
        """
        self.walked.add(graph)
        wrong = {tensor for tensor in facts if self._take(graph, place, tensor, facts[tensor].shape, "")}
        for position, (operator, results, error, _) in enumerate(_steps(graph, facts, self.enter)):
            where = f"{position} ({operator.name})"
            tensors = [t for t in (*operator.outputs, *operator.inputs) if t is not None]
            for tensor in tensors[:1] if error else ():
                self.report(graph, where, tensor, recorded_shape(tensor), None, error)
            cause = next((tensor for tensor in operator.inputs if tensor in wrong), None)
            source = "" if cause is None else f"; it follows from tensor '{cause.name}'"
            for tensor, (shape, _) in zip(operator.outputs, results, strict=True):
                if self._take(graph, where, tensor, shape, source):
                    wrong.add(tensor)
            for one in () if error else wrong_results(operator):
                self.report(graph, where, *one)
        return [facts[tensor] if tensor in facts else recorded_fact(tensor) for tensor in graph.outputs]

    def _take(
        self, graph: Subgraph, where: str | None, tensor: Tensor, shape: Shape | None, source: str
    ) -> bool:
        """Take up a shape, of several what they have in common; report it and return True where it is another."""
        known = self.shapes.get(tensor, shape)
        alike = shape is not None and known is not None and len(shape) == len(known)
        common = (a if a == b else OPEN for a, b in zip(shape or (), known or (), strict=False))
        self.shapes[tensor] = tuple(common) if alike else None
        recorded = recorded_shape(tensor)
        reason = None if where is None else misfit(shape, recorded)
        if reason is not None and where is not None:
            reason = reason + source if where else f"an operator enters with {shape_text(shape)}"
            self.report(graph, where, tensor, recorded, shape, reason)
        return reason is not None

    def enter(self, index: int, inputs: Sequence[Fact]) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs; once for equal inputs, and after many different ones not at all."""
        graph = self._model.subgraphs[index]
        if len(inputs) != len(graph.inputs):
            raise ShapeError(f"it enters subgraph '{graph.name}' with {len(inputs)} inputs")
        values = (None if value is None else (value.dtype.str, repr(value.tolist())) for _, value in inputs)
        key = (index, tuple(fact.shape for fact in inputs), *values)
        if key not in self._entered and self._entries[index] < _MOST_ENTRIES:
            self._entries[index] += 1
            self._entered[key] = None  # where it enters itself
            pairs = zip(graph.inputs, inputs, strict=True)
            facts = {t: Fact(recorded_shape(t) if shape is None else shape, v) for t, (shape, v) in pairs}
            self._entered[key] = self.walk(graph, facts, "")
        return self._entered.get(key)


def check_operators(operators: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Whether the shapes recorded of operators' results are inferred from their inputs; `subgraphs`: the model's.

    Subgraphs that the operators call give what they record, for the inputs that they record.

    Raises:
        RefusedError: an inferred shape is not the recorded one.
    """

    def enter(index: int, inputs: Sequence[Fact]) -> list[Fact]:
        body = subgraphs[index]
        given, expected = [fact.shape for fact in inputs], [recorded_shape(t) for t in body.inputs]
        if given != expected:
            raise ShapeError(f"subgraph '{body.name}' takes {expected}, and is called with {given}")
        return [Fact(recorded_shape(tensor)) for tensor in body.outputs]

    steps = (step for operator in operators for step in _steps([operator], {}, enter))
    for operator, results, error, _ in steps:
        for tensor, (shape, _) in zip(operator.outputs, results, strict=True):
            recorded = recorded_shape(tensor)
            if shape is None or shape != recorded:
                text = f"inferred shape {shape_text(shape)}, recorded {shape_text(recorded)}"
                raise RefusedError(f"{operator.name} '{tensor.name}': {error or text}")


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, operators whose recorded shapes do not fit have a `shape_error` and the name UNTRUSTED.

    A file may record another size than the inputs give, or one where they leave it open. LiteRT goes by the inputs.
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
                operator.shape_error = f"'{tensor.name}' has a size on record, its operands an open one"
    for graph in checked:
        graph.is_checked = True
    try:
        yield
    finally:
        for step in steps:
            step.operator.shape_error = ""
        for graph in checked:
            graph.is_checked = False
