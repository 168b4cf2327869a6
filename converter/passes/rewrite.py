"""One rewrite of one region: what it replaces, what it demands, and how it is committed to the graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_opt.attention.factors import Factored
from edge_opt.base.words import many
from edge_opt.ir import Model, Operator, Subgraph, Tensor
from edge_opt.ir.walk import is_pure, needed_for, places, read_outside, reads


@dataclass(frozen=True, slots=True)
class Demand:
    """How closely the new region must match the old one, on random inputs and both kernel sets.

    `bitwise`: the same bits. `relative`: `|a - b| <= tolerance * max|a|` on rows that are not masked everywhere, with
    the maximum of the whole tensor. `steps`: integers at most `tolerance` quantization steps apart. The same holds on
    every kind of extreme inputs (`edge_opt.runtime.extremes.KINDS`) except the `spared` ones, on which both may rightly
    differ; `relative` excludes all of them, because a softmax amplifies small differences between large logits.
    `absolute`: `|a - b| <= tolerance`, compared with the rewrite's `reference` in float.
    """

    kind: str = "bitwise"
    tolerance: float = 0.0
    spared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kind if self.kind == "bitwise" else f"{self.kind} {self.tolerance:g}"

    @property
    def words(self) -> str:
        """The demand as users read it: 'bit-identical', or the tolerance."""
        return {
            "bitwise": "bit-identical",
            "steps": f"at most {many(int(self.tolerance), 'quantization step')} apart",
            "relative": f"within {self.tolerance:g} of the largest value",
            "absolute": f"within {self.tolerance:.3g} of the result in float",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class MaskInput:
    """The region's mask input `[.., T, S]`, and its values for masked and open entries."""

    tensor: Tensor
    masked: float
    opened: float


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference for a new region if the old one is wrong: `operators` compute `result` (float32) from its input.

    The region has one input of integers and one result. The proof runs it on all of 0 to `count` - 1, and on some
    beyond, where it must match the reference at the nearest of those.
    """

    operators: tuple[Operator, ...]
    result: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The replacement of a subgraph's `old` operators by `new` ones, both in execution order.

    Operators in both lists stay. `demand` overrides the pass's. `note`: what a user should know about the converted
    site. `mask`: the region's mask input, if any. `clipped`: the old region clips its result to these codes, the new
    one does not. `parts`: a result, and the places in it of heads or tiles that the new region computes separately; if
    two are equal, a run shows nothing. `chosen`: new tensors whose quantization parameters the pass chose. `reference`
    replaces the old region in the proof.
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
        """Tensors that the old region reads from outside, without constants, in the order of reading."""
        return tuple(t for t in reads(self.old) if not t.is_constant)

    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors of the old region that operators outside or the graph's caller read."""
        inside = set(self.old)
        made = (tensor for operator in self.old for tensor in operator.outputs)
        return tuple(tensor for tensor in made if read_outside(self.subgraph, tensor, inside))

    def changed(self) -> tuple[Tensor, ...]:
        """Outputs that the new region computes with other operators; only these can show a mistake."""
        outputs = self.outputs()
        old, new = ([set(needed_for([t], region)) for t in outputs] for region in (self.old, self.new))
        return tuple(t for t, one, other in zip(outputs, old, new, strict=True) if one != other)

    def added(self) -> tuple[Operator, ...]:
        """The new operators that are not old ones."""
        kept = set(self.old)
        return tuple(operator for operator in self.new if operator not in kept)

    def removed(self) -> tuple[Operator, ...]:
        """The old operators that do not stay."""
        staying = set(self.new)
        return tuple(operator for operator in self.old if operator not in staying)

    def order(self) -> dict[Operator, Operator | None]:
        """Where operators go once the rewrite is part of the graph (see `edge_opt.ir.walk.places`).

        Raises:
            RefusedError: there is no such order, or it would reorder side effects.
        """
        return places(self.subgraph, self.old, self.new, self.model.subgraphs)

    def commit(self) -> list[Operator]:
        """Commit the new region to the graph; return the old operators that stay for now.

        These may be dead once the last rewrite that shares them is done.

        Raises:
            RefusedError: the operators have no order; the graph is unchanged.
        """
        graph = self.subgraph
        graph.replace(self.removed(), self.order())
        for operator in self.added():
            for tensor in (*operator.inputs, *operator.outputs):
                if tensor is not None and not graph.lists(tensor):
                    graph.add_tensor(tensor)
        return [operator for operator in self.old if operator.subgraph is graph]


def remove_dead(graph: Subgraph, candidates: Iterable[Operator], subgraphs: Sequence[Subgraph] = ()) -> None:
    """Remove `candidates` whose results are no longer read, and operators that only they needed.

    Operators with side effects stay. `subgraphs` are the model's; without them, every call counts as a side effect.
    """
    pending = list(candidates)
    while pending:
        operator = pending.pop()
        is_read = any(tensor.consumers or graph.is_output(tensor) for tensor in operator.outputs)
        if operator.subgraph is graph and not is_read and is_pure(operator, subgraphs):
            graph.remove(operator)
            pending.extend(tensor.producer for tensor in reads([operator]) if tensor.producer is not None)
