"""Plans how a block is split: what every head makes for itself, and where the tensors that come in are cut.

Nothing is built here, and what is planned depends on the graph alone, not on the order in which heads are built.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from edge_opt.attention import factors as fx
from edge_opt.attention.block import Block, Form
from edge_opt.attention.factors import Axis, Factored
from edge_opt.attention.labelling import DEEPEST, OnHeads, OperandFactors
from edge_opt.attention.rule import Labelled
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.walk import read_outside

_OPERATOR = 4
_RESHAPE = 1
_NEVER = 1 << 30
_SCALINGS = frozenset({"MUL", "DIV"})


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the chain between a cut and the tensor that the block reads; `read` are its operand's factors."""

    result: Labelled
    operand: int
    read: Factored

    @property
    def scales(self) -> bool:
        """True for a multiplication by a number, False for a rearrangement."""
        return self.result.operator.name in _SCALINGS


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a labelled tensor is cut: `source`, once `moves` have given it the factors `factored`.

    The `moves` are made once for all heads, without the scalings that stood between them; each head has the `steps`.
    """

    source: Tensor
    factored: Factored
    moves: tuple[Labelled, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(slots=True)
class Plan:
    """How a block is split.

    `cuts` has the tensors that are cut; what else carries heads is made by every head. `old` are the operators that the
    heads' operators replace, `labelled` the results of the core with the factors that tell all heads apart.
    """

    cuts: dict[OnHeads, Cut] = field(default_factory=dict)
    old: dict[Operator, None] = field(default_factory=dict)
    labelled: dict[Tensor, Factored] = field(default_factory=dict)


@dataclass(eq=False)
class Planner:
    """Decides what every head makes for itself, and where the tensors that come into the block are cut."""

    subgraph: Subgraph
    block: Block
    form: Form
    operands: OperandFactors

    def __post_init__(self) -> None:
        self._costs: dict[OnHeads, int] = {}
        is_above = self.form.position == "above"
        self._above = tensors_above(self.subgraph, self.block, self.operands) if is_above else set()

    def plan(self) -> Plan:
        """Go up from the merged heads to the tensors that are cut; then choose the cuts, one after the other."""
        plan, block = Plan(), self.block
        incoming: dict[OnHeads, None] = {}
        seen: set[OnHeads] = set()
        pending = [(*heads, 0) for heads in (*block.others[::-1], (block.output, block.factored))]
        while pending:
            tensor, factored, depth = pending.pop()
            operator = tensor.producer
            if (tensor, factored) in seen or fx.is_shared(factored):
                continue
            seen.add((tensor, factored))
            if operator is None or not self._is_made_per_head(tensor, factored, depth):
                incoming[tensor, factored] = None
                continue
            plan.old[operator] = None
            if operator in block.core and fx.piece_count(factored) == block.pieces:
                plan.labelled.setdefault(tensor, factored)
            of = Labelled(tensor, factored)
            read = self.operands.rules[operator.name].parts(of, keep=self.form.keep_axes)
            pending += [(operator.input(index), own, depth + 1) for index, own in reversed(read.items())]
        replaced = {*block.core, *plan.old}
        for tensor, factored in incoming:
            cut = plan.cuts[tensor, factored] = self._cut(tensor, factored, replaced)
            plan.old.update(dict.fromkeys(of.operator for of in cut.moves))
            plan.old.update(dict.fromkeys(step.result.operator for step in cut.steps))
        return plan

    # Made by every head, or cut: whatever takes fewer operators, all heads counted

    def _is_made_per_head(self, tensor: Tensor, factored: Factored, depth: int) -> bool:
        if tensor.producer in self.block.core or depth >= DEEPEST:
            return tensor.producer in self.block.core
        made, cut = self._cost_made(tensor, factored, depth), self._cost_cut(tensor, factored)
        return tensor in self._above or made < cut

    def _cost(self, tensor: Tensor, factored: Factored, depth: int) -> int:
        if fx.is_shared(factored):
            return 0
        key = (tensor, factored)
        if key not in self._costs:
            # Bounded, because a file may chain more operators than a stack holds.
            made = self._cost_made(tensor, factored, depth) if depth < DEEPEST else _NEVER
            self._costs[key] = min(self._cost_cut(tensor, factored), made)
        return self._costs[key]

    def _cost_cut(self, tensor: Tensor, factored: Factored) -> int:
        if tensor.is_constant:
            return 0
        pieces = fx.piece_count(factored)
        if pieces == 1:
            same = fx.piece_shape(factored, keep=self.form.keep_axes) == tensor.shape
            return 0 if same else _RESHAPE
        # An axis that does not begin with its heads is reshaped into two first.
        operators = sum(1 if leading(factored[axis]) else 2 for axis in fx.labelled_axes(factored))
        return _OPERATOR * pieces * operators

    def _cost_made(self, tensor: Tensor, factored: Factored, depth: int) -> int:
        operator, operands = tensor.producer, self.operands(tensor, factored)
        if operator is None or not isinstance(operands, dict):
            return _NEVER
        # A mask that is repeated for the heads by a CONCATENATION is read several times and cut once.
        read = {(operator.input(index), labelled) for index, labelled in operands.items()}
        above = sum(self._cost(source, labelled, depth + 1) for source, labelled in read)
        of, keep = Labelled(tensor, factored), self.form.keep_axes
        if self.operands.rules[operator.name].passed_on(of, 0, keep=keep) is None:
            return above + fx.piece_count(factored) * _OPERATOR
        if operator.name in MOVEMENT and of.piece_shape(keep=keep) != fx.piece_shape(operands[0], keep=keep):
            return above + fx.piece_count(factored) * _RESHAPE
        return above

    # Where on the rearrangements and scalings above a tensor it is cut

    def _cut(self, tensor: Tensor, factored: Factored, replaced: Container[Operator]) -> Cut:
        """The cut of a tensor that comes in; `replaced` are operators of the rewrite, whose reading does not count."""
        here = Cut(tensor, factored)
        if tensor.is_constant or fx.piece_count(factored) == 1:
            return here
        chain = list(self._chain(tensor, factored, replaced))
        if self.form.position == "near":
            scalings = [i for i, step in enumerate(chain) if step.scales]
            chain = chain[: scalings[-1] + 1] if scalings and self.form.sink else []
        chain.reverse()
        usable = [i for i, step in enumerate(chain) if self._can_be_cut(step.read)]
        if chain and self._can_be_cut(factored):
            usable.append(len(chain))
        if not usable:
            return here
        place = usable[0] if self.form.position == "far" else usable[-1]
        # What stands above the first scaling stays whole and as it is.
        first = next((i for i, step in enumerate(chain[:place]) if step.scales), place)
        source = chain[first - 1].result.tensor if first else chain[0].result.input(chain[0].operand)
        moves = tuple(step.result for step in chain[first:place] if not step.scales)
        sunk = tuple(step for step in chain[first:place] if step.scales)
        at = chain[place].read if place < len(chain) else factored
        return Cut(source, at, moves, (*sunk, *chain[place:]))

    def _chain(self, tensor: Tensor, factored: Factored, readers: Container[Operator]) -> Iterator[Step]:
        """Upwards through rearrangements and scalings by a number, while nobody else reads what is between."""
        for operator, operand, read in self.operands.chain(tensor, factored):
            step = Step(Labelled(tensor, factored), operand, read)
            others = [other for index, other in enumerate(operator.inputs) if index != operand]
            scalar = all(t is not None and t.has_numbers and t.elements == 1 for t in others)
            scales = step.scales and scalar and not operator.option("fused_activation_function")
            followed = operator.name in MOVEMENT or scales
            if not followed or read_outside(self.subgraph, tensor, readers):
                return
            yield step
            tensor, factored, readers = operator.input(operand), read, {operator}

    def _can_be_cut(self, factored: Factored) -> bool:
        axes = fx.labelled_axes(factored)
        if len(axes) != 1:
            return False
        axis = factored[axes[0]]
        if self.form.cut == "unpack":
            return fx.only_labels(axis)
        return fx.take_outer(axis, fx.piece_count(factored)) is not None


def leading(axis: Axis) -> Axis:
    """The labelled factors that an axis begins with."""
    count = next((i for i, factor in enumerate(axis) if not factor.stride), len(axis))
    return axis[:count]


# How far above an attention its heads can be told apart


def tensors_above(subgraph: Subgraph, block: Block, operands: OperandFactors) -> set[Tensor]:
    """Tensors above the block's core that every head can have for itself.

    Heads differ in such a tensor, and whatever reads it is done per head: nothing is computed twice. What the graph's
    caller or operators outside read is cut where it is.
    """
    per_head = {*block.core}
    above: set[Tensor] = set()
    read_as: dict[Tensor, Factored | None] = {}  # None: operators read it in different ways

    def operands_of(operator: Operator) -> list[OnHeads]:
        """What an operator reads, if every head can do it alone; else nothing."""
        read: list[OnHeads] = []
        for tensor in operator.outputs:
            if tensor.consumers or subgraph.is_output(tensor):
                factored = read_as.get(tensor)
                if factored is None or fx.piece_count(factored) == 1:
                    return []
                labelled = operands(tensor, factored)
                if read_outside(subgraph, tensor, per_head) or not isinstance(labelled, dict):
                    return []
                read += [(operator.input(index), own) for index, own in labelled.items()]
        per_head.add(operator)
        above.update(operator.outputs)
        return read

    top = [(block.output, block.factored)]
    walk = operands.upwards(top, lambda tensor, _: tensor.producer in block.core)
    read = [(tensor, factored) for tensor, factored, ends in walk if ends]
    pending: list[Tensor] = []
    while True:
        for tensor, factored in read:
            own = fx.canonical(factored)
            if read_as.setdefault(tensor, own) != own:
                read_as[tensor] = None
            pending.append(tensor)
        if not pending:
            return above
        # A tensor that is read several times gets its turn with the last of its readers.
        operator = pending.pop().producer
        read = [] if operator is None or operator in per_head else operands_of(operator)
