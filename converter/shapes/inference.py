"""Derives every tensor of a model from its graph inputs and constants, and compares with what the file records.

It never asks the interpreter, and never changes the model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.references import subgraph_indices
from edge_opt.shapes.broadcast import misfit
from edge_opt.shapes.call import Array, Call, Fact, small_value
from edge_opt.shapes.control_flow import Variables
from edge_opt.shapes.dimension import Shape, ShapeError, as_shape, shape_text
from edge_opt.shapes.folding import fold
from edge_opt.shapes.report import Disagreement, Findings, Place, ShapeReport
from edge_opt.shapes.rules import RULES, apply

_DEEPEST = 64
"""Subgraphs inside subgraphs: more than the reader lets through, fewer than a Python stack holds."""

_MOST_ENTRIES = 64
"""Ways to enter one subgraph: a file may call each from two places of the one before, with other values each time."""


def infer_shapes(model: Model) -> list[Disagreement]:
    """Derive every tensor's shape, type and quantization again, and list where the file says another thing.

    Dynamic dimensions (-1 in a shape signature) stay dynamic; a recorded size where -1 is derived is no disagreement.
    """
    return list(derive(model).disagreements)


def derive(
    model: Model, *, resize: Mapping[Tensor, Sequence[int]] | None = None, placeholders: bool = False
) -> ShapeReport:
    """Derive every tensor of the model.

    Args:
        model: the model; it is not changed.
        resize: shapes of graph inputs to use in place of the recorded ones, as if the caller resized them.
        placeholders: take the sizes that the file records for dynamic dimensions of graph inputs (usually 1) as
            real ones, as the interpreter does; else they are dynamic.

    Returns:
        The report; its `shapes` has every tensor that an operator, a graph input or a constant defines.
    """
    shapes = {tensor: as_shape(shape, f"tensor '{tensor.name}'") for tensor, shape in (resize or {}).items()}
    return _Derivation(model, shapes, placeholders=placeholders).run()


class _Derivation:
    """One walk over a model; subgraphs that operators enter are walked with their callers' shapes."""

    def __init__(self, model: Model, resize: Mapping[Tensor, Shape | None], *, placeholders: bool) -> None:
        self._model = model
        self._resize = resize
        self._placeholders = placeholders
        self._findings = Findings(model, placeholders=placeholders)
        self._constants: dict[Tensor, Array | None] = {}
        self._variables = Variables(model)
        self._entered: dict[object, Sequence[Fact]] = {}
        self._entries: Counter[int] = Counter()
        self._stack: list[int] = []
        self._callers: list[Place] = []

    def run(self) -> ShapeReport:
        """Walk the subgraphs that nothing enters with their recorded inputs; then what was not entered after all."""
        callees = called_subgraphs(self._model)
        walked: set[int] = set()
        for index, subgraph in enumerate(self._model.subgraphs):
            for tensor in subgraph.tensors:
                if tensor.wrong_size is not None:
                    self._findings.constant(subgraph, tensor, tensor.wrong_size)
            if index not in callees:
                self._walk_root(index, subgraph)
                walked.add(index)
        walked |= {key[0] for key in self._entered if isinstance(key, tuple)}
        for index, subgraph in enumerate(self._model.subgraphs):
            if index not in walked:
                self._walk_root(index, subgraph)
        return self._findings.report()

    def _walk_root(self, index: int, subgraph: Subgraph) -> None:
        self._stack.append(index)
        self._walk(subgraph, {tensor: Fact(self._given(tensor)) for tensor in subgraph.inputs})
        self._stack.pop()

    def _given(self, tensor: Tensor) -> Shape | None:
        """The shape of a graph input: resized, or recorded."""
        return self._resize[tensor] if tensor in self._resize else self._findings.recorded(tensor)

    def _walk(self, subgraph: Subgraph, facts: dict[Tensor, Fact]) -> list[Fact]:
        """Derive every operator of the subgraph; `facts` has its inputs and takes up everything else."""
        for tensor, fact in facts.items():
            self._findings.found(tensor, fact.shape)
        for position, op in enumerate(subgraph.operators):
            self._derive_operator(subgraph, position, op, facts)
        return [self._fact(tensor, facts) for tensor in subgraph.outputs]

    def _fact(self, tensor: Tensor, facts: dict[Tensor, Fact]) -> Fact:
        fact = facts.get(tensor)
        if fact is None:
            shape = tensor.shape if tensor.is_constant else self._findings.recorded(tensor)
            if tensor not in self._constants:
                self._constants[tensor] = small_value(tensor)
            fact = facts[tensor] = Fact(shape, self._constants[tensor])
        return fact

    def _derive_operator(
        self, subgraph: Subgraph, position: int, op: Operator, facts: dict[Tensor, Fact]
    ) -> None:
        inputs = [Fact(None) if tensor is None else self._fact(tensor, facts) for tensor in op.inputs]
        entry = RULES.get(op.name)
        place = (subgraph, position, op)
        if entry is None:
            self._take_recorded(op, facts)
            return
        self._callers.append(place)
        call = Call(
            op,
            [fact.shape for fact in inputs],
            lambda index: inputs[index].value,
            self._enter,
            lambda index: self._variables.shape(op.inputs[index]),
        )
        try:
            shapes = apply(entry, call)
            values = fold(call, shapes)
        except ShapeError as error:
            self._findings.refused(place, error)
            self._take_recorded(op, facts)
            return
        finally:
            self._callers.pop()
        for tensor, shape, value in zip(op.outputs, shapes, values, strict=True):
            facts[tensor] = Fact(self._findings.compared(place, tensor, shape), value)
        self._findings.typed(place)

    def _take_recorded(self, op: Operator, facts: dict[Tensor, Fact]) -> None:
        for tensor in op.outputs:
            facts[tensor] = Fact(self._findings.unknown(tensor))

    def _enter(
        self, index: int, shapes: Sequence[Shape | None], values: Sequence[Array | None]
    ) -> Sequence[Fact] | None:
        """Walk a subgraph with a caller's inputs; once for equal inputs.

        After many different ones it is entered without their values, in the end not at all: nothing is known then.
        """
        if not 0 <= index < len(self._model.subgraphs):
            raise ShapeError(f"it enters subgraph {index}: the model has {len(self._model.subgraphs)}")
        subgraph = self._model.subgraphs[index]
        if len(shapes) != len(subgraph.inputs):
            raise ShapeError(
                f"it gives {len(shapes)} inputs to subgraph '{subgraph.name}': expected {len(subgraph.inputs)}"
            )
        if index in self._stack or len(self._stack) >= _DEEPEST:
            raise ShapeError(
                f"it enters subgraph '{subgraph.name}', which is entered already, or nested too deep"
            )
        if self._entries[index] >= _MOST_ENTRIES:
            values = [None] * len(values)
        key = (index, tuple(shapes), tuple(map(_value_key, values)))
        known = self._entered.get(key)
        if known is None and self._entries[index] < 2 * _MOST_ENTRIES:
            self._entries[index] += 1
            known = self._entered[key] = self._walk_entered(index, subgraph, shapes, values)
        return known

    def _walk_entered(
        self, index: int, subgraph: Subgraph, shapes: Sequence[Shape | None], values: Sequence[Array | None]
    ) -> list[Fact]:
        facts: dict[Tensor, Fact] = {}
        for tensor, shape, value in zip(subgraph.inputs, shapes, values, strict=True):
            recorded = self._findings.recorded(tensor)
            facts[tensor] = Fact(recorded if shape is None else shape, value)
            if shape is not None and recorded is not None and misfit(shape, recorded, allow_refinement=True):
                caller, position, op = self._callers[-1]
                name = self._model.signature_name(caller)
                reason = (
                    f"operator {position} ({op.name}) of subgraph '{name}' enters with {shape_text(shape)}"
                )
                self._findings.entered(subgraph, tensor, (recorded, shape), reason)
        self._stack.append(index)
        outputs = self._walk(subgraph, facts)
        self._stack.pop()
        return outputs


def _value_key(value: Array | None) -> object:
    if value is None:
        return None
    if value.dtype == object:
        return (value.shape, tuple(map(repr, value.ravel().tolist())))
    return (value.shape, value.dtype.str, value.tobytes())


def called_subgraphs(model: Model) -> set[int]:
    """The subgraphs that operators enter or refer to."""
    return {
        index
        for subgraph in model.subgraphs
        for op in subgraph.operators
        for index in subgraph_indices(op.options)
    }
