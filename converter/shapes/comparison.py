"""Compares what is derived with what the file records, and keeps count. It derives nothing."""

from typing import TypeAlias

from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.shapes.broadcast import misfit
from edge_opt.shapes.call import Array, recorded_shape
from edge_opt.shapes.dimension import Shape
from edge_opt.shapes.dtypes import wrong_types
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.quantization import wrong_quantization
from edge_opt.shapes.report import Disagreement, ShapeReport, Stated

Place: TypeAlias = tuple[Subgraph, int, Operator]


class Findings:
    """Takes up what a walk finds; a tensor of a subgraph that is entered twice is reported once.

    `shapes` are those that are derived or given, `values` the numbers that follow from shapes.
    """

    def __init__(self, model: Model, *, placeholders: bool) -> None:
        self._model = model
        self._placeholders = placeholders
        self._names = {id(subgraph): model.signature_name(subgraph) for subgraph in model.subgraphs}
        self._states_ranks = any(
            _states_rank(tensor) for graph in model.subgraphs for tensor in graph.tensors
        )
        self.shapes: dict[Tensor, Shape | None] = {}
        self.values: dict[Tensor, Array] = {}
        self._refused: list[Operator] = []
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

    def unknown(self, tensor: Tensor) -> Shape | None:
        """Take up a result that cannot be derived; return what its readers may assume."""
        self._unknown.add(tensor)
        self.shapes[tensor] = None
        return self.recorded(tensor)

    def compared(self, place: Place, tensor: Tensor, shape: Shape | None) -> Shape | None:
        """Compare a derived shape; return what the tensor's readers may assume."""
        if shape is None:
            return self.unknown(tensor)
        self._unknown.discard(tensor)
        self.shapes[tensor] = shape
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
        self._refused.append(op)
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
        found = tuple(self._reported.values())
        refused = tuple(self._refused)
        return ShapeReport(count, len(self._unknown), found, self.shapes, self.values, refused)


def _states_rank(tensor: Tensor) -> bool:
    return tensor.table is not None and bool(tensor.table.get("has_rank"))
