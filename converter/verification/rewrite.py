"""One rewrite of one region: what it replaces, how it is checked, and how it is committed to the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_opt.attention.factors import Factored
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.walk import (
    is_pure,
    makers_of,
    needed_for,
    placements,
    producers,
    read_outside,
    reads,
)

if TYPE_CHECKING:
    from edge_opt.verification.check import Check


@dataclass(frozen=True, slots=True)
class MaskInput:
    """The region's mask input `[.., T, S]`, and its values for masked and open entries."""

    tensor: Tensor
    masked: float
    opened: float


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The replacement of a subgraph's `old` operators by `new` ones, both in execution order.

    Operators in both lists stay. `check`: when it is accepted; None means the pass's check. `note`: what a user should
    know about the converted site. `mask`: the region's mask input, if any. `parts`: a result, and the places in it of
    heads or tiles that the new region computes separately; if two are equal, a run shows nothing. `chosen`: new tensors
    whose quantization parameters the pass chose.
    """

    model: Model
    subgraph: Subgraph
    old: tuple[Operator, ...]
    new: tuple[Operator, ...]
    check: Check | None = None
    note: str = ""
    mask: MaskInput | None = None
    parts: tuple[Tensor, Factored] | None = None
    chosen: frozenset[Tensor] = frozenset()

    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the old region reads from outside, without constants, in the order of reading."""
        return tuple(tensor for tensor in reads(self.old) if not tensor.is_constant)

    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors of the old region that operators outside or the graph's caller read."""
        inside = set(self.old)
        made = makers_of(self.old)
        return tuple(tensor for tensor in made if read_outside(self.subgraph, tensor, inside))

    def changed(self) -> tuple[Tensor, ...]:
        """Outputs that the new region computes with other operators; only these can show a mistake."""
        changed: list[Tensor] = []
        for tensor in self.outputs():
            before = needed_for([tensor], self.old)
            after = needed_for([tensor], self.new)
            if set(before) != set(after):
                changed.append(tensor)
        return tuple(changed)

    def added(self) -> tuple[Operator, ...]:
        """The new operators that are not old ones."""
        kept = set(self.old)
        return tuple(operator for operator in self.new if operator not in kept)

    def removed(self) -> tuple[Operator, ...]:
        """The old operators that do not stay."""
        staying = set(self.new)
        return tuple(operator for operator in self.old if operator not in staying)

    def order(self) -> dict[Operator, Operator | None]:
        """Where operators go once the rewrite is part of the graph (see `edge_opt.ir.walk.placements`).

        Raises:
            RefusedError: there is no such order, or it would reorder side effects.
        """
        return placements(self.subgraph, self.old, self.new, self.model.subgraphs)

    def commit(self) -> list[Operator]:
        """Commit the new region to the graph; return the old operators that stay for now.

        These may be dead once the last rewrite that shares them is done.

        Raises:
            RefusedError: the operators have no order; the graph is unchanged.
        """
        graph = self.subgraph
        graph.replace(self.removed(), self.order())
        for operator in self.added():
            for tensor in operator.tensors:
                if not graph.lists(tensor):
                    graph.add_tensor(tensor)
        return [operator for operator in self.old if operator.subgraph is graph]


def remove_dead(
    graph: Subgraph, candidates: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()
) -> None:
    """Remove `candidates` whose results are no longer read, and operators that only they needed.

    Operators with side effects stay. `subgraphs` are the model's; without them, every call counts as a side effect.
    """
    pending = list(candidates)
    while pending:
        operator = pending.pop()
        is_read = any(tensor.consumers or graph.is_output(tensor) for tensor in operator.outputs)
        if operator.subgraph is graph and not is_read and is_pure(operator, subgraphs):
            graph.remove(operator)
            pending += producers(operator)
