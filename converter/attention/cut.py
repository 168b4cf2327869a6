"""Plans how a block is split: what every head makes for itself, and where the tensors that come in are cut.

Nothing is built here, and what is planned depends on the graph alone, not on the order in which heads are built.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from edge_opt.attention import factors as fx
from edge_opt.attention.block import Block, Form
from edge_opt.attention.factors import Factored
from edge_opt.attention.labels import DEEPEST, OnHeads, OperandFactors
from edge_opt.attention.rule import Labelled
from edge_opt.attention.rules import MOVEMENT
from edge_opt.ir import Operator, Subgraph, Tensor
from edge_opt.ir.walk import read_outside

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
        self._plan = Plan()
        # How the heads lie in what is read of operators that are still to come; and how far up these are.
        self._reads: dict[Tensor, dict[Factored, None]] = {}
        self._waiting: dict[Operator, int] = {}

    def plan(self) -> Plan:
        """Go up from the merged heads to the tensors that are cut, each after all its readers; then place the cuts."""
        plan, block = self._plan, self.block
        self._read(block.output, block.factored, 0)
        for operator in reversed(self.subgraph.operators):
            if operator in self._waiting:
                self._decide(operator, self._waiting.pop(operator))
            if not self._waiting:
                break
        replaced = {*block.core, *plan.old}
        for tensor, factored in plan.cuts:
            cut = plan.cuts[tensor, factored] = self._placed(tensor, factored, replaced)
            plan.old.update(dict.fromkeys(of.operator for of in (*cut.moves, *(s.result for s in cut.steps))))
        return plan

    def _read(self, tensor: Tensor, factored: Factored, depth: int) -> None:
        operator = tensor.producer
        if operator is None:
            self._plan.cuts[tensor, factored] = Cut(tensor, factored)
        elif not fx.is_shared(factored):
            self._reads.setdefault(tensor, {})[factored] = None
            self._waiting[operator] = max(depth, self._waiting.get(operator, 0))

    def _decide(self, operator: Operator, depth: int) -> None:
        """Make an operator for every head, where it is the block's, leaves nothing or can be had alone; else cut."""
        in_core = operator in self.block.core
        alone = self.form.above and depth < DEEPEST and self._is_made_alone(operator)
        for tensor in operator.outputs:
            for factored in self._reads.pop(tensor, ()):
                leaves_nothing = not self._is_free(tensor, factored) and self._vanishes(
                    tensor, factored, DEEPEST
                )
                if not (in_core or alone or leaves_nothing):
                    self._plan.cuts[tensor, factored] = Cut(tensor, factored)
                    continue
                self._plan.old[operator] = None
                if in_core and fx.piece_count(factored) == self.block.pieces:
                    self._plan.labelled.setdefault(tensor, factored)
                rule, of = self.operands.rules[operator.name], Labelled(tensor, factored)
                for index, own in rule.parts(of, keep=self.form.keep_axes).items():
                    self._read(operator.input(index), own, depth + 1)

    def _is_made_alone(self, operator: Operator) -> bool:
        """True where every head can have an operator for itself and nothing is computed twice.

        Heads differ in its results, and whatever reads these is done per head. What the graph's caller or operators
        outside read is cut where it is.
        """
        for tensor in operator.outputs:
            if not tensor.consumers and not self.subgraph.is_output(tensor):
                continue
            labels = {fx.canonical(factored) for factored in self._reads.get(tensor, ())}
            if len(labels) != 1 or read_outside(self.subgraph, tensor, self._plan.old):
                return False
            (factored,) = labels
            if fx.piece_count(factored) == 1 or not isinstance(self.operands(tensor, factored), dict):
                return False
        return True

    def _is_free(self, tensor: Tensor, factored: Factored) -> bool:
        """True where cutting takes no operator."""
        if fx.is_shared(factored) or tensor.is_constant:
            return True
        same = fx.piece_shape(factored, keep=self.form.keep_axes) == tensor.shape
        return same and fx.piece_count(factored) == 1

    def _vanishes(self, tensor: Tensor, factored: Factored, depth: int) -> bool:
        """True where the operator repeats, joins or enumerates for the heads, or moves what does: nothing is left."""
        operator, operands = tensor.producer, self.operands(tensor, factored)
        if self._is_free(tensor, factored):
            return True
        if operator is None or not isinstance(operands, dict) or not depth:
            return False
        of = Labelled(tensor, factored)
        passes = self.operands.rules[operator.name].passed_on(of, 0, keep=self.form.keep_axes) is not None
        above = operands.items() if operator.name in MOVEMENT else ()
        return passes and all(self._vanishes(of.input(i), own, depth - 1) for i, own in above)

    # Where on the rearrangements and scalings above a tensor it is cut

    def _placed(self, tensor: Tensor, factored: Factored, replaced: Container[Operator]) -> Cut:
        """The cut of a tensor that comes in; `replaced` are operators of the rewrite, whose reading does not count.

        SPLIT cuts at the nearest tensor where the heads are one run of steps, UNPACK at the farthest. Scalings above
        sink below the cut, into each head.
        """
        here = Cut(tensor, factored)
        if tensor.is_constant or fx.piece_count(factored) == 1:
            return here
        chain = list(self._chain(tensor, factored, replaced))
        labels = [factored, *(step.read for step in chain)]
        usable = [place for place, own in enumerate(labels) if self._can_be_cut(own)]
        if not usable:
            return here
        place = usable[0] if self.form.cut == "split" else usable[-1]
        scalings = [above for above, step in enumerate(chain, 1) if step.scales and self.form.sink]
        top = max([place, *scalings])
        if not top:
            return here
        hoisted, source = chain[place:top][::-1], chain[top - 1]
        moves = tuple(step.result for step in hoisted if not step.scales)
        sunk = tuple(step for step in hoisted if step.scales)
        return Cut(source.result.input(source.operand), labels[place], moves, (*sunk, *chain[:place][::-1]))

    def _chain(self, tensor: Tensor, factored: Factored, readers: Container[Operator]) -> Iterator[Step]:
        """Upwards through rearrangements and scalings by a number, while nobody else reads what is between."""
        for _ in range(DEEPEST):
            operands = self.operands(tensor, factored)
            read = operands.items() if isinstance(operands, dict) else ()
            carriers = [(index, own) for index, own in read if fx.piece_count(own) > 1]
            operator = tensor.producer
            if operator is None or len(carriers) != 1 or read_outside(self.subgraph, tensor, readers):
                return
            ((operand, own),) = carriers
            others = [other for index, other in enumerate(operator.inputs) if index != operand]
            step = Step(Labelled(tensor, factored), operand, own)
            scalar = all(t is not None and t.has_numbers and t.elements == 1 for t in others)
            scales = step.scales and scalar and not operator.option("fused_activation_function")
            if not scales and operator.name not in MOVEMENT:
                return
            yield step
            tensor, factored, readers = operator.input(operand), own, {operator}

    def _can_be_cut(self, factored: Factored) -> bool:
        axes = fx.labelled_axes(factored)
        if len(axes) != 1:
            return False
        axis = factored[axes[0]]
        if self.form.cut == "unpack":
            return fx.only_labels(axis)
        cut = fx.cut_axis(axis, fx.piece_count(factored))
        return cut is not None and fx.only_labels(cut[0])
