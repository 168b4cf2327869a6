"""What a derivation gives: the shapes, and where the file says another thing. It derives nothing."""

from dataclasses import dataclass, field
from typing import TypeAlias

from edge_opt.ir import Tensor
from edge_opt.output.record import Record
from edge_opt.shapes.dimension import Shape, shape_text

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
