"""Infers every tensor of a model from its graph inputs and constants, and compares with what the file records.

It never asks the interpreter, and never changes the model; `doubted` marks operators, and takes the marks back.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from edge_opt.base.record import Record
from edge_opt.ir import Model, Operator, Subgraph, Tensor, load
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.refusal import RefusedError
from edge_opt.schema.data import Source
from edge_opt.shapes.dimension import Shape, ShapeError, as_shape, common_shape, misfit, shape_text
from edge_opt.shapes.folding import fold
from edge_opt.shapes.results import wrong_results
from edge_opt.shapes.rules import Call, Enter, Fact, apply, recorded_shape, small_value

Stated: TypeAlias = Shape | str | None
"""A shape, a type or quantization parameters in words, or None where there are none."""


@dataclass(frozen=True, slots=True)
class Disagreement(Record):
    """One tensor for which the file records something else than its operator gives.

    `operator` is its index and name, "34 (BATCH_MATMUL)", "" for a constant. `recorded` and `inferred` are shapes, or
    types or quantization in words; `inferred` is None where the operator's inputs cannot go together at all.
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

    `shapes` has every tensor that an operator, a graph input or a constant defines. A tensor of a subgraph that is
    entered with several shapes has what these have in common.
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
    walk = _Walk(model)
    for subgraph in model.subgraphs:
        for tensor in subgraph.tensors:
            if tensor.wrong_size is not None:
                walk.report(
                    subgraph, "", tensor, tensor.shape, None, f"tensor '{tensor.name}': {tensor.wrong_size}"
                )
    # What operators enter is walked with their shapes; then with its own what was not entered after all.
    for index in sorted(range(len(model.subgraphs)), key=called_subgraphs(model).__contains__):
        if index not in walk.walked:
            inputs = model.subgraphs[index].inputs
            walk.walk(index, {tensor: Fact(given.get(tensor, walk.recorded(tensor))) for tensor in inputs})
    count = sum(len(subgraph.tensors) for subgraph in model.subgraphs)
    return ShapeReport(count, tuple(walk.disagreements.values()), walk.shapes)


def called_subgraphs(model: Model) -> set[int]:
    """The subgraphs that operators enter or refer to."""
    operators = (op for subgraph in model.subgraphs for op in subgraph.operators)
    return {index for op in operators for index in subgraph_indices(op.options)}


def infer_facts(op: Operator, inputs: Sequence[Fact], enter: Enter = lambda *_: None) -> list[Fact]:
    """What is known of an operator's results, from what is known of its inputs; of unknown operators nothing.

    Raises:
        ShapeError: the inputs cannot go together; the sentence has no place yet.
    """
    call = Call(op, [fact.shape for fact in inputs], lambda index: inputs[index].value, enter)
    shapes = apply(call)
    return [Fact(*pair) for pair in zip(shapes, fold(call, shapes), strict=True)]


def recorded_facts(op: Operator) -> list[Fact]:
    """What the file says of an operator's inputs: recorded shapes, and the values of small constants."""
    return [Fact(None) if t is None else Fact(recorded_shape(t), small_value(t)) for t in op.inputs]


_DEEPEST = 64
"""Subgraphs inside subgraphs: more than the reader lets through, fewer than a Python stack holds."""

_MOST_ENTRIES = 64
"""Ways to enter one subgraph: a file may call each from two places of the one before, with other values each time."""


class _Walk:
    """Goes through subgraphs in execution order; those that operators enter are walked with their callers' shapes."""

    def __init__(self, model: Model) -> None:
        self.shapes: dict[Tensor, Shape | None] = {}
        self.disagreements: dict[object, Disagreement] = {}
        self.walked: set[int] = set()
        self._model = model
        # Older writers state no ranks at all: where no tensor of the model does, a shape without sizes is a scalar.
        tensors = (tensor for subgraph in model.subgraphs for tensor in subgraph.tensors)
        self._states_ranks = any(t.table is not None and t.table.get("has_rank") for t in tensors)
        self._entered: dict[object, Sequence[Fact]] = {}
        self._entries: Counter[int] = Counter()
        self._depth = 0
        self._wrong: set[Tensor] = set()

    def recorded(self, tensor: Tensor) -> Shape | None:
        """The shape that the file records, None for an unranked tensor."""
        shape = recorded_shape(tensor)
        return () if shape is None and not self._states_ranks else shape

    def report(
        self,
        subgraph: Subgraph,
        operator: str,
        tensor: Tensor,
        recorded: Stated,
        inferred: Stated,
        reason: str,
    ) -> None:
        """Report a disagreement; of a tensor in a subgraph that is entered twice, once."""
        key = (tensor, operator, inferred if isinstance(inferred, str) else None)
        name = self._model.signature_name(subgraph)
        found = Disagreement(name, tensor.name, operator, recorded, inferred, reason)
        self.disagreements.setdefault(key, found)

    def walk(self, index: int, facts: dict[Tensor, Fact]) -> list[Fact]:
        """Infer every operator of the subgraph; `facts` has its inputs and takes up everything else."""
        subgraph = self._model.subgraphs[index]
        self.walked.add(index)
        self._depth += 1
        for tensor, fact in facts.items():
            self._take(tensor, fact.shape)
        for position, op in enumerate(subgraph.operators):
            inputs = [self._fact(tensor, facts) for tensor in op.inputs]
            for tensor, (shape, value) in zip(
                op.outputs, self._results(subgraph, position, op, inputs), strict=True
            ):
                self._take(tensor, shape)
                facts[tensor] = Fact(self.recorded(tensor) if shape is None else shape, value)
        self._depth -= 1
        return [self._fact(tensor, facts) for tensor in subgraph.outputs]

    def _take(self, tensor: Tensor, shape: Shape | None) -> None:
        """Take up a shape; in a subgraph that is entered with several, what they have in common."""
        self.shapes[tensor] = common_shape(self.shapes.get(tensor, shape), shape)

    def _fact(self, tensor: Tensor | None, facts: dict[Tensor, Fact]) -> Fact:
        """What is known of an operator's input; a tensor that no operator defines is as the file says."""
        if tensor is None:
            return Fact(None)
        if tensor not in facts:
            shape = tensor.shape if tensor.is_constant else self.recorded(tensor)
            facts[tensor] = Fact(shape, small_value(tensor))
        return facts[tensor]

    def _results(self, subgraph: Subgraph, position: int, op: Operator, inputs: Sequence[Fact]) -> list[Fact]:
        """What is known of an operator's results; disagreements with the file are reported."""
        where = f"{position} ({op.name})"
        caller = f"operator {where} of subgraph '{self._model.signature_name(subgraph)}'"
        try:
            facts = infer_facts(op, inputs, partial(self.enter, caller))
        except ShapeError as error:
            tensor = next((t for t in (*op.outputs, *op.inputs) if t is not None), None)
            if tensor is not None:
                self.report(subgraph, where, tensor, self.recorded(tensor), None, error.detail)
            return [Fact(None)] * len(op.outputs)
        for tensor, fact in zip(op.outputs, facts, strict=True):
            reason = misfit(fact.shape, self.recorded(tensor))
            if reason is not None:
                cause = next((tensor for tensor in op.inputs if tensor in self._wrong), None)
                reason += "" if cause is None else f"; it follows from tensor '{cause.name}'"
                self.report(subgraph, where, tensor, self.recorded(tensor), fact.shape, reason)
                self._wrong.add(tensor)
        for wrong in wrong_results(op):
            self.report(subgraph, where, wrong.tensor, wrong.recorded, wrong.expected, wrong.reason)
        return facts

    def enter(self, caller: str, index: int, inputs: Sequence[Fact]) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs; once for equal inputs, and after many different ones not at all."""
        if not 0 <= index < len(self._model.subgraphs):
            raise ShapeError(f"it enters subgraph {index}: the model has {len(self._model.subgraphs)}")
        subgraph = self._model.subgraphs[index]
        if len(inputs) != len(subgraph.inputs):
            text = f"it gives {len(inputs)} inputs to subgraph '{subgraph.name}'"
            raise ShapeError(f"{text}: expected {len(subgraph.inputs)}")
        if self._depth >= _DEEPEST:
            raise ShapeError(
                f"it enters subgraph '{subgraph.name}', which enters itself, or is nested too deep"
            )
        values = (None if value is None else (value.dtype.str, repr(value.tolist())) for _, value in inputs)
        key = (index, tuple(fact.shape for fact in inputs), *values)
        if key not in self._entered and self._entries[index] < _MOST_ENTRIES:
            self._entries[index] += 1
            pairs = zip(subgraph.inputs, inputs, strict=True)
            facts = {tensor: self._entering(caller, subgraph, tensor, fact) for tensor, fact in pairs}
            self._entered[key] = self.walk(index, facts)
        return self._entered.get(key)

    def _entering(self, caller: str, subgraph: Subgraph, tensor: Tensor, fact: Fact) -> Fact:
        """What is known of a subgraph's input; that a caller gives another shape is reported."""
        recorded = self.recorded(tensor)
        if misfit(fact.shape, recorded) is not None:
            reason = f"{caller} enters with {shape_text(fact.shape)}"
            self.report(subgraph, "", tensor, recorded, fact.shape, reason)
            self._wrong.add(tensor)
        return Fact(recorded if fact.shape is None else fact.shape, fact.value)


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

    for op in operators:
        try:
            facts = infer_facts(op, recorded_facts(op), enter)
        except ShapeError as error:
            raise RefusedError(f"{op.name}: {error.detail}") from error
        for (shape, _), tensor in zip(facts, op.outputs, strict=True):
            recorded = recorded_shape(tensor)
            if shape is None or shape != recorded:
                texts = ["unknown" if sizes is None else str(list(sizes)) for sizes in (shape, recorded)]
                raise RefusedError(
                    f"{op.name} '{tensor.name}': inferred shape {texts[0]}, recorded {texts[1]}"
                )


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, operators whose recorded shapes do not fit have a `shape_error` and the name UNTRUSTED."""
    checked = [graph for graph in graphs if not graph.is_checked]
    given: dict[Tensor, Shape] = {}
    errors = [(operator, _shape_error(operator, given)) for graph in checked for operator in graph.operators]
    for operator, error in errors:
        operator.shape_error = error
    for graph in checked:
        graph.is_checked = True
    try:
        yield
    finally:
        for operator, _ in errors:
            operator.shape_error = ""
        for graph in checked:
            graph.is_checked = False


def _shape_error(operator: Operator, given: dict[Tensor, Shape]) -> str:
    """Why the recorded shapes of an operator tell nothing; empty where they do.

    A file may record another size than the inputs give, or one where they leave it open. LiteRT goes by the inputs:
    `given` gets what they give.
    """
    recorded = zip(operator.inputs, recorded_facts(operator), strict=True)
    inputs = [fact if t is None else fact._replace(shape=given.get(t, fact.shape)) for t, fact in recorded]
    try:
        shapes = [fact.shape for fact in infer_facts(operator, inputs)]
    except ShapeError as error:
        return error.detail
    results = list(zip(operator.outputs, shapes, strict=True))
    for tensor, shape in results:
        reason = misfit(shape, recorded_shape(tensor))
        if reason is not None:
            given |= {tensor: shape for tensor, shape in results if shape is not None}
            return f"{reason} of '{tensor.name}'"
        if 0 in tensor.shape:
            return f"'{tensor.name}' is empty"
    if not any(fact.shape and -1 in fact.shape for fact in inputs):
        return ""
    # Of what is not inferred, any size may be open.
    sizes = [(tensor, (-1,) * len(tensor.shape) if shape is None else shape) for tensor, shape in results]
    lies = {tensor: shape for tensor, shape in sizes if -1 in shape and not tensor.is_dynamic}
    given |= lies
    return f"'{next(iter(lies)).name}' has a size on record, its operands an open one" if lies else ""
