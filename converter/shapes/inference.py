"""Derives every tensor of a model from its graph inputs and constants, and compares with what the file records.

It never asks the interpreter, and never changes the model; `doubted` marks operators, and takes the marks back.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from edge_opt.base.record import Record
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.operators import subgraph_indices
from edge_opt.shapes.control_flow import common_shape
from edge_opt.shapes.dimension import Shape, ShapeError, as_shape, misfit, shape_text
from edge_opt.shapes.folding import fold
from edge_opt.shapes.results import wrong_quantization, wrong_types
from edge_opt.shapes.rules import (
    RULES,
    Array,
    Call,
    Fact,
    apply,
    constants_of,
    infer_operator,
    recorded_shape,
    small_value,
)

Stated: TypeAlias = Shape | str | None
"""A shape, a type or quantization parameters in words, or None where there are none."""


@dataclass(frozen=True, slots=True)
class Disagreement(Record):
    """One tensor of which the file says another thing than its operator gives.

    `operator` is its index and name, "34 (BATCH_MATMUL)", "" for a constant. `recorded` and `derived` are shapes, or
    types or quantization in words; `derived` is None where the operator's inputs cannot go together at all.
    """

    subgraph: str
    tensor: str
    operator: str
    recorded: Stated
    derived: Stated
    reason: str

    def __str__(self) -> str:
        place = f"operator {self.operator}" if self.operator else "no operator"
        where = f"subgraph '{self.subgraph}', {place}"
        if self.derived is None:
            return f"{where}: {self.reason}"
        texts = (
            text if isinstance(text, str) else shape_text(text) for text in (self.recorded, self.derived)
        )
        comparison = "is recorded as {}, derived as {}".format(*texts)
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

    _properties = ("derived", "unknown")
    _left_out = ("shapes",)

    @property
    def unknown(self) -> int:
        """How many operators' results have no derived shape."""
        return sum(shape is None and tensor.producer is not None for tensor, shape in self.shapes.items())

    @property
    def derived(self) -> int:
        """How many tensors' shapes are derived, or given: graph inputs and constants."""
        return self.tensors - self.unknown


@contextmanager
def doubted(graphs: Iterable[Subgraph]) -> Iterator[None]:
    """Within the block, such operators have a `shape_error` and the name UNTRUSTED."""
    checked = [graph for graph in graphs if not graph.is_checked]
    opened: dict[Tensor, Shape] = {}
    errors = [(operator, _shape_error(operator, opened)) for graph in checked for operator in graph.operators]
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


def _shape_error(operator: Operator, opened: dict[Tensor, Shape]) -> str:
    """Why the shapes of an operator tell nothing; empty where they do.

    A file may record another size than the inputs give, or one where they leave it open. LiteRT goes by the inputs:
    `opened` gets what they give.
    """
    shapes = [None if t is None else opened.get(t, recorded_shape(t)) for t in operator.inputs]
    try:
        derived = infer_operator(operator, shapes, constants_of(operator))
    except ShapeError as error:
        return error.detail
    for shape, output in zip(derived, operator.outputs, strict=True):
        reason = misfit(shape, recorded_shape(output), allow_refinement=True)
        if reason is not None:
            opened |= {t: s for t, s in zip(operator.outputs, derived, strict=True) if s is not None}
            return f"{reason} of '{output.name}'"
        if 0 in output.shape:
            return f"'{output.name}' is empty"
    if not any(shape and -1 in shape for shape in shapes):
        return ""
    # Of what is not derived, any size may be open.
    sizes = [(-1,) * len(t.shape) if s is None else s for t, s in zip(operator.outputs, derived, strict=True)]
    both = zip(operator.outputs, sizes, strict=True)
    lies = {tensor: shape for tensor, shape in both if -1 in shape and not tensor.is_dynamic}
    opened |= lies
    return f"'{next(iter(lies)).name}' has a size on record, its operands an open one" if lies else ""


_DEEPEST = 64
"""Subgraphs inside subgraphs: more than the reader lets through, fewer than a Python stack holds."""

_MOST_ENTRIES = 64
"""Ways to enter one subgraph: a file may call each from two places of the one before, with other values each time."""

_Place: TypeAlias = tuple[Subgraph, int, Operator]


def infer_shapes(model: Model) -> list[Disagreement]:
    """Derive every tensor's shape, type and quantization again, and list where the file says another thing.

    Dynamic dimensions (-1 in a shape signature) stay dynamic; a recorded size where -1 is derived is no disagreement.
    """
    return list(derive(model).disagreements)


def derive(model: Model, *, resize: Mapping[Tensor, Sequence[int]] | None = None) -> ShapeReport:
    """Derive every tensor of the model, which is not changed.

    `resize` has shapes of graph inputs to use in place of the recorded ones, as if the caller resized them.
    """
    given = {tensor: as_shape(shape, f"tensor '{tensor.name}'") for tensor, shape in (resize or {}).items()}
    return _Derivation(model, given).run()


class _Derivation:
    """One walk over a model; subgraphs that operators enter are walked with their callers' shapes."""

    def __init__(self, model: Model, resize: Mapping[Tensor, Shape | None]) -> None:
        self._model = model
        self._resize = resize
        self._names = {subgraph: model.signature_name(subgraph) for subgraph in model.subgraphs}
        # Older writers state no ranks at all: where no tensor of the model does, a shape without sizes is a scalar.
        tensors = (tensor for subgraph in model.subgraphs for tensor in subgraph.tensors)
        self._states_ranks = any(t.table is not None and t.table.get("has_rank") for t in tensors)
        self._constants: dict[Tensor, Array | None] = {}
        self._entered: dict[object, Sequence[Fact]] = {}
        self._entries: Counter[int] = Counter()
        self._walked: set[int] = set()
        self._stack: list[int] = []
        self._shapes: dict[Tensor, Shape | None] = {}
        self._wrong: set[Tensor] = set()
        self._disagreements: dict[object, Disagreement] = {}

    def run(self) -> ShapeReport:
        """Walk the subgraphs that nothing enters with their recorded inputs; then what was not entered after all."""
        for subgraph in self._model.subgraphs:
            for tensor in subgraph.tensors:
                if tensor.wrong_size is not None:
                    reason = f"tensor '{tensor.name}': {tensor.wrong_size}"
                    self._report((subgraph, ""), tensor, tensor.shape, None, reason)
        indices = range(len(self._model.subgraphs))
        for index in sorted(indices, key=called_subgraphs(self._model).__contains__):
            if index not in self._walked:
                inputs = self._model.subgraphs[index].inputs
                self._walk(index, {t: Fact(self._resize.get(t, self._recorded(t))) for t in inputs})
        count = sum(len(subgraph.tensors) for subgraph in self._model.subgraphs)
        return ShapeReport(count, tuple(self._disagreements.values()), self._shapes)

    def _recorded(self, tensor: Tensor) -> Shape | None:
        """The shape that the file records, None for an unranked tensor."""
        shape = recorded_shape(tensor)
        return () if shape is None and not self._states_ranks else shape

    def _walk(self, index: int, facts: dict[Tensor, Fact]) -> list[Fact]:
        """Derive every operator of the subgraph; `facts` has its inputs and takes up everything else."""
        subgraph = self._model.subgraphs[index]
        self._walked.add(index)
        self._stack.append(index)
        for tensor, fact in facts.items():
            self._take(tensor, fact.shape)
        for position, op in enumerate(subgraph.operators):
            for tensor, fact in zip(op.outputs, self._results((subgraph, position, op), facts), strict=True):
                self._take(tensor, fact.shape)
                shape = self._recorded(tensor) if fact.shape is None else fact.shape
                facts[tensor] = Fact(shape, fact.value)
        self._stack.pop()
        return [self._fact(tensor, facts) for tensor in subgraph.outputs]

    def _take(self, tensor: Tensor, shape: Shape | None) -> None:
        """Take up a shape; in a subgraph that is entered with several, what they have in common."""
        self._shapes[tensor] = common_shape(self._shapes.get(tensor, shape), shape)

    def _fact(self, tensor: Tensor | None, facts: dict[Tensor, Fact]) -> Fact:
        """What is known of an operator's input; a tensor that no operator defines is as the file says."""
        if tensor is None:
            return Fact(None)
        if tensor not in facts:
            if tensor not in self._constants:
                self._constants[tensor] = small_value(tensor)
            shape = tensor.shape if tensor.is_constant else self._recorded(tensor)
            facts[tensor] = Fact(shape, self._constants[tensor])
        return facts[tensor]

    def _results(self, place: _Place, facts: dict[Tensor, Fact]) -> Sequence[Fact]:
        """What is known of an operator's results; disagreements with the file are reported."""
        subgraph, position, op = place
        unknown = [Fact(None)] * len(op.outputs)
        inputs = [self._fact(tensor, facts) for tensor in op.inputs]
        if op.name not in RULES:
            return unknown
        shapes_in, enter = [fact.shape for fact in inputs], partial(self._enter, place)
        call = Call(op, shapes_in, lambda index: inputs[index].value, enter)
        where = (subgraph, f"{position} ({op.name})")
        try:
            shapes = apply(call)
            values = fold(call, shapes)
        except ShapeError as error:
            tensor = next((t for t in (*op.outputs, *op.inputs) if t is not None), None)
            if tensor is not None:
                self._report(where, tensor, self._recorded(tensor), None, error.detail)
            return unknown
        for tensor, shape in zip(op.outputs, shapes, strict=True):
            recorded = self._recorded(tensor)
            reason = misfit(shape, recorded, allow_refinement=True)
            if reason is not None:
                cause = next((tensor for tensor in op.inputs if tensor in self._wrong), None)
                reason += "" if cause is None else f"; it follows from tensor '{cause.name}'"
                self._report(where, tensor, recorded, shape, reason)
                self._wrong.add(tensor)
        for wrong in (*wrong_types(op), *wrong_quantization(op)):
            self._report(where, op.outputs[wrong.output], wrong.recorded, wrong.expected, wrong.reason)
        return [Fact(*pair) for pair in zip(shapes, values, strict=True)]

    def _report(
        self, where: tuple[Subgraph, str], tensor: Tensor, recorded: Stated, derived: Stated, reason: str
    ) -> None:
        """Report a disagreement; of a tensor in a subgraph that is entered twice, once."""
        subgraph, operator = where
        key = (tensor, operator, derived if isinstance(derived, str) else None)
        name = self._names[subgraph]
        self._disagreements.setdefault(
            key, Disagreement(name, tensor.name, operator, recorded, derived, reason)
        )

    def _enter(self, place: _Place, index: int, inputs: Sequence[Fact]) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs; once for equal inputs.

        After many different ones it is entered without their values, in the end not at all: nothing is known then.
        """
        if not 0 <= index < len(self._model.subgraphs):
            raise ShapeError(f"it enters subgraph {index}: the model has {len(self._model.subgraphs)}")
        subgraph = self._model.subgraphs[index]
        if len(inputs) != len(subgraph.inputs):
            text = f"it gives {len(inputs)} inputs to subgraph '{subgraph.name}'"
            raise ShapeError(f"{text}: expected {len(subgraph.inputs)}")
        if index in self._stack or len(self._stack) >= _DEEPEST:
            text = f"it enters subgraph '{subgraph.name}', which is entered already, or nested too deep"
            raise ShapeError(text)
        if self._entries[index] >= _MOST_ENTRIES:
            inputs = [Fact(fact.shape) for fact in inputs]
        key = (index, tuple((fact.shape, _value_key(fact.value)) for fact in inputs))
        if key not in self._entered and self._entries[index] < 2 * _MOST_ENTRIES:
            self._entries[index] += 1
            pairs = zip(subgraph.inputs, inputs, strict=True)
            facts = {tensor: self._entering(place, subgraph, tensor, fact) for tensor, fact in pairs}
            self._entered[key] = self._walk(index, facts)
        return self._entered.get(key)

    def _entering(self, place: _Place, subgraph: Subgraph, tensor: Tensor, fact: Fact) -> Fact:
        """What is known of a subgraph's input; that a caller gives another shape is reported."""
        recorded, (shape, value) = self._recorded(tensor), fact
        if misfit(shape, recorded, allow_refinement=True) is not None:
            caller, position, op = place
            name = self._names[caller]
            reason = f"operator {position} ({op.name}) of subgraph '{name}' enters with {shape_text(shape)}"
            self._report((subgraph, ""), tensor, recorded, shape, reason)
            self._wrong.add(tensor)
        return Fact(recorded if shape is None else shape, value)


def _value_key(value: Array | None) -> object:
    if value is None:
        return None
    content = repr(value.tolist()) if value.dtype == object else value.tobytes()
    return (value.shape, value.dtype.str, content)


def called_subgraphs(model: Model) -> set[int]:
    """The subgraphs that operators enter or refer to."""
    operators = (op for subgraph in model.subgraphs for op in subgraph.operators)
    return {index for op in operators for index in subgraph_indices(op.options)}
