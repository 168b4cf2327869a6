"""One rewrite of one region: what it replaces and what it demands, and how it becomes part of the graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_opt.attention.factors import Factored
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.walk import is_pure, read_outside, reads, replaced


@dataclass(frozen=True, slots=True)
class Demand:
    """How equal the new region must be to the old one, on random inputs and both kernel sets.

    `bitwise`: the same bits. `relative`: `|a - b| <= tolerance * max|a|` on rows that are not masked everywhere, with
    the maximum of the whole tensor. `steps`: integers at most `tolerance` quantization steps apart. The same holds on
    every kind of extreme inputs (`edge_opt.runtime.extremes.KINDS`) but the `spared` ones, on which both may rightly
    differ; `relative` says nothing of any, because a softmax makes a large difference of a small one between large
    logits. `absolute`: `|a - b| <= tolerance`, where the new region is held to the rewrite's `reference` in float.
    """

    kind: str = "bitwise"
    tolerance: float = 0.0
    spared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kind if self.kind == "bitwise" else f"{self.kind} {self.tolerance:g}"


@dataclass(frozen=True, slots=True)
class MaskInput:
    """The region's input that is a mask `[.., T, S]`, and what masked and open entries are in it.

    `exact`: also rows that are masked everywhere must be what they were.
    """

    tensor: Tensor
    masked: float
    opened: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """What a new region is held to where the old one is wrong itself: `operators` make `result` (float32) of its input.

    The region has one input of integers and one result. The proof runs it on all of 0 to `count` - 1, and on some
    beyond: there it must give what the reference gives at the nearest of those.
    """

    operators: tuple[Operator, ...]
    result: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`old` operators of a subgraph are to be replaced by `new` ones, both in execution order.

    Operators in both lists stay. `demand`: instead of the pass's. `note`: what a user should know of the converted
    site. `mask`: where rows that are masked everywhere may differ. `clipped`: the old region's result stops at these
    codes, the new one's does not. `parts`: a result, and where in it the heads or tiles are that the new region makes
    apart; if two are equal, it proves nothing. `chosen`: new tensors whose quantization parameters the pass chose.
    `reference` takes the old region's place in the proof.
    """

    model: Model
    subgraph: Subgraph
    old: tuple[Operator, ...]
    new: tuple[Operator, ...]
    demand: Demand | None = None
    note: str = ""
    mask: MaskInput | None = None
    clipped: tuple[int, int] | None = None
    parts: tuple[Tensor, Factored] | None = None
    chosen: frozenset[Tensor] = frozenset()
    reference: Reference | None = None

    def inputs(self) -> tuple[Tensor, ...]:
        """What the old region reads from outside, without constants; what is read first comes first."""
        return tuple(t for t in reads(self.old) if not t.is_constant)

    def outputs(self) -> tuple[Tensor, ...]:
        """What the old region defines for operators outside or the graph's caller."""
        inside = set(self.old)
        made = (tensor for operator in self.old for tensor in operator.outputs)
        return tuple(tensor for tensor in made if read_outside(self.subgraph, tensor, inside))

    def added(self) -> tuple[Operator, ...]:
        """The new operators that are not old ones."""
        kept = set(self.old)
        return tuple(operator for operator in self.new if operator not in kept)

    def removed(self) -> tuple[Operator, ...]:
        """The old operators that do not stay."""
        staying = set(self.new)
        return tuple(operator for operator in self.old if operator not in staying)

    def order(self) -> list[Operator]:
        """The order in which the graph runs once the rewrite is part of it.

        Raises:
            RefusedError: there is no such order, or effects would change theirs.
        """
        return replaced(self.subgraph, self.old, self.new, self.model.subgraphs)

    def commit(self) -> list[Operator]:
        """Make the new region part of the graph; returns the old operators that stay for now.

        Those may be dead when the last rewrite that shares them is done.

        Raises:
            RefusedError: the operators have no order; then the graph is as it was.
        """
        graph = self.subgraph
        graph.arrange(self.order())
        for operator in self.added():
            for tensor in (*operator.inputs, *operator.outputs):
                if tensor is not None and not graph.lists(tensor):
                    graph.add_tensor(tensor)
        return [operator for operator in self.old if operator.subgraph is graph]


def remove_dead(graph: Subgraph, candidates: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Remove those operators whose results nobody reads any more, and what only they needed.

    What does more than compute its results stays. `subgraphs` are the model's: without them, any call does.
    """
    pending = list(candidates)
    while pending:
        operator = pending.pop()
        is_read = any(tensor.consumers or graph.is_output(tensor) for tensor in operator.outputs)
        if operator.subgraph is graph and not is_read and is_pure(operator, subgraphs):
            graph.remove(operator)
            pending.extend(tensor.producer for tensor in reads([operator]) if tensor.producer is not None)
