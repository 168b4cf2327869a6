"""What a derivation found: counts, disagreements and the shapes themselves. Derives nothing."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from edge_opt.ir import Operator, Tensor
from edge_opt.shapes.call import Array
from edge_opt.shapes.dimension import DYNAMIC, Shape, shape_text

Stated: TypeAlias = Shape | str | None
"""A shape, a type or quantization parameters in words, or None where there are none."""


class WrongResult(NamedTuple):
    """Output `output` of an operator, of which the file says another thing than the kernel does, both in words."""

    output: int
    expected: str
    recorded: str
    reason: str


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
        return {
            "subgraph": self.subgraph,
            "tensor": self.tensor,
            "operator": self.operator,
            "recorded": _plain(self.recorded),
            "derived": _plain(self.derived),
            "reason": self.reason,
        }


def _text(stated: Stated) -> str:
    return stated if isinstance(stated, str) else shape_text(stated)


def _plain(stated: Stated) -> list[int] | str | None:
    if stated is None or isinstance(stated, str):
        return stated
    return [DYNAMIC if dim < 0 else int(dim) for dim in stated]


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """The outcome for a whole model: `derived` tensors have a derived or given shape, `unknown` ones have not.

    `values` are the small numbers that follow from shapes, `refused` the operators whose inputs cannot go together.
    """

    tensors: int
    unknown: int
    disagreements: tuple[Disagreement, ...]
    shapes: dict[Tensor, Shape | None] = field(repr=False)
    values: dict[Tensor, Array] = field(default_factory=dict, repr=False)
    refused: tuple[Operator, ...] = ()

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
