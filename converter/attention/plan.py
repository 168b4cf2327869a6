"""Plans the split of an attention block: which operators are made per head, and which tensors are cut.

    x [1,T,N*H] -> RESHAPE -> [1,T,(N),H] -> TRANSPOSE -> q [1,(N),T,H]     a chain that only the block reads:
                                                          |                 the cut may move up along it
    k [1,(K),S,H] ----------------------------------> BATCH_MATMUL          k is cut into K parts
    mask [1,1,T,S] ---------------------------------> ADD                   has no label: all heads share it
                                                          |                 the core: made per head
    block.output [1,T,(N)(H)] <- RESHAPE <- TRANSPOSE <- ...                joined

The plan depends on the graph alone, not on the order of building. See docs/head-axis.md.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from edge_opt.attention import factors as fx
from edge_opt.attention.block import Block, Form
from edge_opt.attention.factors import Factored
from edge_opt.attention.labelled import Labelled
from edge_opt.attention.labels import DEEPEST, OperandFactors
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
    operands: OperandFactors
    cuts: dict[Labelled, tuple[Labelled, ...]] = field(default_factory=dict)
    old: dict[Operator, None] = field(default_factory=dict)
    labelled: dict[Tensor, Labelled] = field(default_factory=dict)
    # Operators that are not visited yet, with the layouts of heads in their results, each with its depth; and a heap of
    # them, the last one in execution order first.
    _waiting: dict[Operator, dict[Labelled, int]] = field(default_factory=dict)
    _queue: list[tuple[int, Operator]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Go up from the merged heads to the tensors that are cut, each after all its readers; then place the cuts."""
        self._read(Labelled(self.block.output, self.block.factored, self.form.keep), 0)
        while self._queue:
            _, operator = heappop(self._queue)
            self._decide(operator)
        replaced = {*self.block.core, *self.old}
        entering = list(self.cuts)
        self.cuts.clear()
        for of in entering:
            self._place(of, replaced)

    # Up from the merged heads

    def _read(self, of: Labelled, depth: int) -> None:
        operator = of.tensor.producer
        if operator is None:
            self.cuts[of] = (of,)
        elif not fx.is_shared(of.factored):
            if operator not in self._waiting:
                heappush(self._queue, (-self.subgraph.place(operator), operator))
            layouts = self._waiting.setdefault(operator, {})
            layouts[of] = max(depth, layouts.get(of, 0))

    def _decide(self, operator: Operator) -> None:
        """Make an operator per head if it is in the core, vanishes or can be made alone; otherwise cut its results."""
        layouts = self._waiting.pop(operator)
        depth = max(layouts.values())
        in_core = operator in self.block.core
        may_be_made = self.form.above and depth < DEEPEST
        is_made = in_core or (may_be_made and self._is_made_alone(operator, layouts))
        for of in layouts:
            if not is_made and (self._is_free(of) or not self._vanishes(of, DEEPEST)):
                self.cuts[of] = (of,)
                continue
            self.old[operator] = None
            if in_core and of.pieces == self.block.pieces:
                self.labelled.setdefault(of.tensor, of)
            for operand in self._read_in_part(of):
                self._read(operand, depth + 1)

    def _read_in_part(self, of: Labelled) -> list[Labelled]:
        """Operands of which a head reads a part, or the whole with fewer axes."""
        rule = self.operands.rules[of.operator.name]
        operands = self.operands.above(of).values()
        return [operand for operand in operands if not rule.is_read_whole(of, operand)]

    def _is_made_alone(self, operator: Operator, layouts: Iterable[Labelled]) -> bool:
        """True if each head can have its own operator without computing anything twice.

        This requires results that differ between heads and are read only per head. Results that are graph outputs or
        read outside are cut instead.
        """
        for tensor in operator.outputs:
            if not tensor.consumers and not self.subgraph.is_output(tensor):
                continue
            own = {fx.canonical(of.factored): of for of in layouts if of.tensor is tensor}
            if len(own) != 1 or read_outside(self.subgraph, tensor, self.old):
                return False
            (of,) = own.values()
            if of.pieces == 1 or not self.operands.above(of):
                return False
        return True

    def _is_free(self, of: Labelled) -> bool:
        """True if cutting takes no operator."""
        if fx.is_shared(of.factored) or of.tensor.is_constant:
            return True
        return of.pieces == 1 and of.piece_shape == of.tensor.shape

    def _vanishes(self, of: Labelled, depth: int) -> bool:
        """True if the operator only repeats or joins for the heads, or moves such a result, so nothing is left."""
        if self._is_free(of):
            return True
        operands = self.operands.above(of)
        if not operands or not depth:
            return False
        operator = of.operator
        if self.operands.rules[operator.name].passed_on(of, 0) is None:
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
        usable = [place for place, of in enumerate(chain) if self._can_be_cut(of.factored)] or [0]
        place = usable[0 if self.form.keep else -1]
        top = self._above_scalings(chain, place)
        self.cuts[chain[place]] = tuple(reversed(chain[place : top + 1]))
        for of in chain[:top]:
            self.old[of.operator] = None
        # Scalars beside the chain: a head without the axes of the heads needs them without these axes, too.
        for of in chain[:place]:
            for operand in self._read_in_part(of):
                if operand.pieces == 1:
                    self.cuts[operand] = (operand,)

    def _chain(self, of: Labelled, readers: Container[Operator]) -> list[Labelled]:
        """A tensor and those above it, through rearrangements and scalings, while nothing else reads them."""
        chain = [of]
        while len(chain) < DEEPEST and not read_outside(self.subgraph, of.tensor, readers):
            operands = self.operands.above(of).values()
            carriers = [operand for operand in operands if operand.pieces > 1]
            if len(carriers) != 1:
                break
            if of.operator.name not in MOVEMENT and not _scales(of.operator):
                break
            readers = {of.operator}
            of = carriers[0]
            chain.append(of)
        return chain

    def _above_scalings(self, chain: list[Labelled], place: int) -> int:
        """The place in the chain above all scalings that each head repeats for itself."""
        if not self.form.keep or self.block.heads == 1:
            return place
        for above in range(len(chain) - 1, place, -1):
            if chain[above - 1].operator.name not in MOVEMENT:
                return above
        return place

    def _can_be_cut(self, factored: Factored) -> bool:
        """True if one axis begins with all the heads and, for UNPACK, holds nothing else."""
        for axis in filter(fx.tells_heads, factored):
            is_whole = self.form.keep or fx.only_labels(axis)
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
