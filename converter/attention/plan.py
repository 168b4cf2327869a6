"""Plans the split of an attention block: which operators are made per head, and which tensors are cut.

    x [1,T,N*H] -> RESHAPE -> [1,T,(N),H] -> TRANSPOSE -> q [1,(N),T,H]     a chain that only the block reads:
                                                          |                 the cut may move up along it
    k [1,(K),S,H] ----------------------------------> BATCH_MATMUL          k is cut into K parts
    mask [1,1,T,S] ---------------------------------> ADD                   has no label: all heads share it
                                                          |                 the core: made per head
    block.merged [1,T,(N)(H)] <- RESHAPE <- TRANSPOSE <- ...                joined

The plan depends on the graph alone, not on the order of building. See docs/head-axis.md.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from edge_opt.attention import factors as fx
from edge_opt.attention.block import Block, Form
from edge_opt.attention.factors import Factored
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import DEEPEST, HeadLayouts
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.walk import read_outside


@dataclass(eq=False)
class Plan:
    """Decides which operators are made per head, and which tensors that enter the block are cut.

    `cuts` has the tensors that are cut, each with the steps from the tensor that is cut instead down to it: first all
    rearrangements, once for all heads, then the scalings of each part. All other tensors that carry heads are made per
    head. `old` are the operators that the heads' operators replace, `labelled` the results of the core whose pieces
    differ between all heads.
    """

    subgraph: Subgraph
    block: Block
    form: Form
    layouts: HeadLayouts
    cuts: dict[Labelled, tuple[Labelled, ...]] = field(default_factory=dict)
    old: dict[Operator, None] = field(default_factory=dict)
    labelled: dict[Tensor, Labelled] = field(default_factory=dict)
    # The tensors at which the way up from the merged heads ended: their cuts may move farther up.
    _entering: dict[Labelled, None] = field(default_factory=dict)
    # Operators that are not visited yet, with the layouts of heads in their results, each with its depth; and a heap of
    # them, the last one in execution order first.
    _waiting: dict[Operator, dict[Labelled, int]] = field(default_factory=dict)
    _queue: list[tuple[int, Operator]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Go up from the merged heads to the tensors that are cut, each after all its readers; then place the cuts."""
        self._read(self.block.merged._replace(keep_axes=self.form.keep_axes), 0)
        while self._queue:
            _, operator = heappop(self._queue)
            self._decide(operator)
        replaced = {*self.block.core, *self.old}
        for labelled in self._entering:
            self._place(labelled, replaced)

    # Up from the merged heads

    def _read(self, labelled: Labelled, depth: int) -> None:
        """Visit the operator of a tensor later, or end the way up here."""
        operator = labelled.tensor.producer
        if operator is None:
            self._entering[labelled] = None
        elif not fx.is_shared(labelled.factored):
            if operator not in self._waiting:
                heappush(self._queue, (-self.subgraph.place(operator), operator))
            depths = self._waiting.setdefault(operator, {})
            depths[labelled] = max(depth, depths.get(labelled, 0))

    def _decide(self, operator: Operator) -> None:
        """Make an operator per head if it is in the core, vanishes or can be made alone; otherwise cut its results."""
        depths = self._waiting.pop(operator)
        depth = max(depths.values())
        in_core = operator in self.block.core
        may_be_made = self.form.above and depth < DEEPEST
        is_made = in_core or (may_be_made and self._is_made_alone(operator, depths))
        for labelled in depths:
            if not is_made and (self._is_free(labelled) or not self._vanishes(labelled, DEEPEST)):
                self._entering[labelled] = None
                continue
            self.old[operator] = None
            if in_core and labelled.pieces == self.block.merged.pieces:
                self.labelled.setdefault(labelled.tensor, labelled)
            for operand in self._read_in_part(labelled):
                self._read(operand, depth + 1)

    def _read_in_part(self, labelled: Labelled) -> list[Labelled]:
        """Operands of which a head reads a part, or the whole with fewer axes."""
        rule = self.layouts.rules[labelled.operator.name]
        operands = self.layouts.above(labelled).values()
        return [operand for operand in operands if not rule.is_read_whole(labelled, operand)]

    def _is_made_alone(self, operator: Operator, depths: Iterable[Labelled]) -> bool:
        """True if each head can have its own operator without computing anything twice.

        This requires results that differ between heads and are read only per head. Results that are graph outputs or
        read outside are cut instead.
        """
        for tensor in operator.outputs:
            if not tensor.consumers and not self.subgraph.is_output(tensor):
                continue
            own = {
                fx.canonical(labelled.factored): labelled
                for labelled in depths
                if labelled.tensor is tensor
            }
            if len(own) != 1 or read_outside(self.subgraph, tensor, self.old):
                return False
            (labelled,) = own.values()
            if labelled.pieces == 1 or not self.layouts.above(labelled):
                return False
        return True

    def _is_free(self, labelled: Labelled) -> bool:
        """True if cutting takes no operator."""
        if fx.is_shared(labelled.factored) or labelled.tensor.is_constant:
            return True
        return labelled.pieces == 1 and labelled.piece_shape == labelled.tensor.shape

    def _vanishes(self, labelled: Labelled, depth: int) -> bool:
        """True if the operator only repeats or joins for the heads, or moves such a result, so nothing is left."""
        if self._is_free(labelled):
            return True
        operands = self.layouts.above(labelled)
        if not operands or not depth:
            return False
        operator = labelled.operator
        if self.layouts.rules[operator.name].passed_on(labelled, 0) is None:
            return False
        if operator.name not in MOVEMENT:
            return True
        return all(self._vanishes(operand, depth - 1) for operand in operands.values())

    # Along the chains above

    def _place(self, cut: Labelled, replaced: Container[Operator]) -> None:
        """Cut an incoming tensor, or one above it that only operators of the rewrite read.

        SPLIT cuts the nearest tensor whose heads are one run of steps, and moves scalings above it into each head;
        UNPACK cuts the farthest.
        """
        chain = self._chain(cut, replaced)
        usable = [
            place for place, labelled in enumerate(chain) if self._can_be_cut(labelled.factored)
        ] or [0]
        place = usable[0 if self.form.keep_axes else -1]
        top = self._above_scalings(chain, place)
        self.cuts[chain[place]] = tuple(reversed(chain[place : top + 1]))
        for labelled in chain[:top]:
            self.old[labelled.operator] = None
        # Scalars beside the chain: a head without the axes of the heads needs them without these axes, too.
        for labelled in chain[:place]:
            for operand in self._read_in_part(labelled):
                if operand.pieces == 1:
                    self.cuts[operand] = (operand,)

    def _chain(self, labelled: Labelled, readers: Container[Operator]) -> list[Labelled]:
        """A tensor and those above it, through rearrangements and scalings, while nothing else reads them."""
        chain = [labelled]
        while len(chain) < DEEPEST and not read_outside(self.subgraph, labelled.tensor, readers):
            operands = self.layouts.above(labelled).values()
            carriers = [operand for operand in operands if operand.pieces > 1]
            if len(carriers) != 1:
                break
            if labelled.operator.name not in MOVEMENT and not _scales(labelled.operator):
                break
            readers = {labelled.operator}
            labelled = carriers[0]
            chain.append(labelled)
        return chain

    def _above_scalings(self, chain: list[Labelled], place: int) -> int:
        """The place in the chain above all scalings that each head repeats for itself."""
        if not self.form.keep_axes or self.block.heads == 1:
            return place
        for above in range(len(chain) - 1, place, -1):
            if chain[above - 1].operator.name not in MOVEMENT:
                return above
        return place

    def _can_be_cut(self, factored: Factored) -> bool:
        """True if one axis begins with all the heads and, for UNPACK, holds nothing else."""
        for axis in filter(fx.tells_heads, factored):
            is_whole = self.form.keep_axes or fx.only_labels(axis)
            if is_whole and fx.labels((fx.leading(axis),)) == fx.labels(factored):
                return True
        return False


def _scales(operator: Operator) -> bool:
    """True for a multiplication or division of a whole tensor and a scalar."""
    if operator.name not in ("MUL", "DIV"):
        return False
    scalars = [tensor for tensor in operator.given if tensor.has_numbers and tensor.elements == 1]
    whole = [tensor for tensor in operator.given if tensor not in scalars]
    return len(whole) == 1 and whole[0].shape == operator.output.shape
