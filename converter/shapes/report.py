"""Compares what is derived with what the file records, and keeps count. It derives nothing."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.shapes.broadcast import misfit
from edge_opt.shapes.call import recorded_shape
from edge_opt.shapes.control_flow import common_shape
from edge_opt.shapes.dimension import DYNAMIC, Shape, ShapeError, shape_text
from edge_opt.shapes.results import wrong_quantization, wrong_types

Stated: TypeAlias = Shape | str | None
"""A shape, a type or quantization parameters in words, or None where there are none."""


@dataclass(frozen=True, slots=True)
class Disagreement:
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
        where = f"subgraph '{self.subgraph}', " + (
            f"operator {self.operator}" if self.operator else "no operator"
        )
        if self.derived is None:
            return f"{where}: {self.reason}"
        return (
            f"{where}: tensor '{self.tensor}' is recorded as {_text(self.recorded)}, derived as "
            f"{_text(self.derived)}: {self.reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The disagreement as JSON has it; a dynamic dimension is -1."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _text(stated: Stated) -> str:
    return stated if isinstance(stated, str) else shape_text(stated)


def _plain(stated: Stated) -> list[int] | str | None:
    if stated is None or isinstance(stated, str):
        return stated
    return [DYNAMIC if dim < 0 else int(dim) for dim in stated]


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """The outcome for a whole model: `derived` tensors have a derived or given shape, `unknown` ones have not."""

    tensors: int
    unknown: int
    disagreements: tuple[Disagreement, ...]
    shapes: dict[Tensor, Shape | None] = field(repr=False)

    @property
    def derived(self) -> int:
        """How many tensors' shapes are derived, or given: graph inputs and constants."""
        return self.tensors - self.unknown

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "tensors": self.tensors,
            "derived": self.derived,
            "unknown": self.unknown,
            "disagreements": [disagreement.to_dict() for disagreement in self.disagreements],
        }


Place: TypeAlias = tuple[Subgraph, int, Operator]


class Findings:
    """Takes up what a walk finds; a tensor of a subgraph that is entered twice is reported once.

    `shapes` are those that are derived or given.
    """

    def __init__(self, model: Model, *, placeholders: bool) -> None:
        self._model = model
        self._placeholders = placeholders
        self._names = {id(subgraph): model.signature_name(subgraph) for subgraph in model.subgraphs}
        self._states_ranks = any(
            tensor.table is not None and tensor.table.get("has_rank")
            for graph in model.subgraphs
            for tensor in graph.tensors
        )
        self.shapes: dict[Tensor, Shape | None] = {}
        self._reported: dict[tuple[int, str, str], Disagreement] = {}
        self._wrong: set[Tensor] = set()
        self._unknown: set[Tensor] = set()
        self._typed: set[Operator] = set()

    def recorded(self, tensor: Tensor) -> Shape | None:
        """The shape that the file records, None for an unranked tensor.

        Older writers state no ranks at all: where no tensor of the model does, a shape without sizes is a scalar.
        """
        if self._placeholders:
            return tensor.shape
        shape = recorded_shape(tensor)
        return () if shape is None and not self._states_ranks else shape

    def found(self, tensor: Tensor, shape: Shape | None) -> None:
        """Take up a shape; in a subgraph that is entered with several, what they have in common."""
        self.shapes[tensor] = common_shape(self.shapes.get(tensor, shape), shape)

    def unknown(self, tensor: Tensor) -> Shape | None:
        """Take up a result that cannot be derived; return what its readers may assume."""
        self._unknown.add(tensor)
        self.found(tensor, None)
        return self.recorded(tensor)

    def compared(self, place: Place, tensor: Tensor, shape: Shape | None) -> Shape | None:
        """Compare a derived shape; return what the tensor's readers may assume."""
        if shape is None:
            return self.unknown(tensor)
        self._unknown.discard(tensor)
        self.found(tensor, shape)
        recorded = self.recorded(tensor)
        reason = None if recorded is None else misfit(shape, recorded, allow_refinement=True)
        if reason is not None and not (self._placeholders and tensor.is_dynamic):
            self._report(place, tensor, (recorded, shape), reason + self._cause(place[2]))
            self._wrong.add(tensor)
        return shape

    def _cause(self, op: Operator) -> str:
        cause = next((tensor for tensor in op.inputs if tensor in self._wrong), None)
        return "" if cause is None else f"; it follows from tensor '{cause.name}'"

    def refused(self, place: Place, error: ShapeError) -> None:
        """Take up an operator whose inputs cannot go together."""
        op = place[2]
        tensor = next((t for t in (*op.outputs, *op.inputs) if t is not None), None)
        if tensor is not None:
            self._report(place, tensor, (self.recorded(tensor), None), error.detail)

    def typed(self, place: Place) -> None:
        """Compare types and quantization of an operator's results, once however often it is entered."""
        op = place[2]
        if op in self._typed:
            return
        self._typed.add(op)
        for wrong in (*wrong_types(op), *wrong_quantization(op)):
            self._report(place, op.outputs[wrong.output], (wrong.recorded, wrong.expected), wrong.reason)

    def constant(self, subgraph: Subgraph, tensor: Tensor, reason: str) -> None:
        """Take up a constant whose bytes do not fill its shape."""
        self._add(subgraph, "", tensor, (tensor.shape, None), f"tensor '{tensor.name}': {reason}")

    def entered(self, subgraph: Subgraph, tensor: Tensor, stated: tuple[Stated, Stated], reason: str) -> None:
        """Take up a subgraph's input that a caller gives another shape."""
        self._add(subgraph, "", tensor, stated, reason)
        self._wrong.add(tensor)

    def _report(self, place: Place, tensor: Tensor, stated: tuple[Stated, Stated], reason: str) -> None:
        subgraph, position, op = place
        self._add(subgraph, f"{position} ({op.name})", tensor, stated, reason)

    def _add(
        self, subgraph: Subgraph, operator: str, tensor: Tensor, stated: tuple[Stated, Stated], reason: str
    ) -> None:
        kind = "text" if isinstance(stated[1], str) else "shape"
        key = (id(tensor), operator, f"{kind}{stated[1] if kind == 'text' else ''}")
        if key not in self._reported:
            name = self._names[id(subgraph)]
            self._reported[key] = Disagreement(name, tensor.name, operator, *stated, reason)

    def report(self) -> ShapeReport:
        """The outcome."""
        count = sum(len(subgraph.tensors) for subgraph in self._model.subgraphs)
        return ShapeReport(count, len(self._unknown), tuple(self._reported.values()), self.shapes)
